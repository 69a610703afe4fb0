"""Tables with a row for each packed token, in the portable and the sm_90 kernels against float64."""

from dataclasses import replace

import pytest
import torch

from tests.support.attention import assert_equal, assert_matches_float64, packed_case
from tests.support.gpu import ODD_LENGTHS
from tests.support.hopper import needs_sm_90
from verification.testing import make_inputs, run_op

pytestmark = needs_sm_90
LENGTHS = (333, 0, 700, 1, 130)
UNUSED = 9  # tokens after the last sequence
PACKED = packed_case(ODD_LENGTHS, LENGTHS, (UNUSED, UNUSED), tables="random", token_tables=True)


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize(
    "case",
    [
        PACKED,
        replace(PACKED, head_dim=64, norms=1.0, sinks=True, window=(100, 0)),
        replace(PACKED, norms=0.0, rotary_dim=64, interleaved=True, causal=False),
        replace(PACKED, head_dim=256, norms=0.0),
    ],
    ids=lambda case: case.name,
)
def test_tokens_take_their_own_rows(case, backend):
    inputs = make_inputs(case, "cuda")
    assert_matches_float64(case, inputs, run_op(inputs, case, backend=backend))


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_equal_rows_give_the_bits_of_positions_that_restart(backend):
    shared = replace(PACKED, token_tables=False)
    inputs = make_inputs(shared, "cuda")
    index = torch.cat([torch.arange(n) for n in (*LENGTHS, UNUSED)]).cuda()
    own = inputs._replace(cos=inputs.cos[index], sin=inputs.sin[index])
    found = [run_op(x, case, backend=backend) for x, case in ((inputs, shared), (own, PACKED))]
    for name in ("o", "lse", "dk", "dv"):  # dq is summed in an order that varies
        assert_equal(*(getattr(results, name) for results in found))
