"""``python -m bench tune`` without a GPU: its points, its candidates, and their gate."""

import dataclasses
import os

import pytest
import torch

from bench.__main__ import main
from bench.attention import cases
from bench.decode.providers import COPY, OURS, RAW
from bench.decode.suite import DecodeCase
from bench.tune import PRESENT, candidates, changed, steps, tiles
from fused_rope_attn import testing
from fused_rope_attn.attention.portable import configs as portable
from fused_rope_attn.generation import configs as decode_configs
from fused_rope_attn.generation import planning as generation_planning
from tests.support.bench import run
from tests.support.clocks import WallClock


def _case(part="fwd", strategy="prepass", length=64, head_dim=32, dtype=torch.float16):
    case = testing.Case(1, 4, 2, length, length, head_dim, causal=True, dtype=dtype)
    return cases.BenchCase("Tiny", "Tiny", (part, strategy), case)


def test_candidates_follow_the_present_configuration():
    found = candidates(_case("bwd"), ["dq.block_m=32|64 dkdv.num_warps=2|4|8", "section_bytes=0"])
    assert list(found) == [
        PRESENT,
        *(f"dq.block_m={m} dkdv.num_warps={warps}" for m in (32, 64) for warps in (2, 4, 8)),
        "section_bytes=0",
    ]
    assert [name for name, each in found.items() if each.ours] == [PRESENT]


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
@pytest.mark.parametrize("name", [OURS, RAW])
def test_generation_steps_are_gated_and_timed(name, monkeypatch):
    """Each step runs the configuration of its name, and the keys are rotated or raw as its provider has them."""
    seen = []
    plain = generation_planning.configured
    monkeypatch.setattr(generation_planning, "configured", lambda config: (seen.append(config), plain(config))[1])
    suite = steps(["block_n=16|32 num_stages=1"], name)
    rows, _ = run(suite, DecodeCase(1, 64, 2, 1, 32, torch.float16), rounds=1, modes=("graph",))
    wanted = [PRESENT, "block_n=16 num_stages=1", "block_n=32 num_stages=1", COPY]
    assert [row["provider"] for row in rows] == wanted and {row["status"] for row in rows} == {"ok"}
    assert [(config.block_n, config.num_stages) for config in seen[-2:]] == [(16, 1), (32, 1)]
    assert all(row["of_copy"] > 0 for row in rows) and generation_planning.override is None


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs the kernels in Triton's interpreter")
@pytest.mark.parametrize("part", ["fwd", "bwd"])
def test_candidates_are_gated_and_timed(part, monkeypatch):
    monkeypatch.setattr(WallClock, "calls_for", lambda self, fn, round_ms: 1)
    fields = ["tile.block_m=32 tile.num_stages=1"] if part == "fwd" else ["dq.block_m=32 dkdv.num_stages=1"]
    rows, _ = run(tiles(fields), _case(part, length=33), rounds=1, modes=("graph",))
    assert [row["provider"] for row in rows] == [PRESENT, *fields]
    assert [row["status"] for row in rows] == ["ok"] * 2 and {row["pass"] for row in rows} == {part}
    assert [row["role"] for row in rows] == ["ours", "rival"] and {row["mode"] for row in rows} == {"graph"}


def test_a_candidate_that_breaks_or_lies_is_refused():
    def broken(q, k, v, given):
        raise RuntimeError("out of resource: shared memory, Required: 300000")

    def wrong(q, k, v, given):
        return q + 0 * (k.sum() + v.sum())

    found = candidates(_case(), ["tile.block_m=32"]).values()
    people = [dataclasses.replace(each, run=run) for each, run in zip(found, (wrong, broken))]
    rows, _ = run(tiles(()), _case(), providers=people, rounds=1)
    assert [row["status"] for row in rows] == ["failed", "error"]


def test_command_line(capsys, monkeypatch):
    chosen = tiles(()).choose("gqa,d256+inline")
    assert len(chosen) == 2 * 4 + 2 * 2 and {case.groups[-2] for case in chosen} == {"fwd", "bwd"}
    tune = ["tune", "attention", "--configs", "tile.block_m=32|64"]
    assert main([*tune, "--dry-run", "--cases", "Small-1K+fwd+prepass", "--dtype", "fp32"]) == 0
    out = capsys.readouterr().out
    assert PRESENT in out and "tile.block_m=64" in out and "causal fp32" in out
    assert main(["tune", "decode-raw", "--configs", "block_n=32", "--dry-run"]) == 0
    assert "block_n=32" in capsys.readouterr().out
    assert main([*tune, "--cases", "Small-1K+bwd", "--dry-run"]) == 2
    assert "--configs takes FIELD=VALUE of strategy, dkdv, dq" in capsys.readouterr().err
    for wrong in (["tune"], ["tune", "nothing", "--configs", "x=1"], ["tune", "decode"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(tune) == 2
    assert "no GPU" in capsys.readouterr().err
