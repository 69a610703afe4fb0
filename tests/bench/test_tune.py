"""``python -m bench tune`` without a GPU: its points, its candidates, and their gate."""

import dataclasses
import os

import pytest
import torch

from bench.__main__ import main
from bench.attention import cases
from bench.tune import PRESENT, candidates, changed, tiles
from fused_rope_attn import testing
from fused_rope_attn.attention.portable import configs as portable
from fused_rope_attn.generation import configs as decode_configs
from tests.support.bench import run
from tests.support.clocks import WallClock


def _case(part="fwd", strategy="prepass", length=64, head_dim=32, dtype=torch.float16):
    case = testing.Case(1, 4, 2, length, length, head_dim, causal=True, dtype=dtype)
    return cases.BenchCase("Tiny", "Tiny", (part, strategy), case)


def test_candidates_begin_with_the_present_configuration():
    for part in ("fwd", "bwd"):
        found = candidates(_case(part))
        assert next(iter(found)) == PRESENT and [name for name, each in found.items() if each.ours] == [PRESENT]
        assert len(found) == 1 + 24 * (1 if part == "fwd" else 2)


def test_a_candidate_names_the_fields_that_it_changes():
    base = decode_configs.decode("sm_90", 2, 128, True)
    chosen = changed(base, "block_n=32 num_warps=8 max_registers=168")
    assert chosen == dataclasses.replace(base, block_n=32, num_warps=8, max_registers=168)
    tiled = portable.backward("sm_90", 2, 128, "prepass", True, "medium", False)
    tiled = changed(tiled, "dq.block_m=32 tma=True section_bytes=0")
    assert (tiled.dq.block_m, tiled.tma, tiled.section_bytes) == (32, True, 0)
    for text in ("64x4x4x2", "block=3", "dq.block_m=x", "block_n"):
        with pytest.raises(ValueError, match=f"FIELD=VALUE of block_n.*, not '{text}'"):
            changed(base, text)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs the kernels in Triton's interpreter")
@pytest.mark.parametrize("part", ["fwd", "bwd"])
def test_candidates_are_gated_and_timed(part, monkeypatch):
    monkeypatch.setattr(WallClock, "calls_for", lambda self, fn, round_ms: 1)
    fields = ["tile.block_m=32 tile.num_stages=1"] if part == "fwd" else ["dq.block_m=32 dkdv.num_stages=1"]
    people = list(candidates(_case(part, length=33), fields).values())
    rows, _ = run(tiles(), _case(part, length=33), providers=people, rounds=1)
    assert [row["provider"] for row in rows] == [PRESENT, *fields]
    assert [row["status"] for row in rows] == ["ok"] * 2 and {row["pass"] for row in rows} == {part}
    assert [row["role"] for row in rows] == ["ours", "rival"] and {row["mode"] for row in rows} == {"graph"}


def test_a_candidate_that_breaks_or_lies_is_refused():
    def broken(q, k, v, given):
        raise RuntimeError("out of resource: shared memory, Required: 300000")

    def wrong(q, k, v, given):
        return q + 0 * (k.sum() + v.sum())

    people = [dataclasses.replace(each, run=run) for each, run in zip(candidates(_case()).values(), (wrong, broken))]
    rows, _ = run(tiles(), _case(), providers=people, rounds=1)
    assert [row["status"] for row in rows] == ["failed", "error"]


def test_cases(capsys):
    chosen = tiles().choose("gqa,d256+inline")
    assert len(chosen) == 2 * 4 + 2 * 2 and {case.groups[-2] for case in chosen} == {"fwd", "bwd"}
    assert main(["tune", "attention", "--dry-run", "--cases", "Small-1K+fwd+prepass", "--dtype", "fp32"]) == 0
    out = capsys.readouterr().out
    assert PRESENT in out and "causal fp32" in out


def test_tune_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "attention"]) == 2
    assert "no GPU" in capsys.readouterr().err
