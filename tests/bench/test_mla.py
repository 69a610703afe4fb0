"""``python -m bench mla``: its cases, its gate, its rows and what is written from them, and the rivals in it."""

from dataclasses import replace

import pytest
import torch

from baselines import attentions, latent
from baselines.base import Attention
from baselines.latent import LATENT, LatentBaseline
from bench import mla, report
from bench.__main__ import main
from bench.mla import MLA, PROVIDERS, MlaCase
from bench.suite import Provider
from tests.support.bench import run as run_suite
from verification import testing

TINY = MlaCase(1, 3, 33, 33, 32, 16, 48, dtype=torch.float32, interleaved=True)
BATCHED = MlaCase(2, 2, 16, 16, 16, 16, 16, dtype=torch.float32, interleaved=True)
BARE = LatentBaseline("bare_sdpa", None, attentions.SDPA)


def provider(baseline):
    """Add a baseline to the table, and return its provider."""
    LATENT[baseline.name] = baseline
    return Provider(baseline.name, baseline.label, baseline.role, backward=baseline.backward)


@pytest.fixture(autouse=True, scope="module")
def own_table():
    before = dict(LATENT)
    yield
    LATENT.clear()
    LATENT.update(before)


@pytest.fixture(scope="module")
def rows():
    chosen = [PROVIDERS["fused"], PROVIDERS["hf_sdpa"], provider(BARE)]
    found = run_suite(MLA, TINY, BATCHED, providers=chosen)[0]
    del LATENT[BARE.name]
    return found


def test_everybody_agrees_with_float64_and_is_timed(rows):
    assert {row["status"] for row in rows} == {"ok"}, [row["detail"] for row in rows]
    timed = {(row["case"], row["pass"], row["provider"]) for row in report.timed(rows)}
    names = ("fused", "hf_sdpa", "bare_sdpa")
    assert timed == {(name, part, who) for name in ("H3-33", "H2-16") for part in ("fwd", "bwd") for who in names}
    ours = [row for row in rows if row["role"] == "ours"]
    assert {row["provider"] for row in ours} == {"fused"} and all(row["peak_mib"] >= 0 for row in rows)


@pytest.mark.parametrize("broken", range(5))
def test_each_result_is_judged(broken, monkeypatch):
    """A wrong output, or a wrong gradient of any of the tensors, fails at the first or the last head."""
    own = mla.rope_attention_mla

    def wrong(*rows, **options):
        # The value stays, and the gradient of one tensor is 1 % too large.
        rows = [x * 1.01 - x.detach() * 0.01 if i == broken else x for i, x in enumerate(rows)]
        return own(*rows, **options)

    monkeypatch.setattr(mla, "rope_attention_mla", wrong)
    found = run_suite(MLA, TINY, providers=[PROVIDERS["fused"]])[0]
    name = ("dq_nope", "dq_rope", "dk_nope", "dk_rope", "dv")[broken]
    assert {row["status"] for row in found} == {"failed"} and f"{name}:" in found[0]["detail"]


def test_a_wrong_build_is_not_timed():
    def swapped(rows, tables):
        return latent._hf([rows[0], rows[1].flip(-1), *rows[2:]], tables)

    baseline = LatentBaseline("x", replace(latent.HF, build=swapped), attentions.SDPA)
    assert {row["status"] for row in run_suite(MLA, TINY, providers=[provider(baseline)])[0]} == {"failed"}


@pytest.mark.parametrize("name", ["COMPILED", "LIGER"])
def test_builds_give_the_scores_of_transformers_own(name, monkeypatch):
    """Columns may be sorted; scores and gradients are the same."""
    # The formula of the compiled build, uncompiled; Liger's rotation of halves is transformers'.
    monkeypatch.setattr(latent.rotations, "specialised", lambda function: function)
    monkeypatch.setattr(latent, "_whole", latent._whole.__wrapped__)
    monkeypatch.setattr(latent.rotations, "LIGER", latent.rotations.HF)
    inputs = testing.make_latent_inputs(BATCHED)
    found = []
    for build in (latent.HF, getattr(latent, name)):
        baseline = LatentBaseline("x", replace(build, half_tables=False), attentions.SDPA)
        rows = baseline.leaves(list(inputs[:5]))
        for x, own in zip(rows, inputs[:5]):
            assert x.shape == own.shape and x.stride(-1) == 1
        leaves = [x.detach().requires_grad_() for x in rows]
        tables = baseline.prepare(inputs.cos, inputs.sin, torch.float32)
        o = baseline.run(leaves, tables)
        found.append((o.detach(), *(g.sort(-1).values for g in torch.autograd.grad(o, leaves, inputs.do))))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_labels_roles_and_packages():
    LATENT.pop("x", None)
    assert {b.role for name, b in LATENT.items() if name.startswith("bare")} == {"bare"}
    assert [name for name, b in LATENT.items() if not b.backward] == ["liger_fa3", "bare_fa3"]
    assert LATENT["liger_fa3"].pip == ("liger-kernel", "fa3-fwd") and LATENT["compiled_cudnn"].pip == ()
    assert LATENT["compiled_fa4"].label == "compiled build + FA4"
    assert len({b.label for b in LATENT.values()}) == len(LATENT)
    absent = replace(attentions.SDPA, missing=lambda: "pip install it")
    assert LatentBaseline("x", latent.HF, absent).missing() == "pip install it"
    forward_only = Attention("forward", attentions.SDPA.attend, backward=False)
    rows = run_suite(MLA, TINY, providers=[provider(LatentBaseline("x", latent.HF, forward_only))])[0]
    assert {row["pass"]: row["status"] for row in rows} == {"fwd": "ok", "bwd": "unsupported"}


def test_the_command_lists_what_would_run(capsys):
    assert main(["mla", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "B1 H128 N4096x4096 D128+64/128 bfloat16" in text and "compiled_fa4" in text
    assert [case.len_q for case in MLA.cases] == [1024, 4096, 4096, 16384]
