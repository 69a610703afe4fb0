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

# The position of a query that sees no key.
NOWHERE = -(2**32)


def visible_pairs(
    position: Tensor,
    key: Tensor,
    causal: bool,
    *,
    window: tuple[int, int] | None = None,
    kv_starts: Tensor | None = None,
    kv_lens: Tensor | None = None,
    query_starts: Tensor | None = None,
    query_ends: Tensor | None = None,
    first_row: int = 0,
    has_tables: bool = True,
) -> Tensor:
    """Return whether each query sees each key, (1|B, NQ, NK): every mask of the contract is a comparison here.

    position (1|B, NQ), key (1|B, NK): of queries and keys. With tables a query at a negative position has no row, and
    sees no key; without them only one `NOWHERE` sees none. first_row: the number of the first query, from which
    query_starts and query_ends (1|B, NK) count.
    """
    row = torch.arange(first_row, first_row + position.shape[1], device=position.device).unsqueeze(-1)
    position, key = position.unsqueeze(-1), key.unsqueeze(-2)
    bounds = [(position >= 0 if has_tables else position > NOWHERE) & (key >= 0)]
    if causal:
        bounds.append(key <= position)
    if window is not None and window[0] >= 0:
        bounds.append(key >= position - window[0])
    if window is not None and window[1] >= 0:
        bounds.append(key <= position + window[1])
    if kv_starts is not None:
        bounds.append(key >= kv_starts[:, None, None])
    if kv_lens is not None:
        bounds.append(key < kv_lens[:, None, None])
    if query_starts is not None:
        bounds.append(row >= query_starts.unsqueeze(1))
    if query_ends is not None:
        bounds.append(row < query_ends.unsqueeze(1))
    return functools.reduce(torch.logical_and, bounds)


