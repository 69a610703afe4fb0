"""Cases of context parallelism, and who is measured: one GPU, ours on P of them, and PyTorch's context_parallel."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.names import length_name
from bench.suite import Provider, by_name, normal
from fused_rope_attn import apply_rope, rope_attention, rope_attention_varlen
from fused_rope_attn.distributed import cp_shard, plan_varlen_cp, rope_attention_cp, rope_attention_varlen_cp

KINDS = ("plain", "window", "packed")
WINDOW = (4096, 0)


@dataclass(frozen=True)
class CpCase:
    """One causal sequence of ``length`` tokens on ``ranks`` GPUs."""

    kind: str
    length: int
    ranks: int
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"{self.kind}-{length_name(self.length)}"

    @property
    def shape(self) -> str:
        return f"P={self.ranks}"

    @property
    def groups(self) -> tuple[str, ...]:
        return (self.kind,)

    @property
    def window(self) -> tuple[int, int] | None:
        return WINDOW if self.kind == "window" else None

    @property
    def documents(self) -> list[int]:
        """Return where documents of 512 to 32768 tokens begin and end; logarithms of lengths are drawn uniformly."""
        generator, limits = random.Random(self.length), [0]
        while limits[-1] < self.length:
            limits.append(min(self.length, limits[-1] + int(2 ** generator.uniform(9, 15))))
        return limits

    def inputs(self, device: torch.device) -> list[Tensor]:
        """Return q, k, v and do of the whole sequence, (1, H, N, D), the same on every GPU."""
        heads = self.heads_q, self.heads_kv, self.heads_kv, self.heads_q
        shapes = [(1, self.length, count, self.head_dim) for count in heads]
        return [x.transpose(1, 2) for x in normal(shapes, self.dtype, device)]


class Prepared(NamedTuple):
    """A provider's call of one case: ``run(q, k, v) -> o``, its q, k, v and gradient of o, and when it is active."""

    run: Callable[..., Tensor]
    shards: list[Tensor]
    active: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True, kw_only=True)
class CpProvider(Provider):
    """``prepare(case, inputs, tables, group)`` shards q, k, v and do. only: the kinds that it serves."""

    prepare: Callable[[CpCase, list[Tensor], tuple[Tensor, Tensor], Any], Prepared]
    only: tuple[str, ...] = KINDS


def _packed(function: Callable[..., Tensor], *given: Any, **options: Any) -> Callable[..., Tensor]:
    """Return a function of packed (T, H, D) as one of (1, H, T, D)."""

    def run(*qkv: Tensor) -> Tensor:
        return function(*(x[0].transpose(0, 1) for x in qkv), *given, **options).transpose(0, 1)[None]

    return run


def _one(case: CpCase, inputs: list[Tensor], tables: tuple[Tensor, Tensor], group: Any) -> Prepared:
    """Run the whole sequence on one GPU. Every GPU does, so that all are as warm."""
    if case.kind != "packed":
        return Prepared(lambda q, k, v: rope_attention(q, k, v, *tables, True, window=case.window), inputs)
    limits = case.documents
    longest = max(b - a for a, b in zip(limits, limits[1:]))
    cu = torch.tensor(limits, dtype=torch.int32, device=inputs[0].device)
    return Prepared(_packed(rope_attention_varlen, *tables, cu, cu, longest, longest, True), inputs)


def _ours(name: str, label: str, sharding: str, only: tuple[str, ...] = KINDS) -> CpProvider:
    """Return ours with zigzag or balanced shards, by the method that ``plan_cp`` chooses."""

    def prepare(case: CpCase, inputs: list[Tensor], tables: tuple[Tensor, Tensor], group: Any) -> Prepared:
        if case.kind != "packed":
            options = {"group": group, "window": case.window}
            shards = [cp_shard(x, 2, group=group, sharding=sharding) for x in inputs]
            return Prepared(lambda q, k, v: rope_attention_cp(q, k, v, *tables, **options), shards)
        plan = plan_varlen_cp(case.documents, group=group, device=inputs[0].device, sharding=sharding)
        shards = [cp_shard(x, 2, group=group, sharding=plan.sharding) for x in inputs]
        return Prepared(_packed(rope_attention_varlen_cp, *tables, plan), shards)

    return CpProvider(name, label, "ours", prepare=prepare, only=only)


def _torch(case: CpCase, inputs: list[Tensor], tables: tuple[Tensor, Tensor], group: Any) -> Prepared:
    """Run PyTorch's own with SDPA's flash attention on rotated q and k: its rotation costs nothing here.

    K and V have as many heads as Q, because its ring takes no grouped ones.
    """
    from torch.distributed.device_mesh import DeviceMesh

    q, k, v, do = inputs
    k, v = (x.repeat_interleave(case.heads_q // case.heads_kv, dim=1) for x in (apply_rope(k, *tables), v))
    # Its load balancing cuts as our zigzag does.
    shards = [cp_shard(x, 2, group=group).contiguous() for x in (apply_rope(q, *tables), k, v, do)]
    mesh = DeviceMesh.from_group(group, do.device.type, mesh_dim_names=("cp",))

    @contextmanager
    def active() -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        # It reads the length of the sequence from a buffer.
        buffer = torch.zeros(case.length, device=do.device)
        flash = sdpa_kernel([SDPBackend.FLASH_ATTENTION])
        with flash, context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]):
            yield

    return Prepared(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), shards, active)


PROVIDERS: dict[str, CpProvider] = by_name(
    (
        CpProvider("one", "one GPU", "ceiling", prepare=_one),
        _ours("fused", "ours", "zigzag"),
        _ours("fused-balanced", "ours, balanced", "balanced", ("packed",)),
        CpProvider("torch", "torch context_parallel", prepare=_torch, only=("plain",)),
    )
)
