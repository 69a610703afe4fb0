"""The generation step against float64: its output, and what it wrote into the caches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from fused_rope_attn import rope_tables, testing
from fused_rope_attn.generation import reference
from fused_rope_attn.generation.api import run_step
from fused_rope_attn.generation.cache_reference import quantise
from verification.pages import in_pages, like, rows_in_pool, same_float8


@dataclass(frozen=True)
class DecodeCheck:
    """q of (B, HQ, len_q, D) against caches of (B, HKV, capacity, D) that hold ``lengths`` keys, one for each sequence.

    layout: how the caches lie in memory: "bnhd", "bhnd", or "odd" (unaligned, no even stride); "expanded": one batch
    entry for all, which only a call without new tokens can have.

    page_size: rows of a page; the caches are pools then, in ``layout``. float8: "tensor" or "head", what has a scale of
    its own, of caches in float8_e4m3fn.
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
    page_size: int | None = None
    float8: str | None = None
    norms: float | None = None  # norm_offset of norms of q and of the new keys; None: no norms
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

    def norms_of(self, device: torch.device) -> dict[str, Any]:
        """The norms as keyword arguments of both; weights (D,) float32 around 1, offset included."""
        if self.norms is None:
            return {}
        generator = torch.Generator().manual_seed(1)
        weights = 1.0 + 0.25 * torch.randn((2, self.head_dim), generator=generator) - self.norms
        q_norm, k_norm = weights.to(device).unbind(0)
        return {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": 1e-5, "norm_offset": self.norms}


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
    DecodeCheck("decode, pages of 16", (4, 2), 1, 64, 32, (37, 0, 63), page_size=16),
    DecodeCheck("decode, pages of 24, window, 5 tokens, sinks", (4, 2), 5, 96, 16, (70, 3, 91), page_size=24,
                window=(20, 0), sinks=True, layout="bhnd"),
    DecodeCheck("decode, pages of 16, keys rotated in the loop", (4, 2), 2, 64, 24, (37, 60), page_size=16,
                rotated=False, rotary_dim=10, layout="odd"),
    DecodeCheck("decode, pages of 32, nothing new, softcap", (2, 1), 2, 96, 16, (50, 1, 0), page_size=32, append=False,
                softcap=2.0),
    DecodeCheck("decode, pages of 16, the table is full", (2, 1), 3, 32, 16, (31, 33, 40, 20), page_size=16),
    DecodeCheck("decode, a chunk of 33 tokens in pages of 16, window", (8, 1), 33, 96, 16, (50,), page_size=16,
                window=(60, 0)),
    DecodeCheck("decode, a chunk of 33 tokens in pages of 32", (8, 1), 33, 128, 16, (70, 0), page_size=32),
    DecodeCheck("decode, a chunk of 33 tokens, for some of which there is no room", (8, 1), 33, 100, 16, (80,)),
    DecodeCheck("decode, a chunk of 33 tokens, read only", (8, 1), 33, 64, 16, (64,), append=False),
    DecodeCheck("decode, float8", (4, 2), 2, 70, 32, (37, 0), float8="head"),
    DecodeCheck("decode, float8, keys rotated in the loop", (4, 2), 2, 70, 16, (37, 64), rotated=False,
                float8="tensor"),
    DecodeCheck("decode, float8 in pages of 16, softcap", (2, 1), 1, 48, 16, (37, 4), page_size=16, float8="tensor",
                softcap=2.0),
    DecodeCheck("decode, norms", (4, 2), 2, 70, 24, (37, 0), rotary_dim=10, norms=0.0),
    DecodeCheck("decode, norms, keys rotated in the loop, interleaved", (4, 2), 2, 64, 16, (37, 60), page_size=16,
                rotated=False, interleaved=True, norms=1.0),
    DecodeCheck("decode, norms, float8", (4, 2), 2, 70, 32, (37, 0), float8="head", norms=0.0),
    DecodeCheck("decode Qwen3-8B, norms", (32, 8), 1, 4096, 128, (4095, 1, 2048, 777), norms=0.0, scale="large"),
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
    *(
        DecodeCheck(f"decode Llama3-8B, pages of {page_size}{words}", (32, 8), len_q, 4096, 128, (4090, 1, 2048, 777),
                    page_size=page_size, scale="large", **options)
        for page_size in (16, 64, 128)
        for words, len_q, options in (
            ("", 1, {}),
            (", raw keys", 1, {"rotated": False}),
            (", float8", 1, {"float8": "head"}),
            (", window, sinks, 4 tokens", 4, {"window": (1000, 0), "sinks": True}),
        )
    ),
    DecodeCheck("decode, float8, raw keys, D 64, pages of 48", (16, 8), 3, 4080, 64, (4000, 5), rotated=False,
                float8="tensor", page_size=48, interleaved=True, scale="large"),
    DecodeCheck("decode, a chunk of 300 tokens, pages of 16", (8, 2), 300, 4096, 128, (3000, 0), page_size=16,
                scale="large"),
    DecodeCheck("decode, a chunk of 300 tokens, float8 in pages of 128", (8, 2), 300, 4096, 128, (3000, 3700),
                page_size=128, float8="head", scale="large"),
    DecodeCheck("decode, a chunk of 300 tokens, pages of 128, window", (8, 2), 300, 4096, 128, (3000, 0),
                page_size=128, window=(700, 0), scale="large"),
    DecodeCheck("decode, a chunk of 300 tokens, float8 in pages of 64, window", (8, 2), 300, 4096, 128, (3000, 3700),
                page_size=64, float8="head", window=(700, 0), scale="large"),
)  # fmt: skip


