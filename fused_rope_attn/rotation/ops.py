"""torch.library operators of the rotation alone, and their autograd.

The gradient of a rotation is the transposed rotation of the gradient: the operator is its own backward, so that nothing
but tables and positions is saved, and double backward is exact. Plain dispatcher registrations, as in ``ops``.
"""

from __future__ import annotations

import torch

from fused_rope_attn.rotation.configs import rotation
from fused_rope_attn.rotation.launch import Rope
from fused_rope_attn.rotation.validation import LAYOUTS
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import PreparedCalls
from fused_rope_attn.runtime.registration import is_plain

_LIB = torch.library.Library("fused_rope_attn", "FRAGMENT")
_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor? position_ids, Tensor? cu_seqlens, int rotary_dim, bool interleaved, bool inverse, "
    "str layout"
)
_TAGS = (torch.Tag.pt2_compliant_tag,)
_LIB.define(f"rope(Tensor[] xs, {_ARGUMENTS}) -> Tensor[]", tags=_TAGS)
_LIB.define(f"rope_out(Tensor[] xs, Tensor(a!)[] outs, {_ARGUMENTS}) -> ()", tags=_TAGS)
_ROPE = torch.ops.fused_rope_attn.rope.default
_ROPE_OUT = torch.ops.fused_rope_attn.rope_out.default


def _prepare(*arguments) -> Rope:
    *tensors, count, has_ids, has_ends, rotary_dim, interleaved, inverse, layout, in_place, config = arguments
    xs, outs, cos, sin, position_ids, cu_seqlens = _unpack(tensors, count, has_ids, has_ends)
    axes = LAYOUTS[layout]
    return Rope(
        xs, outs, cos, sin, position_ids, cu_seqlens, rotary_dim, interleaved, inverse, axes, in_place, config
    )  # fmt: skip


def _unpack(tensors, count, has_ids, has_ends):
    cos, sin, *rest = tensors[2 * count :]
    position_ids = rest.pop(0) if has_ids else None
    return tensors[:count], tensors[count : 2 * count], cos, sin, position_ids, rest[0] if has_ends else None


_prepared = PreparedCalls(_prepare)


def _launch(xs, outs, in_place, cos, sin, position_ids, cu_seqlens, rotary_dim, interleaved, inverse, layout) -> None:
    sizes = [x.numel() for x in xs]
    if 0 in sizes:
        kept = [pair for pair in zip(xs, outs) if pair[0].numel()]
        xs, outs = [x for x, _ in kept], [out for _, out in kept]
        if not xs:
            return
    where = xs[0].device
    config = rotation(device.arch(where), max(sizes) * xs[0].element_size())
    positions = [tensor for tensor in (position_ids, cu_seqlens) if tensor is not None]
    options = (
        len(xs), position_ids is not None, cu_seqlens is not None, rotary_dim, interleaved, inverse, layout, in_place,
    )  # fmt: skip
    call = _prepared((*xs, *outs, cos, sin, *positions), options, config)
    with device.guard(where):
        call(device.current_stream(where), xs, outs, cos, sin, position_ids, cu_seqlens)


def _rope(xs, *arguments) -> list[torch.Tensor]:
    # The memory order of the input, as any pointwise operation of PyTorch gives it.
    outs = [torch.empty_like(x) for x in xs]
    _launch(xs, outs, False, *arguments)
    return outs


def _rope_out(xs, outs, *arguments) -> None:
    in_place = all((x.data_ptr(), x.stride()) == (out.data_ptr(), out.stride()) for x, out in zip(xs, outs))
    _launch(xs, outs, in_place, *arguments)


def _rope_fake(xs, *arguments):
    return [torch.empty_like(x) for x in xs]


class _Rope(torch.autograd.Function):
    """Saves tables and positions; the backward is the same call with ``inverse`` flipped."""

    @staticmethod
    def forward(ctx, keyset, cos, sin, position_ids, cu_seqlens, rotary_dim, interleaved, inverse, layout, *xs):
        arguments = (cos, sin, position_ids, cu_seqlens, rotary_dim, interleaved, inverse, layout)
        if keyset is None:
            outs = _rope(xs, *arguments)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                outs = _ROPE.redispatch(keyset & torch._C._after_autograd_keyset, xs, *arguments)
        ctx.plain = keyset is None
        ctx.save_for_backward(cos, sin, position_ids, cu_seqlens)
        ctx.options = (rotary_dim, interleaved, not inverse, layout)
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *dos):
        wanted = [i for i, do in enumerate(dos) if do is not None and ctx.needs_input_grad[9 + i]]
        gradients = [None] * len(dos)
        if wanted:
            given = [dos[i] for i in wanted]
            # With create_graph the operator's own autograd must see the call: it is differentiable again.
            run = _rope if ctx.plain and is_plain(*given) and not torch.is_grad_enabled() else _ROPE
            for i, dx in zip(wanted, run(given, *ctx.saved_tensors, *ctx.options)):
                gradients[i] = dx
        return *(None,) * 9, *gradients


def _rope_autograd(keyset, xs, *arguments):
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        return list(_Rope.apply(keyset, *arguments, *xs))
    with torch._C._AutoDispatchBelowAutograd():
        return _ROPE.redispatch(keyset & torch._C._after_autograd_keyset, xs, *arguments)


def _rope_out_autograd(keyset, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        _ROPE_OUT.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


for _name, _kernel, _fake, _autograd in (
    ("rope", _rope, _rope_fake, _rope_autograd),
    ("rope_out", _rope_out, lambda *arguments: None, _rope_out_autograd),
):
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _kernel, _key)
    _LIB.impl(_name, _autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"fused_rope_attn::{_name}", _fake, lib=_LIB)


def rope(xs, outs, *arguments) -> list[torch.Tensor]:
    """Rotated copies of ``xs``, or ``outs`` filled with them. Ordinary eager calls skip the dispatcher, as ``ops``."""
    plain = is_plain(*xs, *(outs or ()), *(x for x in arguments if isinstance(x, torch.Tensor)))
    if outs is not None:
        (_rope_out if plain else _ROPE_OUT)(xs, outs, *arguments)
        return outs
    if not plain:
        return _ROPE(xs, *arguments)
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        return list(_Rope.apply(None, *arguments, *xs))
    return _rope(xs, *arguments)
