"""Checks of ``rope_attention_with_kvcache`` and ``write_kvcache``: results, and every row of the caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import fused_rope_attn
from fused_rope_attn import rope_tables, testing
from fused_rope_attn.attention import planning
from fused_rope_attn.generation import reference
from fused_rope_attn.generation.api import run_step, run_write
from fused_rope_attn.generation.cache_reference import quantise
from fused_rope_attn.generation.configs import FLOAT8
from verification.calls import Check, Finding, Machine, Ran, References, normal, same_bits
from verification.memory import SHARED, in_pages, lay, lay_table, rows_in_pool, same_float8

CACHES = ("k_cache", "v_cache")


@dataclass(frozen=True)
class DecodeCheck(Check):
    """A step: q (B, HQ, len_q, D) and caches (B, HKV, capacity, D) with ``lengths`` keys, one for each sequence.

    layout: of both caches in memory, ``memory.LAYOUTS``; v_layout: of v_cache if it has another. memory: of q, k and v.
    page_size: rows of a page; the caches are pools then. float8: "tensor" or "head", what has a scale of its own, of
    caches in float8_e4m3fn. backends: "auto" is the public function, others choose the backend.
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
    size: str = "small"
    v_layout: str | None = None
    memory: tuple[str, str, str] = ("bnhd", "bnhd", "bnhd")
    table_memory: str = "plain"
    dtype: torch.dtype = torch.float16
    table_dtype: torch.dtype = torch.float32
    sinks_dtype: torch.dtype = torch.float32
    norm_dtype: torch.dtype = torch.float32
    norm_eps: float = 1e-5
    kv_starts: tuple[int, ...] | None = None
    extra_rows: int = 0
    infers_rotary_dim: bool = False
    return_lse: bool = True
    bshd: bool = False
    seed: int = 0
    backends: tuple[str, ...] = ("triton",)
    function: ClassVar[str] = "rope_attention_with_kvcache"
    backend: ClassVar[str] = "decode"
    writes: ClassVar[tuple[str, ...]] = CACHES

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are no tensors, for the function and for the reference."""
        return {
            "cache_is_rotated": self.rotated,
            "causal": self.causal,
            "interleaved": self.interleaved,
            "window": self.window,
            "softcap": self.softcap,
        }

    def norms_of(self, device: torch.device | str) -> dict[str, Any]:
        """Return the norms as keyword arguments; weights (D,) around 1, offset included."""
        if self.norms is None:
            return {}
        weights = 1.0 + 0.25 * torch.randn((2, self.head_dim), generator=torch.Generator().manual_seed(1)) - self.norms
        q_norm, k_norm = weights.to(device, self.norm_dtype).unbind(0)
        return {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": self.norm_eps, "norm_offset": self.norms}

    def starts_of(self, device: torch.device | str) -> Tensor | None:
        return None if self.kv_starts is None else torch.tensor(self.kv_starts, dtype=torch.int32, device=device)

    def arguments(self, device: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        given = self.named(make_inputs(self, self.dtype, device))
        return fused_rope_attn.rope_attention_with_kvcache, given | {"return_lse": self.return_lse}

    def named(self, inputs: Inputs) -> dict[str, Any]:
        """Return the arguments by name, in the layout that the call has."""
        is_ambiguous = self.full_width and self.rotary_dim is not None and 2 * self.rotary_dim <= self.head_dim
        absent = {"q_norm": None, "k_norm": None, "norm_eps": 1e-6, "norm_offset": 0.0}
        given = {
            **inputs._asdict(),
            **self.options,
            "softmax_scale": self.softmax_scale,
            "rotary_dim": None if self.infers_rotary_dim and not is_ambiguous else self.rotary_dim,
            "kv_starts": self.starts_of(inputs.q.device),
            **(self.norms_of(inputs.q.device) or absent),
        }
        if self.bshd:
            turned = {name: given[name] for name in ("q", *CACHES, "k", "v") if given[name] is not None}
            given |= {name: x.transpose(1, 2) for name, x in turned.items()} | {"layout": "bshd"}
        return given

    @property
    def variants(self) -> tuple[tuple[str, str], ...]:
        return tuple((backend, "auto") for backend in self.backends)

    def obstacle(self, arch: str, variant: tuple[str, str]) -> planning.Obstacle | None:
        backend = variant[0]
        if backend in ("auto", "reference"):
            return None
        if self.float8 is not None and arch not in FLOAT8 and backend == "triton":
            return NotImplementedError, "float8_e4m3fn caches need one of"
        return planning.obstacle(backend, planning.Needs(arch, self.dtype, self.head_dim, cached=True))

    def make(self, device: str) -> dict[str, Any]:
        return make_inputs(self, self.dtype, device)._asdict()

    def call(self, made: dict[str, Any], variant: tuple[str, str]) -> tuple[Callable[..., Any], dict[str, Any]]:
        check = replace(self, backends=variant[:1])
        return lambda **given: run_kernels(check, Inputs(**given)), self._fresh(made)

    def _fresh(self, made: dict[str, Any]) -> dict[str, Any]:
        return made | {name: lay(made[name].clone(), self._layout(name)) for name in CACHES}

    def references(self, made: dict[str, Any], device: str) -> References:
        written = self.written(made)

        def run(dtype: torch.dtype | None) -> dict[str, Tensor]:
            found = run_reference(self, Inputs(**made), dtype or self.dtype)
            return dict(zip(("o", "lse", *CACHES), found)) | {"keys": _rows(found[2], written)}

        return References(run, device, lambda name: self.dtype)

    def results(self, function: Callable[..., Any], given: dict[str, Any], made: dict[str, Any]) -> dict[str, Tensor]:
        return {name: x for name, x in zip(("o", "lse"), function(**given)) if x is not None}

    def further(self, ran: Ran) -> Iterator[Finding]:
        """Hold new keys against float64; values, keys that are copied, and all rows that are not new, to the bit."""
        written = self.written(ran.made)
        new = {name: _rows(ran.given[name], written) for name in CACHES}
        eager = {name: _rows(ran.references.eager[name], written) for name in CACHES}
        if self.float8 is not None:
            yield Finding(ran.label, same_float8("k_cache", new["k_cache"], eager["k_cache"]))
        else:
            yield Finding(ran.label, replace(ran.references.compare("keys", new["k_cache"]), tensor="k_cache"))
        copied = {"v_cache"} | ({"k_cache"} if not self.rotated and self.norms is None else set())
        faults = [f"{name[0]} is no copy" for name in sorted(copied) if not same_bits(new[name], eager[name])]
        if not all(same_bits(_rows(ran.given[name], ~written), _rows(ran.before[name], ~written)) for name in CACHES):
            faults.append("a row of the caches that is not new was written")
        yield Finding(ran.label, testing.Comparison("v_cache", 0.0, 0.0, 0.0, 0.0, not faults, "; ".join(faults)))

    def _layout(self, name: str) -> str:
        return self.v_layout if name == "v_cache" and self.v_layout is not None else self.layout

    def written(self, made: dict[str, Any]) -> Tensor:
        """Return (B, S_max), or (num_pages, page_size): True in the rows of the caches that the call writes."""
        counts = torch.full_like(made["cache_seqlens"], self.len_q if self.append else 0)
        return self._rows_written(made, counts)

    def _rows_written(self, made: dict[str, Any], counts: Tensor) -> Tensor:
        row = torch.arange(self.capacity, device=counts.device)
        first = made["cache_seqlens"].long().clamp(0, self.capacity)[:, None]
        written = (row >= first) & (row < first + counts[:, None])
        table = made.get("block_table")
        return written if table is None else rows_in_pool(written, table, made["k_cache"])


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

    The order of pages is random. Unused pages hold NaN, and entries that are not needed are outside the pool.
    """
    c = check
    generator = torch.Generator(device).manual_seed(c.seed)
    new = [
        normal(generator, len(c.lengths), heads, c.len_q, c.head_dim, dtype=dtype) for heads in (*c.heads, c.heads[1])
    ]
    q, k, v = (lay(x, layout) for x, layout in zip(new, c.memory))
    sinks = normal(generator, c.heads[0], dtype=c.sinks_dtype) if c.sinks else None
    lengths = torch.tensor(c.lengths, device=device).clamp(0, c.capacity)[:, None]
    lowest = torch.zeros_like(lengths) if c.kv_starts is None else c.starts_of(device).long()[:, None]
    if c.window is not None and c.window[0] >= 0:
        lowest = torch.maximum(lowest, lengths - (0 if c.append else c.len_q) - c.window[0])
    end = lengths + (c.len_q if c.append else 0)
    first = torch.arange(0, c.capacity, c.page_size or 1, device=device)
    last = first + (c.page_size or 1)
    needed = ((last > lengths) | (last > lowest)) & (first < end)
    k_cache, v_cache, *stores = _caches(c, dtype, generator, lengths, lowest, needed)
    k, v = (k, v) if c.append else (None, None)
    seqlens = torch.tensor(c.lengths, dtype=torch.int32, device=device)
    return Inputs(q, k_cache, v_cache, *_tables(c, generator), k, v, seqlens, sinks, *stores)


