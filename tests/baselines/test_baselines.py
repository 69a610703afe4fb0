"""The rivals without a GPU: the registry is complete and honest, and each part computes what it says."""

import re

import pytest
import torch

from baselines import BASELINES, attentions, base, rotations
from baselines.base import Baseline
from bench.attention.cases import BenchCase
from bench.attention.providers import rival
from bench.attention.suite import ATTENTION
from tests.support.bench import run
from tests.support.dtypes import BF16, F16, F32
from tests.support.marks import interpreted
from tests.support.paths import python
from verification.testing import Case

LIGER = ["liger_flash", "liger_cudnn", "liger_fa3", "liger_fa4"]


def test_the_registry():
    for name, baseline in BASELINES.items():
        assert baseline.name == name and baseline.rotates == (not name.startswith("bare"))
        assert baseline.label.startswith("bare ") != baseline.rotates
    assert len({baseline.label for baseline in BASELINES.values()}) == len(BASELINES) == 12
    assert [b.name for b in BASELINES.values() if b.in_place] == LIGER
    assert [b.name for b in BASELINES.values() if not b.backward] == ["liger_fa3", "bare_fa3"]
    program = "import sys, baselines; assert not {'transformers', 'flash_attn', 'liger_kernel'} & set(sys.modules)"
    python("-c", program).check_returncode()


def test_a_missing_or_broken_package_is_reported(monkeypatch):
    base.import_error.cache_clear()
    assert base.import_error("json", "dumps") is None
    assert base.import_error("json", "no_such_name").startswith("AttributeError")
    reason = "pip install no-such-thing (ModuleNotFoundError: No module named 'no_such_thing')"
    assert base.Package("no-such-thing", "no_such_thing", "f").missing() == reason
    monkeypatch.setattr(base, "import_error", lambda module, attribute: f"ModuleNotFoundError: '{module}'")
    of_parts = {"hf": "transformers", "compiled": "transformers", "liger": "liger-kernel"}
    of_parts |= {"fa3": "fa3-fwd", "fa4": "flash-attn-4"}
    for name, baseline in BASELINES.items():  # flash-attn alone is replaced: PyTorch's build of its kernels
        packages = [package for part, package in of_parts.items() if part in name.split("_")]
        assert re.findall(r"pip install ([\w-]+) \(ModuleNotFoundError", baseline.missing() or "") == packages


@pytest.mark.parametrize("installed", [True, False])
def test_flash_attn_falls_back_to_pytorch_and_says_so(installed, monkeypatch):
    monkeypatch.setattr(base, "import_error", lambda module, attribute: None if installed else "no")
    for name in ("hf_flash_attn", "bare_flash"):
        assert ("PyTorch's build" in BASELINES[name].label) == (not installed)
        assert BASELINES[name].missing() is None or "flash" not in BASELINES[name].missing()


@pytest.mark.parametrize("returns_lse", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("attention", [attentions.FLASH_ATTN, attentions.FA3, attentions.FA4])
def test_flash_attentions_get_bnhd(attention, causal, returns_lse, monkeypatch):
    def flash_attn_func(q, k, v, **options):
        assert q.shape == (2, 16, 4, 8) and k.shape == v.shape == (2, 16, 2, 8) and options == {"causal": causal}
        return (q, None) if returns_lse else q

    monkeypatch.setattr(base, "import_error", lambda module, attribute: None)
    monkeypatch.setattr(base, "load", lambda module, attribute: flash_attn_func)
    q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
    assert torch.equal(attention.attend(q, k, k, causal), q)


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("liger_cudnn", {}, None),
        ("liger_cudnn", {"dtype": F32}, "float32"),
        ("liger_cudnn", {"head_dim": 264}, "head dims"),
        ("liger_cudnn", {"len_q": 4}, "as many queries"),
        ("liger_cudnn", {"interleaved": True}, "half layout"),
        ("liger_cudnn", {"rotary_dim": 32}, "half layout"),
        ("hf_sdpa", {"dtype": F32}, None),
        ("bare_fa4", {"head_dim": 20}, "head dims"),
        ("bare_fa3", {"dtype": F16}, "float16"),
        ("bare_fa3", {"dtype": BF16}, None),
    ],
)
def test_what_a_rival_does_not_serve_is_said(name, changed, reason):
    sizes = {"batch": 1, "heads_q": 2, "heads_kv": 1, "len_q": 8, "len_k": 8, "head_dim": 64}
    found = BASELINES[name].unsupported(Case(**sizes | changed))
    assert found is None if reason is None else reason in found


def test_tables_are_prepared_once_in_the_form_of_each_rotation():
    cos, sin = torch.randn(6, 4), torch.randn(6, 4)
    for rotation, dtype in ((rotations.HF, BF16), (rotations.LIGER, F32), (rotations.COMPILED, F32)):
        for table, source in zip(rotation.prepare(cos, sin, BF16), (cos, sin)):
            assert table.dtype == dtype and torch.equal(table, torch.cat((source, source), 1).to(dtype)[None])
    assert BASELINES["bare_cudnn"].prepare(cos, sin, BF16) is None


ATTENTIONS = [
    *(
        (BASELINES[name], Case(2, 4, heads_kv, 65, 65, 64, causal=causal, dtype=BF16))
        for name in ("hf_sdpa", "hf_flash_attn", "bare_flash")
        for causal, heads_kv in ((True, 4), (True, 1), (False, 1))
    ),
    pytest.param(Baseline("liger", rotations.LIGER, attentions.SDPA), Case(1, 4, 2, 33, 33, 64), marks=interpreted),
]


@pytest.mark.parametrize(("baseline", "case"), ATTENTIONS)
def test_pytorchs_attentions_and_ligers_rotation(baseline, case):
    if reason := baseline.missing():
        pytest.skip(reason)
    tiny = BenchCase("Tiny", "Tiny", (), case)
    rows, _ = run(ATTENTION, tiny, providers=[rival(baseline)], rounds=1, modes=("eager",))
    assert {row["status"] for row in rows} <= {"ok", "loose"}, rows[0]["detail"]
