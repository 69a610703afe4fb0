"""Which providers a run has, and what they say that they do not serve."""

import dataclasses

import torch

from baselines import BASELINES
from bench import providers
from fused_rope_attn import testing


def test_provider_selection():
    assert [p.name for p in providers.select(["ours"])] == ["fused", "fused_inline", "fused_prepass", "fused_hopper"]
    assert {p.name for p in providers.select(["bare", "hf_sdpa"])} == {n for n in BASELINES if n.startswith("bare")} | {
        "hf_sdpa"
    }
    assert [p.name for p in providers.select([])] == list(providers.PROVIDERS)


def test_the_sm_90_backend_says_where_it_does_not_run(monkeypatch):
    from fused_rope_attn.runtime import device

    hopper = providers.OURS["fused_hopper"]
    case = testing.Case(1, 2, 2, 128, 128, 128, dtype=torch.bfloat16)
    assert "sm_90" in hopper.unsupported(case)
    monkeypatch.setattr(device, "arch", lambda where: "sm_90")
    assert hopper.unsupported(case) is None
    assert hopper.unsupported(dataclasses.replace(case, head_dim=256)) is None
    assert "has 264" in hopper.unsupported(dataclasses.replace(case, head_dim=264))
    assert "float32" in hopper.unsupported(dataclasses.replace(case, dtype=torch.float32))
    assert all(providers.OURS[name].unsupported(case) is None for name in providers.OURS)
