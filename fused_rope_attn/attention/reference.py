"""Eager PyTorch attention with rotary position embedding: the reference for every kernel.

Runs on any device, in any floating dtype (float64 included, for `gradcheck` and for the tolerances), is differentiable,
traces under `torch.compile` and never synchronises with the device. It materialises the score matrix: it is an oracle
and a fallback, not a fast path.

Symbols: B batch, HQ/HKV query/key-value heads, NQ/NK query/key lengths, D head dim, R rotary dim, S table rows.
"""

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from fused_rope_attn.rotation.reference import norm, normalise_tables, rotate


def visible_range(
    len_q: int,
    len_k: int,
    causal: bool,
    *,
    window: tuple[int, int] | None = None,
    kv_starts: Tensor | None = None,
    kv_lens: Tensor | None = None,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the position of every query, and the keys [low, high) that it sees: three int64 tensors (1|B, NQ).

    Every mask of the contract is an interval of keys, so these bounds are the whole mask. A row is dead if low >= high.
    Queries are aligned with the end of the keys (position L - NQ + i, where L is kv_lens or NK). A query at a negative
    position has no table row and is dead.
    """
    index = torch.arange(len_q, device=device)
    # A length beyond the keys that exist is clamped: the result stays defined without asking the device.
    length = kv_lens.long().clamp(0, len_k).unsqueeze(1) if kv_lens is not None else len_k
    position = (length - len_q + index).expand(1 if kv_lens is None else kv_lens.shape[0], len_q)
    return visible_keys(position, length, causal, window=window, kv_starts=kv_starts)


def visible_keys(
    position: Tensor,
    length: Tensor | int,
    causal: bool,
    *,
    window: tuple[int, int] | None = None,
    kv_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `visible_range` of queries at `position` (..., NQ) among `length` keys."""
    low, high = torch.zeros_like(position), torch.zeros_like(position) + length
    if kv_starts is not None:
        low = low + kv_starts.long().clamp(min=0).unsqueeze(1)
        position, high = position.expand_as(low), high.expand_as(low)
    if window is not None and window[0] >= 0:
        low = torch.maximum(low, position - window[0])
    if window is not None and window[1] >= 0:
        high = torch.minimum(high, position + window[1] + 1)
    if causal:
        high = torch.minimum(high, position + 1)
    return position, low, torch.where(position < 0, 0, high)


def packed_range(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, len_q: int, len_k: int, causal: bool, *, window: tuple[int, int] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return `visible_range` of packed sequences, and the position of every key and whether it is in none, (1, NK).

    Queries after the last sequence see no key, and no query sees the keys there. If either of `cu_seqlens` does not
    begin with 0, falls, or ends past the last token, this holds for all rows.
    """

    def is_wrong(cu: Tensor, length: int) -> Tensor:
        return (cu[0] != 0) | (cu[1:] < cu[:-1]).any() | (cu[-1] > length)

    wrong = is_wrong(cu_seqlens_q, len_q) | is_wrong(cu_seqlens_k, len_k)

    def sequences(cu: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sequence of every token, its index in it, and all lengths, with an empty sequence at the end."""
        token = torch.arange(length, device=cu.device)
        sequence = (torch.searchsorted(cu, token, right=True) - 1).clamp(min=0).masked_fill(wrong, cu.shape[0] - 1)
        lengths = torch.cat((cu[1:] - cu[:-1], cu.new_zeros(1))).long()
        return sequence, token - cu[sequence], lengths

    sequence, index, lengths_q = sequences(cu_seqlens_q, len_q)
    sequence_k, position_k, lengths_k = sequences(cu_seqlens_k, len_k)
    length = lengths_k[sequence]
    position, low, high = visible_keys(length - lengths_q[sequence] + index, length, causal, window=window)
    high = torch.where(sequence == lengths_q.shape[0] - 1, 0, high)
    first = cu_seqlens_k.long()[sequence]
    outside = sequence_k == lengths_k.shape[0] - 1
    position_k = torch.where(outside, 0, position_k)
    return position[None], (low + first)[None], (high + first)[None], position_k[None], outside[None]


def in_intervals(
    query_starts: Tensor | None, query_ends: Tensor | None, rows: tuple[int, int], device: torch.device
) -> Tensor | None:
    """Return whether each of the query rows ``rows`` (first, end) is in the interval of each key, (1|B, rows, NK).

    query_starts, query_ends (1|B, NK); None if both are None.
    """
    row = torch.arange(*rows, device=device).unsqueeze(-1)
    sees = [] if query_starts is None else [row >= query_starts.unsqueeze(1)]
    sees += [] if query_ends is None else [row < query_ends.unsqueeze(1)]
    return functools.reduce(torch.logical_and, sees) if sees else None


def apply_intervals(sees: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return (high, absent) under the intervals `sees` of `in_intervals` (1|B, NQ, NK), and the keys [low, high).

    high (1|B, NQ) is 0 for rows that see no key, so that they are dead. absent (1|B, NK): keys that no row sees.
    """
    sees = sees & pairs_in(low, high, sees.shape[-1])
    return torch.where(sees.any(-1), high, 0), ~sees.any(-2)


def pairs_in(low: Tensor, high: Tensor, len_k: int) -> Tensor:
    """Return whether each query sees each of `len_k` keys, (1|B, NQ, NK), if it sees the keys [low, high) (1|B, NQ)."""
    key = torch.arange(len_k, device=low.device)
    return (key >= low.unsqueeze(-1)) & (key < high.unsqueeze(-1))


class _Visible(torch.autograd.Function):
    """Base of the two products of visible pairs, which save their inputs for the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)


class _VisibleProduct(_Visible):
    """``weights @ x``, where each row depends on visible rows of x only: (B, H, n, d) in x's dtype.

    weights (B, H, n, m), 0 where visible (1|B, 1, n, m) is False; x (B, H, m, d). 0 times NaN or infinity is NaN, so a
    plain product would spread a NaN in one row of x to every row. This product treats values that are not finite as 0,
    and sets the elements that see them to NaN. Gradients, of any order, do the same, because x's is such a product too.
    """

    @staticmethod
    def forward(weights: Tensor, x: Tensor, visible: Tensor) -> Tensor:
        bad = ~torch.isfinite(x)
        product = torch.matmul(weights, x.masked_fill(bad, 0))
        seen = torch.einsum("bxnm,bhmd->bhnd", visible.float(), bad.float())
        return product.masked_fill(seen > 0, float("nan"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, x, visible = ctx.saved_tensors
        transposed = weights.transpose(-1, -2), grad, visible.transpose(-1, -2)
        return _VisibleScores.apply(grad, x, visible), _VisibleProduct.apply(*transposed), None


class _VisibleScores(_Visible):
    """``a @ b^T`` of the pairs that see each other, 0 elsewhere: (B, H, n, m) of a (B, H, n, d) and b (B, H, m, d).

    It is the gradient of `_VisibleProduct`, and the other way round; visible as there.
    """

    @staticmethod
    def forward(a: Tensor, b: Tensor, visible: Tensor) -> Tensor:
        return torch.matmul(a, b.transpose(-1, -2)).masked_fill(~visible, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b, visible = ctx.saved_tensors
        grad = grad.masked_fill(~visible, 0)
        transposed = grad.transpose(-1, -2), a, visible.transpose(-1, -2)
        return _VisibleProduct.apply(grad, b, visible), _VisibleProduct.apply(*transposed), None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    low: Tensor,
    high: Tensor,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    sees: Tensor | None = None,
    apart: bool = False,
    return_max_logit: bool = False,
) -> tuple[Tensor, ...]:
    """Attend with rotated q (B, HQ, NQ, D) over rotated k and v (B, HKV, NK, D), keys [low, high) (1|B, NQ).

    sees (1|B, NQ, NK): the pairs of `in_intervals`, None for all; low >= high for rows that see no key with it.

    Return o (B, HQ, NQ, D) in q's dtype and lse (B, HQ, NQ), float32 (float64 for float64 q); with `return_max_logit`
    also the largest visible logit of each row, like lse, without a gradient.
    Products are taken in the input dtype, the softmax in float32. K and V are not expanded to HQ heads: the query heads
    of a group are folded into the rows.

    apart: NaN and infinities reach the rows that see them and no others, in forward and backward, at twice the
    products. If False, keys that some row sees must be finite, and keys that no row sees must be zero.
    """
    softmax_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads_kv, len_q, len_k = k.shape[1], q.shape[2], k.shape[2]
    rows = {"g": q.shape[1] // heads_kv, "n": len_q}  # both are given: einops cannot divide by an empty length
    dead = (low >= high)[:, None, :, None]
    visible = pairs_in(low, high, len_k).unsqueeze(1)  # (1|B, 1, NQ, NK)
    if sees is not None:
        visible = visible & sees.unsqueeze(1)
    # Queries and masks are folded, and scores never are: torch.export cannot prove that heads and rows of scores are
    # adjacent where the stride of a row, NK, has a name.
    dead, visible = (x.repeat(1, 1, rows["g"], 1) for x in (dead, visible))

    # A dead row may hold anything (a padding token, NaN); it must not reach its output or the gradients of k and v.
    q = rearrange(q, "b (h g) n d -> b h (g n) d", h=heads_kv).masked_fill(dead, 0)
    # The caller has applied autocast already, so no product here may be cast again. Autocast does not support tensors
    # on meta, even with enabled=False.
    on_meta = q.device.type == "meta"
    with contextlib.nullcontext() if on_meta else torch.autocast(q.device.type, enabled=False):
        scores = _VisibleScores.apply(q, k, visible) if apart else torch.matmul(q, k.transpose(-1, -2))
        scores = scores.to(softmax_dtype) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, float("-inf"))
        row_max = largest(scores.detach()) if return_max_logit else None
        # Dead rows get finite scores, so that the softmax and its gradient stay finite; their weights are zeroed below.
        scores = scores.masked_fill(dead, 0.0)
        if sinks is not None:
            logit = repeat(sinks.to(softmax_dtype), "(h g) -> b h (g n) 1", b=q.shape[0], **rows)
            scores = torch.cat((scores, logit), dim=-1)
        # Not only dead rows: a row of NaN, or a gradient do v^T that overflows, must not reach what it does not see.
        weights = F.softmax(scores, dim=-1)[..., :len_k].masked_fill(~visible, 0.0).to(q.dtype)
        o = _VisibleProduct.apply(weights, v, visible) if apart else torch.matmul(weights, v)
    o = o.masked_fill(dead, 0)  # also stops a NaN in `do` of a dead row
    lse = torch.logsumexp(scores, dim=-1).masked_fill(dead.squeeze(-1), float("-inf"))
    o = rearrange(o, "b h (g n) d -> b (h g) n d", **rows)
    return (o, *(rearrange(x, "b h (g n) -> b (h g) n", **rows) for x in (lse, row_max) if x is not None))


def largest(x: Tensor) -> Tensor:
    """Return the largest element along the last axis, -inf if it is empty."""
    return x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], float("-inf"))


def largest_of_sequences(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the largest element of x (B, HQ, N) along N, (B, HQ).

    With cu_seqlens (sequences + 1,) B is 1, and the result is that of each packed sequence, (sequences, HQ).
    """
    if cu_seqlens is None:
        return largest(x)
    sequences = cu_seqlens.shape[0] - 1
    # Rows after the last sequence belong to one more, which is dropped.
    sequence = (torch.searchsorted(cu_seqlens, torch.arange(x.shape[2], device=x.device), right=True) - 1).clamp(min=0)
    most = x.new_full((x.shape[1], sequences + 1), float("-inf"))
    return most.scatter_reduce(1, sequence.expand(x.shape[1], -1), x[0], "amax")[:, :sequences].T.contiguous()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    causal: bool = False,
    *,
    softmax_scale: float,
    rotary_dim: int,
    interleaved: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_starts: Tensor | None = None,
    kv_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float | None = None,
    norm_offset: float | None = None,
    query_starts: Tensor | None = None,
    query_ends: Tensor | None = None,
    token_tables: bool = False,
    q_nope: Tensor | None = None,
    k_nope: Tensor | None = None,
    return_max_logit: bool = False,
) -> tuple[Tensor, ...]:
    """Compute rotary attention in eager PyTorch. Arguments as in `fused_rope_attn.rope_attention`, already validated.

    q (B, HQ, NQ, D), k and v (B, HKV, NK, D), any floating dtype; cos and sin in any form of `normalise_tables`.
    Return o (B, HQ, NQ, D) in q's dtype and lse (B, HQ, NQ), natural log, float32 (float64 for float64 q), which
    includes the sink if there is one.

    Norm and rotate in float32, round, multiply in the input dtype, softmax in float32, round, multiply. A row
    without a visible key gives o = 0, lse = -inf and gradients 0. The values of such a row, and of k and v outside
    [kv_starts, kv_lens) or of keys that the intervals hide from all rows, reach neither the output nor a gradient, even
    if they are NaN.

    `cu_seqlens_q`, `cu_seqlens_k` (sequences + 1,) int32, both or neither: B is 1 and the sequences are packed along NQ
    and NK; positions restart in each, or with `token_tables` row t of the tables belongs to token t. This makes the
    whole (NQ, NK) matrix of scores all the same. NaN and infinities of one sequence, or of rows after the last, do not
    reach other rows, in o and in the gradients.

    `q_nope` (B, H, NQ, DN) and `k_nope` (B, H, NK, DN), both or neither: multi-head latent attention, with q (B, H, NQ,
    R), k (B, 1, NK, R) and v and o of DV columns. The rotated columns are appended to these, and k is expanded to all
    heads, because DeepSeek V2's own code does so.

    `return_max_logit`: also return the largest visible logit of each batch entry, or packed sequence, and head, (B |
    sequences, HQ), in lse's dtype, without the sink and without a gradient.
    """
    len_q, len_k = q.shape[2], k.shape[2]
    cos, sin = normalise_tables(cos, sin, rotary_dim, interleaved)
    absent: Tensor | None
    if cu_seqlens_q is None or cu_seqlens_k is None:
        position, low, high = visible_range(
            len_q, len_k, causal, window=window, kv_starts=kv_starts, kv_lens=kv_lens, device=q.device
        )
        absent = absent_keys(len_k, position, window=window, kv_starts=kv_starts, kv_lens=kv_lens)
        of_keys = cos[:, None, :len_k], sin[:, None, :len_k]
    else:
        position, low, high, position_k, absent = packed_range(
            cu_seqlens_q, cu_seqlens_k, len_q, len_k, causal, window=window
        )
        rows = max(cos.shape[1] - 1, 0)
        if token_tables:
            position = position_k = torch.arange(len_k, device=q.device)[None]
        position, of_keys = position.clamp(max=rows), query_rows(cos, sin, position_k.clamp(max=rows))
    sees = in_intervals(query_starts, query_ends, (0, len_q), q.device)
    if sees is not None:
        high, absent = apply_intervals(sees, low, high)
        low = low.expand_as(high)
    if absent is not None:
        absent = absent[:, None, :, None]
        k, v = k.masked_fill(absent, 0), v.masked_fill(absent, 0)
        k_nope = None if k_nope is None else k_nope.masked_fill(absent, 0)
    options: dict[str, Any] = {"interleaved": interleaved, "norm_eps": norm_eps, "norm_offset": norm_offset}
    k_rot = norm_rotate(k, k_norm, *of_keys, **options)
    q_rot = norm_rotate(q, q_norm, *query_rows(cos, sin, position), unseeing=low >= high, **options)
    if q_nope is not None and k_nope is not None:
        q_rot = torch.cat((q_nope, q_rot), -1)
        k_rot = torch.cat((k_nope, k_rot.expand(-1, k_nope.shape[1], -1, -1)), -1)
    scores: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap, "sinks": sinks}
    apart = cu_seqlens_q is not None
    scores["return_max_logit"] = return_max_logit
    o, lse, *row_max = attend(q_rot, k_rot, v, low, high, **scores, sees=sees, apart=apart)
    return (o, lse, *(largest_of_sequences(x, cu_seqlens_q) for x in row_max))


def norm_rotate(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    norm_eps: float | None,
    norm_offset: float | None,
    unseeing: Tensor | None = None,
) -> Tensor:
    """Norm, if there is a `weight` (D,), and rotate rows (B, H, N, D) of q or k; round once to x's dtype.

    unseeing (1|B, N): queries that see no key. They may hold NaN, so they are zeroed before the norm.
    """
    if weight is None or norm_eps is None or norm_offset is None:
        return rotate(x, cos, sin, interleaved=interleaved)
    if unseeing is not None:
        x = x.masked_fill(unseeing[:, None, :, None], 0)
    return rotate(norm(x, weight, norm_eps, norm_offset), cos, sin, interleaved=interleaved).to(x.dtype)


def absent_keys(
    len_k: int,
    position: Tensor,
    *,
    window: tuple[int, int] | None = None,
    kv_starts: Tensor | None = None,
    kv_lens: Tensor | None = None,
) -> Tensor | None:
    """Return (1|B, NK), True for keys outside [kv_starts, kv_lens) and for keys before the first query's window.

    Return None without such bounds. position: (1|B, NQ) as `visible_range` returns it.
    """
    key = torch.arange(len_k, device=position.device)
    absent = []
    if kv_starts is not None:
        absent.append(key < kv_starts.unsqueeze(1))
    if kv_lens is not None:
        absent.append(key >= kv_lens.unsqueeze(1))
    if window is not None and window[0] >= 0 and position.shape[1] > 0:
        absent.append(key < position[:, :1] - window[0])
    return functools.reduce(torch.logical_or, absent) if absent else None


def query_rows(cos: Tensor, sin: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return the table rows of the queries, (1|B, 1, NQ, R/2). A dead query gets row 0, or 1 and 0 if there is none."""
    if cos.shape[1] == 0:
        cos, sin = F.pad(cos, (0, 0, 0, 1), value=1.0), F.pad(sin, (0, 0, 0, 1))
    rows = position.clamp(min=0)
    if rows.shape[0] == 1:
        return cos[:, rows[0]].unsqueeze(1), sin[:, rows[0]].unsqueeze(1)
    batch = 0 if cos.shape[0] == 1 else torch.arange(cos.shape[0], device=rows.device).unsqueeze(1)
    return cos[batch, rows].unsqueeze(1), sin[batch, rows].unsqueeze(1)
