"""Calls of ``rope_attention_with_kvcache`` and ``write_kvcache``: results, and every row of the caches."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fused_rope_attn.attention import planning
from fused_rope_attn.attention.problem import DESCRIBED, Cache
from fused_rope_attn.generation import api, reference
from fused_rope_attn.generation.configs import FLOAT8
from fused_rope_attn.generation.problem import StepTensors, Written, describe_step, describe_write
from fused_rope_attn.generation.reference import quantise
from fused_rope_attn.runtime.entry import fill
from verification import testing
from verification.calls import Call, Made, Ran, same_bits
from verification.memory import SHARED, in_pages, lay, rows_in_pool
from verification.testing import Finding

CACHES = ("k_cache", "v_cache")


def run_write(*arguments, backend: str = "auto", **options) -> None:
    """Run ``write_kvcache`` by a backend of choice."""
    bound = inspect.signature(api.write_kvcache).bind(*arguments, **options)
    bound.apply_defaults()
    kept = {name: bound.arguments[name] for name in ("layout", "cache_is_rotated", "rotary_dim", "interleaved")}
    api.run_write(fill(Written, bound.arguments), **kept, backend=backend)


@dataclass(frozen=True)
class DecodeCheck(Call):
    """A step: q (B, HQ, len_q, D) and caches (B, HKV, len_k, D) with ``lengths`` keys, one for each batch entry.

    memory: of q, the new k and v, k_cache and v_cache; None: ``layout`` is that of the caches, one of
    ``memory.lay``. page_size: rows of a page; the caches are pools then. float8: "tensor" or "head", what has a
    scale of its own, of caches in float8_e4m3fn.
    """

    lengths: tuple[int, ...] = ()
    rotated: bool = True
    append: bool = True
    page_size: int | None = None
    float8: str | None = None
    variants: tuple[tuple[str, str], ...] = (("triton", "auto"),)
    backend: ClassVar[str] = "decode"
    function: ClassVar[str] = "rope_attention_with_kvcache"
    writes: ClassVar[tuple[str, ...]] = CACHES

    def make(self, device: str) -> Made:
        """NaN is in all rows of the caches that do not exist. The order of pages is random; unused pages hold NaN, and
        entries that are not needed are outside the pool."""
        inputs = testing.make_inputs(replace(self, layout="bhnd"), device)
        new = testing.make_inputs(replace(self, layout="bhnd", len_k=self.len_q, seed=self.seed + 1), device)
        fresh = self.laid({"q": inputs.q, "k": new.k, "v": new.v})
        if not self.append:
            fresh |= {"k": None, "v": None}
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        masks = testing.masks_of(self, device)
        end = lengths.long().clamp(0, self.len_k)[:, None]  # a window may be as large as an int32
        lowest = torch.zeros_like(end) if masks["kv_starts"] is None else masks["kv_starts"][:, None]
        if self.window is not None and self.window[0] >= 0:
            lowest = torch.maximum(lowest, end - (0 if self.append else self.len_q) - self.window[0])
        page = self.page_size or 1
        first = torch.arange(0, self.len_k, page, device=device)
        needed = (first + page > torch.minimum(end, lowest)) & (first < end + (self.len_q if self.append else 0))
        row = torch.arange(self.len_k, device=device)
        stores = self._stores(inputs, needed, (row >= end) | (row < lowest))
        given = {**fresh, **stores, **self.tables_of(inputs), "cache_seqlens": lengths}
        given |= {name: masks[name] for name in ("sinks", "kv_starts")}
        return Made(given | self.norms_of(device), {})

    def _stores(self, inputs: testing.Inputs, needed: Tensor, gone: Tensor | None = None) -> dict[str, Any]:
        """Return the caches, their block table and their scales. needed: (B, pages), True for pages that must be in the
        pool. gone: (B, S_max), rows that hold NaN."""
        caches, generator = inputs[1:3], torch.Generator(needed.device).manual_seed(self.seed)
        if gone is not None and not any(self._cache_layout(name) in SHARED for name in CACHES):
            caches = [x.masked_fill(gone[:, None, :, None], math.nan) for x in caches]
        table, scales = None, [None, None]
        if self.float8 is not None:
            count = self.heads_kv if self.float8 == "head" else 1
            scales = [0.003 + 0.01 * torch.rand(count, generator=generator, device=needed.device) for _ in CACHES]
            caches = [quantise(x, scale) for x, scale in zip(caches, scales)]
        if self.page_size is not None:
            caches, table = in_pages(caches, self.page_size, needed, generator)
        caches = [lay(x, self._cache_layout(name)) for x, name in zip(caches, CACHES)]
        return dict(zip((*CACHES, "block_table", "k_scale", "v_scale"), (*caches, table, *scales)))

    def _cache_layout(self, name: str) -> str:
        return self.layout if self.memory is None else self.memory[-2:][CACHES.index(name)]

    def obstacle(self, arch: str, variant: tuple[str, str]) -> planning.Obstacle | None:
        if self.float8 is not None and arch not in FLOAT8 and variant[0] == "triton":
            return NotImplementedError, "float8_e4m3fn caches need one of"
        return super().obstacle(arch, variant)

    def planned(self) -> dict[str, Any]:
        return {"cache": Cache(True, True)}

    def call(self, made: Made, variant: tuple[str, str]) -> tuple[Callable[..., Any], dict[str, Any]]:
        own = {name: lay(made.given[name].clone(), self._cache_layout(name)) for name in CACHES}
        function, given = super().call(Made(made.given | own, {}), variant)
        return function, given | {"cache_is_rotated": self.rotated}

    def reference(self, made: Made, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return what the reference gives, and the caches, which it writes."""
        found = dict(made.given)
        for name in ("q", "k", "v", *CACHES):
            if (x := found.get(name)) is not None:
                to = x.dtype if x.dtype == torch.float8_e4m3fn else dtype
                found[name] = x.to(to, copy=True, memory_format=torch.contiguous_format)
        if dtype == torch.float64 and self.rotary:
            found |= {name: found[name].double() for name in ("cos", "sin")}
        is_write = self.function == "write_kvcache"
        tensors = fill(Written if is_write else StepTensors, found)
        describe, names = (describe_write, ("interleaved",)) if is_write else (describe_step, DESCRIBED)
        own = {"cache_is_rotated": self.rotated, "rotary_dim": self.rotary}
        problem = describe(tensors, **own, **self.options(names, softmax_scale=self.scale))
        returned = getattr(reference, self.function.removeprefix("rope_"))(problem, tensors)
        written = self.written(made)
        caches = {name: found[name] for name in CACHES}
        return dict(zip(self.outputs, returned or ())) | caches | {"keys": _rows(caches["k_cache"], written)}

    def further(self, ran: Ran) -> Iterator[Finding]:
        """Hold new keys against float64; values, keys that are copied, and all rows that are not new, to the bit."""
        written, caches = self.written(ran.made), {name: self.back(ran.given[name]) for name in CACHES}
        before = {name: self.back(ran.before[name]) for name in CACHES}
        new = {name: _rows(caches[name], written) for name in CACHES}
        eager = {name: _rows(ran.references.eager[name], written) for name in CACHES}
        if self.float8 is not None:
            yield same_float8("k_cache", new["k_cache"], eager["k_cache"])
        else:
            yield replace(ran.references.compare("keys", new["k_cache"]), tensor="k_cache")
        is_raw = not (self.rotated and self.rotary) and self.norms is None
        copied = {"v_cache"} | ({"k_cache"} if is_raw else set())
        faults = [f"{name[0]} is no copy" for name in sorted(copied) if not same_bits(new[name], eager[name])]
        if not all(same_bits(_rows(caches[name], ~written), _rows(before[name], ~written)) for name in CACHES):
            faults.append("a row of the caches that is not new was written")
        yield Finding("v_cache", not faults, "; ".join(faults), 0.0, 0.0, 0.0, 0.0)

    def written(self, made: Made) -> Tensor:
        """Return (B, S_max), or (num_pages, page_size): True in the rows of the caches that the call writes."""
        first = made.given["cache_seqlens"].long().clamp(0, self.len_k)[:, None]
        row = torch.arange(self.len_k, device=first.device)
        written = (row >= first) & (row < first + self._counts(first))
        table = made.given["block_table"]
        return written if table is None else rows_in_pool(written, table, made.given["k_cache"])

    def _counts(self, like: Tensor) -> Tensor:
        """Return how many rows each batch entry writes, (B, 1)."""
        return torch.full_like(like, self.len_q if self.append else 0)


