"""The sm_90 backward in blocks of 128 queries, at lengths for which the table has blocks of 64."""

from dataclasses import replace

import pytest

from fused_rope_attn.attention import configs
from fused_rope_attn.attention.hopper import configs as hopper_configs
from tests.support.dtypes import BF16, F16
from tests.support.gpu import MANY_TILES, ODD_LENGTHS
from tests.support.hopper import check_in_dtype, check_reruns, needs_sm_90
from tests.support.internals import forget_plans
from tests.support.marks import cases

pytestmark = needs_sm_90


@pytest.fixture(autouse=True)
def blocks_of_128(monkeypatch):
    """Give the backward blocks of 128 queries where it can take them."""
    row = hopper_configs.Row(head_dim=64, config=configs.HopperBackwardConfig(block_m=128))
    monkeypatch.setattr(hopper_configs, "BACKWARD", (row,))
    forget_plans()
    yield
    forget_plans()


@cases(
    # Both parts of the last block have queries, or one does.
    replace(ODD_LENGTHS, head_dim=64),
    replace(ODD_LENGTHS, len_q=1101, len_k=1101, head_dim=64),
    replace(ODD_LENGTHS, len_q=704, len_k=704, heads_kv=8, head_dim=64),
    replace(ODD_LENGTHS, len_q=128, len_k=128, heads_kv=1, head_dim=64),
    replace(ODD_LENGTHS, len_q=65, len_k=65, heads_kv=8, head_dim=64),
    replace(ODD_LENGTHS, len_q=5, len_k=5, head_dim=64),
    replace(ODD_LENGTHS, len_q=1, len_k=513, head_dim=64),
    # The diagonal is not that of a block.
    replace(ODD_LENGTHS, len_q=300, len_k=812, head_dim=64),
    replace(ODD_LENGTHS, len_q=556, len_k=300, head_dim=64),
    replace(ODD_LENGTHS, len_q=700, len_k=700, causal=False, head_dim=64),
    replace(ODD_LENGTHS, len_q=129, len_k=1000, causal=False, head_dim=40),
    replace(ODD_LENGTHS, len_q=700, len_k=700, softmax_scale=-0.2, tables="random", layout="bhnd", head_dim=64),
    replace(ODD_LENGTHS, len_q=700, len_k=700, norms=0.0, sinks=True, head_dim=64),
    # These take blocks of 64.
    replace(ODD_LENGTHS, len_q=300, len_k=556, softcap=4.0, head_dim=64),
    replace(ODD_LENGTHS, len_q=700, len_k=700, window=(100, 0), head_dim=64),
)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_against_float64(case, dtype):
    check_in_dtype(case, dtype)


@cases(replace(ODD_LENGTHS, len_q=700, len_k=700, head_dim=64), replace(MANY_TILES, len_q=1024, head_dim=64))
def test_reruns(case):
    check_reruns(case, 20)
