"""Co-RoPE in eager PyTorch: the definition, in any dtype and on any device, in chunks that bound its memory."""

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Angles (query rows x keys x D/2) that exist at once; autograd keeps about ten tensors of this size while in a chunk.
_CHUNK_ANGLES = 1 << 23


def corope(
    q: Tensor, k: Tensor, v: Tensor, *, base: float, softmax_scale: float, chunk_angles: int | None = None
) -> Tensor:
    """Return o ``(B, HQ, N, D)`` for q ``(B, HQ, N, D)``, k and v ``(B, HKV, N, D)``; differentiable.

    The definition of the issue: with ``z_ij = sigmoid(s q_leader,i . k_j)`` for ``j <= i``, the mileage
    ``a_ij = sum_{m<=j} z_im`` and the distance ``a_ii - a_ij``, which rotates key against query in place of ``i - j``.
    Everything up to the softmax is computed in float32 at least; the probabilities are rounded to v's dtype. Chunks (a
    few groups, or query rows of one, of at most ``chunk_angles`` angles) are computed again in the backward pass
    instead of kept, unless there is only one.
    """
    batch, heads_q, length, head_dim = q.shape
    groups = batch * k.shape[1]
    if q.numel() == 0:
        return q + k.sum() + v.sum()  # nothing, with a gradient for all three
    q = q.reshape(groups, heads_q // k.shape[1], length, head_dim)
    k, v = k.reshape(groups, length, head_dim), v.reshape(groups, length, head_dim)
    most = chunk_angles or _CHUNK_ANGLES
    together = max(1, most // (length * length * head_dim // 2))
    rows = length if together > 1 else max(1, most // (length * head_dim // 2))
    if together >= groups and rows >= length:
        return _rows(q, k, v, 0, base, softmax_scale).view(batch, heads_q, length, head_dim)
    o = []
    for first in range(0, groups, together):
        some = slice(first, first + together)
        again = functools.partial(checkpoint, _rows, use_reentrant=False, preserve_rng_state=False)
        starts = range(0, length, rows)
        chunks = [again(q[some, :, i : i + rows], k[some], v[some], i, base, softmax_scale) for i in starts]
        o.append(torch.cat(chunks, dim=2))
    return torch.cat(o).view(batch, heads_q, length, head_dim)


def _rows(q: Tensor, k: Tensor, v: Tensor, start: int, base: float, softmax_scale: float) -> Tensor:
    """Return o of the queries ``(groups, G, rows, D)`` from ``start`` on; k and v ``(groups, N, D)``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    half, stop = q.shape[-1] // 2, start + q.shape[2]
    i, j = torch.arange(start, stop, device=q.device)[:, None], torch.arange(stop, device=q.device)
    q, k = q.to(wide), k[:, :stop].to(wide)
    z = torch.sigmoid(softmax_scale * (q[:, 0] @ k.mT)).where(j <= i, 0.0)
    a = z.cumsum(-1)
    delta = a[..., -1:] - a  # z is 0 beyond the diagonal: the last column is a_ii
    omega = base ** -(torch.arange(half, device=q.device, dtype=wide) / half)
    angle = delta[..., None] * omega
    cos, sin = angle.cos(), angle.sin()
    q1, q2, k1, k2 = q[..., :half], q[..., half:], k[:, None, :, :half], k[:, None, :, half:]
    # (q1 k1 + q2 k2) cos - (q2 k1 - q1 k2) sin, collected by q1 and q2: products with a group's heads are last.
    scores = torch.einsum("bgrd,brjd->bgrj", q1, k1 * cos + k2 * sin)
    scores = softmax_scale * (scores + torch.einsum("bgrd,brjd->bgrj", q2, k2 * cos - k1 * sin))
    p = scores.masked_fill(j > i, float("-inf")).softmax(-1)
    return p.to(v.dtype) @ v[:, None, :stop]
