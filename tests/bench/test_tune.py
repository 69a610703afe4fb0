"""``python -m bench tune`` without a GPU: its points, its candidates, and their gate."""

import os

import pytest
import torch

from bench import tune
from bench.__main__ import main
from bench.attention import cases
from bench.tune import PRESENT, TILES, candidates, grid, tile_grid
from fused_rope_attn import testing
from tests.support.bench import run
from tests.support.clocks import WallClock


def _case(part="fwd", strategy="prepass", length=64, head_dim=32, dtype=torch.float16):
    case = testing.Case(1, 4, 2, length, length, head_dim, causal=True, dtype=dtype)
    return cases.BenchCase("Tiny", "Tiny", (part, strategy), case)


@pytest.mark.parametrize("kernel", ["tile", "dkdv", "dq"])
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_there_are_tiles_to_try(head_dim, element_size, kernel):
    tiles = list(tile_grid(head_dim, element_size, kernel))
    assert 4 <= len(tiles) <= 60 and len(set(tiles)) == len(tiles)


def test_candidates_begin_with_the_present_configuration():
    for part in ("fwd", "bwd"):
        tried = [by_pass[part] for by_pass in grid(_case(part, head_dim=128, length=4096), "sm_90")]
        assert len(set(tried)) == len(tried) and {config.tma for config in tried} == {False, True}
        assert {config.section_bytes for config in tried} >= {0, 8 << 20, 24 << 20}
        inline = grid(_case(part, "inline", head_dim=128, length=4096), "sm_90")
        assert not any(by_pass[part].tma for by_pass in inline[1:])
        found = candidates(_case(part))
        assert [name.endswith(PRESENT) for name in found] == [True, *[False] * (len(found) - 1)]
        assert [provider.ours for provider in found.values()] == [True, *[False] * (len(found) - 1)]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs the kernels in Triton's interpreter")
@pytest.mark.parametrize("part", ["fwd", "bwd"])
def test_candidates_are_gated_and_timed(part, monkeypatch):
    monkeypatch.setattr(WallClock, "calls_for", lambda self, fn, round_ms: 1)
    people = list(candidates(_case(part, length=33)).values())
    rows, _ = run(TILES, _case(part, length=33), providers=[people[0], people[-1]], rounds=1)
    assert [row["status"] for row in rows] == ["ok"] * 2 and {row["pass"] for row in rows} == {part}
    assert [row["role"] for row in rows] == ["ours", "rival"] and {row["mode"] for row in rows} == {"graph"}


def test_a_candidate_that_breaks_or_lies_is_refused(monkeypatch):
    def attend(by_pass, q, k, v, given):
        stages = by_pass["fwd"].tile.num_stages
        if stages == 3:
            raise RuntimeError("out of resource: shared memory, Required: 300000")
        return q * float(stages) + 0 * (k.sum() + v.sum())

    monkeypatch.setattr(tune, "_run", attend)
    people = [each for each in candidates(_case()).values() if each.name[-2:] in ("s2", "s3")]
    rows, _ = run(TILES, _case(), providers=people, rounds=1)
    assert {row["provider"][-2:]: row["status"] for row in rows} == {"s2": "failed", "s3": "error"}


def test_cases(capsys):
    chosen = TILES.choose("gqa,d256+inline")
    assert len(chosen) == 2 * 4 + 2 * 2 and {case.groups[-2] for case in chosen} == {"fwd", "bwd"}
    assert main(["tune", "attention", "--dry-run", "--cases", "Small-1K+fwd+prepass", "--dtype", "fp32"]) == 0
    out = capsys.readouterr().out
    assert PRESENT in out and "causal fp32" in out


def test_tune_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "attention"]) == 2
    assert "no GPU" in capsys.readouterr().err
