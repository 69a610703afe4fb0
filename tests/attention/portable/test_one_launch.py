"""The backward pass in one launch, in Triton's interpreter, against float64: each mask, and q and k in both forms."""

from dataclasses import replace

import pytest

from fused_rope_attn.attention import configs
from fused_rope_attn.attention.portable import configs as portable_configs
from fused_rope_attn.runtime.launch import watched
from tests.support.attention import assert_equal, run_and_compare
from tests.support.cases import packed
from tests.support.dtypes import F16, F32
from tests.support.internals import forget_plans
from tests.support.marks import both_strategies, cases, ignore_overflow, interpreted
from verification.testing import Case, make_inputs, run_op

BASE = Case(1, 2, 1, 70, 70, 16, dtype=F32)


@pytest.fixture(autouse=True)
def one_launch(monkeypatch):
    """Every backward pass of the portable kernels is planned in one launch."""
    row = portable_configs.backward

    def planned(*key):
        return replace(row(*key), one_launch=True, tma=False)

    monkeypatch.setattr(portable_configs, "backward", planned)
    forget_plans()
    yield
    monkeypatch.undo()
    forget_plans()


@interpreted
@ignore_overflow
@both_strategies
@cases(
    BASE,
    replace(BASE, batch=2, len_q=40, window=(20, 0), kv_starts=(0, 50), kv_lens=(70, 66), dtype=F16),
    replace(BASE, len_q=40, causal=False, rotary_dim=8, interleaved=True),
    packed((40, 1, 0, 30), dtype=F32, heads_q=2, sinks=True, softcap=3.0),
    replace(BASE, len_q=40, len_k=33, norms=0.0),
)
def test_gradients(case, strategy):
    """Inline takes q and k as they came, and the pre-pass saves them rotated."""
    run_and_compare(case, strategy=strategy)


@interpreted
@pytest.mark.parametrize("lengths", [(0, 9), (9, 0)])
def test_no_queries_and_no_keys(monkeypatch, lengths):
    """Only one of the two roles has programs, but both are compiled: each needs all of its arguments."""
    len_q, len_k = lengths
    case = replace(BASE, len_q=len_q, len_k=len_k, extra_rows=1, sinks=True)
    launches = []
    monkeypatch.setattr(watched, "launches", launches)
    out = run_op(make_inputs(case), case, backend="triton")
    _, given = launches[-1]
    assert given["sinks_ptr"] is not None and given["dsinks_ptr"] is not None
    assert not out.dq.any() and not out.dk.any() and not out.dv.any() and not out.dsinks.any()


@interpreted
def test_nothing_else_is_launched_and_the_bits_are_those_of_three_launches(monkeypatch):
    """Here delta is summed in one order by both; on a GPU it need not be."""
    case = replace(BASE, heads_q=1, len_q=40, len_k=40, head_dim=32)
    inputs = make_inputs(case)
    found = []
    for strategy in ("inline", "prepass"):
        launches = []
        monkeypatch.setattr(watched, "launches", launches)
        found.append(run_op(inputs, case, backend="triton", strategy=strategy))
        names = [launch.kernel.fn.__name__ for launch, _ in launches]
        assert names[-2:] == ["forward_kernel", "one_launch_kernel"] and len(names) == 2 + (strategy == "prepass")
    monkeypatch.undo()
    forget_plans()
    found.append(run_op(inputs, case, backend="triton", strategy="prepass"))
    for out in found[:2]:
        assert_equal(out, found[2])


def test_tiles_that_cannot_share_a_launch_are_refused():
    tiles = configs.Tile(64, 32, 4, 2), configs.Tile(32, 64, 4, 3)
    with pytest.raises(ValueError, match="same launch options"):
        configs.BackwardConfig("prepass", *tiles, one_launch=True)
    with pytest.raises(ValueError, match="with descriptors must be the same"):
        configs.BackwardConfig("prepass", tiles[0], replace(tiles[1], num_stages=2), one_launch=True, tma=True)
