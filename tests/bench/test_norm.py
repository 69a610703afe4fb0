"""``python -m bench norm`` without a GPU: its gate with both weights' gradients, its rivals, and what it concludes."""

from dataclasses import replace

import pytest
import torch

from baselines import attentions, norms, registry
from baselines.norms import NORMED, NormedBaseline, Norms
from bench import report
from bench.__main__ import main
from bench.attention.cases import BenchCase
from bench.suites.norm import problem
from bench.suites.norm.plots import draw
from bench.suites.norm.problem import Problem
from bench.suites.norm.providers import FUSED, OURS, PROVIDERS, WITHOUT
from bench.suites.norm.report import results, summary
from bench.suites.norm.suite import CASES, Norm
from fused_rope_attn.testing import Case
from tests.support.bench import FACTS
from tests.support.bench import run as run_suite
from tests.support.internals import rotate_without_the_kernel

TINY = Case(2, 4, 2, 24, 24, 16, causal=True, dtype=torch.float32, norms=0.0)


def tiny(**other):
    return BenchCase("Tiny-24", "Tiny", ("norm",), replace(TINY, **other))


@pytest.fixture(autouse=True)
def eager_rotation(monkeypatch):
    rotate_without_the_kernel(monkeypatch)


def turned_wrong(q, k, given, tables):
    """Norms whose weights have an offset too many."""
    return NORMED["norm_hf_sdpa"].turn(q, k, given._replace(offset=1 - given.offset), tables)


def rival(name, turn=None, missing=None):
    base, hf = NORMED["norm_hf_sdpa"].base, NORMED["norm_hf_sdpa"].turn
    return NormedBaseline(name, name, turn or hf, base, lambda: missing)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_everybody_is_held_to_float64(offset):
    providers = [
        *FUSED.values(),
        rival("right"),
        rival("wrong", turned_wrong),
        rival("absent", missing="pip install x"),
    ]
    rows, _ = run_suite(Norm(providers), tiny(norms=offset), modes=("eager", "graph"))
    status = {row["provider"]: row["status"] for row in rows}
    assert status == dict.fromkeys((*FUSED, "right"), "ok") | {"wrong": "failed", "absent": "missing"}
    failed = next(row for row in rows if row["provider"] == "wrong")
    assert all(f"{name}: " in failed["detail"] for name in ("o", "dq", "dk", "dq_norm", "dk_norm"))
    timed = report.timed(rows)
    assert {(row["provider"], row["pass"], row["mode"]) for row in timed} == {
        (name, part, mode) for name in (*FUSED, "right") for part in ("fwd", "bwd") for mode in ("eager", "graph")
    }
    assert all(row["peak_mib"] == 1.5 for row in timed)
    mine = [row for row in timed if row["provider"] == OURS]
    assert all(row["over_without"] > 0 and "reference" in row["plan"] for row in mine)
    assert {row["provider"]: row["ours"] for row in rows} == {name: name in (OURS, WITHOUT) for name in status}
    assert not report.red(rows)
    text = summary(rows)
    assert "! wrong" in text and "failed" in text and "pip install x" in text and "4 lines, slower than" in text


def test_weights_gradients_are_held(monkeypatch):
    """A gradient of a weight that lacks one head's share is red, though all else is right."""
    once = problem.Subject.once

    def less(self, grads):
        found = once(self, grads)
        return found | ({"dk_norm": 0.9 * found["dk_norm"]} if self._provider.name == OURS else {})

    monkeypatch.setattr(problem.Subject, "once", less)
    rows, _ = run_suite(Norm(list(FUSED.values())), tiny(), modes=("eager",), passes=("fwd",))
    (failed,) = (row for row in rows if row["status"] == "failed")
    assert failed["provider"] == OURS and failed["detail"].startswith("dk_norm: ") and report.red(rows)


def test_long_cases_compare_some_heads(monkeypatch):
    monkeypatch.setattr(problem, "_WHOLE", 16)
    found = Problem(replace(TINY, heads_q=6, heads_kv=3), torch.device("cpu"))
    assert found.do[0, :2].any() and found.do[1, 4:].any()
    assert not found.do[0, 2:].any() and not found.do[1, :4].any()
    monkeypatch.setattr(problem, "_LONG", 24)
    last = Problem(replace(TINY, heads_q=6, heads_kv=3), torch.device("cpu"))
    assert last.do[1, 4:].any() and not last.do[0].any() and not last.do[1, :4].any()
    rows, _ = run_suite(Norm([FUSED[OURS]]), tiny(heads_q=6, heads_kv=3), modes=("eager",))
    assert {row["status"] for row in rows} == {"ok"}


def test_forward_only():
    asked = Norm(list(FUSED.values()), grads=False)
    rows, _ = run_suite(asked, tiny(), modes=("eager",), passes=("fwd",))
    assert {row["status"] for row in rows} == {"ok"} and len(rows) == 3


