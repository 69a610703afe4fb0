"""Rotated q and k that the sm_90 forward saves for the backward, against the backward that rotates them itself."""

import gc
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention
from tests.support.attention import assert_equal, assert_matches_float64
from tests.support.dtypes import BF16, F16
from tests.support.gpu import MANY_TILES, ODD_LENGTHS, assert_same_but_dq
from tests.support.internals import run_operators
from tests.support.marks import cases
from tests.support.places import EMPTY, ON_SM_90, PADDED, UNEVEN, needs_sm_90, packed
from verification.testing import Case, make_inputs, run_op

pytestmark = needs_sm_90

# A block's first tile, and its others, are rotated by different warps.
CASES = (
    ODD_LENGTHS,
    replace(ODD_LENGTHS, causal=False, dtype=F16, interleaved=True, rotary_dim=64),
    replace(ODD_LENGTHS, head_dim=64, softmax_scale=-0.2, tables="random"),
    replace(ODD_LENGTHS, head_dim=96, heads_kv=1),
    replace(ODD_LENGTHS, head_dim=256, norms=1.0),
    replace(PADDED, kv_starts=(40, 690), kv_lens=(650, 700), sinks=True, norms=0.0),
    packed(UNEVEN),
    packed(UNEVEN, head_dim=64, causal=False, norms=1.0),
    packed(EMPTY),
    packed((20, 333), behind=(400, 700), window=(33, 0), head_dim=192),
    MANY_TILES,
    packed((300, 129, 1000, 63) * 12),
)


@cases(*CASES)
def test_the_saved_are_what_the_backward_would_rotate(case):
    """All the same bits but dq, which is added in any order, because a rotation has the same bits in every kernel.
    Both match float64."""
    inputs = make_inputs(case, "cuda")
    rotated_by_forward = run_op(inputs, case, **ON_SM_90)
    rotated_by_backward = run_operators(inputs, case, forward="hopper", backward="hopper")
    if case.norms is None:
        assert_same_but_dq(rotated_by_forward, rotated_by_backward)
    assert_equal(rotated_by_forward[:2], rotated_by_backward[:2])
    assert_matches_float64(case, inputs, rotated_by_forward)
    assert_matches_float64(case, inputs, rotated_by_backward)
    with torch.no_grad():
        assert_equal(run_op(inputs, case, **ON_SM_90, grads=False)[:2], rotated_by_forward[:2])


@pytest.mark.parametrize(("forward", "backward"), [("hopper", "triton"), ("triton", "hopper")])
@cases(
    replace(PADDED, window=(150, 0), softcap=30.0, kv_starts=(0, 300), kv_lens=(700, 600), sinks=True),
    replace(ODD_LENGTHS, causal=False, intervals="random", norms=0.0, kv_starts=(0, 300), kv_lens=(700, 600)),
    packed(UNEVEN, window=(150, 0), softcap=30.0, sinks=True, head_dim=256),
)
def test_passes_of_different_backends_fit_together(case, forward, backward):
    """o and lse mean the same to both."""
    inputs = make_inputs(case, "cuda")
    assert_matches_float64(case, inputs, run_operators(inputs, case, forward=forward, backward=backward))


def test_memory_of_a_step_whose_q_and_k_nobody_keeps():
    """In a model q and k are results of projections: no more is held between the passes than before."""
    case = Case(2, 16, 16, 2048, 2048, 128, dtype=BF16)
    inputs = make_inputs(case, "cuda")
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    size = inputs.q.numel() * inputs.q.element_size()

    def held(save_unrotated):
        gc.collect()  # what tests before this one left in cycles would be freed while memory is counted
        before = torch.cuda.memory_allocated()
        q, k, v = (x * 1 for x in leaves)
        o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, **ON_SM_90, deterministic=save_unrotated)
        del q, k, v
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before, o

    unrotated, o = held(True)
    del o
    rotated, o = held(False)
    lse = o.numel() // case.head_dim * 4
    assert unrotated == rotated <= 4 * size + lse + (64 << 10)
