"""Rotated q and k that the sm_90 forward saves for the backward, against the backward that rotates them itself."""

import gc
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention
from tests.support.attention import assert_equal, assert_matches_float64
from tests.support.dtypes import BF16, F16
from tests.support.gpu import MANY_TILES, ODD_LENGTHS, assert_same_but_dq
from tests.support.hopper import EMPTY, ON_SM_90, PADDED, UNEVEN, needs_sm_90, packed
from tests.support.internals import run_operators
from tests.support.marks import cases
from verification.testing import Case, make_inputs, run_op

pytestmark = needs_sm_90

# A block's first tile, and its others, are rotated by different warps.
CASES = (
    ODD_LENGTHS,
    replace(ODD_LENGTHS, causal=False, dtype=F16, interleaved=True, rotary_dim=64),
    replace(ODD_LENGTHS, head_dim=64, softmax_scale=-0.2, tables="random"),
    replace(ODD_LENGTHS, head_dim=96, layout="bhnd"),
    replace(ODD_LENGTHS, head_dim=40, heads_kv=1),
    replace(ODD_LENGTHS, head_dim=256),
    replace(ODD_LENGTHS, len_q=700, len_k=333, window=(90, 0)),
    replace(PADDED, kv_starts=(40, 690), kv_lens=(650, 700), sinks=True),
    replace(PADDED, kv_lens=(100, 0), softcap=4.0),
    packed(UNEVEN),
    packed(UNEVEN, head_dim=64, causal=False),
    packed(EMPTY),
    packed((20, 333), behind=(400, 700), window=(33, 0)),
    packed((63, 65, 1, 127, 129)),
    packed(UNEVEN, head_dim=256),
    packed((20, 333), behind=(400, 700), window=(33, 0), head_dim=192),
    packed(EMPTY, head_dim=256),
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
    assert_same_but_dq(rotated_by_forward, rotated_by_backward)
    assert_matches_float64(case, inputs, rotated_by_forward)


@cases(CASES[0], CASES[5], CASES[9], CASES[14])
def test_a_forward_pass_that_saves_returns_the_same(case):
    inputs = make_inputs(case, "cuda")
    with torch.no_grad():
        o, lse = run_op(inputs, case, **ON_SM_90, grads=False)[:2]
    saving = run_op(inputs, case, **ON_SM_90)
    assert_equal((o, lse), saving[:2])


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


def test_in_place_changes_of_q_and_k_after_the_call():
    """Backward does not look at them any more."""
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    q, k, v = (x * 1 for x in leaves)
    o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, **ON_SM_90)
    with torch.no_grad():
        q.zero_()
        k.zero_()
    gradients = torch.autograd.grad(o, leaves, inputs.do)
    expected = run_op(inputs, ODD_LENGTHS, **ON_SM_90)
    assert_same_but_dq((o.detach(), expected.lse, *gradients), expected)


@pytest.mark.parametrize("create_graph", [False, True])
def test_double_backward_is_refused(create_graph):
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    o = rope_attention(*leaves, inputs.cos, inputs.sin, True, **ON_SM_90)
    gradients = torch.autograd.grad(o, leaves, inputs.do, create_graph=create_graph)
    assert_same_but_dq(
        (o.detach(), o.detach(), *(x.detach() for x in gradients)),
        (o.detach(), o.detach(), *run_op(inputs, ODD_LENGTHS, **ON_SM_90)[2:]),
    )
    if create_graph:
        with pytest.raises(NotImplementedError, match="double backward"):
            gradients[0].sum().backward()
