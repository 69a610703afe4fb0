"""Who is measured: one GPU with the whole sequence, ours on P of them, and PyTorch's context_parallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from bench.suites.context_parallel.cases import HEADS_KV, HEADS_Q, Work
from fused_rope_attn import apply_rope, rope_attention, rope_attention_varlen
from fused_rope_attn.distributed import cp_shard, plan_varlen_cp, rope_attention_cp, rope_attention_varlen_cp


class One:
    """One GPU with the whole sequence: divided by P it is the ideal. Every GPU runs it, so that all are as warm."""

    name, label = "one", "one GPU"

    def is_for(self, work: Work) -> bool:
        """Whether it is measured at all."""
        return True

    def missing(self, work: Work) -> str | None:
        return None

    def prepare(self, work: Work, given: list[torch.Tensor], tables: Any, group: Any) -> None:
        self.inputs = [x.detach().requires_grad_() for x in given[:3]]
        self.do, self.tables, self.work = given[3], tables, work
        if work.kind == "packed":
            limits = work.documents
            self.longest = max(b - a for a, b in zip(limits, limits[1:]))
            self.cu_seqlens = torch.tensor(limits, dtype=torch.int32, device=self.do.device)

    def forward(self) -> torch.Tensor:
        q, k, v = self.inputs
        if self.work.kind != "packed":
            return rope_attention(q, k, v, *self.tables, True, window=self.work.window)
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        cu, longest = self.cu_seqlens, self.longest
        o = rope_attention_varlen(*packed, *self.tables, cu, cu, longest, longest, True)
        return o.transpose(0, 1).unsqueeze(0)

    def active(self) -> Any:
        return nullcontext()


class Ours(One):
    """This package's, by the method that ``plan_cp`` chooses or by a given one; zigzag shards, or balanced ones."""

    def __init__(self, method: str = "auto", sharding: str = "zigzag"):
        self.method, self.sharding = method, sharding
        words = [word for word in (method, sharding) if word not in ("auto", "zigzag")]
        self.name, self.label = "-".join(["fused", *words]), ", ".join(["ours", *words])

    def is_for(self, work: Work) -> bool:
        return self.sharding == "zigzag" or work.kind == "packed"

    def prepare(self, work: Work, given: list[torch.Tensor], tables: Any, group: Any) -> None:
        self.plan, sharding = None, self.sharding
        if work.kind == "packed":
            self.plan = plan_varlen_cp(work.documents, group=group, device=given[3].device, sharding=sharding)
            sharding = self.plan.sharding
        shards = [cp_shard(x, 2, group=group, sharding=sharding) for x in given]
        self.inputs = [x.requires_grad_() for x in shards[:3]]
        self.do, self.tables, self.work, self.group = shards[3], tables, work, group

    def forward(self) -> torch.Tensor:
        q, k, v = self.inputs
        if self.plan is None:
            options = {"group": self.group, "window": self.work.window, "method": self.method}
            return rope_attention_cp(q, k, v, *self.tables, **options)
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        return rope_attention_varlen_cp(*packed, *self.tables, self.plan, method=self.method).transpose(0, 1)[None]


class Torch(One):
    """PyTorch's own, with SDPA's flash attention, of q and k that are rotated already: its rotation costs nothing here.

    K and V have as many heads as Q, since its ring takes no grouped ones.
    """

    name, label = "torch", "torch context_parallel"

    def missing(self, work: Work) -> str | None:
        return None if work.kind == "plain" else "it has causal masks only"

    def prepare(self, work: Work, given: list[torch.Tensor], tables: Any, group: Any) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        q, k, v, do = given
        k, v = (x.repeat_interleave(HEADS_Q // HEADS_KV, dim=1) for x in (apply_rope(k, *tables), v))
        # Its load balancing cuts as our zigzag does.
        shards = [cp_shard(x, 2, group=group).contiguous() for x in (apply_rope(q, *tables), k, v, do)]
        self.inputs = [x.requires_grad_() for x in shards[:3]]
        self.do, self.work = shards[3], work
        self.mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("cp",))

    def forward(self) -> torch.Tensor:
        return F.scaled_dot_product_attention(*self.inputs, is_causal=True)

    @contextmanager
    def active(self) -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        # It asks a buffer for the length of the sequence, and gives it back as it was.
        buffer = torch.zeros(self.work.length, device=self.do.device)
        flash = sdpa_kernel([SDPBackend.FLASH_ATTENTION])
        with flash, context_parallel(self.mesh, buffers=[buffer], buffer_seq_dims=[0]):
            yield


_OURS = (Ours(), Ours(sharding="balanced"), Ours("all_gather"), Ours("all_to_all"))
PROVIDERS = {provider.name: provider for provider in (One(), *_OURS, Torch())}
DEFAULT = ("one", "fused", "fused-balanced", "torch")


def barrier(group: Any) -> None:
    """All GPUs idle, all hosts here."""
    torch.cuda.synchronize()
    dist.barrier(group)
    torch.cuda.synchronize()
