"""torch.library operators and their autograd: what is saved and what is passed on, nothing else.

Plain dispatcher registrations (define, impl per key) rather than ``torch.library.custom_op``: the same behaviour under
torch.compile for less host time per call.
"""

from __future__ import annotations

import functools

import torch

from fused_rope_attn.attention import configs, planning
from fused_rope_attn.attention.masks import describe_masks
from fused_rope_attn.attention.portable.backward import attention_backward
from fused_rope_attn.attention.portable.forward import attention_forward
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.layouts import like_input
from fused_rope_attn.runtime.registration import is_plain

_LIB = torch.library.Library("fused_rope_attn", "FRAGMENT")
# backend: "auto", "triton" or "hopper"; which kernels "auto" means is decided here, where v's address is known.
_OPTIONS = (
    "bool causal, float softmax_scale, int rotary_dim, bool interleaved, str strategy, str backend, bool deterministic"
)
# A call without masks leaves all of these out. window_left, window_right: -1 for unbounded; max_seqlen: of packed ones.
_MASKS = (
    "Tensor? sinks=None, Tensor? kv_starts=None, Tensor? kv_lens=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, SymInt max_seqlen=0"
)
_NO_MASKS = (None, None, None, None, None, -1, -1, 0.0, 0)
_COUNT, _SINKS = 7, 7  # of _OPTIONS, and the index of sinks among both
_LIB.define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, {_OPTIONS}, {_MASKS})"
    " -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# The last result is the gradient of sinks, empty where there are none.
_LIB.define(
    "attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor cos, Tensor sin, "
    f"{_OPTIONS}, {_MASKS}) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_FORWARD = torch.ops.fused_rope_attn.attention_forward.default
_BACKWARD = torch.ops.fused_rope_attn.attention_backward.default


def _launcher(q, k, v, options):
    """(the plan, the launcher's keyword arguments but its configuration), from _OPTIONS and perhaps _MASKS."""
    causal, softmax_scale, rotary_dim, interleaved, strategy, backend, deterministic = options[:_COUNT]
    keywords = {
        "causal": causal,
        "softmax_scale": softmax_scale,
        "rotary_dim": rotary_dim,
        "interleaved": interleaved,
    }
    if len(options) == _COUNT:
        return planning.plan_for(q, k, v, causal, strategy, backend, deterministic), keywords
    # The dispatcher drops trailing defaults.
    masks = (*options[_COUNT:], *_NO_MASKS[len(options) - _COUNT :])
    # Kernels index these with unit stride; they nearly always have it.
    masks = (*(x if x is None or x.is_contiguous() else x.contiguous() for x in masks[:5]), *masks[5:])
    tensors, (left, right, softcap, max_seqlen) = masks[:5], masks[5:]
    sinks, starts, lens, cu_seqlens, _ = tensors
    window = None if left < 0 and right < 0 else (left, right)
    feature = planning.mask_feature(window, softcap, sinks, starts, lens, cu_seqlens)
    if feature:
        keywords |= {
            "masks": describe_masks(causal, left, right, softcap, tensors, max_seqlen),
            "mask_tensors": tensors,
        }
    sequences = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    plan = planning.plan_for(q, k, v, causal, strategy, backend, deterministic, feature, max_seqlen, window, sequences)
    return plan, keywords


def _forward(q, k, v, cos, sin, *options):
    plan, keywords = _launcher(q, k, v, options)
    run = attention_forward if type(plan.forward) is configs.ForwardConfig else _hopper()[0]
    with device.guard(q.device):
        return run(q, k, v, cos, sin, **keywords, config=plan.forward)


def _run_backward(do, q, k, v, o, lse, cos, sin, *options):
    """dq, dk, dv, and with sinks theirs."""
    plan, keywords = _launcher(q, k, v, options)
    run = attention_backward if type(plan.backward) is configs.BackwardConfig else _hopper()[1]
    with device.guard(q.device):
        return run(do, q, k, v, o, lse, cos, sin, **keywords, config=plan.backward)


def _backward(do, q, *rest):
    gradients = _run_backward(do, q, *rest)
    return gradients if len(gradients) == 4 else (*gradients, q.new_empty(0))


@functools.cache
def _hopper():
    """(forward, backward) launchers of the sm_90 backend, imported where they are used: Gluon is still experimental."""
    from fused_rope_attn.attention.hopper import backward, forward

    return forward.attention_forward, backward.attention_backward


def _forward_fake(q, k, v, cos, sin, *options):
    return like_input(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_fake(do, q, k, v, o, lse, cos, sin, *options):
    sinks = options[_SINKS] if len(options) > _SINKS else None
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return like_input(q), like_input(k), like_input(v), dsinks


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
        ctx.save_for_backward(q, k, v, o, lse, cos, sin, *options[_COUNT : _COUNT + 5])
        ctx.options = options[:_COUNT], options[_COUNT + 5 :]
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        unused = (None,) * (len(ctx.needs_input_grad) - 4)
        if do is None:
            return None, None, None, None, *unused
        q, k, v, o, lse, cos, sin, *masks = ctx.saved_tensors
        # With create_graph the operator's own autograd must see the call, to refuse a second differentiation.
        run = _run_backward if ctx.plain and type(do) is torch.Tensor and not torch.is_grad_enabled() else _BACKWARD
        dq, dk, dv, *dsinks = run(do, q, k, v, o, lse, cos, sin, *ctx.options[0], *masks, *ctx.options[1])
        _, need_q, need_k, need_v = ctx.needs_input_grad[:4]
        if len(unused) > _SINKS + 2 and ctx.needs_input_grad[6 + _SINKS]:
            unused = (*unused[: _SINKS + 2], dsinks[0], *unused[_SINKS + 3 :])
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


def _requires_grad(q, k, v, options) -> bool:
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return len(options) > _SINKS and options[_SINKS] is not None and options[_SINKS].requires_grad


def _forward_autograd(keyset, q, k, v, cos, sin, *options):
    if torch.is_grad_enabled() and _requires_grad(q, k, v, options):
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


def attention(q, k, v, cos, sin, *options):
    """(o, lse); ``options`` as the operators take them. Tracing, fake tensors and modes see one operator; ordinary
    calls save its dispatch (15 us)."""
    if not is_plain(q, k, v, cos, sin, *(x for x in options[_COUNT : _COUNT + 5] if x is not None)):
        return _FORWARD(q, k, v, cos, sin, *options)
    if torch.is_grad_enabled() and _requires_grad(q, k, v, options):
        return _Attention.apply(None, q, k, v, cos, sin, *options)
    return _forward(q, k, v, cos, sin, *options)