class Inputs(NamedTuple):
    """q, k and v of the new tokens (k, v None without), caches, lengths (B,) int32, tables and sinks or None.

    Caches are pools where there is a block_table (B, pages) int32; scales are float32, for float8 caches.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cos: Tensor
    sin: Tensor
    k: Tensor | None
    v: Tensor | None
    cache_seqlens: Tensor
    sinks: Tensor | None
    block_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def make_inputs(check: DecodeCheck, dtype: torch.dtype, device: torch.device | str = "cpu") -> Inputs:
    """Normally distributed, with NaN in all rows of the caches that do not exist. Equal for equal device.

    Pages lie in a random order among others, which hold NaN, and entries that are not needed are outside the pool.
    """
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
    scales: list[Tensor | None] = [None, None]
    if c.float8 is not None:
        shape = (c.heads[1],) if c.float8 == "head" else ()
        scales = [0.002 + 0.01 * torch.rand(shape, generator=generator, device=device) for _ in caches]
        caches = [like(quantise(x, scale), x) for x, scale in zip(caches, scales)]
    table = None
    if c.page_size is not None:
        caches, table = _pages(c, caches, generator)
    seqlens = torch.tensor(c.lengths, dtype=torch.int32, device=device)
    sinks = normal(c.heads[0], dtype=torch.float32) if c.sinks else None
    return Inputs(q, *caches, cos, sin, *new, seqlens, sinks, table, *scales)


def _pages(check: DecodeCheck, caches: list[Tensor], generator: torch.Generator) -> tuple[list[Tensor], Tensor]:
    """(pools, block_table) of a check's caches, in its layout."""
    size, device = cast(int, check.page_size), caches[0].device
    first = torch.arange(check.capacity // size, device=device) * size
    lengths = torch.tensor(check.lengths, device=device)[:, None].clamp(max=check.capacity)
    needed = first < lengths + (check.len_q if check.append else 0)
    if check.window is not None and check.window[0] >= 0:
        needed &= first + size > lengths - (0 if check.append else check.len_q) - check.window[0]

    def lay(pool: Tensor) -> Tensor:
        if check.layout == "bnhd":
            return like(pool, torch.empty(pool.transpose(1, 2).shape, device=device).transpose(1, 2))
        if check.layout == "odd":
            return like(pool, torch.empty(*pool.shape[:3], pool.shape[3] + 3, device=device)[..., 1:-2])
        return pool

    return in_pages(caches, size, needed, generator, lay)


def run_reference(check: DecodeCheck, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, lse, k_cache, v_cache) of the reference computed in ``dtype``; the inputs stay as they are."""
    q, k_cache, v_cache, cos, sin, k, v, seqlens, sinks, *paged = inputs
    wide = dtype == torch.float64
    cos, sin = (t.double() if wide else t for t in (cos, sin))
    q, k, v = (x if x is None else x.to(dtype, copy=True) for x in (q, k, v))
    k_cache, v_cache = (x.clone() if check.float8 else x.to(dtype, copy=True) for x in (k_cache, v_cache))
    o, lse = reference.attention_with_kvcache(
        q, k_cache, v_cache, cos, sin, k, v, seqlens, **check.options, sinks=sinks,
        softmax_scale=check.head_dim**-0.5 if check.softmax_scale is None else check.softmax_scale,
        rotary_dim=check.head_dim if check.rotary_dim is None else check.rotary_dim,
        block_table=paged[0], k_scale=paged[1], v_scale=paged[2], **check.norms_of(q.device),
    )  # fmt: skip
    return o, lse, k_cache, v_cache


def run_kernels(check: DecodeCheck, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(o, lse) of the kernels, here or in Triton's interpreter; writes the caches of ``inputs``."""
    q, k_cache, v_cache, cos, sin, k, v, seqlens, sinks, block_table, k_scale, v_scale = inputs
    return run_step(  # the public function takes the reference for CPU tensors
        q, k_cache, v_cache, cos, sin, k, v, cache_seqlens=seqlens, **check.options, sinks=sinks,
        softmax_scale=check.softmax_scale, rotary_dim=check.rotary_dim, block_table=block_table, k_scale=k_scale,
        v_scale=v_scale, **check.norms_of(q.device), backend="triton",
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
    if inputs.block_table is not None:
        written = rows_in_pool(written, inputs.block_table, inputs.k_cache)
    keys, exact, near = (
        x.transpose(1, 2)[written].transpose(0, 1) for x in (inputs.k_cache, ref64[2], eager[2])
    )  # (HKV, written rows, D)
    if check.float8:
        found.append(same_float8("k_cache", keys, near))
    else:
        found.append(testing.compare("k_cache", keys, exact, near, grad=False, dtype=dtype))
    left_alone = all(
        _same_bits(x.transpose(1, 2)[~written], y.transpose(1, 2)[~written])
        for x, y in zip(inputs[1:3], before)
    )  # fmt: skip
    if not check.rotated and check.norms is None:
        left_alone &= _same_bits(keys, near)
    values = _same_bits(*(x.transpose(1, 2)[written] for x in (inputs.v_cache, eager[3])))
    detail = ["a row of the caches that is not new was written"] * (not left_alone) + ["v is no copy"] * (not values)
    found.append(testing.Comparison("v_cache", 0.0, 0.0, 0.0, 0.0, not detail, "; ".join(detail)))
    return found


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal to the bit, NaN included."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.equal(x.contiguous().view(integer), y.contiguous().view(integer))
