"""Every refusal of `apply_rope` and `apply_rope_qk`, raised before anything is written, launched or allocated."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_rope_attn.runtime.checks import (
    INPUT_DTYPES,
    are_ordinary,
    check_ends,
    check_kinds,
    check_norm,
    check_norm_eps,
    check_norm_offset,
    check_rotary_dim,
    check_tables,
    check_tensor,
    named,
    refuse_choice,
    refuse_device,
    refuse_non_bool,
    shown,
)

# The axes B, H, N and D of a tensor in each layout; packed tokens have no batch.
LAYOUTS: dict[str, tuple[int | None, int, int, int]] = {
    "bhsd": (0, 1, 2, 3),
    "bshd": (0, 2, 1, 3),
    "sbhd": (1, 2, 0, 3),
    "thd": (None, 1, 0, 2),
}


class Norms(NamedTuple):
    """The arguments of a norm of q and k, as a caller gave them, and q in any layout."""

    q: Any
    q_norm: Any
    k_norm: Any
    norm_eps: Any
    norm_offset: Any


def check_rotation(
    xs: dict[str, Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    rotary_dim: int | None,
    interleaved: bool,
    inverse: bool,
    layout: str,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    outs: dict[str, Any] | None,
    norms: Norms | None = None,
) -> int:
    """Check the arguments of `apply_rope` and `apply_rope_qk`, tensors by their names, and return the rotary dim R.

    Raises TypeError or ValueError naming the argument, what was expected and what came.
    """
    if not are_ordinary(*xs.values(), cos, sin):
        check_kinds(**xs, cos=cos, sin=sin)
    if not (isinstance(interleaved, bool) and isinstance(inverse, bool)):
        refuse_non_bool(interleaved=interleaved, inverse=inverse)
    if not isinstance(layout, str) or layout not in LAYOUTS:
        refuse_choice("layout", layout, tuple(LAYOUTS))
    axis_b, axis_h, axis_n, axis_d = LAYOUTS[layout]
    first, *others = xs
    x = xs[first]
    dtype, device, rank = x.dtype, x.device, 3 if axis_b is None else 4
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"{first} must be float16, bfloat16, float32 or float64, but is {named(dtype)}")
    for name in others:
        if xs[name].dtype != dtype:
            raise TypeError(f"{name} must have {first}'s dtype {named(dtype)}, but is {named(xs[name].dtype)}")
    if cos.device != device or sin.device != device or any(xs[name].device != device for name in others):
        refuse_device(device, first, **{name: xs[name] for name in others}, cos=cos, sin=sin)
    for name, y in xs.items():
        if y.ndim != rank:
            form = f"({', '.join(layout.upper().replace('S', 'N'))})"
            raise ValueError(
                f"{name} must have shape {form} for layout {layout!r}, but has {y.ndim} dimensions: {shown(y.shape)}"
            )
    batch, length, head_dim = 1 if axis_b is None else x.shape[axis_b], x.shape[axis_n], x.shape[axis_d]
    for name in others:
        shape = xs[name].shape
        if any(shape[axis] != x.shape[axis] for axis in range(rank) if axis != axis_h):
            raise ValueError(
                f"{name} must have {first}'s shape {shown(x.shape)} apart from the heads, but has {shown(shape)}"
            )
    if head_dim < 2:
        raise ValueError(f"{first} must have a head dim of at least 2, but has shape {shown(x.shape)}")

    if position_ids is not None and cu_seqlens is not None:
        raise ValueError("position_ids must be None where cu_seqlens is given: both say where every token stands")
    two_ids = False
    if position_ids is not None:
        two_ids = _check_position_ids(position_ids, device, batch, length, first)
    if cu_seqlens is not None:
        if layout != "thd":
            raise ValueError(f"cu_seqlens must be None unless layout is 'thd', but layout is {layout!r}")
        _check_cu_seqlens(cu_seqlens, device, first)
        check_ends("cu_seqlens", cu_seqlens, length, first)
    elif layout == "thd" and position_ids is None:
        raise ValueError("cu_seqlens must be given for layout 'thd' (or position_ids), but is None")

    rows = length if position_ids is None and cu_seqlens is None else 0
    if not two_ids:
        rotary_dim = check_tables(cos, sin, dtype, batch, rows, head_dim, rotary_dim, first, first)
    else:  # the tables serve one half of the rotary dims, which is rotated as if it were a head of its own
        if rotary_dim is not None:
            rotary_dim = check_rotary_dim(rotary_dim, head_dim)
            if rotary_dim % 4:
                raise ValueError(f"rotary_dim must be a multiple of 4 for two position ids, but is {rotary_dim}")
        half = None if rotary_dim is None else rotary_dim // 2
        rotary_dim = 2 * check_tables(cos, sin, dtype, batch, rows, head_dim // 2, half, first, first)
    if norms is not None:
        for name in ("q_norm", "k_norm"):
            if getattr(norms, name) is not None:
                check_norm(name, getattr(norms, name), norms)
        check_norm_eps("norm_eps", norms.norm_eps, norms)
        check_norm_offset("norm_offset", norms.norm_offset, norms)
    if outs is not None:
        _check_outs(xs, outs, norms)
    return rotary_dim


def _check_position_ids(ids: Any, device: torch.device, batch: int, length: int, first: str) -> bool:
    """Check position_ids, and return whether every token has two."""
    check_kinds(position_ids=ids)
    shape = ids.shape
    check_tensor("position_ids", ids, (torch.int32, torch.int64), device, "", shape, first)
    one = len(shape) == 1 or (len(shape) == 2 and shape[0] in (1, batch))
    two = len(shape) == 3 and shape[0] in (1, batch) and shape[1] == 2
    if not (one or two) or shape[-1] != length:
        raise ValueError(
            "position_ids must have shape (N,), (B, N), or (B, 2, N) for two ids of every token, with B = 1 or "
            f"{batch} and N = {length}, but has {shown(shape)}"
        )
    return two


def _check_cu_seqlens(ends: Any, device: torch.device, first: str) -> None:
    check_kinds(cu_seqlens=ends)
    check_tensor("cu_seqlens", ends, (torch.int32,), device, "", ends.shape, first)
    if ends.ndim != 1 or ends.shape[0] < 1 or not ends.is_contiguous():
        raise ValueError(
            "cu_seqlens must be contiguous with shape (number of sequences + 1,), but has shape "
            f"{shown(ends.shape)} and strides {tuple(ends.stride())}"
        )


def _check_outs(xs: dict[str, Tensor], outs: dict[str, Any], norms: Norms | None) -> None:
    for (name, x), (out_name, out) in zip(xs.items(), outs.items()):
        check_tensor(out_name, out, (x.dtype,), x.device, f"{name}'s shape", x.shape, name)
        if out.numel() and any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape)):
            raise ValueError(f"{out_name} must not be expanded: several elements share memory, strides {out.stride()}")
        if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
            wanting = name if x.requires_grad else out_name
            raise ValueError(f"{out_name} must be None where {wanting} requires a gradient: there is none through out=")
    weights = {} if norms is None else {"q_norm": norms.q_norm, "k_norm": norms.k_norm}
    for name, weight in weights.items():
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"out must be None where {name} requires a gradient: there is none through out=")
