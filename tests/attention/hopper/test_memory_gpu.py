"""The sm_90 kernels read q, k and gradients of any layout, and allocate no more memory than expected."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention
from tests.support.attention import assert_matches_float64
from tests.support.dtypes import BF16
from tests.support.gpu import ODD_LENGTHS, assert_alike, bytes_of, misaligned, peaks_of_both_passes
from tests.support.hopper import ON_SM_90, needs_sm_90
from verification.testing import Case, make_inputs, run_op

pytestmark = needs_sm_90


def test_q_k_and_the_gradient_may_lie_anyhow():
    inputs, odd = make_inputs(ODD_LENGTHS, "cuda"), make_inputs(replace(ODD_LENGTHS, layout="odd"), "cuda")
    ones = torch.ones((), dtype=BF16, device="cuda").expand(inputs.q.shape)
    turned = inputs.do.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    for changes in (
        {"q": odd.q},
        {"k": odd.k},
        {"do": odd.do},
        {"do": ones},
        {"do": turned},
        {"do": misaligned(inputs.do.contiguous())},
        {"cos": misaligned(inputs.cos)},
        {"q": odd.q, "k": odd.k, "do": odd.do},
    ):
        some = inputs._replace(**changes)
        assert_matches_float64(ODD_LENGTHS, some, run_op(some, ODD_LENGTHS, **ON_SM_90))
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    rope_attention(q, k, v, inputs.cos, inputs.sin, True, **ON_SM_90).sum().backward()
    assert_alike((q.grad, k.grad, v.grad), run_op(inputs._replace(do=ones), ODD_LENGTHS, **ON_SM_90)[2:])


@pytest.mark.unpoisoned
@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
def test_memory(layout):
    """No copy of a strided input but the rotated q and k, K and V not expanded to the query heads, no score matrix.

    Few key heads of one sequence are divided among programs. They add up dk and dv of 128 keys in float32, in up to two
    slots for each multiprocessor.
    """
    case = Case(1, 32, 2, 1000, 1000, 128, dtype=BF16, layout=layout)
    inputs, o, results, forward, backward = peaks_of_both_passes(case, **ON_SM_90)
    lse = torch.empty(1, 32, 1000, device="cuda")
    accumulator = torch.empty(1, 32, 1024, 128, device="cuda")
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    sums = torch.empty(2, multiprocessors, 2, 128, 128, device="cuda")
    slack = 64 << 10
    assert forward <= bytes_of(o, lse, inputs.q, inputs.k) + slack
    assert backward <= bytes_of(*results, lse, lse, accumulator, sums) + slack
