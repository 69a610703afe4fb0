"""``python -m bench tune`` without a GPU: its points, its candidates, its search and its proposals."""

import dataclasses
import os

import pytest
import torch

from bench.__main__ import main
from bench.suites.tune import command, search
from bench.suites.tune.point import SHAPES, Point, Timed
from bench.suites.tune.proposal import finalists_table, proposal, refusals
from fused_rope_attn import testing
from fused_rope_attn.attention import configs
from fused_rope_attn.attention.portable.configs import BackwardRow, ForwardRow
from tests.support.clocks import WallClock


def _point(part="fwd", **other):
    point = Point(part, 32, True, "tiny", True, "prepass", torch.float16)
    return dataclasses.replace(point, **other)


def test_proposed_rows_are_what_they_say():
    tile = configs.Tile(128, 64, 8, 2, 128)
    forward = configs.ForwardConfig("prepass", tile, section_bytes=8 << 20, pdl=True, tma=True)
    facts = {"gpu": "NVIDIA H200", "triton": "3.6.0", "date": "2026-11-21T10:00:00+00:00"}
    current = Timed(configs.ForwardConfig("prepass", configs.Tile(64, 64, 4, 3)), 0.7, 0.69, 0.71)
    text = proposal(_point(head_dim=128), "sm_90", Timed(forward, 0.6, 0.59, 0.61), current, facts)
    assert "# NVIDIA H200, 2026-11-21, triton 3.6.0: 0.6000 ms" in text and "was 0.7000 (64x64 w4 s3)" in text
    names = {"ForwardRow": ForwardRow, "BackwardRow": BackwardRow, "Tile": configs.Tile, "MIB": configs.MIB}
    (row,) = eval(f"[\n{text}\n]", names)
    assert row.config("sm_90", "prepass") == forward
    assert row.matches("sm_90", 2, 128, "prepass", True, "tiny", True)
    for other in (
        ("sm_80", 2, 128, "prepass", True, "tiny", True),
        ("sm_90", 2, 128, "inline", True, "tiny", True),
        ("sm_90", 2, 128, "prepass", False, "tiny", True),
        ("sm_90", 2, 128, "prepass", True, "long", True),
        ("sm_90", 2, 128, "prepass", True, "tiny", False),
    ):
        assert not row.matches(*other)
    tiles = configs.Tile(32, 64, 4, 3), configs.Tile(128, 64, 8, 3)
    backward = configs.BackwardConfig("inline", *tiles, section_bytes=1000, pdl=True)
    text = proposal(_point("bwd", strategy="inline"), "sm_90", Timed(backward, 0.6, 0.59, 0.61), None, facts)
    (row,) = eval(f"[\n{text}\n]", names)
    assert row.config("sm_90", "inline") == backward and row.strategies == ("inline",)


@pytest.mark.parametrize("kernel", ["tile", "dkdv", "dq"])
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_there_are_tiles_to_try(head_dim, element_size, kernel):
    tiles = list(search.tile_grid(head_dim, element_size, kernel))
    assert 4 <= len(tiles) <= 60 and len(set(tiles)) == len(tiles)


def test_candidates_begin_with_the_current_configuration():
    for part, kernel in (("fwd", "tile"), ("bwd", "dkdv"), ("bwd", "dq")):
        point = _point(part, head_dim=128, bucket="medium")
        tried = search.candidates(point, "sm_90", kernel)
        assert tried[0] == point.current("sm_90") and len(set(tried)) == len(tried)
        assert {config.tma for config in tried} == {False, True}
        inline = dataclasses.replace(point, strategy="inline")
        assert not any(config.tma for config in search.candidates(inline, "sm_90", kernel)[1:])


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs the kernels in Triton's interpreter")
@pytest.mark.parametrize("part", ["fwd", "bwd"])
def test_a_search_gates_times_and_ranks(part, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", (1, 4, 33))
    monkeypatch.setattr(WallClock, "calls_for", lambda self, fn, round_ms: 1)
    point = _point(part)

    def grid(point, arch, kernel):
        current = point.current(arch)
        return [current, dataclasses.replace(current, **{kernel: configs.Tile(32, 32, 1, 1)})]

    finalists, refused = search.search(point, WallClock(), "interpreter", grid=grid, sections=(0,), rounds=1)
    assert refused == [] and len(finalists) == 2 if part == "fwd" else len(finalists) in (3, 4)
    assert [timed.ms for timed in finalists] == sorted(timed.ms for timed in finalists)
    assert point.current("interpreter") in [timed.config for timed in finalists]
    current = next(timed for timed in finalists if timed.config == point.current("interpreter"))
    text = finalists_table(finalists, current)
    assert "(current)" in text and "1.00x" in text


def test_a_candidate_that_breaks_or_lies_is_refused(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", (1, 4, 64))
    point = _point()
    reference = testing.run_reference(testing.make_inputs(point.case), point.case)

    def call(self, config):
        if config.tile.num_stages == 3:
            raise_it = RuntimeError("out of resource: shared memory, Required: 300000")
            return lambda: (_ for _ in ()).throw(raise_it)
        factor = 2.0 if config.tile.num_stages == 2 else 1.0
        return lambda: (reference.o * factor, reference.lse)

    monkeypatch.setattr(search.Bench, "call", call)

    def grid(point, arch, kernel):
        current = point.current(arch)
        return [current, *(dataclasses.replace(current, tile=configs.Tile(32, 32, 1, stages)) for stages in (1, 2, 3))]

    finalists, refused = search.search(point, WallClock(), "interpreter", grid=grid, sections=(0,), rounds=1)
    assert len(finalists) == 2 and len(refused) == 2
    text = refusals(refused)
    assert "1 RuntimeError" in text and "! 32x32 w1 s2: FAILED the gate" in text


def test_tune_command_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_tune_points():
    arguments = command._parser().parse_args(["--head-dims", "128", "--gqa", "both", "--buckets", "medium,long"])
    points = command._points(arguments)
    assert len(points) == len(set(points)) == 2 * 2 * 2 * 2
    assert {p.case.len_q for p in points} == {4096, 16384}
    assert {(p.case.heads_q, p.case.heads_kv) for p in points} == {(32, 32), (32, 8)}
    for point in points:
        assert configs.bucket(point.case.len_q) == point.bucket
