# mypy: allow-untyped-defs, allow-incomplete-defs
"""The choice of a call's method by bytes and floating-point operations, with the reason. Communicates nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from fused_rope_attn.attention.problem import Problem
from fused_rope_attn.distributed.groups import Group
from fused_rope_attn.distributed.layout import Shares
from fused_rope_attn.runtime.options import CpMethod

METHODS: tuple[CpMethod, ...] = get_args(CpMethod)
# Rates of one H200 among several of its host. They only weigh the methods against one another.
FLOPS, LINK = 600e12, 300e9
# The part of the all-gather that no work hides.
EXPOSED = 0.25


@dataclass(frozen=True)
class CpPlan:
    """The method of a call of ``rope_attention_cp``, and its cost.

    method: "all_gather" or "all_to_all". reason: why. received_bytes: of the rank that receives most, forward. flops:
    of the rank that computes most, forward. gathered_bytes: the most K and V of other ranks that a rank holds at a
    time; backward also holds their gradients' parts, in float32.
    """

    method: str
    reason: str
    received_bytes: int
    flops: float
    gathered_bytes: int


def choose(problem: Problem, method: str, group: Group, shares: Shares) -> CpPlan:
    """Return the plan of a call with these shares. problem: with the local lengths.

    Raises ValueError if ``method="all_to_all"`` is asked for and the key heads cannot be divided.
    """
    size = group.size
    row_bytes = problem.batch * problem.head_dim * problem.dtype.itemsize
    gathered = 2 * problem.heads_kv * row_bytes * shares.most_received
    work = [
        4.0 * problem.batch * problem.heads_q * problem.head_dim * sum(_pairs(problem, p) for p in share.segments)
        for share in shares.shares
    ]
    heads = 2 * problem.heads_q + 2 * problem.heads_kv
    exchanged = heads * row_bytes * problem.len_q * (size - 1) // size
    by_gather = CpPlan("all_gather", "", gathered, max(work, default=0.0), gathered)
    by_heads = CpPlan("all_to_all", "", exchanged, sum(work) / max(1, size), exchanged)
    divides = problem.heads_kv % size == 0
    if method == "all_to_all":
        if not divides:
            raise ValueError(
                f"method must be 'all_gather' or 'auto' where k's heads are no multiple of the group's {size} ranks, "
                f"but is 'all_to_all', and k has {problem.heads_kv} heads"
            )
        return replace(by_heads, reason="asked for")
    if method == "all_gather":
        return replace(by_gather, reason="asked for")
    if size == 1:
        return replace(by_gather, reason="one rank exchanges nothing")
    if not divides:
        return replace(by_gather, reason=f"k's {problem.heads_kv} heads are no multiple of {size} ranks")
    compute, link = by_gather.flops / FLOPS, by_gather.received_bytes / LINK
    hidden = min((1 - EXPOSED) * link, (1 - EXPOSED) * compute)
    gather_time = compute + link - hidden
    heads_time = by_heads.flops / FLOPS + by_heads.received_bytes / LINK
    figures = (
        f"{by_gather.received_bytes / 2**20:.3g} MiB next to {by_gather.flops / 1e12:.3g} TFLOP, where heads would "
        f"exchange {by_heads.received_bytes / 2**20:.3g} MiB before and after {by_heads.flops / 1e12:.3g}"
    )
    if gather_time <= heads_time:
        return replace(by_gather, reason=f"a rank receives {figures}")
    return replace(by_heads, reason=f"a rank would receive {figures}")


def when_it_runs(method: str) -> CpPlan:
    """Return the plan of a call that is being traced, where only the method asked for is known."""
    return CpPlan(method, "chosen when the graph runs", 0, 0.0, 0)


def _pairs(problem: Problem, segment) -> float:
    """Estimate the number of pairs of a query and a key that see each other in one head of a segment."""
    limits_q = segment.cu_seqlens_q or (0, segment.queries)
    limits_k = segment.cu_seqlens_k or (0, segment.num_keys)
    total = 0.0
    window = problem.window
    widest = float("inf")
    if window is not None and window[0] >= 0 and (problem.causal or window[1] >= 0):
        widest = window[0] + 1 + (0 if problem.causal else window[1])
    for i in range(len(limits_q) - 1):
        queries, keys = limits_q[i + 1] - limits_q[i], limits_k[i + 1] - limits_k[i]
        seen = keys - queries / 2 if problem.causal else keys
        total += queries * min(seen, widest)
    return total
