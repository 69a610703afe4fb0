"""What is measured: lengths by kinds of masks, and the inputs of a rank."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from bench.names import length_name
from fused_rope_attn import rope_tables

KINDS = ("plain", "window", "packed")
WINDOW = (4096, 0)
HEADS_Q, HEADS_KV, HEAD_DIM = 32, 8, 128


@dataclass(frozen=True)
class Work:
    """One causal sequence of ``length`` tokens, bfloat16, 32 query heads, 8 key heads, D 128."""

    kind: str
    length: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{length_name(self.length)}"

    @property
    def takes_seconds(self) -> bool:
        """Whether a call is so long that nothing needs to be warm."""
        return self.kind == "plain" and self.length >= 1 << 20

    @property
    def window(self) -> tuple[int, int] | None:
        return WINDOW if self.kind == "window" else None

    @property
    def documents(self) -> list[int]:
        """Where documents of 512 to 32768 tokens begin and end, their lengths drawn with equal weight for every order
        of magnitude."""
        generator, limits = random.Random(self.length), [0]
        while limits[-1] < self.length:
            limits.append(min(self.length, limits[-1] + int(2 ** generator.uniform(9, 15))))
        return limits

    def inputs(self, device: torch.device) -> list[torch.Tensor]:
        """q, k, v and do of the whole sequence, (1, H, N, D), as models make them, the same on every GPU."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int) -> torch.Tensor:
            shape = (1, self.length, heads, HEAD_DIM)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).transpose(1, 2)

        return [normal(HEADS_Q), normal(HEADS_KV), normal(HEADS_KV), normal(HEADS_Q)]

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_tables(self.length, HEAD_DIM, base=500000.0, device=device)

    def fields(self) -> dict[str, Any]:
        sizes = {"batch": 1, "heads_q": HEADS_Q, "heads_kv": HEADS_KV, "head_dim": HEAD_DIM, "dtype": "bf16"}
        return {"case": self.name, "kind": self.kind, "length": self.length, **sizes}