def _tables(check: DecodeCheck, generator: torch.Generator) -> list[Tensor]:
    """Return cos and sin as the call takes them."""
    c, device = check, generator.device
    rotary_dim = c.head_dim if c.rotary_dim is None else c.rotary_dim
    tables = rope_tables(c.capacity + c.extra_rows, rotary_dim, device=device)
    if c.random_tables:
        shape = (len(c.lengths), *tables[0].shape) if c.table_batch else tables[0].shape
        uniform = torch.rand((2, *shape), generator=generator, device=device)
        angle, radius = 2 * math.pi * uniform[0], 0.5 + uniform[1]
        tables = radius * angle.cos(), radius * angle.sin()
    if c.full_width:
        tables = ((t.repeat_interleave(2, -1) if c.interleaved else torch.cat((t, t), -1)) for t in tables)
    return [lay_table(table.to(c.table_dtype), c.table_memory) for table in tables]


def _caches(
    check: DecodeCheck, dtype: torch.dtype, generator: torch.Generator, lengths: Tensor, lowest: Tensor, needed: Tensor
) -> tuple[Tensor | None, ...]:
    """Return caches or pools, block_table, k_scale and v_scale. Rows outside [lowest, lengths), (B, 1) both, hold NaN.

    needed: (B, pages), True for pages that must be in the pool.
    """
    c, device = check, generator.device
    shape = (len(c.lengths), c.heads[1], c.capacity, c.head_dim)
    caches = [normal(generator, *shape, dtype=dtype) for _ in CACHES]
    if not any(c._layout(name) in SHARED for name in CACHES):
        row = torch.arange(c.capacity, device=device)
        gone = ((row >= lengths) | (row < lowest))[:, None, :, None]
        caches = [x.masked_fill(gone, math.nan) for x in caches]
    table, scales = None, (None, None)
    if c.float8 is not None:
        count = c.heads[1] if c.float8 == "head" else 1
        scales = [0.003 + 0.01 * torch.rand(count, generator=generator, device=device) for _ in CACHES]
        caches = [quantise(x, scale) for x, scale in zip(caches, scales)]
    if c.page_size is not None:
        caches, table = in_pages(caches, c.page_size, needed, generator)
    return *(lay(x, c._layout(name)) for x, name in zip(caches, CACHES)), table, *scales


