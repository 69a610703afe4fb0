"""The rotation alone against float64: rows for q and k, their gradients, in the layouts that users have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from fused_rope_attn import testing
from fused_rope_attn.rotation import reference

_FROM_BHND = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}


@dataclass(frozen=True)
class RopeCheck:
    """q and k of (B, H, N, D). positions: ``index``, ``ids`` or ``two ids``; ``thd`` packs the batch into one row."""

    name: str
    batch: int = 2
    heads: tuple[int, int] = (3, 1)
    length: int = 37
    head_dim: int = 32
    rotary_dim: int = 32
    interleaved: bool = False
    layout: str = "bhsd"
    positions: str = "index"
    full_width: bool = False
    random_tables: bool = False
    in_place: bool = False
    scale: str = "small"
    backend: ClassVar[str] = "rotation"

    def compared(self, dtype: torch.dtype, device: str) -> Iterator[testing.Comparison]:
        """q, k, dq and dk, as ``runner.OwnCheck``."""
        import fused_rope_attn

        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        ids = ends = None
        rows = max(self.length, 1)
        if self.positions != "index":
            shape = (self.batch, 2, self.length) if self.positions == "two ids" else (self.batch, self.length)
            ids = torch.randint(0, rows, shape, generator=generator, device=device)
        sections = 2 if self.positions == "two ids" else 1
        cos, sin = fused_rope_attn.rope_tables(rows, self.rotary_dim // sections, device=device)
        if self.full_width:
            cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
        if self.random_tables:
            cos, sin = (normal(*t.shape, dtype=torch.float32) for t in (cos, sin))
        if self.layout == "thd":
            ends = torch.arange(self.batch + 1, device=device, dtype=torch.int32) * self.length

        def lay(x: torch.Tensor) -> torch.Tensor:
            """(B, H, N, D) in the memory of the layout."""
            if self.layout == "thd":
                return x.transpose(1, 2).flatten(0, 1).contiguous()
            return x.permute(_FROM_BHND[self.layout]).contiguous()

        def back(x: torch.Tensor) -> torch.Tensor:
            if self.layout == "thd":
                return x.unflatten(0, (self.batch, self.length)).transpose(1, 2)
            axes = _FROM_BHND[self.layout]
            return x.permute([axes.index(axis) for axis in range(4)])

        options = {
            "rotary_dim": self.rotary_dim,
            "interleaved": self.interleaved,
            "position_ids": ids,
            "cu_seqlens": ends,
        }
        xs = [normal(self.batch, heads, self.length, self.head_dim) for heads in self.heads]
        dos = [normal(*x.shape) for x in xs]
        with testing.poison_empty():
            leaves = [lay(x).requires_grad_() for x in xs]
            outs = fused_rope_attn.apply_rope_qk(*leaves, cos, sin, layout=self.layout, **options)
            gradients = torch.autograd.grad(outs, leaves, [lay(do) for do in dos])
            if self.in_place:
                outs = tuple(x.detach().clone() for x in leaves)
                fused_rope_attn.apply_rope_qk(*outs, cos, sin, layout=self.layout, out=outs, **options)
        eager_options = {"rotary_dim": self.rotary_dim, "interleaved": self.interleaved}
        if ids is not None:
            eager_options["position_ids"] = ids if ids.ndim == 3 else ids[:, None]
        for names, results, inputs, inverse in ((("q", "k"), outs, xs, False), (("dq", "dk"), gradients, dos, True)):
            for name, result, x in zip(names, results, inputs):
                ref64 = reference.rotation(x.double(), cos.double(), sin.double(), inverse=inverse, **eager_options)
                eager = reference.rotation(x, cos, sin, inverse=inverse, **eager_options)
                yield testing.compare(name, back(result).detach(), ref64, eager, grad=inverse, dtype=dtype)


CHECKS = (
    RopeCheck("rotation"),
    RopeCheck("rotation, interleaved", interleaved=True),
    RopeCheck("rotation (B, N, H, D), R 10 of D 24", layout="bshd", head_dim=24, rotary_dim=10),
    RopeCheck(
        "rotation (N, B, H, D), interleaved, R 6 of D 7", layout="sbhd", head_dim=7, rotary_dim=6, interleaved=True
    ),
    RopeCheck("rotation of packed sequences", layout="thd", batch=3, length=11),
    RopeCheck("rotation with position ids", positions="ids", random_tables=True),
    RopeCheck("rotation with two ids a token", positions="two ids", interleaved=True, rotary_dim=24),
    RopeCheck("rotation with full-width tables, two angles a pair", full_width=True, random_tables=True),
    RopeCheck("rotation in place, interleaved, R 16 of D 32", in_place=True, interleaved=True, rotary_dim=16),
    RopeCheck("rotation of a single token", length=1, random_tables=True),
    RopeCheck("rotation of nothing", length=0),
    RopeCheck("rotation Wide-1K", 10, (96, 8), 1024, 128, 128, layout="bshd", scale="large"),
    RopeCheck("rotation Llama3-8B-4K, interleaved", 2, (32, 8), 4096, 128, 128, True, scale="large"),
    RopeCheck("rotation of 128K positions", 1, (4, 4), 131072, 128, 128, layout="bshd", positions="ids", scale="large"),
)
