"""Decisions of the host for the sm_90 kernels: pieces of columns, aligned masks, programs of a group of heads."""

from dataclasses import replace

import pytest

from fused_rope_attn.attention.hopper import configs as hopper_configs
from fused_rope_attn.attention.hopper.backward import parts_of_group
from fused_rope_attn.attention.hopper.columns import needed_columns, right_columns
from fused_rope_attn.attention.hopper.forward import is_aligned
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.layouts import block_d
from tests.support.internals import described_for_launch
from verification.testing import Case, make_inputs

SQUARE = Case(1, 1, 1, 300, 300, 64)


@pytest.mark.parametrize("head_dim", range(16, 257, 8))
def test_pieces_hold_the_head_and_are_sizes_that_products_have(head_dim):
    width = max(64, block_d(head_dim))
    right, columns = right_columns(head_dim, width), needed_columns(head_dim, width)
    assert head_dim <= columns <= width
    assert (right > 0) == (64 < head_dim <= hopper_configs.NARROW_HEAD_DIM)
    if right:
        assert columns == 64 + right and right in (16, 32) and columns - head_dim < 16
    else:
        assert columns == width


ALIGNED = ({}, {"len_q": 44}, {"len_k": 428, "softcap": 2.0, "sinks": True})
NOT_ALIGNED = ({"len_k": 172}, {"len_q": 299}, {"causal": False}, {"window": (100, 0)}, {"kv_lens": (300,)},
               {"kv_starts": (0,)}, {"intervals": "tree"},
               {"len_q": 384, "len_k": 384, "seqlens": ((128, 128), (256, 256))})  # fmt: skip


@pytest.mark.parametrize("changes", [*ALIGNED, *NOT_ALIGNED], ids=str)
def test_the_forward_skips_the_masked_half_of_diagonal_blocks(changes):
    case = replace(SQUARE, **changes)
    problem, _ = described_for_launch(make_inputs(case), case)
    assert is_aligned(problem, 128, 128) is (changes in ALIGNED)
    assert not is_aligned(problem, 192, 128) and not is_aligned(problem, 128, 64)


@pytest.mark.parametrize(
    ("sizes", "changes", "parts"),
    [
        ((2, 32, 8, 4096), {}, 1),
        # Four heads in a part, or parts of equal size.
        ((1, 64, 8, 8192), {}, 2), ((1, 128, 8, 4096), {}, 4), ((2, 40, 8, 4096), {}, 4), ((2, 28, 4, 4096), {}, 4),
        # Few programs: at least one for each multiprocessor, or one for each head.
        ((1, 8, 1, 8192), {}, 4), ((1, 8, 1, 4096), {}, 8), ((1, 64, 8, 1024), {}, 4), ((1, 16, 4, 2048), {}, 4),
        ((1, 4, 4, 1024), {}, 1),
        # The order of dQ is fixed, or the device divides tiles.
        ((1, 8, 1, 4096), {"deterministic": True}, 1), ((1, 8, 1, 4096), {"has_intervals": True}, 1),
        # Equal tiles are divided for more programs only.
        ((1, 128, 8, 4096), {"causal": False}, 1), ((1, 128, 8, 1024), {"causal": False}, 4),
        ((1, 64, 8, 16384), {"window": (4096, 0)}, 2), ((1, 64, 8, 16384), {"window": (4095, 0)}, 1),
        ((1, 64, 8, 16384), {"window": (4000, 96), "causal": False}, 2),
        ((1, 64, 8, 16384), {"window": (4000, 95), "causal": False}, 1),
    ],
)  # fmt: skip
def test_programs_of_the_backward_that_divide_a_group(sizes, changes, parts, monkeypatch):
    """On a card of 132 multiprocessors."""
    monkeypatch.setattr(device, "num_sms", lambda where: 132)
    batch, heads_q, heads_kv, length = sizes
    changes = {"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "len_q": length, "len_k": length} | changes
    problem = described_for_launch(make_inputs(SQUARE), SQUARE)[0]._replace(**changes)
    tiles = batch * heads_kv * -(-length // 128)
    assert parts_of_group(problem, tiles, problem.group_size * 1024) == parts  # bytes of a row of a head of 128 columns
