# mypy: allow-untyped-defs, allow-incomplete-defs
"""Co-RoPE, rotary attention with distances measured by content: the public function, its checks and its autograd."""

import warnings

import torch
from torch import Tensor

from fused_rope_attn.experimental.corope import reference
from fused_rope_attn.runtime import checks, device
from fused_rope_attn.runtime.differentiation import differentiable, last_gradients
from fused_rope_attn.runtime.entry import is_autocast_on

if device.has_triton():  # elsewhere every call takes the reference
    from fused_rope_attn.experimental.corope.launch import corope_backward, corope_forward

__all__ = ["corope_attention"]
_FORMS = checks.Forms(q="B HQ N D", k="B HKV N D", v="B HKV N D")


def corope_attention(
    q: Tensor, k: Tensor, v: Tensor, *, base: float = 10000.0, softmax_scale: float | None = None
) -> Tensor:
    """Causal attention with rotary distances measured by content (Co-RoPE), differentiable in q, k and v.

    For each group of query heads the *leader* is its first one. ``z_ij = sigmoid(s q_leader,i . k_j)`` says how much of
    a step key ``j <= i`` is; the distance ``Delta_ij = sum_{j < m <= i} z_im`` takes the place of ``i - j`` in RoPE for
    all heads of the group. Gradients flow through the distances too.

    GPU tensors in float16, bfloat16 or float32 with D from 32 to 128 take Triton kernels with O(N) memory, whose
    gradients are summed by atomics and so may differ in the last bits from run to run; everything else takes eager
    PyTorch, in chunks.

    Args:
        q: ``(B, HQ, N, D)``, float16, bfloat16 or float32, D even, any strides.
        k: ``(B, HKV, N, D)``, q's dtype and device; HQ must be a multiple of HKV.
        v: shape, dtype and device of k.
        base: of the frequencies ``base ** (-2 d / D)``; positive.
        softmax_scale: s, of scores and of z; default ``D ** -0.5``; any finite float.

    Returns:
        o ``(B, HQ, N, D)`` in q's dtype.

    Raises:
        TypeError: wrong type or dtype.
        ValueError: wrong shape, range or device.
        NotImplementedError: double backward and forward-mode differentiation; transforms of torch.func on a GPU.
        RuntimeError: their backward pass under ``torch.use_deterministic_algorithms(True)``.
    """
    _, heads_q, _, head_dim, heads_kv = _FORMS.check("bhsd", (q, k, v))
    checks.check_heads(heads_q, heads_kv, head_dim)
    checks.check_positive("base", base)
    checks.check_softmax_scale("softmax_scale", softmax_scale, None)
    if is_autocast_on(q.device.type) and q.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    base, scale = float(base), head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    q, k, v = differentiable("corope_attention", (q, k, v))
    is_served = q.dtype is not torch.float64 and 32 <= head_dim <= 128
    if q.is_cuda and is_served and device.has_triton():
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotImplementedError(
                "corope_attention: the kernels do not support the transforms of torch.func (grad, vmap, ...)"
            )
        return CoRopeAttention.apply(q, k, v, base, scale)
    return reference.corope(q, k, v, base=base, softmax_scale=scale)


class CoRopeAttention(torch.autograd.Function):
    """The kernels under autograd: ``apply(q, k, v, base, softmax_scale) -> o``."""

    @staticmethod
    def forward(ctx, q, k, v, base, softmax_scale):
        with device.guard(q.device):
            o, lse, mileage = corope_forward(q, k, v, base=base, softmax_scale=softmax_scale)
        ctx.save_for_backward(q, k, v, o, lse, mileage)
        ctx.options = {"base": base, "softmax_scale": softmax_scale}
        return o

    @staticmethod
    def backward(ctx, do):
        _refuse_determinism()
        saved = ctx.saved_tensors
        with device.guard(do.device):
            gradients = corope_backward(do, *saved, **ctx.options)
        needed = [g if need else None for g, need in zip(gradients, ctx.needs_input_grad)]
        return *last_gradients("corope_attention", needed, (do, *saved)), None, None


def _refuse_determinism() -> None:
    """Raise, or warn if so chosen, as PyTorch's operators do if their backward pass is not deterministic."""
    message = "the backward pass of corope_attention has no deterministic kernels: atomics sum its gradients"
    if torch.are_deterministic_algorithms_enabled():
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(f"{message}; torch.use_deterministic_algorithms(True, warn_only=True) lets them run")
        warnings.warn(message, UserWarning, stacklevel=2)
