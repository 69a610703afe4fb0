"""The conventions of docs/guides/rotation.md, against the formula that their libraries share, written out."""

from functools import partial

import pytest
import torch

from fused_rope_attn import RotaryEmbedding, apply_rope
from tests.support.dtypes import F64
from tests.support.marks import ignore_overflow
from tests.support.rotation import assert_close, normal

pytestmark = ignore_overflow
B, N, D, ROWS = 2, 7, 16, 14
AXES = {"bhsd": (0, 2, 1, 3), "bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3)}  # from (B, N, H, D)
IDS = torch.tensor([[0, 1, 2, 10, 11, 3, 3], [7, 6, 5, 4, 3, 13, 0]])
ONE_AFTER_ANOTHER = torch.arange(N).expand(B, N)


def half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def angles(dim, base=10000.0):
    return torch.arange(ROWS, dtype=F64)[:, None] * base ** -(torch.arange(0, dim, 2, dtype=F64) / dim)


def two_halves(angle):
    return torch.cat((angle, angle), -1)


def twice(angle):
    return angle.repeat_interleave(2, -1)


def oracle(x, angle, ids, partner):
    """Rotate x (B, N, H, D): each of the ids (B, N) names rows of angle (ROWS, columns) for the next columns of x."""
    parts, first = [], 0
    for rows in ids:
        part, turn = x[..., first : first + angle.shape[1]], angle[rows][:, :, None]
        parts.append(part * turn.cos() + partner(part) * turn.sin())
        first += angle.shape[1]
    return torch.cat((*parts, x[..., first:]), -1)


# The layout, the partner of a column, the angle of each column, and the ids; the table holds a column for each if wide.
CONVENTIONS = {
    "Transformer Engine, Apex": ("sbhd", half, two_halves(angles(10)), None, True),
    "Transformer Engine, bshd": ("bshd", half, two_halves(angles(10)), None, True),
    "Paddle": ("bshd", half, two_halves(angles(D, 77.0)), IDS, True),
    "Paddle, neox style, time major": ("sbhd", every_two, twice(angles(D, 77.0)), None, True),
    "Paddle, derived from the base": ("bshd", half, twice(angles(D, 500.0)), None, True),
    "OneFlow, plane": ("bhsd", half, two_halves(angles(12, 300.0)), None, False),
    "OneFlow, interval, BMHK": ("bshd", every_two, twice(angles(12, 300.0)), IDS, False),
    "OneFlow, plane, two ids, MBHK": ("sbhd", half, two_halves(angles(6, 300.0)), torch.stack((IDS, IDS.flip(1)), 1),
                                      False),
    "OneFlow, interval, two ids": ("bhsd", every_two, twice(angles(6, 300.0)), torch.stack((IDS.flip(0), IDS), 1),
                                   False),
    "torchtune": ("bshd", every_two, twice(angles(D)), IDS, False),
    "Metal": ("sbhd", every_two, twice(angles(D)), None, False),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVENTIONS)
def test_conventions(name):
    layout, partner, angle, ids, is_wide = CONVENTIONS[name]
    rows = [ONE_AFTER_ANOTHER] if ids is None else [ids] if ids.ndim == 2 else ids.unbind(1)
    given = angle if is_wide else angle[:, ::2] if partner is every_two else angle.chunk(2, -1)[0]
    x, options = normal(B, N, 3, D), {"layout": layout, "position_ids": ids}
    if name == "torchtune":
        rotate = RotaryEmbedding(D, max_seq_len=ROWS, interleaved=True)
    else:
        options |= {"rotary_dim": angle.shape[1] * len(rows), "interleaved": partner is every_two}
        rotate = partial(apply_rope, cos=given.cos().float(), sin=given.sin().float())
    found = rotate(x.permute(AXES[layout]).contiguous().float(), **options)
    assert_close(found, oracle(x, angle, rows, partner).permute(AXES[layout]), 1e-5)


def test_packed_sequences_of_transformer_engine():
    x, angle, ends = normal(11, 3, D), two_halves(angles(10)), torch.tensor([0, 3, 3, 9], dtype=torch.int32)
    ids = torch.tensor([[*range(3), *range(6), 0, 0]])  # the last two pass through, as at position 0
    found = apply_rope(x.float(), angle.cos().float(), angle.sin().float(), layout="thd", cu_seqlens=ends)
    assert_close(found, oracle(x[None], angle, [ids], half)[0], 1e-5)
