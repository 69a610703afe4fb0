"""The norms of q and k in attention: transformers' own modules, and rows that a norm could spoil."""

import importlib
import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fused_rope_attn import rope_attention, rope_tables
from tests.support.dtypes import F32, F64
from tests.support.marks import both_strategies, ignore_overflow, interpreted
from tests.support.operators import kernel_or_reference, small_call
from tests.support.rotation import assert_close, normal
from verification.testing import Case, make_inputs, run_op

pytestmark = ignore_overflow
CASE = Case(1, 2, 1, 9, 9, 16, dtype=F32, norms=1.0, norm_eps=1e-3)


@kernel_or_reference("triton", "reference")
@pytest.mark.parametrize(("name", "offset"), [("Qwen3", 0.0), ("Gemma3", 1.0)])
def test_transformers(name, offset, backend):
    """The models' own norms and rotation, and PyTorch's attention: outputs and all gradients, in float32."""
    model = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    norms = [getattr(model, f"{name}RMSNorm")(16, eps=1e-3) for _ in range(2)]
    for i, norm in enumerate(norms):
        norm.weight.data.copy_(normal(16, seed=4 + i))
    q, k, v = (normal(2, 7, heads, 16, seed=i).float().requires_grad_() for i, heads in enumerate((4, 2, 2)))
    cos, sin = (torch.cat((t, t), -1)[None] for t in rope_tables(7, 16))
    turned = model.apply_rotary_pos_emb(*(norm(x).transpose(1, 2) for norm, x in zip(norms, (q, k))), cos, sin)
    expected = scaled_dot_product_attention(*turned, v.transpose(1, 2), is_causal=True, enable_gqa=True)
    weights = dict(zip(("q_norm", "k_norm"), (norm.weight for norm in norms)))
    options = {"norm_eps": 1e-3, "norm_offset": offset, "layout": "bshd", "backend": backend}
    o = rope_attention(q, k, v, cos, sin, True, **weights, **options).transpose(1, 2)
    leaves, do = (q, k, v, *weights.values()), normal(*o.shape, seed=7).float()
    found = (o, *torch.autograd.grad(o, leaves, do))
    for x, y in zip(found, (expected, *torch.autograd.grad(expected, leaves, do)), strict=True):
        assert_close(x.detach(), y.detach().to(F64), 1e-5)


@interpreted
@both_strategies
def test_rows_of_zeros(strategy):
    """Without eps: no NaN anywhere, scores of zero."""
    case = replace(CASE, norm_eps=0.0, norms=0.0)
    inputs = make_inputs(case)
    inputs.q[:, :, 3], inputs.k[:, :, 2] = 0.0, 0.0
    out, expected = run_op(inputs, case, backend="triton", strategy=strategy), run_op(inputs, case, backend="reference")
    for x, y in zip((*out, out.dq_norm, out.dk_norm), (*expected, expected.dq_norm, expected.dk_norm)):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@interpreted
@both_strategies
def test_a_row_that_is_not_finite_stays_in_its_row(strategy):
    clean, soiled = make_inputs(CASE), make_inputs(CASE)
    soiled.q[0, 0, 4, 3] = math.inf
    out, expected = (run_op(inputs, CASE, backend="triton", strategy=strategy) for inputs in (soiled, clean))
    others = [i for i in range(9) if i != 4]
    for x, y in ((out.o, expected.o), (out.dq, expected.dq)):
        assert x[0, 0, 4].isnan().all() and torch.equal(x[0, 0, others], y[0, 0, others])
        assert torch.equal(x[0, 1], y[0, 1])


@interpreted
def test_weights_without_unit_strides():
    run, tensors = small_call("norms and intervals", backend="triton")
    apart = [x.repeat_interleave(2)[::2] if x.ndim == 1 else x for x in tensors.values()]
    assert torch.equal(run(*apart)[0], run(*tensors.values())[0])
