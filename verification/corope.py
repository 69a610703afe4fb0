"""Co-RoPE against float64: on a GPU through the public function, else its kernels in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fused_rope_attn import testing
from verification.runner import Row, dtype_name, failure


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


CHECKS = (
    CoRopeCheck("Co-RoPE, GQA of 3", 1, 3, 1, 35, 32),
    CoRopeCheck("Co-RoPE, D 64", 1, 1, 1, 33, 64),
    CoRopeCheck("Co-RoPE, a single token", 2, 2, 1, 1, 32),
    CoRopeCheck("Co-RoPE, heads 32/8, 1024 tokens", 1, 32, 8, 1024, 128, "large"),
    CoRopeCheck("Co-RoPE, heads 16/1, 1000 tokens, D 64", 1, 16, 1, 1000, 64, "large"),
    CoRopeCheck("Co-RoPE, heads 4/1, 8192 tokens", 1, 4, 1, 8192, 128, "large"),
)


@dataclass(frozen=True)
class CoRopeTask:
    """A check in one dtype, as ``runner.Task``."""

    check: CoRopeCheck
    dtype: torch.dtype
    device: str

    @property
    def name(self) -> str:
        return f"{self.check.name} {dtype_name(self.dtype)}"

    def run(self) -> list[Row]:
        """All rows of the task. Nothing is raised."""
        try:
            return _run(self)
        except torch.OutOfMemoryError:
            return [failure(self, "corope", "does not fit this GPU's memory", "SKIP")]
        except Exception as error:
            return [failure(self, "corope", error)]


def _run(task: CoRopeTask) -> list[Row]:
    from fused_rope_attn.experimental.corope import corope_attention, reference
    from fused_rope_attn.experimental.corope.api import CoRopeAttention

    c, generator = task.check, torch.Generator(task.device).manual_seed(0)
    scale = c.head_dim**-0.5

    def normal(heads: int) -> torch.Tensor:
        shape = (c.batch, c.length, heads, c.head_dim)
        return torch.randn(shape, generator=generator, device=task.device).to(task.dtype).transpose(1, 2)

    inputs, do = (normal(c.heads_q), normal(c.heads_kv), normal(c.heads_kv)), normal(c.heads_q)

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
        out = results(kernels, task.dtype)
    ref64, eager = results(right, torch.float64), results(right, task.dtype)
    found = []
    for name, *tensors in zip(("o", "dq", "dk", "dv"), out, ref64, eager):
        compared = testing.compare(name, *tensors, grad=name != "o", dtype=task.dtype)
        found.append(
            Row(c.name, dtype_name(task.dtype), "corope", name, compared.error, compared.eager_error, compared.ratio,
                compared.row_ratio, "ok" if compared.ok else "FAIL", compared.detail)
        )  # fmt: skip
    return found
