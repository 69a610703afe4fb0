"""Programs that tests of context parallelism run on every rank: PyTorch's features, groups, memory that is never read.
Each returns plain tensors, for the test to compare."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from fused_rope_attn.distributed import (
    cp_shard,
    methods,
    plan_cp,
    plan_varlen_cp,
    rope_attention_cp,
    rope_attention_varlen_cp,
)
from verification.ranks import group_of

Tensors = dict[str, torch.Tensor]


def _inputs(
    ranks: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    length: int = 24,
    device: str = "cpu",
    heads: tuple[int, int] = (4, 2),
) -> tuple[Any, list, tuple]:
    generator = torch.Generator().manual_seed(5)
    group = group_of(ranks)
    whole = [torch.randn(1, n, length, 16, generator=generator).to(device, dtype) for n in (*heads, heads[1])]
    angles = (torch.arange(length)[:, None] * torch.linspace(1.0, 0.1, 8)).to(device)
    shards = [cp_shard(x, 2, group=group).requires_grad_() for x in whole]
    return group, shards, (angles.cos(), angles.sin())


def plain_and(ranks: tuple[int, ...], feature: str, device: str = "cpu") -> tuple[Tensors, Tensors]:
    """o and gradients of an ordinary call, and of the same under a feature of PyTorch."""
    group, shards, tables = _inputs(ranks, device=device)
    plan = plan_varlen_cp([0, 7, 24], group=group, device=device) if "varlen" in feature else None

    def attend(q, k, v):
        if plan is not None:
            packed = (x[0].transpose(0, 1) for x in (q, k, v))
            return rope_attention_varlen_cp(*packed, *tables, plan)
        return rope_attention_cp(q, k, v, *tables, group=group, window=(9, 0))

    def run(function, *inputs) -> Tensors:
        o = function(*inputs)
        gradients = torch.autograd.grad(o.square().sum(), inputs)
        return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients)))

    if "compile" in feature:
        # Before the eager call, which adds plans to the cache.
        found = run(torch.compile(attend, fullgraph=True, backend="aot_eager"), *shards)
        return run(attend, *shards), found
    expected = run(attend, *shards)
    if feature == "checkpoint":
        return expected, run(lambda *inputs: checkpoint(attend, *inputs, use_reentrant=False), *shards)
    if feature == "layout":
        flipped = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in shards]

        def attend_flipped(q, k, v):
            return rope_attention_cp(q, k, v, *tables, group=group, window=(9, 0), layout="bshd")

        return expected, {name: x.transpose(1, 2) for name, x in run(attend_flipped, *flipped).items()}
    if feature == "mesh":
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
        return expected, run(lambda q, k, v: rope_attention_cp(q, k, v, *tables, group=mesh, window=(9, 0)), *shards)
    if feature == "interpreter":
        return expected, run(
            lambda q, k, v: rope_attention_cp(q, k, v, *tables, group=group, window=(9, 0), backend="triton"), *shards
        )
    if feature == "all_to_all":
        return expected, run(
            lambda q, k, v: rope_attention_cp(q, k, v, *tables, group=group, window=(9, 0), method="all_to_all"),
            *shards,
        )
    if feature == "two calls in flight":
        both = [attend(*shards) for _ in range(2)]
        gradients = torch.autograd.grad(both[0].square().sum() + both[1].square().sum(), shards)
        return expected, {"o": both[1].detach(), **{n: g / 2 for n, g in zip(("dq", "dk", "dv"), gradients)}}
    raise ValueError(feature)


def autocast(ranks: tuple[int, ...]) -> tuple[torch.dtype, torch.dtype]:
    """dtypes of o and of dk where autocast has bfloat16 and the inputs are float32."""
    group, shards, tables = _inputs(ranks)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = rope_attention_cp(*shards, *tables, group=group)
    o.sum().backward()
    return o.dtype, shards[1].grad.dtype


def only_some_use_it(ranks: tuple[int, ...]) -> tuple[Tensors, Tensors]:
    """Gradients where rank 0's loss has o times 0, and where it is None: the node gets a gradient of another output."""
    group, shards, tables = _inputs(ranks)
    found = []
    for unused in (False, True):
        q, k, v = (x.detach().requires_grad_() for x in shards)
        first = rope_attention_cp(q, k, v, *tables, group=group)
        # The second call's gradient is the first one's `do`; where rank 0 leaves it out, that is zero.
        weight = 0.0 if group.rank() == 0 else 1.0
        loss = (first * weight).sum() + (0.0 if not unused else (first.detach() * 0).sum())
        loss.backward()
        found.append({"dq": q.grad, "dk": k.grad, "dv": v.grad})
    return found[0], found[1]


