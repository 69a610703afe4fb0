"""The norms of q and k in the sm_90 kernels: against float64, compiled, under autocast, and the same bits again."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention
from tests.support.attention import assert_equal, assert_matches_float64
from tests.support.dtypes import BF16, F16, F32
from tests.support.gpu import MANY_TILES, ODD_LENGTHS, assert_alike, replayed
from tests.support.hopper import ON_SM_90, PADDED, UNEVEN, needs_sm_90, packed
from tests.support.internals import run_operators
from tests.support.marks import cases
from verification.testing import make_inputs, norms_of, run_op

pytestmark = needs_sm_90

NORMED = replace(ODD_LENGTHS, norms=0.0)
CASES = (
    NORMED,
    replace(NORMED, norms=1.0, norm_dtype=BF16, head_dim=64, interleaved=True),
    replace(NORMED, head_dim=80, causal=False),
    replace(NORMED, head_dim=96, rotary_dim=40, interleaved=True, table_dtype=BF16),
    replace(NORMED, head_dim=128, rotary_dim=64, layout="bhnd", norm_eps=1e-2),
    replace(NORMED, head_dim=256, norms=1.0),
    replace(NORMED, head_dim=40, heads_kv=1, softmax_scale=-0.2, tables="random"),
    replace(NORMED, window=(90, 0), len_q=700, len_k=333),
    replace(NORMED, window=(64, 0), len_q=2000, len_k=2000),
    replace(NORMED, softcap=4.0, sinks=True, head_dim=256, interleaved=True, rotary_dim=64),
    replace(PADDED, norms=1.0, kv_starts=(40, 690), kv_lens=(650, 700), sinks=True),
    replace(PADDED, norms=0.0, kv_lens=(100, 0), head_dim=64),
    packed(UNEVEN, norms=1.0),
    packed(UNEVEN, norms=0.0, head_dim=64, causal=False, norm_dtype=BF16),
    packed((20, 333), behind=(400, 700), window=(33, 0), norms=0.0, head_dim=256),
    packed(UNEVEN, norms=1.0, head_dim=192, norm_dtype=BF16),
)


@cases(*CASES)
def test_norms_against_float64(case):
    """By the forward pass's rotated copies, and by a backward pass that norms and rotates again."""
    inputs = make_inputs(case, "cuda")
    before = [x.clone() for x in inputs]
    out = run_op(inputs, case, **ON_SM_90)
    assert_equal(before, inputs)
    assert_matches_float64(case, inputs, out)
    assert out.dq_norm.dtype == out.dk_norm.dtype == case.norm_dtype
    again = run_operators(inputs, case, forward="hopper", backward="hopper")
    assert_equal(out[:2], again[:2])
    assert_matches_float64(case, inputs, again)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_many_tiles(dtype):
    case = replace(MANY_TILES, norms=1.0, dtype=dtype)
    inputs = make_inputs(case, "cuda")
    assert_matches_float64(case, inputs, run_op(inputs, case, **ON_SM_90))


def test_what_is_deterministic():
    """dk, dv and with them k_norm's gradient in every run; with ``deterministic`` all."""
    case = replace(MANY_TILES, norms=0.0)
    inputs = make_inputs(case, "cuda")
    runs = [run_op(inputs, case, **ON_SM_90) for _ in range(3)]
    for out in runs[1:]:
        assert_equal((out.o, out.dk, out.dv, out.dk_norm), (runs[0].o, runs[0].dk, runs[0].dv, runs[0].dk_norm))
        assert_alike((out.dq, out.dq_norm), (runs[0].dq, runs[0].dq_norm))
    first, again = (run_op(inputs, case, **ON_SM_90, deterministic=True) for _ in range(2))
    assert_equal((*first, first.dq_norm, first.dk_norm), (*again, again.dq_norm, again.dk_norm))


def weights_of(case):
    norms = norms_of(case, "cuda")
    return [norms.pop(name).requires_grad_() for name in ("q_norm", "k_norm")], norms


@pytest.mark.unpoisoned
def test_compile():
    """Inductor, full graph: what eager gives, weights' gradients included."""
    torch._dynamo.reset()
    weights, options = weights_of(NORMED)

    def block(q, k, v, cos, sin, q_norm, k_norm):
        return 0.5 * rope_attention(2.0 * q, k, v, cos, sin, True, q_norm=q_norm, k_norm=k_norm, **options, **ON_SM_90)

    compiled = torch.compile(block, fullgraph=True)
    for length in (333, 200):
        inputs = make_inputs(replace(NORMED, len_q=length), "cuda")
        leaves = [*(x.detach().requires_grad_() for x in inputs[:3]), *weights]
        results = []
        for function in (block, compiled):
            o = function(*leaves[:3], inputs.cos, inputs.sin, *weights)
            results.append((o.detach(), *torch.autograd.grad(o, leaves, inputs.do)))
        assert_alike(*results)


def test_autocast():
    """float32 weights next to q, k and v that become bfloat16; the weights' gradients are float32."""
    inputs, (weights, options) = make_inputs(replace(NORMED, dtype=F32), "cuda"), weights_of(NORMED)
    leaves = [*(x.detach().requires_grad_() for x in inputs[:3]), *weights]
    norms = {"q_norm": weights[0], "k_norm": weights[1], **options}
    with torch.autocast("cuda", BF16):
        o = rope_attention(*leaves[:3], inputs.cos, inputs.sin, True, **norms, **ON_SM_90)
    found = torch.autograd.grad(o, leaves, inputs.do.to(BF16))
    low = [*(x.detach().to(BF16).requires_grad_() for x in leaves[:3]), *weights]
    expected = rope_attention(*low[:3], inputs.cos, inputs.sin, True, **norms, **ON_SM_90)
    assert torch.equal(o, expected)
    assert all(x.dtype == F32 for x in found)
    assert_alike(found, torch.autograd.grad(expected, low, inputs.do.to(BF16)))


def test_cuda_graphs():
    """Captured once, replayed with other inputs: the counter, the sums and the buffers are the call's own."""
    norms = norms_of(NORMED, "cuda")
    for inputs, found in replayed(NORMED, (5, 6), **norms, **ON_SM_90):
        leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
        o = rope_attention(*leaves, inputs.cos, inputs.sin, True, **norms, **ON_SM_90)
        assert_alike(found, (o.detach(), *torch.autograd.grad(o, leaves, inputs.do)))


def test_a_row_that_is_not_finite_stays_in_its_row():
    inputs = make_inputs(NORMED, "cuda")
    clean = run_op(inputs, NORMED, **ON_SM_90)
    q = inputs.q.clone()
    q[0, 1, 100, 7] = float("inf")
    out = run_op(inputs._replace(q=q), NORMED, **ON_SM_90)
    others = torch.arange(333, device="cuda") != 100
    for x, y in ((out.o, clean.o), (out.dq, clean.dq)):
        assert x[0, 1, 100].isnan().all()
        assert_alike([x[0, 1, others], x[1]], [y[0, 1, others], y[1]])
