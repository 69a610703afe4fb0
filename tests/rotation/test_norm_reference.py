"""The reference of norm and rotation against others: PyTorch's norm, and transformers' Qwen 3 and Gemma 3."""

import pytest
import torch

from fused_rope_attn import apply_rope_qk, rope_tables
from fused_rope_attn.rotation import reference
from tests.support.dtypes import F16, F32, F64
from tests.support.internals import rotate_without_the_kernel
from tests.support.marks import interpreted
from tests.support.rotation import assert_close, normal


@pytest.mark.parametrize(("eps", "offset"), [(1e-6, 0.0), (1e-2, 1.0)])
def test_the_norm_is_pytorchs(eps, offset):
    x, weight = normal(3, 5, 8).requires_grad_(), normal(8, seed=1).requires_grad_()
    expected = torch.nn.functional.rms_norm(x, (8,), offset + weight, eps)
    torch.testing.assert_close(reference.norm(x, weight, eps, offset), expected)
    assert torch.autograd.gradcheck(lambda x, weight: reference.norm(x, weight, eps, offset), (x, weight))
    assert reference.norm(x.half(), weight.half(), eps, offset).dtype == F32


def test_gradients_of_norm_and_rotation():
    cos, sin = normal(2, 3, 3, seed=3)
    leaves = [normal(1, heads, 3, 8, seed=heads).requires_grad_() for heads in (2, 1)]
    leaves += [normal(8, seed=5 + i).requires_grad_() for i in range(2)]
    for inverse in (False, True):

        def run(q, k, q_norm, k_norm):
            return apply_rope_qk(
                q,
                k,
                cos,
                sin,
                q_norm=q_norm,
                k_norm=k_norm,
                norm_eps=1e-2,
                norm_offset=0.5,
                rotary_dim=6,
                inverse=inverse,  # noqa: B023
            )

        assert torch.autograd.gradcheck(run, leaves)


def test_a_row_of_zeros_without_eps():
    x, weight = normal(2, 4).index_fill(0, torch.tensor([1]), 0.0).requires_grad_(), normal(4, seed=1).requires_grad_()
    y = reference.norm(x, weight, 0.0, 0.0)
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert not y[1].any() and dx.isfinite().all() and dweight.isfinite().all()


def test_normed_and_rotated_are_rounded_once():
    x, weight = normal(1, 1, 64, 32).half(), normal(32, seed=1).half()
    cos, sin = rope_tables(64, 32)
    options = {"rotary_dim": 16, "weight": weight, "norm_eps": 1e-6, "norm_offset": 0.0}
    wide = reference.rotation(x.double(), cos[:, :8].double(), sin[:, :8].double(), **options)
    found = reference.rotation(x, cos[:, :8], sin[:, :8], **options)
    # Half a unit in the last place, and float32's own error where two products cancel.
    assert found.dtype == F16 and bool(((found.double() - wide).abs() <= wide.abs() * 2**-11 + 2**-19).all())


def model_of(name):
    """(a norm over 16 columns with eps 1e-3, the rotation) of a model of transformers."""
    pytest.importorskip("transformers")
    if name == "qwen3":
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm as Norm, apply_rotary_pos_emb
    else:
        from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm as Norm, apply_rotary_pos_emb
    return [Norm(16, eps=1e-3) for _ in range(2)], apply_rotary_pos_emb


@pytest.mark.parametrize("kernel", [pytest.param(True, marks=interpreted), False], ids=["kernel", "reference"])
@pytest.mark.parametrize(("name", "offset"), [("qwen3", 0.0), ("gemma3", 1.0)])
def test_transformers(name, offset, kernel, monkeypatch):
    """The model's own norms and rotation of (B, N, H, D), outputs and all gradients, in float32."""
    if not kernel:
        rotate_without_the_kernel(monkeypatch)
    norms, rotate = model_of(name)
    q, k = (normal(2, 7, heads, 16, seed=heads).float().requires_grad_() for heads in (2, 1))
    for i, norm in enumerate(norms):
        norm.weight.data.copy_(normal(16, seed=4 + i))
    weights = [norm.weight for norm in norms]
    cos, sin = (torch.cat((t, t), -1)[None] for t in rope_tables(7, 16))
    expected = rotate(*(norm(x).transpose(1, 2) for norm, x in zip(norms, (q, k))), cos, sin)
    outs = apply_rope_qk(
        q.transpose(1, 2),
        k.transpose(1, 2),
        cos,
        sin,
        q_norm=weights[0],
        k_norm=weights[1],
        norm_eps=1e-3,
        norm_offset=offset,
    )
    dos = [normal(*out.shape, seed=7).float() for out in outs]
    found = (*outs, *torch.autograd.grad(outs, (q, k, *weights), dos))
    for x, y in zip(found, (*expected, *torch.autograd.grad(expected, (q, k, *weights), dos)), strict=True):
        assert_close(x.detach(), y.detach().to(F64), 1e-5)