@dataclass(frozen=True)
class WriteCheck(DecodeCheck):
    """k and v of ``len_q`` rows, padded or packed.

    lengths: the cached rows of each sequence. new: the tokens of each sequence that are written.
    """

    new: tuple[int, ...] = ()
    packed: bool = False
    function: ClassVar[str] = "write_kvcache"
    outputs: ClassVar[tuple[str, ...]] = ()

    def make(self, device: str) -> Made:
        """NaN is in tokens that do not exist."""
        inputs = testing.make_inputs(replace(self, layout="bhnd"), device)
        rows = replace(
            self, layout="bhnd", len_k=self.len_q, batch=1 if self.packed else self.batch, seed=self.seed + 1
        )
        new = torch.tensor(self.new, dtype=torch.int32, device=device)
        past = torch.arange(self.len_q, device=device) >= (new.sum()[None] if self.packed else new)[:, None]
        fresh = dict(zip(("k", "v"), testing.make_inputs(rows, device)[1:3]))
        if not set(self.memory or ()) & {*SHARED}:  # elements that share memory belong to tokens that exist, too
            fresh = {name: x.masked_fill(past[:, None, :, None], math.nan) for name, x in fresh.items()}
        ends = torch.nn.functional.pad(new.cumsum(0).int(), (1, 0))
        given = self.laid(fresh) | {
            "cu_seqlens": ends if self.packed else None,
            "new_lens": None if self.packed else new,
        }
        given |= {"cache_seqlens": torch.tensor(self.lengths, dtype=torch.int32, device=device), "block_table": None}
        needed = self.written(Made(given, {})).unflatten(1, (-1, self.page_size or 1)).any(-1)
        return Made(given | self._stores(inputs, needed) | self.tables_of(inputs), {})

    def entry(self, variant: tuple[str, str]) -> Callable[..., Any]:
        if variant[0] == "auto":
            return super().entry(variant)
        return functools.partial(run_write, backend=variant[0])  # the choice is not public

    def as_passed(self, name: str, x: Any) -> Any:
        return x[0].transpose(0, 1) if self.packed and name in ("k", "v") else super().as_passed(name, x)

    def results(self, function: Callable[..., Any], given: dict[str, Any], made: Made) -> dict[str, Tensor]:
        function(**given)
        return {}

    def _counts(self, like: Tensor) -> Tensor:
        return torch.tensor(self.new, device=like.device)[:, None]


def _rows(cache: Tensor, written: Tensor) -> Tensor:
    """Return the ``written`` rows of a cache, (HKV, rows, D)."""
    return cache.transpose(1, 2)[written].transpose(0, 1)


def same_float8(name: str, x: Tensor, y: Tensor) -> Finding:
    """Compare numbers of float8: equal but for one in a thousand, which another float32 rounding moves by one step."""
    wide, other = x.float(), y.float()
    off = torch.where(wide.isnan() & other.isnan(), 0.0, (wide - other).abs())
    moved = int((off != 0).sum())
    ok = bool((off <= 0.13 * other.abs() + 2e-3).all()) and moved <= 1 + 1e-3 * off.numel()
    return Finding(name, ok, f"{moved} of {off.numel()} numbers differ", 0.0, float(moved), 0.0, 0.0)
