"""The method ``"all_to_all"``: sequence shards of all heads become whole sequences of a part of the heads, and back.

Each rank then makes one ordinary call of attention, whose dk and dv are exact: nothing is summed over ranks.
"""

from __future__ import annotations

import torch

from fused_rope_attn.attention.problem import Gradients, Problem, Saved, Tensors
from fused_rope_attn.distributed import local
from fused_rope_attn.distributed.cuts import chunks_of, owners_of
from fused_rope_attn.distributed.groups import Exchange, Group, join_rows, others
from fused_rope_attn.distributed.layout import Call
from fused_rope_attn.runtime.layouts import like_input


def forward(call: Call, problem: Problem, tensors: Tensors, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o, lse) of the local rows. Arguments as in ``gather.forward``; total: rows of the sequence that exist."""
    one, given, _ = _whole(call, problem, tensors, total)
    o, lse = local.forward(local.plan_of(one), one, given)
    length = problem.len_q * call.group.size
    if total < length:
        o = torch.nn.functional.pad(o, (0, 0, 0, length - total))
        lse = torch.nn.functional.pad(lse, (0, length - total), value=float("-inf"))
    o, lse = to_rows(call.group, call.sharding, [o, lse])
    return like_input(tensors.q).copy_(o), lse


def backward(
    call: Call, problem: Problem, tensors: Tensors, total: int, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
) -> Gradients:
    """Return gradients as ``gather.backward`` does."""
    # Some ranks may have no gradient of lse, but all take part in the exchange.
    dlse = torch.zeros_like(lse) if tensors.dlse is None else tensors.dlse
    one, given, (do, o, of_rows) = _whole(call, problem, tensors, total, do, o, torch.stack((lse, dlse), -1))
    lse, dlse = (x.contiguous() for x in of_rows.unbind(-1))
    found = local.backward(local.plan_of(one), one, do, Saved(o, lse, given._replace(dlse=dlse)))
    length = problem.len_q * call.group.size
    whole = [found.dq, found.dk, found.dv]
    if total < length:
        whole = [torch.nn.functional.pad(x, (0, 0, 0, length - total)) for x in whole]
    gradients = to_rows(call.group, call.sharding, whole)
    dq, dk, dv = (like_input(x).copy_(dx) for x, dx in zip(tensors[:3], gradients))
    dsinks = None
    if tensors.sinks is not None:
        dsinks = torch.zeros_like(tensors.sinks)
        dsinks[_own_heads(call.group, problem.heads_q)] = found.dsinks
    return Gradients(dq, dk, dv, dsinks, found.dq_norm, found.dk_norm)


def _own_heads(group: Group, heads: int) -> slice:
    return slice(heads // group.size * group.rank, heads // group.size * (group.rank + 1))


def _whole(
    call: Call, problem: Problem, tensors: Tensors, total: int, *others: torch.Tensor
) -> tuple[Problem, Tensors, list[torch.Tensor]]:
    """Return this rank's heads of the whole sequence as one call, and those of ``others``, which have a row a query."""
    group = call.group
    whole = to_heads(group, call.sharding, [*tensors[:3], *others])
    q, k, v, *others_whole = (x[:, :, :total] for x in whole)
    cos, sin = tensors.cos, tensors.sin
    if call.tables_are_local:
        cos, sin = (join_rows(group, call.sharding, x, x.ndim - 2) for x in (cos, sin))
    sinks = None if tensors.sinks is None else tensors.sinks[_own_heads(group, problem.heads_q)]
    problem = problem._replace(heads_q=q.shape[1], heads_kv=k.shape[1], len_q=total, len_k=total)
    others_whole = [x if x.ndim == 4 else x.contiguous() for x in others_whole]
    return problem, tensors._replace(q=q, k=k, v=v, cos=cos, sin=sin, sinks=sinks), others_whole


def to_heads(group: Group, sharding: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Exchange (B, H, N / P, ...) for this rank's H / P heads of the whole sequence, (B, H / P, N, ...), contiguous."""
    parts = len(chunks_of(0, group.size, sharding))
    flat = []
    for x in tensors:
        batch, heads, rows = x.shape[:3]
        shape = (batch, group.size, heads // group.size, parts, rows // parts, *x.shape[3:])
        # (P, parts, B, H / P, C, ...)
        flat.append(x.reshape(shape).movedim((1, 3), (0, 1)).contiguous())
    received = _exchange(group, flat)
    order = owners_of(group.size, sharding)
    return [torch.cat([x[rank, place] for rank, place in order], dim=2) for x in received]


def to_rows(group: Group, sharding: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Inverse of ``to_heads``: (B, H / P, N, ...) become (B, H, N / P, ...), contiguous."""
    size = group.size
    parts = len(chunks_of(0, size, sharding))
    flat = []
    for x in tensors:
        batch, heads, rows = x.shape[:3]
        chunk = rows // (parts * size)
        sent = x.new_empty(size, parts, batch, heads, chunk, *x.shape[3:])
        for rank in range(size):
            for place, c in enumerate(chunks_of(rank, size, sharding)):
                sent[rank, place].copy_(x[:, :, c * chunk : (c + 1) * chunk])
        flat.append(sent)
    received = _exchange(group, flat)
    # (P, parts, B, H / P, C, ...) to (B, P, H / P, parts, C, ...)
    return [x.movedim((0, 1), (1, 3)).flatten(3, 4).flatten(1, 2) for x in received]


def _exchange(group: Group, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Send part r of each tensor (P, ...) to rank r, and return the parts that arrive, of the same shapes."""
    received, running, rank = [torch.empty_like(x) for x in tensors], [], group.rank
    for x, y in zip(tensors, received):
        y[rank].copy_(x[rank])
        running.append(Exchange(group, others(list(y), rank), others(list(x), rank), x))
    for exchange in running:
        exchange.wait()
    return received
