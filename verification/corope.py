"""Co-RoPE against float64: on a GPU through the public function, else its kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from fused_rope_attn import testing


@dataclass(frozen=True)
class CoRopeCheck:
    """q of (batch, heads_q, length, head_dim), k and v with heads_kv."""

    name: str
    batch: int
    heads_q: int
    heads_kv: int
    length: int
    head_dim: int
    scale: str = "small"
    backend: ClassVar[str] = "corope"

    def compared(self, dtype: torch.dtype, device: str) -> Iterator[testing.Comparison]:
        """o, dq, dk and dv, as ``runner.OwnCheck``."""
        from fused_rope_attn.experimental.corope import corope_attention, reference
        from fused_rope_attn.experimental.corope.api import CoRopeAttention

        generator, scale = torch.Generator(device).manual_seed(0), self.head_dim**-0.5

        def normal(heads: int) -> torch.Tensor:
            shape = (self.batch, self.length, heads, self.head_dim)
            return torch.randn(shape, generator=generator, device=device).to(dtype).transpose(1, 2)

        inputs, do = (normal(self.heads_q), normal(self.heads_kv), normal(self.heads_kv)), normal(self.heads_q)

        def results(function, dtype: torch.dtype) -> list[torch.Tensor]:
            leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
            o = function(*leaves)
            return [o.detach(), *torch.autograd.grad(o, leaves, do.to(dtype))]

        def kernels(q, k, v):
            # On CPU tensors the public function takes the reference.
            return corope_attention(q, k, v) if q.is_cuda else CoRopeAttention.apply(q, k, v, 10000.0, scale)

        def right(q, k, v):
            return reference.attention(q, k, v, base=10000.0, softmax_scale=scale)

        with testing.poison_empty():
            out = results(kernels, dtype)
        ref64, eager = results(right, torch.float64), results(right, dtype)
        for name, *tensors in zip(("o", "dq", "dk", "dv"), out, ref64, eager):
            yield testing.compare(name, *tensors, grad=name != "o", dtype=dtype)


CHECKS = (
    CoRopeCheck("Co-RoPE, GQA of 3", 1, 3, 1, 35, 32),
    CoRopeCheck("Co-RoPE, D 64", 1, 1, 1, 33, 64),
    CoRopeCheck("Co-RoPE, a single token", 2, 2, 1, 1, 32),
    CoRopeCheck("Co-RoPE, heads 32/8, 1024 tokens", 1, 32, 8, 1024, 128, "large"),
    CoRopeCheck("Co-RoPE, heads 16/1, 1000 tokens, D 64", 1, 16, 1, 1000, 64, "large"),
    CoRopeCheck("Co-RoPE, heads 4/1, 8192 tokens", 1, 4, 1, 8192, 128, "large"),
)
