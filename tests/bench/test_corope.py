"""``python -m bench corope``: its gate, its rows and README's block of them, on a CPU."""

import math

import pytest
import torch

from bench import report
from bench.__main__ import main
from bench.suites import corope
from tests.support.bench import run as run_suite

TINY = corope.CoRopeCase("Tiny", 2, (4, 2), 9, 8)


def run(providers=corope.PROVIDERS, **options):
    return run_suite(corope.CoRope(providers, torch.float32), TINY, **{"modes": ("eager",)} | options)[0]


@pytest.fixture(scope="module")
def rows():
    return run()


def test_everybody_is_held_to_float64_and_timed(rows):
    timed = {(row["provider"], row["pass"]) for row in report.timed(rows)}
    assert timed == {(name, part) for name in ("corope", "chunked", "dense") for part in ("fwd", "bwd")}
    for row in rows:
        assert row["shape"] == "B2 H4/2 N9 D8" and row["peak_mib"] == 1.5 and len(row["rounds"]) == 2
        assert row["ours"] == (row["provider"] == "corope") and 0 < row["gate_ratio"] < 2


def test_who_is_wrong_broken_or_too_slow_is_named_and_not_timed():
    def right(q, k, v):
        return corope.corope_attention(q, k, v)

    def wrong(q, k, v):  # in one head of the last group
        o = right(q, k, v)
        return torch.cat((o[:, :-1], o[:, -1:] * 1.01), 1)

    def broken(q, k, v):
        raise RuntimeError("no such kernel\nand more")

    people = [("wrong", wrong, None), ("broken", broken, None), ("slow", right, 8), ("fine", right, 9)]
    rows = run([corope.CoRopeProvider(name, name, function, longest) for name, function, longest in people])
    found = {row["provider"]: (row["status"], row["detail"]) for row in rows}
    assert {name: status for name, (status, _) in found.items()} == {
        "wrong": "failed", "broken": "error", "slow": "unsupported", "fine": "ok",
    }  # fmt: skip
    assert found["broken"][1] == "RuntimeError: no such kernel" and found["slow"][1].endswith("8 tokens here")
    with pytest.raises(ValueError, match="corope"):
        corope.results(rows)


def test_the_deadline_leaves_cases_out():
    assert run(deadline=-math.inf) == []


def test_generated_block(rows):
    rows = [row | {"ms": 2.0, "rounds": [2.0, 2.0]} if row["ours"] else row for row in rows]
    rows = [row | {"ms": 5.0, "rounds": [5.0, 5.0]} if row["provider"] == "dense" else row for row in rows]
    text = corope.results(rows)
    assert "| B2 H4/2 N9 D8 | `corope_attention` | 2.00 | 2.00 | 2 |" in text
    assert "| B2 H4/2 N9 D8 | eager, at once | 5.00 (2.5×) | 5.00 (2.5×) | 2 |" in text
    assert "toy, float32" in text and "commit abc" in text


def test_command_line(capsys):
    assert main(["corope", "--dry-run", "--cases", "mqa"]) == 0
    text = capsys.readouterr().out
    assert "H16/1 N8192" in text and "CoRoPE-1K" not in text
    assert main(["corope", "--dry-run", "--cases", "no such"]) == 2
    if not torch.cuda.is_available():
        assert main(["corope"]) == 2 and "no GPU" in capsys.readouterr().err
