"""Programs that tests of context parallelism run on every rank next to attention, and judges of their results."""

from __future__ import annotations

from typing import Any

import torch

from fused_rope_attn.distributed import (
    cp_positions,
    cp_shard,
    cp_shift_labels,
    cp_unshard,
    plan_varlen_cp,
    rope_attention_cp,
    rope_attention_varlen_cp,
)
from verification.context_parallel import attend, compared
from verification.interpreter import products_in_float64
from verification.ranks import group_of
from verification.testing import Case


def judge(case: Case, found: dict[str, torch.Tensor], total: int | None = None, device: str = "cpu") -> None:
    """Hold all tensors to the contract's tolerance, every row."""
    for comparison in compared(case, found, total, device):
        assert comparison.ok, f"{case.name}: {comparison.tensor}: {comparison.detail}"


def attend_invariantly(case: Case, ranks: tuple[int, ...], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what ``attend`` does of kernels with the same bits, in the interpreter."""
    with products_in_float64():
        return attend(case, ranks, "cpu", {"backend": "triton", "batch_invariant": True} | options)


def balanced(ranks: tuple[int, ...], cu_seqlens: list[int]) -> tuple[str, float]:
    """(the sharding that a balanced plan finds, this rank's work over half of all, by its own positions)."""
    group = group_of(ranks)
    plan = plan_varlen_cp(cu_seqlens, group=group, sharding="balanced")
    limits, every = torch.tensor(cu_seqlens), torch.arange(cu_seqlens[-1])
    seen = every - limits[torch.searchsorted(limits, every, right=True) - 1] + 1
    own = seen[cp_positions(plan.total, group=group, sharding=plan.sharding)]
    assert torch.equal(own, cp_shard(seen, 0, group=group, sharding=plan.sharding))
    return plan.sharding, float(own.sum() / seen.sum() * len(ranks))


def refused_plan(ranks: tuple[int, ...], cu_seqlens: list[int], options: dict[str, Any]) -> str:
    """The message with which ``plan_varlen_cp`` refuses."""
    try:
        plan_varlen_cp(cu_seqlens, group=group_of(ranks), **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing was refused"


def refused(ranks: tuple[int, ...], wrong: dict[str, Any]) -> tuple[str, str]:
    """Name and message of the error of a call in which rank 1, or with "all" every rank, passes something wrong."""
    group, wrong = group_of(ranks), dict(wrong)
    if not wrong.pop("all", False) and group.rank() != 1:
        wrong = {}
    length, heads_kv, rows = wrong.pop("length", 12), wrong.pop("heads_kv", 2), wrong.pop("rows", 36)
    length_k, grad = wrong.pop("length_k", length), wrong.pop("grad", True)
    q = torch.zeros(1, 4, length, 16, requires_grad=grad)
    k, v = torch.zeros(1, heads_kv, length_k, 16), torch.zeros(1, heads_kv, length_k, 16)
    try:
        rope_attention_cp(q, k, v, torch.ones(rows, 8), torch.zeros(rows, 8), **{"group": group, **wrong})
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "nothing was refused"


def refused_documents(ranks: tuple[int, ...], ends: list[int], options: dict[str, Any]) -> str:
    """The message of a packed call for which each rank's first document has its entry of ends as its length."""
    group = group_of(ranks)
    plan = plan_varlen_cp([0, ends[group.rank()], 12], group=group)
    x = torch.zeros(plan.local, 2, 16)
    try:
        rope_attention_varlen_cp(x, x, x, torch.ones(12, 8), torch.zeros(12, 8), plan, **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing was refused"


def cut_and_join(
    ranks: tuple[int, ...], whole: torch.Tensor, weights: list[torch.Tensor], sharding: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(this rank's shard, all of them joined, the gradient of the sum of weights times the joined) of a tensor."""
    group = group_of(ranks)
    x = whole.clone().requires_grad_()
    shard = cp_shard(x, 1, group=group, sharding=sharding)
    joined = cp_unshard(shard, -2, group=group, sharding=sharding)
    (joined * weights[group.rank()]).sum().backward()
    return shard.detach(), joined.detach(), x.grad


def positions_of(ranks: tuple[int, ...], total: int, sharding: str) -> torch.Tensor:
    return cp_positions(total, group=group_of(ranks), sharding=sharding)


def labels_of(ranks: tuple[int, ...], labels: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    return cp_shift_labels(labels, group=group_of(ranks), cu_seqlens=cu_seqlens)