def run_reference(check: DecodeCheck, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, lse, k_cache, v_cache) of the reference computed in ``dtype``; the inputs stay as they are."""
    given = inputs._asdict() | check.options | check.norms_of(inputs.q.device) | _in_dtype(inputs._asdict(), dtype)
    given["kv_starts"] = check.starts_of(inputs.q.device)
    given["softmax_scale"] = check.head_dim**-0.5 if check.softmax_scale is None else check.softmax_scale
    given["rotary_dim"] = check.head_dim if check.rotary_dim is None else check.rotary_dim
    o, lse = reference.attention_with_kvcache(**given)
    return o, lse, given["k_cache"], given["v_cache"]


def run_kernels(check: DecodeCheck, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """(o, lse) of the check's first backend, "triton" by default; writes the caches of ``inputs``."""
    (backend, *_), given = check.backends, check.named(inputs)
    if backend == "auto":
        returned = fused_rope_attn.rope_attention_with_kvcache(**given, return_lse=check.return_lse)
        o, lse = returned if check.return_lse else (returned, None)
    else:  # the choice of a backend is not public: the public function takes the reference for CPU tensors
        o, lse = run_step(backend=backend, **given)
    return (o.transpose(1, 2) if check.bshd else o), lse


def hold(check: DecodeCheck, dtype: torch.dtype, device: str = "cpu") -> list[testing.Comparison]:
    """Run the kernels once and compare: o, lse, the keys that were written; values and all other rows to the bit."""
    return [finding.found for finding in replace(check, dtype=dtype).run(Machine.of(device))]


