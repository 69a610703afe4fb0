"""``python -m bench tune`` without a GPU: its points, its candidates, and their gate."""

import dataclasses
import os

import pytest
import torch

from bench import tune
from bench.__main__ import main
from bench.tune import POINTS, SHAPES, Point, PointTrial, candidate, grid, tile_grid
from fused_rope_attn import testing
from fused_rope_attn.attention import configs
from tests.support.bench import run
from tests.support.clocks import WallClock


def _point(part="fwd", **other):
    point = Point(part, 32, True, "tiny", True, "prepass", torch.float16)
    return dataclasses.replace(point, **other)


@pytest.mark.parametrize("kernel", ["tile", "dkdv", "dq"])
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_there_are_tiles_to_try(head_dim, element_size, kernel):
    tiles = list(tile_grid(head_dim, element_size, kernel))
    assert 4 <= len(tiles) <= 60 and len(set(tiles)) == len(tiles)


def test_candidates_begin_with_the_present_configuration():
    for part in ("fwd", "bwd"):
        point = _point(part, head_dim=128, bucket="medium")
        tried = grid(point, "sm_90")
        assert tried[0] == point.present("sm_90") and len(set(tried)) == len(tried)
        assert {config.tma for config in tried} == {False, True}
        assert {config.section_bytes for config in tried} >= {0, 8 << 20, 24 << 20}
        inline = dataclasses.replace(point, strategy="inline")
        assert not any(config.tma for config in grid(inline, "sm_90")[1:])
        names = [candidate(config, tried[0]).name for config in tried]
        assert names[0].endswith("(table)") and len(set(names)) == len(names)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs the kernels in Triton's interpreter")
@pytest.mark.parametrize("part", ["fwd", "bwd"])
def test_candidates_are_gated_and_timed(part, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", (1, 4, 33))
    monkeypatch.setattr(WallClock, "calls_for", lambda self, fn, round_ms: 1)
    point = _point(part)
    present = point.present("interpreter")
    tile = configs.Tile(32, 32, 1, 1)
    others = [dataclasses.replace(present, **{kernel: tile}) for kernel in tune.kernels(point)]
    people = [candidate(config, present) for config in (present, *others)]
    rows, _ = run(POINTS, point, providers=people, rounds=1)
    assert [row["status"] for row in rows] == ["ok"] * len(people) and {row["pass"] for row in rows} == {part}
    assert [row["role"] for row in rows] == ["ours", *["rival"] * len(others)]
    assert rows[1]["config"][tune.kernels(point)[0]]["block_m"] == 32


def test_a_candidate_that_breaks_or_lies_is_refused(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", (1, 4, 64))
    point = _point()
    reference = testing.run_reference(testing.make_inputs(point.case), point.case)

    def call(self, config):
        if config.tile.num_stages == 3:
            error = RuntimeError("out of resource: shared memory, Required: 300000")
            return lambda: (_ for _ in ()).throw(error)
        factor = 2.0 if config.tile.num_stages == 2 else 1.0
        return lambda: (reference.o * factor, reference.lse)

    monkeypatch.setattr(PointTrial, "call", call)
    present = point.present("interpreter")
    tried = [dataclasses.replace(present, tile=configs.Tile(32, 32, 1, stages)) for stages in (1, 2, 3)]
    rows, _ = run(POINTS, point, providers=[candidate(config, present) for config in tried], rounds=1)
    assert {row["provider"][-2:]: row["status"] for row in rows} == {"s1": "ok", "s2": "failed", "s3": "error"}


def test_points(capsys):
    chosen = POINTS.choose("causal+d128+medium+bf16,causal+d128+long+bf16")
    assert len(chosen) == len(set(chosen)) == 2 * 2 * 2 * 2
    assert {p.case.len_q for p in chosen} == {4096, 16384}
    assert {(p.case.heads_q, p.case.heads_kv) for p in chosen} == {(32, 32), (32, 8)}
    assert all(configs.bucket(point.case.len_q) == point.bucket for point in chosen)
    assert main(["tune", "attention", "--dry-run", "--cases", "fwd+prepass+tiny+d64+causal+mha+bf16"]) == 0
    assert "(table)" in capsys.readouterr().out


def test_tune_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "attention"]) == 2
    assert "no GPU" in capsys.readouterr().err
