"""The sm_90 backward with a second warpgroup that leaves out query blocks without a key of its own. The table takes it
for as many query heads as key heads, up to 4096 tokens, which few other tests have."""

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


@pytest.fixture(params=[64, 96, 128])
def head_dim(request, monkeypatch):
    """The head dim at which every backward pass leaves those blocks out where it can."""
    config = configs.HopperBackwardConfig(skips_masked_half=True)
    row = hopper_configs.Row(head_dim=request.param, config=config)
    monkeypatch.setattr(hopper_configs, "BACKWARD", (row,))
    forget_plans()
    yield request.param
    forget_plans()


@cases(
    # The keys before the queries fill whole blocks, so that the diagonal is a block's, or they do not.
    ODD_LENGTHS,
    replace(ODD_LENGTHS, len_q=1101, len_k=1101),
    replace(ODD_LENGTHS, len_q=704, len_k=704, heads_kv=8),
    replace(ODD_LENGTHS, len_q=128, len_k=128, heads_kv=1),
    replace(ODD_LENGTHS, len_q=65, len_k=65, heads_kv=8),
    replace(ODD_LENGTHS, len_q=64, len_k=64),
    replace(ODD_LENGTHS, len_q=5, len_k=5),
    replace(ODD_LENGTHS, len_q=300, len_k=812),
    replace(ODD_LENGTHS, len_q=1, len_k=513),
    replace(ODD_LENGTHS, len_q=556, len_k=300),
    replace(ODD_LENGTHS, len_q=300, len_k=556, softcap=4.0, sinks=True),
    replace(ODD_LENGTHS, len_q=700, len_k=700, softmax_scale=-0.2, tables="random", layout="bhnd"),
    replace(ODD_LENGTHS, len_q=700, len_k=700, norms=0.0),
)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_against_float64(head_dim, case, dtype):
    check_in_dtype(replace(case, head_dim=head_dim), dtype)


@cases(replace(ODD_LENGTHS, len_q=700, len_k=700), replace(MANY_TILES, len_q=1024, len_k=1024))
def test_reruns(head_dim, case):
    check_reruns(replace(case, head_dim=head_dim), 20)


def test_many_tiles(head_dim):
    check_in_dtype(replace(MANY_TILES, head_dim=head_dim), BF16)


def test_a_narrower_head(head_dim):
    check_in_dtype(replace(ODD_LENGTHS, len_q=700, len_k=700, head_dim=head_dim - 24), BF16)