def test_half_precision_rivals_are_within_reach():
    """Those of Hugging Face round several times: loose at worst, never failed."""
    providers = [FUSED[OURS], FUSED["norm_hf_fused"], NORMED["norm_hf_sdpa"]]
    case = tiny(dtype=torch.bfloat16, norm_dtype=torch.bfloat16, len_q=96, len_k=96, head_dim=32)
    rows, _ = run_suite(Norm(providers), case, modes=("eager",), passes=("fwd",))
    assert {row["provider"]: row["status"] for row in rows}[OURS] == "ok"
    assert {row["status"] for row in rows} <= {"ok", "loose"}


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_formula_that_is_compiled(offset, monkeypatch):
    """What the compiled rival traces is what transformers computes."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    norms._compiled.cache_clear()
    made = Problem(replace(TINY, norms=offset, norm_eps=1e-3), torch.device("cpu"))
    x = made.inputs
    tables = NORMED["norm_compiled_cudnn"].prepare(x.cos, x.sin, torch.float32)
    got = NORMED["norm_compiled_cudnn"].turn(x.q, x.k, made.norms, tables)
    norms._compiled.cache_clear()
    for one, other in zip(got, NORMED["norm_hf_sdpa"].turn(x.q, x.k, made.norms, tables)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_liger_is_called_as_its_patches_do(monkeypatch):
    calls = []

    class Function:
        @staticmethod
        def apply(x, weight, *options):
            calls.append((tuple(x.shape), *options))
            return x

    monkeypatch.setattr(norms, "_liger_function", lambda: Function)
    x, weight = torch.zeros(2, 5, 4, 16), torch.ones(16)
    norms.liger_norm(x, weight, 1e-6, 0.0)
    norms.liger_norm(x, weight, 1e-5, 1.0, in_place=False)
    assert calls == [((2, 5, 4, 16), 1e-6, 0.0, "llama", True), ((2, 5, 4, 16), 1e-5, 1.0, "gemma", False)]


def test_the_rivals():
    assert list(NORMED) == ["norm_hf_sdpa", "norm_liger_cudnn", "norm_liger_fa4", "norm_compiled_cudnn"]
    assert set(PROVIDERS) == {OURS, WITHOUT, "norm_hf_fused", *NORMED}
    for name, baseline in NORMED.items():
        assert baseline.base == registry.BASELINES[name.removeprefix("norm_")]
        assert baseline.missing() is None or "pip install" in baseline.missing()
    assert NORMED["norm_liger_fa4"].pip == ("liger-kernel", "flash-attn-4")
    assert NORMED["norm_hf_sdpa"].label == "HF norm + HF rope + SDPA" and NORMED["norm_hf_sdpa"].half_tables
    assert "float32" in NORMED["norm_liger_cudnn"].unsupported(TINY)
    q = torch.zeros(1, 1, 4, 8)
    given = Norms(torch.ones(8), torch.ones(8), 1e-6, 0.0)
    assert not attentions.SDPA.attend(q, q, q, True).any() and given.offset == 0.0


def test_the_cases():
    """The attention of Qwen3-0.6B and 8B, whose heads are Llama3-8B's, and of Gemma 3's smallest two."""
    shapes = {(c.family, c.case.heads_q, c.case.heads_kv, c.case.head_dim) for c in CASES}
    assert shapes == {
        ("Qwen3-0.6B", 16, 8, 128), ("Qwen3-8B", 32, 8, 128), ("Gemma3-1B", 4, 1, 256), ("Gemma3-4B", 8, 4, 256)
    }  # fmt: skip
    assert [case.case.norms for case in CASES] == [float("Gemma" in case.name) for case in CASES]
    assert len({case.name for case in CASES}) == len(CASES) and CASES[-1].name == "Qwen3-8B-16K"


def rows_of(times, part="fwd", case="Qwen3-8B-4K", **extra):
    return [
        FACTS | {
            "case": case, "shape": "B2", "provider": name, "label": PROVIDERS[name].label, "pass": part, "detail": "",
            "mode": "graph", "status": "ok", "ms": ms, "rounds": [ms, ms], "ours": name in (OURS, WITHOUT),
            "peak_mib": 7.0,
        } | extra
        for name, ms in times.items()
    ]  # fmt: skip


def test_what_it_concludes(tmp_path):
    rows = rows_of({OURS: 1.03, WITHOUT: 1.0, "norm_liger_fa4": 1.236, "norm_hf_sdpa": 2.06})
    rows += rows_of({OURS: 4.0, "norm_liger_cudnn": 3.8}, "bwd", status="loose")
    text = summary(rows)
    assert "1.030" in text and "1.20x" in text and "0.95x LOSS" in text
    assert "2 lines, slower than the strongest rival in 1" in text
    block = results(rows)
    (line,) = (line for line in block.splitlines() if line.startswith("| Qwen3-8B-4K"))
    assert line == "| Qwen3-8B-4K (B2) | 1.03 / 4.00 | 1.030 / - | 7 (7) | 2.00× | 0.95× ~ | 1.20× |"
    assert "commit abc" in block and "~: outside" in block
    for wrong in ([], rows_of({WITHOUT: 1.0}), rows + rows_of({OURS: 1.0}, case="other", gpu="another")):
        with pytest.raises(ValueError, match="on one card"):
            results(wrong)
    assert summary([]).startswith("nothing was timed")
    pytest.importorskip("matplotlib")
    (path,) = draw(rows, tmp_path)
    assert path.name == "norm_graph.png" and path.stat().st_size > 1000
    assert draw([], tmp_path) == []


def test_the_command(capsys):
    assert main(["norm", "--dry-run", "--cases", "0.6B"]) == 0
    listing = capsys.readouterr().out
    assert "Qwen3-0.6B-2K" in listing and "Gemma3" not in listing and "Liger norm + Liger rope + FA4" in listing
    assert main(["norm", "--providers", "nobody"]) == 2
    if not torch.cuda.is_available():
        assert main(["norm"]) == 2
