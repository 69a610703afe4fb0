"""The generation step against float64: its output, and what it wrote into the caches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fused_rope_attn import rope_tables, testing
from fused_rope_attn.generation import reference
from fused_rope_attn.generation.api import run_step


@dataclass(frozen=True)
class DecodeCheck:
    """q of (B, HQ, len_q, D) against caches of (B, HKV, capacity, D) that hold ``lengths`` keys, one for each sequence.

    layout: how the caches lie in memory: "bnhd", "bhnd", or "odd" (unaligned, no even stride); "expanded": one batch
    entry for all, which only a call without new tokens can have.
    """

    name: str
    heads: tuple[int, int]
    len_q: int
    capacity: int
    head_dim: int
    lengths: tuple[int, ...]
    rotated: bool = True
    append: bool = True
    causal: bool = True
    rotary_dim: int | None = None
    interleaved: bool = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    sinks: bool = False
    softmax_scale: float | None = None
    random_tables: bool = False
    table_batch: bool = False
    full_width: bool = False
    layout: str = "bnhd"
    scale: str = "small"
    backend: ClassVar[str] = "decode"

    def compared(self, dtype: torch.dtype, device: str) -> Iterator[testing.Comparison]:
        """Run the kernels once and hold o, lse and what was written into the caches."""
        yield from hold(self, dtype, device)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that the public function and the reference share."""
        return {
            "cache_is_rotated": self.rotated,
            "causal": self.causal,
            "interleaved": self.interleaved,
            "window": self.window,
            "softcap": self.softcap,
        }


CHECKS = (
    DecodeCheck("decode, GQA, lengths differ", (4, 2), 1, 70, 32, (37, 0, 69)),
    DecodeCheck("decode, a head shared by many", (2, 1), 1, 200, 16, (190,)),
    DecodeCheck("decode, many short sequences", (2, 2), 1, 20, 16, (0, 3, 19, 16, 17, 1, 5)),
    DecodeCheck("decode, keys rotated in the loop", (4, 2), 1, 70, 32, (37, 64), rotated=False),
    DecodeCheck("decode, keys rotated in the loop, R 10 of D 24, interleaved", (3, 1), 2, 70, 24, (37, 64),
                rotated=False, rotary_dim=10, interleaved=True, layout="odd"),
    DecodeCheck("decode, R 10 of D 24", (3, 1), 2, 70, 24, (37, 64), rotary_dim=10, layout="odd"),
    DecodeCheck("decode, R 12 of D 16, interleaved, any tables", (2, 1), 1, 40, 16, (33, 20), rotary_dim=12,
                interleaved=True, random_tables=True, table_batch=True, layout="bhnd"),
    DecodeCheck("decode, any tables, full-width", (2, 1), 3, 40, 16, (33, 20), random_tables=True, full_width=True),
    DecodeCheck("decode, window", (2, 1), 3, 100, 16, (90, 10), window=(20, 0)),
    DecodeCheck("decode, window, new tokens see one another", (2, 1), 5, 100, 16, (70, 10), window=(20, 2),
                causal=False),
    DecodeCheck("decode, softcap and sinks", (4, 2), 2, 70, 16, (50, 0), softcap=2.0, sinks=True, rotated=False),
    DecodeCheck("decode, window and sinks", (4, 2), 1, 70, 16, (60, 3), window=(32, 0), sinks=True),
    DecodeCheck("decode, 17 new tokens, GQA of 5", (5, 1), 17, 40, 16, (20, 0), layout="bhnd"),
    DecodeCheck("decode, scale negative", (8, 4), 1, 40, 16, (33, 20, 7, 39), softmax_scale=-0.7),
    DecodeCheck("decode, nothing new", (4, 2), 2, 70, 16, (50, 1, 0), append=False, layout="expanded"),
    DecodeCheck("decode, nothing new, window, all queries see all", (2, 1), 3, 70, 16, (50, 2), append=False,
                causal=False, window=(20, 1), rotated=False),
    DecodeCheck("decode, the cache is full", (2, 1), 3, 33, 16, (31, 33, 40, 20)),
    DecodeCheck("decode Llama3-8B, 4096", (32, 8), 1, 4096, 128, (4095, 1, 2048, 777), scale="large"),
    DecodeCheck("decode Llama3-8B, 4096, keys rotated in the loop", (32, 8), 1, 4096, 128, (4095, 1, 2048, 777),
                rotated=False, scale="large"),
    DecodeCheck("decode Llama3-8B, 131072", (32, 8), 1, 131072, 128, (131071,), scale="large"),
    DecodeCheck("decode 64 sequences", (32, 8), 4, 1024, 128, tuple(range(5, 965, 15)), scale="large"),
    DecodeCheck("decode, D 256, window, softcap", (16, 8), 1, 8192, 256, (8000, 5000), window=(4095, 0), softcap=50.0,
                scale="large"),
    DecodeCheck("decode, D 64, sinks, window", (64, 8), 1, 4096, 64, (4000, 100), window=(128, 0), sinks=True,
                scale="large"),
    DecodeCheck("decode, D 80, MQA, 40 new tokens", (16, 1), 40, 3000, 80, (2960, 1), rotary_dim=32, scale="large"),
)  # fmt: skip