def positions(len_q: int, len_k: int, kv_lens: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions of queries (1|B, NQ) and keys (1, NK): the last query has that of the last key."""
    row, key = (torch.arange(length, device=device)[None] for length in (len_q, len_k))
    # A length beyond the keys that exist is clamped: the result stays defined without asking the device.
    length = len_k if kv_lens is None else kv_lens.long().clamp(0, len_k).unsqueeze(1)
    return row + length - len_q, key


def packed_positions(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, len_q: int, len_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `positions` within packed sequences, and whether query and key are of one sequence, (1, NQ, NK).

    Queries after the last sequence are `NOWHERE`. If either of `cu_seqlens` does not begin with 0, falls, or ends
    past the last token, all queries are.
    """
    ends = ((cu_seqlens_q, len_q), (cu_seqlens_k, len_k))
    wrong = [(cu[0] != 0) | (cu[1:] < cu[:-1]).any() | (cu[-1] > length) for cu, length in ends]
    (sequence, index), (sequence_k, key) = (_sequences(*x) for x in ends)
    more_keys = F.pad((cu_seqlens_k - cu_seqlens_q).diff().long(), (0, 1))  # 0 after the last sequence
    is_outside = wrong[0] | wrong[1] | (sequence == cu_seqlens_q.shape[0] - 1)
    position = torch.where(is_outside, NOWHERE, index + more_keys[sequence])
    return position, key, sequence.unsqueeze(-1) == sequence_k.unsqueeze(-2)


def _sequences(cu: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the sequence of every token, the number of sequences after the last, and its index in it, (1, N) each."""
    token = torch.arange(length, device=cu.device)[None]
    sequence = (torch.searchsorted(cu, token, right=True) - 1).clamp(min=0)
    return sequence, (token - cu[sequence]).clamp(min=0)


def hide(x: Any, rows: Tensor) -> Any:
    """Return a tensor (B, H, N, D) with 0 in these rows (1|B, N); None for None."""
    return None if x is None else x.masked_fill(rows[:, None, :, None], 0)


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


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    apart: bool = False,
    return_max_logit: bool = False,
) -> tuple[Tensor, ...]:
    """Attend with rotated q (B, HQ, NQ, D) over rotated k and v (B, HKV, NK, D); visible (1|B, NQ, NK).

    Return o (B, HQ, NQ, D) in q's dtype and lse (B, HQ, NQ), float32 (float64 for float64 q); with `return_max_logit`
    also the largest visible logit of each row, like lse, without a gradient.
    Products are taken in the input dtype, the softmax in float32. K and V are not expanded to HQ heads: the query heads
    of a group are folded into the rows.

    apart: NaN and infinities reach the rows that see them and no others, in forward and backward, at twice the
    products. If False, keys that some row sees must be finite, and queries and keys that see none must be zero.
    """
    softmax_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads_kv, len_q, len_k = k.shape[1], q.shape[2], k.shape[2]
    rows = {"g": q.shape[1] // heads_kv, "n": len_q}  # both are given: einops cannot divide by an empty length
    visible = visible.unsqueeze(1)
    # Queries and masks are folded, and scores never are: torch.export cannot prove that heads and rows of scores are
    # adjacent where the stride of a row, NK, has a name.
    visible = visible.repeat(1, 1, rows["g"], 1)
    dead = ~visible.any(-1, keepdim=True)
    q = rearrange(q, "b (h g) n d -> b h (g n) d", h=heads_kv)
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
    sequence, _ = _sequences(cu_seqlens, x.shape[2])
    most = x.new_full((x.shape[1], sequences + 1), float("-inf"))
    return most.scatter_reduce(1, sequence.expand(x.shape[1], -1), x[0], "amax")[:, :sequences].T.contiguous()


def attention(problem: Any, tensors: Any) -> tuple[Tensor, ...]:
    """Compute rotary attention in eager PyTorch, from the records of a validated call, of any floating dtype.

    Return o (B, HQ, NQ, D) in q's dtype and lse (B, HQ, NQ), natural log, float32 (float64 for float64 q), which
    includes the sink if there is one. With `return_max_logit` the largest visible logit of each batch entry, or packed
    sequence, and head follows, (B | sequences, HQ), in lse's dtype, without the sink and without a gradient.

    Norm and rotate in float32, round, multiply in the input dtype, softmax in float32, round, multiply. A row
    without a visible key gives o = 0, lse = -inf and gradients 0. The values of such a row, and of k and v outside
    [kv_starts, kv_lens) or of keys that the intervals hide from all rows, reach neither the output nor a gradient, even
    if they are NaN.

    Packed sequences make the whole (NQ, NK) matrix of scores all the same. NaN and infinities of one sequence, or of
    rows after the last, do not reach other rows, in o and in the gradients.

    In multi-head latent attention the rotated columns are appended to q_nope and k_nope, and k is expanded to all
    heads, because DeepSeek V2's own code does so.
    """
    q, k, v, q_nope, k_nope = tensors.q, tensors.k, tensors.v, tensors.q_nope, tensors.k_nope
    cu_seqlens, len_k = (tensors.cu_seqlens_q, tensors.cu_seqlens_k), k.shape[2]
    tables = normalise_tables(tensors.cos, tensors.sin, problem.rotary_dim, problem.interleaved)
    masks = {name: getattr(tensors, name) for name in ("kv_starts", "kv_lens", "query_starts", "query_ends")}
    masks["has_tables"] = problem.rotary_dim > 0
    apart = cu_seqlens[0] is not None
    if apart:
        position, key, is_same = packed_positions(*cu_seqlens, q.shape[2], len_k)
    else:
        position, key = positions(q.shape[2], len_k, tensors.kv_lens, q.device)
    visible = visible_pairs(position, key, problem.causal, window=problem.window, **masks)
    visible = visible & is_same if apart else visible
    if problem.token_tables:
        position = key = torch.arange(len_k, device=q.device)[None]
    # Hidden rows may hold anything, such as padding or NaN. It must not reach a result or a gradient.
    dead, absent = ~visible.any(-1), ~visible.any(-2)
    q, q_nope = hide(q, dead), hide(q_nope, dead)
    k, v, k_nope = hide(k, absent), hide(v, absent), hide(k_nope, absent)
    options: dict[str, Any] = {name: getattr(problem, name) for name in ("interleaved", "norm_eps", "norm_offset")}
    q_rot = norm_rotate(q, tensors.q_norm, *table_rows(*tables, position), **options)
    k_rot = norm_rotate(k, tensors.k_norm, *table_rows(*tables, key), **options)
    if q_nope is not None:
        q_rot = torch.cat((q_nope, q_rot), -1)
        k_rot = torch.cat((k_nope, k_rot.expand(-1, k_nope.shape[1], -1, -1)), -1)
    scores: dict[str, Any] = {name: getattr(problem, name) for name in ("softmax_scale", "softcap", "return_max_logit")}
    o, lse, *row_max = masked_attention(q_rot, k_rot, v, visible, **scores, sinks=tensors.sinks, apart=apart)
    return (o, lse, *(largest_of_sequences(x, cu_seqlens[0]) for x in row_max))


def norm_rotate(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    interleaved: bool,
    norm_eps: float | None,
    norm_offset: float | None,
) -> Tensor:
    """Norm, if there is a `weight` (D,), and rotate rows (B, H, N, D) of q or k, if there are tables; round once to x's
    dtype."""
    dtype = x.dtype
    if weight is not None and norm_eps is not None and norm_offset is not None:
        x = norm(x, weight, norm_eps, norm_offset)
    if cos is not None and sin is not None:
        x = rotate(x, cos, sin, interleaved=interleaved)
    return x.to(dtype)


def table_rows(cos: Tensor | None, sin: Tensor | None, position: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the table rows of positions (1|B, N), (1|B, 1, N, R/2); of those without a row the nearest, or 1 and 0."""
    if cos is None or sin is None:
        return None, None
    if cos.shape[1] == 0:
        cos, sin = F.pad(cos, (0, 0, 0, 1), value=1.0), F.pad(sin, (0, 0, 0, 1))
    rows = position.clamp(0, cos.shape[1] - 1)
    if rows.shape[0] == 1:
        return cos[:, rows[0]].unsqueeze(1), sin[:, rows[0]].unsqueeze(1)
    batch = 0 if cos.shape[0] == 1 else torch.arange(cos.shape[0], device=rows.device).unsqueeze(1)
    return cos[batch, rows].unsqueeze(1), sin[batch, rows].unsqueeze(1)