@dataclass(frozen=True)
class WriteCheck(DecodeCheck):
    """k and v of ``len_q`` rows, padded or packed.

    lengths: the cached rows of each sequence. new: the tokens of each sequence that are written.
    """

    new: tuple[int, ...] = ()
    packed: bool = False
    function: ClassVar[str] = "write_kvcache"

    def make(self, device: str) -> dict[str, Any]:
        """Return arguments by name, tensors (B, H, N, D) or packed (T, H, D); NaN in tokens that do not exist."""
        generator = torch.Generator(device).manual_seed(self.seed)
        new = torch.tensor(self.new, dtype=torch.int32, device=device)
        counts = new.sum()[None] if self.packed else new
        past = torch.arange(self.len_q, device=device) >= counts[:, None]
        found: dict[str, Any] = {"cu_seqlens": None, "new_lens": None}
        for name, layout in zip(("k", "v"), self.memory):
            x = normal(generator, len(counts), self.heads[1], self.len_q, self.head_dim, dtype=self.dtype)
            # Elements that share memory belong to tokens that exist, too.
            x = lay(x if layout in SHARED else x.masked_fill(past[:, None, :, None], math.nan), layout)
            found[name] = x[0].transpose(0, 1) if self.packed else x
        if self.packed:
            found["cu_seqlens"] = torch.nn.functional.pad(new.cumsum(0).int(), (1, 0))
        else:
            found["new_lens"] = new
        found["cache_seqlens"] = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        lengths = torch.full_like(new, self.capacity)[:, None]
        needed = self.written(found).unflatten(1, (-1, self.page_size or 1)).any(-1)
        stores = _caches(self, self.dtype, generator, lengths, torch.zeros_like(lengths), needed)
        cos, sin = _tables(self, generator)
        return {
            **found,
            **dict(zip((*CACHES, "block_table", "k_scale", "v_scale"), stores)),
            "cos": cos,
            "sin": sin,
            "cache_is_rotated": self.rotated,
            "rotary_dim": self.head_dim if self.rotary_dim is None else self.rotary_dim,
            "interleaved": self.interleaved,
        }

    def written(self, made: dict[str, Any]) -> Tensor:
        return self._rows_written(made, torch.tensor(self.new, device=made["cache_seqlens"].device))

    def _as_passed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if not self.bshd:
            return arguments
        turned = CACHES if self.packed else (*CACHES, "k", "v")
        return arguments | {name: arguments[name].transpose(1, 2) for name in turned} | {"layout": "bshd"}

    def arguments(self, device: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        return fused_rope_attn.write_kvcache, self._as_passed(self.make(device))

    def call(self, made: dict[str, Any], variant: tuple[str, str]) -> tuple[Callable[..., Any], dict[str, Any]]:
        return lambda **given: run_write(**self._as_passed(given), backend=variant[0]), self._fresh(made)

    def references(self, made: dict[str, Any], device: str) -> References:
        written = self.written(made)

        def run(dtype: torch.dtype | None) -> dict[str, Tensor]:
            given = made | _in_dtype(made, dtype or self.dtype)
            if self.packed:
                given |= {name: given[name].transpose(0, 1).unsqueeze(0) for name in ("k", "v")}
            reference.write_kvcache(**given)
            return {name: given[name] for name in CACHES} | {"keys": _rows(given["k_cache"], written)}

        return References(run, device, lambda name: self.dtype)

    def results(self, function: Callable[..., Any], given: dict[str, Any], made: dict[str, Any]) -> dict[str, Tensor]:
        function(**given)
        return {}


def _in_dtype(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return copies of q, k, v and the caches in ``dtype``, caches in float8 as they are, and float64 tables for it."""
    found = {}
    for name in ("q", "k", "v", *CACHES):
        if (x := given.get(name)) is not None:
            to = x.dtype if x.dtype == torch.float8_e4m3fn else dtype
            found[name] = x.to(to, copy=True, memory_format=torch.contiguous_format)
    return found | ({name: given[name].double() for name in ("cos", "sin")} if dtype == torch.float64 else {})


def _rows(cache: Tensor, written: Tensor) -> Tensor:
    """Return the ``written`` rows of a cache, (HKV, rows, D)."""
    return cache.transpose(1, 2)[written].transpose(0, 1)
