"""What is swept, and what comes out of it: points of the tables, and timed configurations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fused_rope_attn import testing
from fused_rope_attn.attention import configs
from fused_rope_attn.attention.portable import configs as portable_configs

Config = configs.ForwardConfig | configs.BackwardConfig

# Batch, query heads and length that stand for a bucket; every one fills a large card.
SHAPES = {"tiny": (4, 16, 512), "short": (4, 16, 1024), "medium": (2, 32, 4096), "long": (1, 32, 16384)}
_GQA_GROUP = 4


@dataclass(frozen=True)
class Point:
    """What one row of the table is looked up by, and a shape to measure it at."""

    part: str  # "fwd" or "bwd"
    head_dim: int
    causal: bool
    bucket: str
    gqa: bool
    strategy: str
    dtype: torch.dtype

    @property
    def case(self) -> testing.Case:
        batch, heads, length = SHAPES[self.bucket]
        heads_kv = heads // _GQA_GROUP if self.gqa else heads
        return testing.Case(batch, heads, heads_kv, length, length, self.head_dim, causal=self.causal, dtype=self.dtype)

    @property
    def name(self) -> str:
        return f"{self.part} {self.strategy}, {self.bucket}: {self.case.name}"

    def current(self, arch: str) -> Config:
        """What the committed table holds."""
        find = portable_configs.forward if self.part == "fwd" else portable_configs.backward
        return find(arch, self.dtype.itemsize, self.head_dim, self.strategy, self.causal, self.bucket, self.gqa)


@dataclass(frozen=True)
class Timed:
    """One configuration's figures in ms; ``rounds`` are medians of interleaved rounds, empty after a screening."""

    config: Config
    ms: float
    p20: float
    p80: float
    rounds: tuple[float, ...] = ()