class Inputs(NamedTuple):
    """q, k and v of the new tokens (k, v None without), caches, lengths (B,) int32, tables and sinks or None."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cos: Tensor
    sin: Tensor
    k: Tensor | None
    v: Tensor | None
    cache_seqlens: Tensor
    sinks: Tensor | None


def make_inputs(check: DecodeCheck, dtype: torch.dtype, device: torch.device | str = "cpu") -> Inputs:
    """Normally distributed, with NaN in all rows of the caches that do not exist. Equal for equal device."""
    c, batch = check, len(check.lengths)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def cache() -> Tensor:
        rows, heads, head_dim = c.capacity, c.heads[1], c.head_dim
        if c.layout == "bhnd":
            return normal(batch, heads, rows, head_dim)
        if c.layout == "odd":
            return normal(batch, rows, heads + 5, head_dim + 3)[:, :, 2 : heads + 2, 1 : head_dim + 1].transpose(1, 2)
        if c.layout == "expanded":
            return normal(1, heads, rows, head_dim).expand(batch, -1, -1, -1)
        return normal(batch, rows, heads, head_dim).transpose(1, 2)

    rotary_dim = c.head_dim if c.rotary_dim is None else c.rotary_dim
    cos, sin = rope_tables(c.capacity, rotary_dim, device=device)
    if c.random_tables:
        angle = 2 * math.pi * torch.rand((batch, *cos.shape), generator=generator, device=device)
        radius = 0.5 + torch.rand(angle.shape, generator=generator, device=device)
        cos, sin = (radius * angle.cos(), radius * angle.sin()) if c.table_batch else (angle[0].cos(), angle[0].sin())
    if c.full_width:
        cos, sin = ((t.repeat_interleave(2, -1) if c.interleaved else torch.cat((t, t), -1)) for t in (cos, sin))
    q = normal(batch, c.len_q, c.heads[0], c.head_dim).transpose(1, 2)
    new = [normal(batch, c.len_q, c.heads[1], c.head_dim).transpose(1, 2) if c.append else None for _ in range(2)]
    caches = [cache(), cache()]
    rows = torch.arange(c.capacity, device=device)
    for b, length in enumerate(c.lengths) if c.layout != "expanded" else ():
        gone = rows >= length
        if c.window is not None and c.window[0] >= 0:
            gone |= rows < length - (0 if c.append else c.len_q) - c.window[0]
        for x in caches:
            x[b, :, gone] = math.nan
    seqlens = torch.tensor(c.lengths, dtype=torch.int32, device=device)
    sinks = normal(c.heads[0], dtype=torch.float32) if c.sinks else None
    return Inputs(q, *caches, cos, sin, *new, seqlens, sinks)


def run_reference(check: DecodeCheck, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, lse, k_cache, v_cache) of the reference computed in ``dtype``; the inputs stay as they are."""
    q, k_cache, v_cache, cos, sin, k, v, seqlens, sinks = inputs
    wide = dtype == torch.float64
    cos, sin = (t.double() if wide else t for t in (cos, sin))
    q, k_cache, v_cache, k, v = (x if x is None else x.to(dtype, copy=True) for x in (q, k_cache, v_cache, k, v))
    o, lse = reference.attention_with_kvcache(
        q, k_cache, v_cache, cos, sin, k, v, seqlens, **check.options, sinks=sinks,
        softmax_scale=check.head_dim**-0.5 if check.softmax_scale is None else check.softmax_scale,
        rotary_dim=check.head_dim if check.rotary_dim is None else check.rotary_dim,
    )  # fmt: skip
    return o, lse, k_cache, v_cache


def run_kernels(check: DecodeCheck, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(o, lse) of the kernels, here or in Triton's interpreter; writes the caches of ``inputs``."""
    q, k_cache, v_cache, cos, sin, k, v, seqlens, sinks = inputs
    return run_step(  # the public function takes the reference for CPU tensors
        q, k_cache, v_cache, cos, sin, k, v, cache_seqlens=seqlens, **check.options, sinks=sinks,
        softmax_scale=check.softmax_scale, rotary_dim=check.rotary_dim, backend="triton",
    )  # fmt: skip


def hold(check: DecodeCheck, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[testing.Comparison]:
    """Run the kernels once and compare: o, lse, the keys that were written; values and all other rows to the bit."""
    inputs = make_inputs(check, dtype, device)
    ref64, eager = run_reference(check, inputs, torch.float64), run_reference(check, inputs, dtype)
    before = [x.clone() for x in inputs[1:3]]
    with testing.poison_empty():
        o, lse = run_kernels(check, inputs)
    found = [
        testing.compare(name, out, exact, near, grad=False, dtype=dtype)
        for name, out, exact, near in zip(("o", "lse"), (o, lse), ref64, eager)
    ]
    index = torch.arange(check.capacity, device=device)
    cached = inputs.cache_seqlens.long().clamp(0, check.capacity)[:, None]
    written = (index >= cached) & (index < cached + check.len_q) if check.append else torch.zeros_like(index + cached)
    written = written.bool()
    keys, exact, near = (
        x.transpose(1, 2)[written].transpose(0, 1) for x in (inputs.k_cache, ref64[2], eager[2])
    )  # (HKV, written rows, D)
    found.append(testing.compare("k_cache", keys, exact, near, grad=False, dtype=dtype))
    left_alone = all(
        _same_bits(x.transpose(1, 2)[~written], y.transpose(1, 2)[~written])
        for x, y in zip(inputs[1:3], before)
    )  # fmt: skip
    if not check.rotated:
        left_alone &= _same_bits(keys, near)
    values = _same_bits(*(x.transpose(1, 2)[written] for x in (inputs.v_cache, eager[3])))
    detail = ["a row of the caches that is not new was written"] * (not left_alone) + ["v is no copy"] * (not values)
    found.append(testing.Comparison("v_cache", 0.0, 0.0, 0.0, 0.0, not detail, "; ".join(detail)))
    return found


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal to the bit, NaN included."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.equal(x.contiguous().view(integer), y.contiguous().view(integer))
