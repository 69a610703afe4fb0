"""The rotation alone against float64: rows for q and k, their gradients, in the layouts that users have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fused_rope_attn import testing

_FROM_BHND = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}


@dataclass(frozen=True)
class RopeCheck:
    """q and k of (B, H, N, D). positions: ``index``, ``ids`` or ``two ids``; ``thd`` packs the batch into one row.
    norms: their weights' dtype, ``float32`` or ``input``; "" for none. norm_offset comes with them."""

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
    norms: str = ""
    norm_offset: float = 0.0
    backend: ClassVar[str] = "rotation"

    def compared(self, dtype: torch.dtype, device: str) -> Iterator[testing.Comparison]:
        """q, k, dq and dk, with norms dq_norm and dk_norm too, as ``runner.OwnCheck``."""
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
        weights: list[torch.Tensor] = []
        if self.norms:
            weight_dtype = dtype if self.norms == "input" else torch.float32
            weights = [normal(self.head_dim, dtype=weight_dtype).requires_grad_() for _ in xs]
            options |= {"q_norm": weights[0], "k_norm": weights[1], "norm_offset": self.norm_offset}
        with testing.poison_empty():
            leaves = [lay(x).requires_grad_() for x in xs]
            outs = fused_rope_attn.apply_rope_qk(*leaves, cos, sin, layout=self.layout, **options)
            gradients = torch.autograd.grad(outs, leaves + weights, [lay(do) for do in dos])
            if self.in_place:
                outs = tuple(x.detach().clone() for x in leaves)
                with torch.no_grad():
                    fused_rope_attn.apply_rope_qk(*outs, cos, sin, layout=self.layout, out=outs, **options)
        eager_options: dict[str, Any] = {"rotary_dim": self.rotary_dim, "interleaved": self.interleaved}
        if ids is not None:
            eager_options["position_ids"] = ids if ids.ndim == 3 else ids[:, None]
        if weights:
            eager_options |= {"norm_eps": 1e-6, "norm_offset": self.norm_offset}
        for i, (name, x, do) in enumerate(zip(("q", "k"), xs, dos)):
            weight = weights[i] if weights else None
            ref64, eager = (
                testing.run_rotation_reference(x, do, cos, sin, wide, weight=weight, **eager_options)
                for wide in (torch.float64, None)
            )
            forward, backward = back(outs[i]).detach(), back(gradients[i])
            yield testing.compare(name, forward, ref64.y, eager.y, grad=False, dtype=dtype)
            yield testing.compare(f"d{name}", backward, ref64.dx, eager.dx, grad=True, dtype=dtype)
            if weight is not None and ref64.dweight is not None and eager.dweight is not None:
                found = (x[None] for x in (gradients[len(xs) + i], ref64.dweight, eager.dweight))
                yield testing.compare(f"d{name}_norm", *found, grad=True, dtype=weight.dtype)


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
    RopeCheck("norm and rotation", norms="input"),
    RopeCheck(
        "norm and rotation (B, N, H, D), interleaved, R 10 of D 24, offset 1", layout="bshd", head_dim=24,
        rotary_dim=10, interleaved=True, norms="float32", norm_offset=1.0,
    ),
    RopeCheck("norm and rotation of packed sequences", layout="thd", batch=3, length=11, norms="float32"),
    RopeCheck(
        "norm and rotation, two ids a token, R 24 of D 32, in place", positions="two ids", rotary_dim=24,
        norms="input", in_place=True, length=11,
    ),
    RopeCheck("norm and rotation of nothing", length=0, norms="float32"),
    RopeCheck("rotation Wide-1K", 10, (96, 8), 1024, 128, 128, layout="bshd", scale="large"),
    RopeCheck("rotation Llama3-8B-4K, interleaved", 2, (32, 8), 4096, 128, 128, True, scale="large"),
    RopeCheck(
        "norm and rotation Qwen3-8B-4K", 2, (32, 8), 4096, 128, 128, layout="bshd", scale="large", norms="input"
    ),
    RopeCheck(
        "norm and rotation D256, interleaved, offset 1", 2, (16, 8), 1000, 256, 256, True, scale="large",
        norms="float32", norm_offset=1.0,
    ),
    RopeCheck("rotation of 128K positions", 1, (4, 4), 131072, 128, 128, layout="bshd", positions="ids", scale="large"),
)  # fmt: skip
