"""Programs that tests of context parallelism run on every rank, and the judge of their results."""

from __future__ import annotations

import functools
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from fused_rope_attn import rope_attention
from fused_rope_attn.distributed import (
    cp_shard,
    cp_unshard,
    methods,
    plan_cp,
    plan_varlen_cp,
    rope_attention_cp,
    rope_attention_varlen_cp,
)
from verification import testing
from verification.context_parallel import attend, compared
from verification.interpreter import products_in_float64
from verification.ranks import group_of
from verification.testing import Case

SMALL = Case(1, 4, 2, 24, 24, 16, dtype=torch.float32, window=(9, 0))
Members = tuple[int, ...]
Tensors = tuple[torch.Tensor, ...]


def judge(case: Case, found: dict[str, torch.Tensor], total: int | None = None, device: str = "cpu") -> None:
    """Hold all tensors to the contract's tolerance, every row."""
    for comparison in compared(case, found, total, device):
        assert comparison.ok, f"{case.name}: {comparison.tensor}: {comparison.detail}"


def attend_in_sections(*given: Any) -> dict[str, torch.Tensor]:
    """Return what ``attend`` does where heads travel one after the other."""
    usual, methods.SECTION_BYTES = methods.SECTION_BYTES, 1
    try:
        return attend(*given)
    finally:
        methods.SECTION_BYTES = usual


