"""Rotation alone: every RoPE convention through one kernel."""

import itertools
import math
from typing import Any

import torch

from fused_rope_attn.rotation import reference
from fused_rope_attn.rotation.problem import WITH_NORMS, RotationOptions, RotationTensors, check_rotation
from fused_rope_attn.runtime.device import has_triton, is_interpreted
from fused_rope_attn.runtime.differentiation import differentiable
from fused_rope_attn.runtime.entry import explain_keywords
from fused_rope_attn.runtime.layouts import AXES, RotationLayout

if has_triton():  # elsewhere planning sends every call to the reference
    from fused_rope_attn.rotation import ops


@explain_keywords
def apply_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    layout: RotationLayout = "bhsd",
    position_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate every head of x by the angles of its tokens (RoFormer, Su et al. 2021, eq. 34); differentiable.

    Args:
        x: ``(B, H, N, D)``, or what ``layout`` says; float16, bfloat16, float32 or float64, any strides, no copies.
        cos: ``(S, R/2)``, ``(S, R)``, or either with a leading 1 or B; float32 (preferred) or x's dtype; no gradient.
            Need not be unit-norm. A full-width table is taken column by column, ``x * cos + rotate_half(x) * sin``.
        sin: shape and dtype of cos.
        rotary_dim: R, even, at most D; columns R to D pass through. Default: a table of width W is full-width (R = W)
            when ``W > D/2``, else half-width (R = 2W). Needed for a full-width table with ``R <= D/2``.
        interleaved: False rotates pairs ``(x[i], x[i + R/2])`` (NeoX, Llama), True ``(x[2i], x[2i+1])`` (GPT-J).
        inverse: rotate by the negative angle, the transpose (the inverse where ``cos**2 + sin**2 = 1``).
        layout: ``"bhsd"``, ``"bshd"``, ``"sbhd"``: the order of batch, tokens, heads; ``"thd"``: packed, (T, H, D).
        position_ids: ``(N,)`` or ``(B, N)`` int32 or int64: the table row of every token; default its index. Or
            ``(B, 2, N)``: the first id rotates the first R/2 columns and the second the next R/2, each like a head
            of its own, with tables for R/2 columns. A position outside the tables gives NaN.
        cu_seqlens: ``(sequences + 1,)`` int32, for ``"thd"``: where each sequence begins; positions restart there.
            Tokens after the last sequence pass through unrotated. They begin with 0, never fall, and end at or before
            T: on a CPU anything else is a ValueError, on a GPU it rotates by wrong positions.
        out: written instead of a new tensor; may be x itself, and must not overlap with it otherwise. No gradient.

    Returns:
        shape and dtype of x, in its memory order, or ``out``. Computed in float32 (float64 for float64), rounded once.

    Raises:
        TypeError: wrong type or dtype.
        ValueError: wrong shape, range, device or combination.
    """
    tensors = RotationTensors([x], None if out is None else [out], cos, sin, position_ids, cu_seqlens)
    return _apply((rotary_dim, interleaved, inverse, layout), tensors)[0]


@explain_keywords
def apply_rope_qk(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    v: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    layout: RotationLayout = "bhsd",
    position_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    out: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, ...]:
    """``apply_rope`` of q and k, and of v where it is given, in one launch: the same tokens, any numbers of heads.

    Args:
        q: as x of ``apply_rope``, and so are the other arguments.
        k: shape of q apart from the heads, q's dtype and device.
        v: as k; some conventions (Paddle's) rotate it too.
        q_norm, k_norm: weights ``(D,)`` of a root-mean-square norm over the D columns of each head of q and of k, which
            comes before the rotation (Qwen 3, Gemma 3): ``x * rsqrt(mean(x**2) + norm_eps) * (norm_offset + weight)``.
            Both or neither, float32 or q's dtype, differentiable; v is not normed. The norm covers the columns R to D
            too, and what ``cu_seqlens`` leave unrotated. With ``inverse`` it still is first.
        norm_eps: at least 0. A row of zeros stays one, also where this is 0.
        norm_offset: 1 for weights that are stored as their distance from one (Gemma).
        out: ``(q, k)``, or ``(q, k, v)`` with v: written instead of new tensors.

    Returns:
        ``(q, k)``, or ``(q, k, v)`` with v, normed and rotated in float32, rounded once.

    Raises:
        TypeError, ValueError: as ``apply_rope``.
        NotImplementedError: forward-mode differentiation; double backward with norms.
    """
    xs = [q, k] if v is None else [q, k, v]
    if out is not None:
        if not isinstance(out, (tuple, list)):
            raise TypeError(f"out must be a tuple of {len(xs)} tensors or None, but is {type(out).__name__}")
        if len(out) != len(xs):
            names = ", ".join("qkv"[: len(xs)])
            raise ValueError(f"out must hold {len(xs)} tensors, for {names}, but holds {len(out)}")
    tensors = RotationTensors(
        xs, None if out is None else list(out), cos, sin, position_ids, cu_seqlens, (q_norm, k_norm)
    )
    return tuple(_apply((rotary_dim, interleaved, inverse, layout), tensors, norm_eps, norm_offset))


def _apply(options: tuple, tensors: RotationTensors, *of_norms: Any) -> list[torch.Tensor]:
    """Check and rotate. options, of_norms: the fields of ``RotationOptions``, as the caller gave them."""
    rotary_dim = check_rotation(RotationOptions(*options), tensors, *of_norms)
    ids = tensors.position_ids
    if ids is not None and ids.ndim < 3:
        tensors = tensors._replace(position_ids=ids[None, None] if ids.ndim == 1 else ids[:, None])
    if tensors.q_norm is None:
        of_norms, tensors = (), tensors._replace(weights=())
    return rotate_checked(RotationOptions(rotary_dim, *options[1:], *of_norms), tensors)


def rotate_checked(options: RotationOptions, tensors: RotationTensors) -> list[torch.Tensor]:
    """Rotate as ``apply_rope`` does, without checks, for callers who know that their arguments are right."""
    if _has_kernel(tensors.xs[0]):
        return ops.rotate_by_kernel(options, tensors)
    if tensors.weights:
        given = differentiable(WITH_NORMS, (*tensors.xs, *tensors.weights))
    else:  # linear: the operator is its own backward, which can be differentiated as often as one likes
        given = differentiable("apply_rope", tensors.xs, orders=math.inf)
    count = len(tensors.xs)
    rotated = [_reference(*one, options, tensors) for one in itertools.zip_longest(given[:count], given[count:])]
    return rotated if tensors.outs is None else [out.copy_(x) for out, x in zip(tensors.outs, rotated)]


def _has_kernel(x: torch.Tensor) -> bool:
    """Return True on GPUs and in Triton's interpreter, but not for float64, nor for bfloat16 if interpreted (wrong)."""
    if x.dtype is torch.float64 or not has_triton():
        return False
    return x.is_cuda or (is_interpreted() and x.device.type == "cpu" and x.dtype is not torch.bfloat16)


def _reference(x: torch.Tensor, weight: torch.Tensor | None, options: RotationOptions, tensors: RotationTensors):
    order = AXES[options.layout]
    packed = len(order) == 3
    if packed:  # tokens without a batch are one batch
        x, order = x.unsqueeze(0), (0, *order)
    names = ("rotary_dim", "interleaved", "inverse", "norm_eps", "norm_offset")
    given = {name: getattr(options, name) for name in names}
    given |= {"position_ids": tensors.position_ids, "cu_seqlens": tensors.cu_seqlens, "weight": weight}
    x = x.permute([order.index(axis) for axis in range(4)])
    rotated = reference.rotation(x, tensors.cos, tensors.sin, **given).permute(order)
    return rotated.squeeze(0) if packed else rotated
