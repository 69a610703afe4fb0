"""The sm_90 kernels for head dims 72 to 96, which multiply the columns of a tile of 128 in two pieces.

The table has other configurations up to 1024 tokens than beyond; the one for more than 4096 is among the divisions of
``test_warpgroups_gpu``.
"""

from dataclasses import replace

import pytest

from tests.support.dtypes import BF16, F16
from tests.support.gpu import MANY_TILES, ODD_LENGTHS
from tests.support.hopper import EMPTY, PADDED, UNEVEN, check_in_dtype, check_reruns, needs_sm_90, packed
from tests.support.marks import cases

pytestmark = needs_sm_90


@cases(
    ODD_LENGTHS,
    replace(ODD_LENGTHS, causal=False, interleaved=True, rotary_dim=32),
    replace(ODD_LENGTHS, rotary_dim=64, layout="bhnd", softmax_scale=-0.2, tables="random"),
    replace(ODD_LENGTHS, heads_kv=8, len_q=700),
    replace(ODD_LENGTHS, len_q=1, len_k=700),
    replace(ODD_LENGTHS, len_q=700, len_k=333, window=(90, 0)),
    replace(ODD_LENGTHS, len_q=2000, len_k=2000, window=(200, 0), sinks=True),
    replace(ODD_LENGTHS, softcap=20.0, norms=1.0, len_k=1100),
    replace(PADDED, norms=0.0, interleaved=True, kv_starts=(40, 690), kv_lens=(650, 700), sinks=True),
    replace(PADDED, len_k=1100, kv_starts=(0, 5), kv_lens=(100, 0), softcap=4.0, causal=False),
    packed(UNEVEN, window=(33, 0)),
    packed(EMPTY, norms=0.0),
    MANY_TILES,
)
@pytest.mark.parametrize(("head_dim", "dtype"), [(96, BF16), (80, F16)])
def test_against_float64(case, head_dim, dtype):
    check_in_dtype(replace(case, head_dim=head_dim), dtype)


@pytest.mark.parametrize("head_dim", [72, 88])
def test_a_piece_that_the_head_does_not_fill(head_dim):
    check_in_dtype(replace(ODD_LENGTHS, head_dim=head_dim), BF16)


@pytest.mark.parametrize("head_dim", [96, 80])
def test_reruns(head_dim):
    check_reruns(replace(ODD_LENGTHS, head_dim=head_dim), 20)