def attend_invariantly(case: Case, ranks: Members, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what ``attend`` does of kernels with the same bits, in the interpreter."""
    with products_in_float64():
        return attend(case, ranks, "cpu", {"backend": "triton", "batch_invariant": True} | options)


def with_group(ranks: Members, function: Any, arguments: tuple, options: dict[str, Any]) -> Any:
    return function(*arguments, group=group_of(ranks), **options)


class Shard:
    """This rank's rows of a case's inputs, and calls of ``rope_attention_cp`` with them."""

    def __init__(self, case: Case, ranks: Members, device: str = "cpu", sharding: str = "zigzag"):
        self.case, self.inputs, self.group = case, testing.make_inputs(case, device), group_of(ranks)
        self.cut = functools.partial(cp_shard, dim=2, group=self.group, sharding=sharding)
        self.options = {"group": self.group, "sharding": sharding, "window": case.window}
        self.qkv = [self.cut(x).requires_grad_() for x in self.inputs[:3]]
        self.do = self.cut(self.inputs.do)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        tables = self.inputs.cos, self.inputs.sin
        return rope_attention_cp(q, k, v, *tables, self.case.causal, **{**self.options, **options})

    def packed(self, plan: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend to the same rows as documents."""
        flat = (x[0].transpose(0, 1) for x in (q, k, v))
        o = rope_attention_varlen_cp(*flat, self.inputs.cos, self.inputs.sin, plan, deterministic=True)
        return o.transpose(0, 1).unsqueeze(0)

    def both(self, call: Any = None, qkv: Any = None, **options: Any) -> Tensors:
        """Return (o, dq, dk, dv) of a call, of this one by default."""
        qkv = self.qkv if qkv is None else qkv
        o = (call or self)(*qkv, **options)
        return (o.detach(), *torch.autograd.grad(o, qkv, self.do))


def same(xs: Tensors, ys: Tensors) -> bool:
    return all(map(torch.equal, xs, ys))


def under(ranks: Members, feature: str) -> tuple[Tensors, Tensors]:
    """o and gradients of an ordinary call, and of the same under a feature of PyTorch."""
    shard = usual = Shard(SMALL, ranks)
    if feature == "checkpoint":
        call = functools.partial(checkpoint, shard, use_reentrant=False)
    elif feature == "mesh":
        mesh = DeviceMesh.from_group(shard.group, "cpu", mesh_dim_names=("cp",))
        call = functools.partial(shard, group=mesh)
    elif feature == "interpreter":
        call = functools.partial(shard, backend="triton")
    elif feature == "layout":

        def call(*qkv):
            return shard(*(x.transpose(1, 2) for x in qkv), layout="bshd").transpose(1, 2)
    elif feature == "two calls in flight":

        def call(*qkv):
            return (shard(*qkv) + shard(*qkv)) / 2
    else:
        if "varlen" in feature:
            usual = functools.partial(shard.packed, plan_varlen_cp([0, 7, 24], group=shard.group))

        def attend(q, k, v):
            return usual(q, k, v)

        call = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found = shard.both(call)  # first, because the eager call adds plans to the cache
    return found, shard.both(usual)


def autocast(ranks: Members) -> tuple[torch.dtype, torch.dtype]:
    """dtypes of o and of dk where autocast has bfloat16 and the inputs are float32."""
    shard = Shard(SMALL, ranks)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = shard(*shard.qkv)
    o.sum().backward()
    return o.dtype, shard.qkv[1].grad.dtype


def used_by_some(ranks: Members, method: str) -> list[Tensors]:
    """Gradients where losses have an output times zero, and where they do not: rank 0 has no o, the others no lse."""
    shard, found = Shard(SMALL, ranks), []
    for times_zero in (True, False):
        outputs = shard(*shard.qkv, method=method, return_lse=True)
        unused, used = outputs if shard.group.rank() == 0 else reversed(outputs)
        loss = used.square().sum() + (0 * unused).sum() if times_zero else used.square().sum()
        found.append(torch.autograd.grad(loss, shard.qkv))
    return found


def only_values_need_gradients(ranks: Members) -> torch.Tensor:
    shard = Shard(SMALL, ranks)
    q, k, v = (x.detach() for x in shard.qkv)
    return torch.autograd.grad(shard(q, k, v.requires_grad_()).sum(), v)[0]


def double_backward(ranks: Members) -> None:
    shard = Shard(SMALL, ranks)
    torch.autograd.grad(shard(*shard.qkv).sum(), shard.qkv[:1], create_graph=True)[0].sum().backward()


def forward_mode(ranks: Members) -> None:
    """Only the first rank passes a tangent."""
    shard = Shard(SMALL, ranks)
    q, k, v = (x.detach() for x in shard.qkv)
    with torch.autograd.forward_ad.dual_level():
        if shard.group.rank() == 0:
            k = torch.autograd.forward_ad.make_dual(k, torch.ones_like(k))
        shard(q, k, v)


def poisoned(ranks: Members, total: int) -> Tensors:
    """Return o and gradients of a call with NaN in q, k, v and do from row ``total`` on."""
    shard = Shard(SMALL, ranks)
    poison = torch.zeros(1, 1, 24, 1)
    poison[:, :, total:] = float("nan")
    shard.qkv = [(x.detach() + shard.cut(poison)).requires_grad_() for x in shard.qkv]
    shard.do += shard.cut(poison)
    return shard.both(total_len=total)


def planned(ranks: Members, heads_kv: int, length: int, options: dict[str, Any]) -> tuple[str, str]:
    """Method and reason that ``plan_cp`` finds, on tensors without data, and asked of one rank alone."""
    q, k = (torch.empty(1, heads, length, 128, dtype=torch.bfloat16, device="meta") for heads in (32, heads_kv))
    table = torch.empty(length * len(ranks), 64, device="meta")
    plan = plan_cp(q, k, k, table, table, group=group_of(ranks), **options)
    return plan.method, plan.reason


def refused(ranks: Members, wrong: dict[str, Any]) -> None:
    """Make a call in which rank 1, or with "all" every rank, passes something wrong."""
    group, wrong = group_of(ranks), dict(wrong)
    if not wrong.pop("all", False) and group.rank() != 1:
        wrong = {}
    length, heads_kv, rows = wrong.pop("length", 12), wrong.pop("heads_kv", 2), wrong.pop("rows", 36)
    length_k, grad = wrong.pop("length_k", length), wrong.pop("grad", True)
    q = torch.zeros(1, 4, length, 16, requires_grad=grad)
    k = torch.zeros(1, heads_kv, length_k, 16)
    rope_attention_cp(q, k, k, torch.ones(rows, 8), torch.zeros(rows, 8), **{"group": group, **wrong})


def refused_documents(ranks: Members, ends: list[int], options: dict[str, Any]) -> None:
    """Make a packed call for which each rank's first document has its entry of ends as its length."""
    group = group_of(ranks)
    plan = plan_varlen_cp([0, ends[group.rank()], 12], group=group)
    x = torch.zeros(plan.local, 2, 16)
    rope_attention_varlen_cp(x, x, x, torch.ones(12, 8), torch.zeros(12, 8), plan, **options)


def cut_and_join(ranks: Members, whole: torch.Tensor, weights: list[torch.Tensor], sharding: str) -> Tensors:
    """(this rank's shard, all of them joined, the gradient of the sum of weights times the joined) of a tensor."""
    cut = {"group": group_of(ranks), "sharding": sharding}
    x = whole.clone().requires_grad_()
    shard = cp_shard(x, 1, **cut)
    joined = cp_unshard(shard, -2, **cut)
    (joined * weights[cut["group"].rank()]).sum().backward()
    return shard.detach(), joined.detach(), x.grad


# On GPUs.


def has_bits_of_one_gpu(case: Case, ranks: Members, sharding: str, batch_invariant: bool) -> list[bool]:
    """Return whether this rank's rows of o and lse have the bits of one GPU's call of the whole sequence."""
    shard = Shard(case, ranks, "cuda", sharding)
    options = {"return_lse": True, "batch_invariant": batch_invariant}
    found = shard(*shard.qkv, **options)
    whole = rope_attention(*shard.inputs[:5], case.causal, window=case.window, **options)
    return [torch.equal(x, shard.cut(y)) for x, y in zip(found, whole)]


def repeats(case: Case, ranks: Members, most: int, seconds: float, late: bool) -> tuple[bool, int]:
    """Return whether runs of both passes have the same bits, and the number of runs: ``most``, or fewer if so many
    seconds end before. late: one rank is late at random, on the host and on the GPU, and dq and dk, which are not
    asked to be deterministic, may differ."""
    shard, generator, start = Shard(case, ranks, "cuda"), random.Random(3), time.monotonic()
    first, wrong = None, torch.zeros((), device="cuda")
    for done in range(most):
        if done % 50 == 0:
            over = torch.tensor(float(time.monotonic() - start > seconds), device="cuda")
            dist.all_reduce(over, dist.ReduceOp.MAX, group=shard.group)
            if over.item():
                return bool(wrong == 0), done
        chosen, microseconds = generator.randrange(len(ranks)), generator.choice((0, 0, 0, 50, 500, 2000))
        if late and chosen == shard.group.rank():
            time.sleep(microseconds * 1e-6)
            torch.cuda._sleep(1000 * microseconds)
        found = shard.both(deterministic=not late)
        found = found[::3] if late else found
        first = first or found
        for x, y in zip(first, found):
            wrong += (x != y).any()
    return bool(wrong == 0), most


def graph(case: Case, ranks: Members) -> bool:
    """Return whether a forward pass captured in a CUDA graph gives the eager one's bits, with other inputs."""
    shard = Shard(case, ranks, "cuda")
    static, side = [x.detach().clone() for x in shard.qkv], torch.cuda.Stream()
    with torch.no_grad():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                shard(*static)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        dist.barrier(shard.group)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            o = shard(*static)
        for x in static:
            x.mul_(0.5)
        captured.replay()
        return torch.equal(o, shard(*static))


def compiled(case: Case, ranks: Members) -> list[bool]:
    """Return whether graphs of whole calls, compiled for both passes, give the eager bits; packed, several plans."""
    shard = Shard(case, ranks, "cuda")
    group, found = shard.group, []

    def attend(q, k, v):
        return shard(q, k, v, deterministic=True)

    def attend_packed(q, k, v, plan):
        return shard.packed(plan, q, k, v)

    plans = [plan_varlen_cp([0, n, case.len_k], group=group, device="cuda") for n in (case.len_k // 3, case.len_k // 2)]
    for function, *more in ((attend,), *((attend_packed, plan) for plan in plans)):
        graphs = torch.compile(function, fullgraph=True)
        both = [shard.both(lambda *qkv, call=call, more=more: call(*qkv, *more)) for call in (graphs, function)]
        found.append(same(*both))
    return found


def memory(case: Case, ranks: Members) -> list[float]:
    """Most MiB beyond inputs and outputs in forward, and in backward, of a call that is compiled."""
    shard = Shard(case, ranks, "cuda")
    shard.both()
    passes, found, kept = [lambda: shard(*shard.qkv), lambda: torch.autograd.grad(kept[0], shard.qkv, shard.do)], [], []
    for run in passes:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        kept.append(run())
        torch.cuda.synchronize()
        found.append((torch.cuda.max_memory_allocated() - base) / 2**20)
    return found


def late_inputs(case: Case, ranks: Members) -> bool:
    """Return whether late inputs of a side stream are waited for, and results are those of the default stream."""
    shard, side = Shard(case, ranks, "cuda"), torch.cuda.Stream()
    expected = shard.both(deterministic=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late = [torch.full_like(x, float("nan")) for x in shard.qkv]
        torch.cuda._sleep(50_000_000)
        for x, y in zip(late, shard.qkv):
            x.copy_(y)
        found = shard.both(qkv=[x.detach().requires_grad_() for x in late], deterministic=True)
    side.synchronize()
    return same(found, expected)
