"""``python -m bench norm`` without a GPU: its gate with both weights' gradients, and its rivals."""

import types
from dataclasses import replace

import pytest
import torch

from baselines import attentions, norms, registry
from baselines.norms import NORMED, Norms
from bench import gate, report
from bench.attention import providers
from bench.attention.cases import BenchCase
from bench.attention.suite import NORM
from bench.gate import Gate
from tests.support.bench import run
from tests.support.internals import rotate_without_the_kernel
from verification import testing
from verification.testing import Case

TINY = Case(2, 4, 2, 24, 24, 16, causal=True, dtype=torch.float32, norms=0.0)
PROVIDERS = providers.table("norm")
FUSED = [PROVIDERS[name] for name in ("fused", "fused_without")]


def tiny(**other):
    return BenchCase("Tiny-24", "Tiny", ("norm",), replace(TINY, **other), "norm")


@pytest.fixture(autouse=True)
def eager_rotation(monkeypatch):
    rotate_without_the_kernel(monkeypatch)


def turned_wrong(q, k, given, tables):
    """Norm with weights that have an offset too many."""
    return NORMED["norm_hf_sdpa"].norm_and_rotate(q, k, given._replace(offset=1 - given.offset), tables)


def rival(name, turn=None, missing=None):
    hf = NORMED["norm_hf_sdpa"]
    turn = turn or hf.norm_and_rotate
    return providers.rival(replace(hf, name=name, norm=name, norm_and_rotate=turn, norm_missing=lambda: missing))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_everybody_is_held_to_float64(offset):
    people = [*FUSED, rival("right"), rival("wrong", turned_wrong), rival("absent", missing="pip install x")]
    rows, _ = run(NORM, tiny(norms=offset), providers=people)
    names = [provider.name for provider in FUSED]
    status = {row["provider"]: row["status"] for row in rows}
    assert status == dict.fromkeys((*names, "right"), "ok") | {"wrong": "failed", "absent": "missing"}
    failed = next(row for row in rows if row["provider"] == "wrong")
    assert all(f"{name}: " in failed["detail"] for name in ("o", "dq", "dk", "dq_norm", "dk_norm"))
    timed = report.timed(rows)
    assert {(row["provider"], row["pass"], row["mode"]) for row in timed} == {
        (name, part, "graph") for name in (*names, "right") for part in ("fwd", "bwd")
    }
    assert all(row["peak_mib"] == 1.5 for row in timed)
    assert {row["provider"] for row in rows if row["role"] == "ours"} == {"fused", "fused_without"}
    assert not report.red(rows)


def test_weights_gradients_are_held():
    """A gradient of a weight that lacks one head's share is red, though all else is right."""

    def less(q, k, v, given):
        weight = given.weights["k_norm"]
        scaled = given._replace(weights=given.weights | {"k_norm": 0.9 * weight + 0.1 * weight.detach()})
        return providers.fused(q, k, v, scaled)

    rows, _ = run(NORM, tiny(), providers=[replace(PROVIDERS["fused"], run=less), FUSED[1]])
    (failed,) = (row for row in rows if row["status"] == "failed")
    assert failed["provider"] == "fused" and failed["detail"].startswith("dk_norm: ") and report.red(rows)


def test_long_cases_compare_some_heads(monkeypatch):
    case = replace(TINY, heads_q=6, heads_kv=3)
    found = Gate(case, testing.make_inputs(case))
    assert found.do[0, :2].any() and found.do[1, 4:].any()
    assert not found.do[0, 2:].any() and not found.do[1, :4].any()
    monkeypatch.setattr(gate, "_LONG", 24)
    last = Gate(case, testing.make_inputs(case))
    assert last.do[1, 4:].any() and not last.do[0].any() and not last.do[1, :4].any()
    rows, _ = run(NORM, tiny(heads_q=6, heads_kv=3), providers=[PROVIDERS["fused"]])
    assert {row["status"] for row in rows} == {"ok"}


def test_forward_only():
    rows, _ = run(NORM, tiny(), providers=FUSED, passes=("fwd",))
    assert {row["status"] for row in rows} == {"ok"} and len(rows) == 2


def test_half_precision_rivals_are_within_reach():
    """Those of Hugging Face round several times: loose at worst, never failed."""
    people = [PROVIDERS["fused"], PROVIDERS["norm_hf_sdpa"]]
    case = tiny(dtype=torch.bfloat16, norm_dtype=torch.bfloat16, len_q=96, len_k=96, head_dim=32)
    rows, _ = run(NORM, case, providers=people, passes=("fwd",))
    assert {row["provider"]: row["status"] for row in rows}["fused"] == "ok"
    assert {row["status"] for row in rows} <= {"ok", "loose"}


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_formula_that_is_compiled(offset, monkeypatch):
    """The compiled rival traces the formula of transformers."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    norms._compiled.cache_clear()
    case = replace(TINY, norms=offset, norm_eps=1e-3)
    x = testing.make_inputs(case)
    given = Norms(*testing.norms_of(case).values())
    tables = NORMED["norm_compiled_cudnn"].prepare(x.cos, x.sin, torch.float32)
    got = NORMED["norm_compiled_cudnn"].norm_and_rotate(x.q, x.k, given, tables)
    norms._compiled.cache_clear()
    for one, other in zip(got, NORMED["norm_hf_sdpa"].norm_and_rotate(x.q, x.k, given, tables)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_liger_is_called_as_its_patches_do(monkeypatch):
    calls = []

    class Function:
        @staticmethod
        def apply(x, weight, *options):
            calls.append((tuple(x.shape), *options))
            return x

    monkeypatch.setattr(norms, "LIGER_NORM", types.SimpleNamespace(load=lambda: Function))
    x, weight = torch.zeros(2, 5, 4, 16), torch.ones(16)
    norms.liger_norm(x, weight, 1e-6, 0.0)
    norms.liger_norm(x, weight, 1e-5, 1.0, in_place=False)
    assert calls == [((2, 5, 4, 16), 1e-6, 0.0, "llama", True), ((2, 5, 4, 16), 1e-5, 1.0, "gemma", False)]


def test_the_rivals():
    assert list(NORMED) == ["norm_hf_sdpa", "norm_liger_cudnn", "norm_liger_fa4", "norm_compiled_cudnn"]
    assert set(PROVIDERS) == {"fused", "fused_without", *NORMED}
    for name, baseline in NORMED.items():
        plain = registry.BASELINES[name.removeprefix("norm_")]
        assert (baseline.rotation, baseline.attention) == (plain.rotation, plain.attention) and not baseline.in_place
        assert baseline.missing() is None or "pip install" in baseline.missing()
    assert NORMED["norm_liger_fa4"].pip == ("liger-kernel", "flash-attn-4")
    assert NORMED["norm_hf_sdpa"].label == "HF norm + HF rope + SDPA" and NORMED["norm_hf_sdpa"].half_tables
    assert "float32" in NORMED["norm_liger_cudnn"].unsupported(TINY)
    q = torch.zeros(1, 1, 4, 8)
    given = Norms(torch.ones(8), torch.ones(8), 1e-6, 0.0)
    assert not attentions.SDPA.attend(q, q, q, True).any() and given.offset == 0.0
