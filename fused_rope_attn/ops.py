"""torch.library operators and their autograd: what is saved and what is passed on, nothing else.

Plain dispatcher registrations (define, impl per key) rather than ``torch.library.custom_op``: the same behaviour under
torch.compile for less host time per call.
"""

from __future__ import annotations

import functools

import torch

from fused_rope_attn import configs, device, planning
from fused_rope_attn.kernels.backward import attention_backward
from fused_rope_attn.kernels.forward import attention_forward
from fused_rope_attn.kernels.launch import like_input

_LIB = torch.library.Library("fused_rope_attn", "DEF")
# backend: "auto", "triton" or "hopper"; which kernels "auto" means is decided here, where v's address is known.
_OPTIONS = (
    "bool causal, float softmax_scale, int rotary_dim, bool interleaved, str strategy, str backend, bool deterministic"
)
_LIB.define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, {_OPTIONS}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIB.define(
    "attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor cos, Tensor sin, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_FORWARD = torch.ops.fused_rope_attn.attention_forward.default
_BACKWARD = torch.ops.fused_rope_attn.attention_backward.default


def _forward(
    q, k, v, cos, sin, causal, softmax_scale, rotary_dim, interleaved, strategy, backend, deterministic
):  # fmt: skip
    config = planning.plan_for(q, k, v, causal, strategy, backend, deterministic).forward
    run = attention_forward if type(config) is configs.ForwardConfig else _hopper()[0]
    with device.guard(q.device):
        return run(
            q, k, v, cos, sin, causal=causal, softmax_scale=softmax_scale, rotary_dim=rotary_dim,
            interleaved=interleaved, config=config,
        )  # fmt: skip


def _backward(
    do, q, k, v, o, lse, cos, sin, causal, softmax_scale, rotary_dim, interleaved, strategy, backend, deterministic
):  # fmt: skip
    config = planning.plan_for(q, k, v, causal, strategy, backend, deterministic).backward
    run = attention_backward if type(config) is configs.BackwardConfig else _hopper()[1]
    with device.guard(q.device):
        return run(
            do, q, k, v, o, lse, cos, sin, causal=causal, softmax_scale=softmax_scale, rotary_dim=rotary_dim,
            interleaved=interleaved, config=config,
        )  # fmt: skip


@functools.cache
def _hopper():
    """(forward, backward) launchers of the sm_90 backend, imported where they are used: Gluon is still experimental."""
    from fused_rope_attn.kernels.hopper import backward, forward

    return forward.attention_forward, backward.attention_backward


def _forward_fake(q, k, v, cos, sin, *options):
    return like_input(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_fake(do, q, k, v, o, lse, cos, sin, *options):
    return like_input(q), like_input(k), like_input(v)


class _Attention(torch.autograd.Function):
    """Saves the *unrotated* q, k, v: gradients come back in the frame the caller knows."""

    @staticmethod
    def forward(ctx, keyset, q, k, v, cos, sin, *options):
        if keyset is None:
            o, lse = _forward(q, k, v, cos, sin, *options)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                o, lse = _FORWARD.redispatch(keyset & torch._C._after_autograd_keyset, q, k, v, cos, sin, *options)
        ctx.plain = keyset is None
        ctx.save_for_backward(q, k, v, o, lse, cos, sin)
        ctx.options = options
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        unused = (None,) * (2 + len(ctx.options))
        if do is None:
            return None, None, None, None, *unused
        q, k, v, o, lse, cos, sin = ctx.saved_tensors
        # With create_graph the operator's own autograd must see the call, to refuse a second differentiation.
        run = _backward if ctx.plain and type(do) is torch.Tensor and not torch.is_grad_enabled() else _BACKWARD
        dq, dk, dv = run(do, q, k, v, o, lse, cos, sin, *ctx.options)
        _, need_q, need_k, need_v = ctx.needs_input_grad[:4]
        return None, dq if need_q else None, dk if need_k else None, dv if need_v else None, *unused


class _AttentionBackward(torch.autograd.Function):
    """Makes a second differentiation an error instead of a silent zero."""

    @staticmethod
    def forward(ctx, keyset, *args):
        ctx.set_materialize_grads(False)
        with torch._C._AutoDispatchBelowAutograd():
            return _BACKWARD.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("rope_attention: double backward (create_graph=True) is not supported")


def _forward_autograd(keyset, q, k, v, cos, sin, *options):
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(keyset, q, k, v, cos, sin, *options)
    with torch._C._AutoDispatchBelowAutograd():
        return _FORWARD.redispatch(keyset & torch._C._after_autograd_keyset, q, k, v, cos, sin, *options)


def _backward_autograd(keyset, *args):
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        return _AttentionBackward.apply(keyset, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return _BACKWARD.redispatch(keyset & torch._C._after_autograd_keyset, *args)


for _name, _kernel, _fake, _autograd in (
    ("attention_forward", _forward, _forward_fake, _forward_autograd),
    ("attention_backward", _backward, _backward_fake, _backward_autograd),
):
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _kernel, _key)
    _LIB.impl(_name, _autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"fused_rope_attn::{_name}", _fake, lib=_LIB)


def _is_plain(*tensors) -> bool:
    """True in ordinary eager mode: nothing but autograd wants to see the operator, and its dispatch can be skipped."""
    return (
        not torch.compiler.is_compiling()
        and all(type(x) is torch.Tensor or type(x) is torch.nn.Parameter for x in tensors)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def attention(q, k, v, cos, sin, *options):
    """(o, lse); ``options`` as the operators take them. Tracing, fake tensors and modes see one operator; ordinary
    calls save its dispatch (15 us)."""
    if not _is_plain(q, k, v, cos, sin):
        return _FORWARD(q, k, v, cos, sin, *options)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(None, q, k, v, cos, sin, *options)
    return _forward(q, k, v, cos, sin, *options)
