"""The method ``"all_to_all"``: sequence shards of all heads become whole sequences of a part of the heads, and back.

Each rank then makes one ordinary call of attention, whose dk and dv are exact: nothing is summed over ranks.
"""

from __future__ import annotations

import torch

from fused_rope_attn.attention.problem import Gradients, Problem, Saved, Tensors
from fused_rope_attn.distributed import local
from fused_rope_attn.distributed.groups import exchange, join_rows
from fused_rope_attn.distributed.layout import ParallelCall
from fused_rope_attn.runtime.layouts import like_input


def forward_pass(call: ParallelCall, problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o, lse) of the local rows. Arguments as in ``gather.forward_pass``."""
    one, given, _ = _own_heads(call, problem, tensors)
    o, lse = local.segment_forward(local.plan_of(one), one, given)
    o, lse = to_rows(call, [(o, 0.0), (lse, float("-inf"))])
    return like_input(tensors.q).copy_(o), lse


def backward_pass(
    call: ParallelCall, problem: Problem, tensors: Tensors, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
) -> Gradients:
    """Return gradients as ``gather.backward_pass`` does."""
    # Some ranks may have no gradient of lse, but all take part in the exchange.
    dlse = torch.zeros_like(lse) if tensors.dlse is None else tensors.dlse
    one, given, (do, o, of_rows) = _own_heads(call, problem, tensors, do, o, torch.stack((lse, dlse), -1))
    lse, dlse = (x.contiguous() for x in of_rows.unbind(-1))
    found = local.segment_backward(local.plan_of(one), one, do, Saved(o, lse, given._replace(dlse=dlse)))
    gradients = to_rows(call, [(x, 0.0) for x in found[:3]])
    dq, dk, dv = (like_input(x).copy_(dx) for x, dx in zip(tensors[:3], gradients))
    dsinks = None
    if tensors.sinks is not None:
        dsinks = torch.zeros_like(tensors.sinks)
        dsinks.unflatten(0, (call.group.size, -1))[call.group.rank].copy_(found.dsinks)
    return Gradients(dq, dk, dv, dsinks, found.dq_norm, found.dk_norm)


def _own_heads(
    call: ParallelCall, problem: Problem, tensors: Tensors, *others: torch.Tensor
) -> tuple[Problem, Tensors, list[torch.Tensor]]:
    """Return this rank's heads of the whole sequence as one call, and those of ``others``, which have a row a query."""
    q, k, v, *of_others = (x[:, :, : call.total] for x in to_heads(call, [*tensors[:3], *others]))
    cos, sin = tensors.cos, tensors.sin
    if call.tables_are_local:
        cos, sin = (join_rows(call.group, call.owners, x, x.ndim - 2) for x in (cos, sin))
    sinks = None if tensors.sinks is None else tensors.sinks.unflatten(0, (call.group.size, -1))[call.group.rank]
    problem = problem._replace(heads_q=q.shape[1], heads_kv=k.shape[1], len_q=call.total, len_k=call.total)
    return problem, tensors._replace(q=q, k=k, v=v, cos=cos, sin=sin, sinks=sinks), of_others


def to_heads(call: ParallelCall, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Exchange (B, H, N / P, ...) for this rank's H / P heads of the whole sequence, (B, H / P, N, ...), contiguous."""
    size, parts = call.group.size, len(call.owned)
    # (P, parts, B, H / P, C, ...)
    sent = [x.unflatten(2, (parts, -1)).unflatten(1, (size, -1)).movedim((1, 3), (0, 1)).contiguous() for x in tensors]
    return [torch.cat([x[owner] for owner in call.owners], dim=2) for x in exchange(call.group, *sent)]


def to_rows(call: ParallelCall, tensors: list[tuple[torch.Tensor, float]]) -> list[torch.Tensor]:
    """Inverse of ``to_heads``: (B, H / P, N, ...) become (B, H, N / P, ...), contiguous.

    Each tensor has a value for the rows that do not exist.
    """
    size, sent = call.group.size, []
    for x, fill in tensors:
        missing = len(call.owners) * call.chunk - x.shape[2]
        if missing:
            x = torch.cat((x, x.new_full((*x.shape[:2], missing, *x.shape[3:]), fill)), dim=2)
        chunks = x.unflatten(2, (len(call.owners), -1)).unbind(2)
        sent.append([torch.stack([chunks[c] for c in call.work.owned[rank]]) for rank in range(size)])
    # (P, parts, B, H / P, C, ...) to (B, P, H / P, parts, C, ...)
    received = exchange(call.group, *sent)
    return [x.movedim((0, 1), (1, 3)).flatten(3, 4).flatten(1, 2) for x in received]
