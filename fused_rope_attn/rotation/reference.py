"""Rotary position embedding in eager PyTorch: the one eager formula, which every kernel's rotation is held to.

Runs on any device, in any floating dtype (float64 included), is differentiable and never synchronises with the device.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def normalise_tables(cos: Any, sin: Any, rotary_dim: int, interleaved: bool) -> tuple[Any, Any]:
    """Bring tables of any accepted form to (1|B, S, R/2). Views only: strides change, nothing is copied. None stays.

    `cos`, `sin`: (S, R/2), (S, R), or either with a leading 1 or B. A full-width table holds each angle twice, the way
    the layout pairs columns: [c, c] for halves, [c0, c0, c1, c1, ...] for `interleaved`. Idempotent.
    """
    if cos is None:
        return None, None
    cos, sin = (table.unsqueeze(0) if table.ndim == 2 else table for table in (cos, sin))
    if cos.shape[-1] == rotary_dim:
        cos, sin = _pairs(cos, interleaved)[0], _pairs(sin, interleaved)[0]
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inverse: bool = False) -> Tensor:
    """Rotate the first R columns of `x` (..., N, D); columns R..D pass through. Returns a new tensor in x's dtype.

    `cos`, `sin`: (..., N, R/2), broadcastable against x's leading dimensions. Computed in float32 (float64 when x or a
    table is float64) and rounded once. `inverse` rotates by the negative angle, which is the transpose: the inverse
    only where cos^2 + sin^2 = 1. Pairs are (x[i], x[i + R/2]), or (x[2i], x[2i+1]) when `interleaved` (RoFormer,
    arXiv:2104.09864, equation 34).
    """
    wide = torch.float64 in (x.dtype, cos.dtype, sin.dtype)
    compute_dtype = torch.float64 if wide else torch.float32
    cos, sin = cos.to(compute_dtype), sin.to(compute_dtype)
    if inverse:
        sin = -sin
    rotary_dim = 2 * cos.shape[-1]
    rotating, passing = x[..., :rotary_dim], x[..., rotary_dim:]
    x1, x2 = _pairs(rotating.to(compute_dtype), interleaved)
    rotated = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1 if interleaved else -2)
    rotated = rotated.flatten(-2).to(x.dtype)
    return torch.cat((rotated, passing), dim=-1) if rotary_dim < x.shape[-1] else rotated


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """Return views (..., R/2) of the first and of the second columns of all pairs of x (..., R)."""
    return x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)


def norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """``x * rsqrt(mean(x ** 2) + eps) * (offset + weight)`` over the last axis of `x`, in float32: the result is not
    rounded to x's dtype (float64 where x or the weight is).

    The root-mean-square norm of Zhang and Sennrich 2019 (arXiv:1910.07467), equation 4. `weight`: (D,). A row of zeros
    stays one, also with eps 0.
    """
    wide = torch.float64 in (x.dtype, weight.dtype)
    compute_dtype = torch.float64 if wide else torch.float32
    x = x.to(compute_dtype)
    mean_square = x.square().mean(dim=-1, keepdim=True) + eps
    silent = mean_square < torch.finfo(torch.float32).tiny
    # Masked twice, since the gradient of rsqrt at 0 is infinite.
    scale = mean_square.masked_fill(silent, 1.0).rsqrt().masked_fill(silent, 0.0)
    return x * scale * (offset + weight.to(compute_dtype))


def rotation(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    rotary_dim: int,
    interleaved: bool = False,
    inverse: bool = False,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    weight: Tensor | None = None,
    norm_eps: float | None = None,
    norm_offset: float | None = None,
) -> Tensor:
    """Rotation alone, `fused_rope_attn.apply_rope` in eager PyTorch for `x` (B, H, N, D), its arguments validated.

    `position_ids`: (1|B, 1, N), or (1|B, 2, N) where the first half of the rotary dims turns by the first id and the
    second half by the second, each like a head of R/2 dims. `cu_seqlens`: (sequences + 1,), positions restart in each.
    A position without a row in the tables gives NaN, a token after the last sequence passes through. With a `weight`
    (D,) all columns are normed first, and normed and rotated are rounded once.
    """
    dtype = x.dtype
    if weight is not None and norm_eps is not None and norm_offset is not None:
        x = norm(x, weight, norm_eps, norm_offset)
    cos, sin = (table.unsqueeze(0) if table.ndim == 2 else table for table in (cos, sin))
    if cu_seqlens is not None:
        token = torch.arange(x.shape[2], device=x.device)
        sequence = torch.searchsorted(cu_seqlens, token, right=True, out_int32=True) - 1
        position = token - cu_seqlens[sequence.clamp(min=0)]
        outside = (sequence < 0) | (sequence >= cu_seqlens.shape[0] - 1)
        cos_rows, sin_rows = _rows(cos, sin, torch.where(outside, 0, position)[None])
        cos_rows, sin_rows = (t.masked_fill(outside[:, None], fill) for t, fill in ((cos_rows, 1.0), (sin_rows, 0.0)))
        return _rotate_wide(x, cos_rows, sin_rows, rotary_dim, interleaved, inverse).to(dtype)
    if position_ids is None:
        cos, sin = (table[:, None, : x.shape[2]] for table in (cos, sin))
        return _rotate_wide(x, cos, sin, rotary_dim, interleaved, inverse).to(dtype)
    width = rotary_dim // position_ids.shape[1]
    parts = [x[..., i * width : (i + 1) * width] for i in range(position_ids.shape[1])]
    rotated = [
        _rotate_wide(part, *_rows(cos, sin, ids), width, interleaved, inverse)
        for part, ids in zip(parts, position_ids.unbind(1))
    ]
    return torch.cat((*rotated, x[..., rotary_dim:]), dim=-1).to(dtype)


def _rows(cos: Tensor, sin: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `position` (1|B, N) of tables (1|B, S, W) as (1|B, 1, N, W); NaN where there is no such row."""
    missing = ((position < 0) | (position >= cos.shape[1])).unsqueeze(-1)
    if cos.shape[1] == 0:
        cos, sin = F.pad(cos, (0, 0, 0, 1)), F.pad(sin, (0, 0, 0, 1))
    rows = position.long().clamp(0, cos.shape[1] - 1)
    batch = 0 if cos.shape[0] == 1 else torch.arange(cos.shape[0], device=cos.device).unsqueeze(1)
    cos_rows, sin_rows = (table[batch, rows].masked_fill(missing, float("nan")).unsqueeze(1) for table in (cos, sin))
    return cos_rows, sin_rows


def _rotate_wide(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool, inverse: bool) -> Tensor:
    """`rotate` with tables of half or full width (..., N, W). A full-width table is taken column by column, as in
    `x * cos + rotate_half(x) * sin`: where the two columns of a pair differ, both count."""
    if cos.shape[-1] != rotary_dim:
        return rotate(x, cos, sin, interleaved=interleaved, inverse=inverse)
    (cos1, cos2), (sin1, sin2) = _pairs(cos, interleaved), _pairs(sin, interleaved)
    if inverse:  # the transpose of [[cos1, -sin1], [sin2, cos2]]
        sin1, sin2 = sin2, sin1
    first = rotate(x, cos1, sin1, interleaved=interleaved, inverse=inverse)
    second = rotate(x, cos2, sin2, interleaved=interleaved, inverse=inverse)
    column = torch.arange(x.shape[-1], device=x.device)
    return torch.where(column % 2 == 0 if interleaved else column < rotary_dim // 2, first, second)
