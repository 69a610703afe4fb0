# mypy: allow-untyped-defs, allow-incomplete-defs
"""Cutting tensors along the sequence, joining them again, and what goes with the rows: positions and labels."""

from __future__ import annotations

from typing import Any

import torch

from fused_rope_attn.distributed.cuts import check_sharding, chunk_count, chunks_of
from fused_rope_attn.distributed.groups import Exchange, Group, group_named, group_of, join_rows, others
from fused_rope_attn.runtime.checks import check_int, refuse_non_tensor, shown
from fused_rope_attn.runtime.differentiation import SingleLevelFunction, apply_in_operator
from fused_rope_attn.runtime.registration import Operator


def _members(group: Any, sharding: str) -> Group:
    members = group_of(group)
    check_sharding("sharding", sharding, members.size)
    return members


def _check_axis(x: Any, dim: Any) -> int:
    """Return the axis, counted from 0."""
    if not isinstance(x, torch.Tensor):
        refuse_non_tensor(x=x)
    dim = check_int("dim", dim)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be an axis of x, which has shape {shown(x.shape)}, but is {dim}")
    return dim % x.ndim


def cp_shard(x: torch.Tensor, dim: int, *, group: Any, sharding: str = "zigzag") -> torch.Tensor:
    """This rank's rows of a tensor that every rank has whole: N rows along ``dim`` become N / P. Differentiable.

    A copy, or with ``"contiguous"`` a view. Gradients are those of the sum of all ranks' losses with respect to this
    rank's x: zero in the rows of other ranks.

    Args:
        x: any tensor; its rows, a multiple of 2P of them (``"contiguous"``: of P), belong to the sequence.
        dim: the axis of the rows.
        group: a ProcessGroup or a DeviceMesh of one dimension, of P ranks.
        sharding: ``"zigzag"``: of 2P chunks rank r has number r and number 2P - 1 - r; ``"contiguous"``: P chunks;
            ``"dealt:0,1,1,0"``, which is ``plan_varlen_cp(..., sharding="balanced").sharding``: the rank of each chunk.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    members, dim = _members(group, sharding), _check_axis(x, dim)
    count = chunk_count(members.size, sharding)
    if x.shape[dim] % count:
        raise ValueError(
            f"x must have a multiple of {count} rows along dim {dim} for {members.size} ranks and "
            f"sharding={sharding!r}, but has {x.shape[dim]}"
        )
    chunk = x.shape[dim] // count
    parts = [x.narrow(dim, c * chunk, chunk) for c in chunks_of(members.rank, members.size, sharding)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def cp_unshard(x: torch.Tensor, dim: int, *, group: Any, sharding: str = "zigzag") -> torch.Tensor:
    """All ranks' rows, in the order of the sequence, on every rank: inverse of ``cp_shard``. Differentiable.

    Every rank must call it. Gradients are those of the sum of all ranks' losses: what each rank's loss says of these
    rows is added up, in float32 at least and in the order of the ranks. Arguments as in ``cp_shard``.
    """
    members, dim = _members(group, sharding), _check_axis(x, dim)
    parts = len(chunks_of(0, members.size, sharding))
    if x.shape[dim] % parts:
        raise ValueError(
            f"x must have a multiple of {parts} rows along dim {dim} for sharding={sharding!r}, but has {x.shape[dim]}"
        )
    return _unshard(x, dim, members.name, sharding)


def cp_positions(
    total_len: int, *, group: Any, sharding: str = "zigzag", device: torch.device | str | None = None
) -> torch.Tensor:
    """(N / P,) int64: the positions, in the whole sequence of ``total_len`` = N rows, of this rank's rows.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    total_len = check_int("total_len", total_len)
    members = _members(group, sharding)
    count = chunk_count(members.size, sharding)
    if total_len < 0 or total_len % count:
        raise ValueError(
            f"total_len must be a multiple of {count} for {members.size} ranks and sharding={sharding!r}, but is "
            f"{total_len}"
        )
    chunk = total_len // count
    owned = chunks_of(members.rank, members.size, sharding)
    return torch.cat([torch.arange(c * chunk, (c + 1) * chunk, device=device) for c in owned])


def cp_shift_labels(
    labels: torch.Tensor,
    *,
    group: Any,
    sharding: str = "zigzag",
    dim: int = -1,
    ignore_index: int = -100,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's rows of labels that are shifted already: the label of a token is the token after it.

    Causal language models shift their labels against their logits; on a shard the token after a chunk's last one is
    another rank's. So labels are shifted while they are whole, here, and the loss takes them as they are: in
    transformers pass them as ``shift_labels``.

    Args:
        labels: (..., N), the whole sequence on every rank, not shifted.
        dim: the axis of the sequence.
        ignore_index: the label of the last token, because no token follows it.
        cu_seqlens: (documents + 1,), of packed documents: the last token of each gets ``ignore_index``.

    The other arguments are those of ``cp_shard``.
    """
    dim = _check_axis(labels, dim)
    shifted = torch.full_like(labels, ignore_index)
    length = labels.shape[dim]
    if length > 1:
        shifted.narrow(dim, 0, length - 1).copy_(labels.narrow(dim, 1, length - 1))
    if cu_seqlens is not None:
        ends = cu_seqlens[1:].to(labels.device).long() - 1
        shifted.index_fill_(dim, ends[ends >= 0], ignore_index)
    return cp_shard(shifted, dim, group=group, sharding=sharding)


def _sum_impl(x: torch.Tensor, dim: int, name: str, sharding: str) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' x."""
    group = group_named(name)
    size, rank = group.size, group.rank
    count = chunk_count(size, sharding)
    chunks = x.unflatten(dim, (count, -1)).movedim(dim, 0)
    inputs = [torch.stack([chunks[c] for c in chunks_of(other, size, sharding)]) for other in range(size)]
    outputs = [torch.empty_like(part) if other != rank else part for other, part in enumerate(inputs)]
    Exchange(group, others(outputs, rank), others(inputs, rank), x).wait()
    wide = torch.promote_types(x.dtype, torch.float32)
    total = outputs[0].to(wide)
    for part in outputs[1:]:
        total = total + part
    return torch.cat(list(total.to(x.dtype)), dim=dim)


def _resized(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:dim], length, *x.shape[dim + 1 :]))


class _Linear(SingleLevelFunction):
    """One of the two operators below. Each is the gradient of the other."""

    @staticmethod
    def forward(ctx, keyset, operator: Operator, transposed: Operator, *arguments):
        ctx.transposed, ctx.arguments = transposed, arguments[1:]
        return operator.below_function(keyset, *arguments)

    @staticmethod
    def backward(ctx, gradient):
        return None, None, None, ctx.transposed(gradient, *ctx.arguments), None, None, None


_unshard: Operator = Operator(
    "context_parallel_unshard(Tensor x, int dim, str group, str sharding) -> Tensor",
    run=lambda x, dim, name, sharding: join_rows(group_named(name), sharding, x, dim),
    fake=lambda x, dim, name, sharding: _resized(x, dim, x.shape[dim] * group_named(name).size),
    function="cp_unshard",
    autograd=lambda keyset, *arguments: apply_in_operator(_Linear, keyset, _unshard, _sum, *arguments),
)
_sum: Operator = Operator(
    "context_parallel_sum(Tensor x, int dim, str group, str sharding) -> Tensor",
    run=_sum_impl,
    fake=lambda x, dim, name, sharding: _resized(x, dim, x.shape[dim] // group_named(name).size),
    function="cp_unshard",
    autograd=lambda keyset, *arguments: apply_in_operator(_Linear, keyset, _sum, _unshard, *arguments),
)
