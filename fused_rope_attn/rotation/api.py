"""Rotation alone: every RoPE convention through one kernel."""

from __future__ import annotations

import math

import torch

from fused_rope_attn.rotation import reference
from fused_rope_attn.rotation.problem import WITH_NORMS, RotationOptions, RotationTensors
from fused_rope_attn.rotation.validation import LAYOUTS, Norms, check_rotation
from fused_rope_attn.runtime.device import has_triton, is_interpreted
from fused_rope_attn.runtime.differentiation import differentiable
from fused_rope_attn.runtime.entry import explain_keywords
from fused_rope_attn.runtime.layouts import RotationLayout

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
    outs = None if out is None else {"out": out}
    (rotated,) = _apply({"x": x}, cos, sin, rotary_dim, interleaved, inverse, layout, position_ids, cu_seqlens, outs)
    return rotated


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
    xs = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    outs = None
    if out is not None:
        if not isinstance(out, (tuple, list)):
            raise TypeError(f"out must be a tuple of {len(xs)} tensors or None, but is {type(out).__name__}")
        if len(out) != len(xs):
            raise ValueError(f"out must hold {len(xs)} tensors, for {', '.join(xs)}, but holds {len(out)}")
        outs = {f"out[{i}]": x for i, x in enumerate(out)}
    norms = Norms(q, q_norm, k_norm, norm_eps, norm_offset)
    return tuple(_apply(xs, cos, sin, rotary_dim, interleaved, inverse, layout, position_ids, cu_seqlens, outs, norms))


def _apply(xs, cos, sin, rotary_dim, interleaved, inverse, layout, position_ids, cu_seqlens, outs, norms=None):
    places = {"layout": layout, "position_ids": position_ids, "cu_seqlens": cu_seqlens}
    flags = {"rotary_dim": rotary_dim, "interleaved": interleaved, "inverse": inverse}
    rotary_dim = check_rotation(xs, cos, sin, **flags, **places, outs=outs, norms=norms)
    if position_ids is not None and position_ids.ndim < 3:
        position_ids = position_ids[None, None] if position_ids.ndim == 1 else position_ids[:, None]
    given = None if outs is None else list(outs.values())
    tensors = RotationTensors(list(xs.values()), given, cos, sin, position_ids, cu_seqlens)
    options = RotationOptions(rotary_dim, interleaved, inverse, layout)
    if norms is not None and norms.q_norm is not None:
        tensors = tensors._replace(weights=[norms.q_norm, norms.k_norm])
        options = options._replace(norm_eps=norms.norm_eps, norm_offset=norms.norm_offset)
    return rotate_checked(options, tensors)


def rotate_checked(options: RotationOptions, tensors: RotationTensors) -> list[torch.Tensor]:
    """Rotate as ``apply_rope`` does, without checks, for callers who know that their arguments are right."""
    if _has_kernel(tensors.xs[0]):
        return ops.rotate_by_kernel(options, tensors)
    count = len(tensors.xs)
    if tensors.weights:
        given = differentiable(WITH_NORMS, (*tensors.xs, *tensors.weights))
    else:  # linear: the operator is its own backward, which can be differentiated as often as one likes
        given = differentiable("apply_rope", tensors.xs, orders=math.inf)
    xs, weights = given[:count], given[count:]
    rotated = [_reference(x, weight, options, tensors) for x, weight in zip(xs, (*weights, *(None for _ in xs)))]
    return rotated if tensors.outs is None else [out.copy_(x) for out, x in zip(tensors.outs, rotated)]


def _has_kernel(x: torch.Tensor) -> bool:
    """Return True on GPUs and in Triton's interpreter, but not for float64, nor for bfloat16 if interpreted (wrong)."""
    if x.dtype is torch.float64 or not has_triton():
        return False
    return x.is_cuda or (is_interpreted() and x.device.type == "cpu" and x.dtype is not torch.bfloat16)


def _reference(
    x: torch.Tensor, weight: torch.Tensor | None, options: RotationOptions, tensors: RotationTensors
) -> torch.Tensor:
    batch_axis, *others = LAYOUTS[options.layout]
    packed = batch_axis is None  # tokens without a batch are one batch
    axes = (0, *(axis + 1 for axis in others)) if batch_axis is None else (batch_axis, *others)
    if packed:
        x = x.unsqueeze(0)
    names = ("rotary_dim", "interleaved", "inverse", "norm_eps", "norm_offset")
    chosen = {name: getattr(options, name) for name in names}
    places = {"position_ids": tensors.position_ids, "cu_seqlens": tensors.cu_seqlens}
    rotated = reference.rotation(x.permute(axes), tensors.cos, tensors.sin, weight=weight, **places, **chosen)
    rotated = rotated.permute([axes.index(axis) for axis in range(4)])
    return rotated.squeeze(0) if packed else rotated