def only_some_use_lse(ranks: tuple[int, ...], method: str) -> tuple[Tensors, Tensors]:
    """Gradients where rank 0's loss has lse, and the others' have lse times 0, or do not have it."""
    group, shards, tables = _inputs(ranks)
    found = []
    for unused in (False, True):
        q, k, v = (x.detach().requires_grad_() for x in shards)
        o, lse = rope_attention_cp(q, k, v, *tables, group=group, method=method, return_lse=True)
        loss = o.square().sum()
        if group.rank() == 0:
            loss = loss + lse.square().sum()
        elif not unused:
            loss = loss + (lse * 0).sum()
        loss.backward()
        found.append({"dq": q.grad, "dk": k.grad, "dv": v.grad})
    return found[0], found[1]


def only_values_need_gradients(ranks: tuple[int, ...]) -> Tensors:
    group, shards, tables = _inputs(ranks)
    q, k, v = (x.detach() for x in shards)
    v.requires_grad_()
    o = rope_attention_cp(q, k, v, *tables, group=group)
    o.sum().backward()
    return {"dv": v.grad}


def double_backward(ranks: tuple[int, ...]) -> str:
    group, shards, tables = _inputs(ranks)
    o = rope_attention_cp(*shards, *tables, group=group)
    (dq,) = torch.autograd.grad(o.sum(), shards[:1], create_graph=True)
    try:
        dq.sum().backward()
    except NotImplementedError as error:
        return str(error)
    return "nothing was refused"


def forward_mode(ranks: tuple[int, ...]) -> str:
    """Return the message of a rank when only the first one passes a tangent."""
    group, shards, tables = _inputs(ranks)
    q, k, v = (x.detach() for x in shards)
    try:
        with torch.autograd.forward_ad.dual_level():
            if group.rank() == 0:
                k = torch.autograd.forward_ad.make_dual(k, torch.ones_like(k))
            rope_attention_cp(q, k, v, *tables, group=group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def poisoned(ranks: tuple[int, ...], total: int) -> Tensors:
    """Return o and gradients of a call with NaN in q, k, v and do from row ``total`` on."""
    group, shards, tables = _inputs(ranks)
    whole = torch.zeros(1, 1, 24, 1)
    whole[:, :, total:] = float("nan")
    poison = cp_shard(whole, 2, group=group)
    q, k, v = ((x.detach() + poison).requires_grad_() for x in shards)
    o = rope_attention_cp(q, k, v, *tables, group=group, total_len=total)
    gradients = torch.autograd.grad(o, (q, k, v), torch.ones_like(o) + poison)
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients)))


def planned(ranks: tuple[int, ...], heads_kv: int, length: int, options: dict[str, Any]) -> tuple[str, str]:
    """Method and reason that ``plan_cp`` finds, on tensors without data, and asked of one rank alone."""
    q = torch.empty(1, 32, length, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, heads_kv, length, 128, dtype=torch.bfloat16, device="meta")
    rows = length * len(ranks)
    table = torch.empty(rows, 64, device="meta")
    plan = plan_cp(q, k, k, table, table, group=group_of(ranks), **options)
    return plan.method, plan.reason


def repeats(ranks: tuple[int, ...]) -> list[bool]:
    """Return whether two runs of a deterministic call have the same bits."""
    group, shards, tables = _inputs(ranks, torch.float16)
    found = []
    for _ in range(2):
        o = rope_attention_cp(*shards, *tables, group=group, deterministic=True)
        found.append((o, *torch.autograd.grad(o.sum(), shards)))
        dist.barrier(group)
    return [torch.equal(a, b) for a, b in zip(*found)]


def in_sections(ranks: tuple[int, ...], options: dict[str, Any], section_bytes: int) -> tuple[Tensors, Tensors]:
    """o, lse and gradients where all heads travel at once, and where several sections of them do."""
    group, shards, tables = _inputs(ranks, heads=(16, 8))
    sinks = torch.linspace(-1.0, 1.0, 16).requires_grad_()
    found, usual = [], methods.SECTION_BYTES
    for methods.SECTION_BYTES in (usual, section_bytes):
        given = {"sinks": sinks, "return_lse": True, **options}
        o, lse = rope_attention_cp(*shards, *tables, group=group, **given)
        gradients = torch.autograd.grad(o.square().sum(), (*shards, sinks))
        found.append(dict(zip(("o", "lse", "dq", "dk", "dv", "dsinks"), (o.detach(), lse.detach(), *gradients))))
    methods.SECTION_BYTES = usual
    return found[0], found[1]
