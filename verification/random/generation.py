"""Random calls of ``rope_attention_with_kvcache``: results, and every row of the caches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

import fused_rope_attn
from fused_rope_attn import testing
from fused_rope_attn.attention import planning
from fused_rope_attn.generation import reference
from fused_rope_attn.generation.api import run_step
from fused_rope_attn.generation.cache_reference import quantise
from fused_rope_attn.generation.configs import FLOAT8
from verification.pages import in_pages, rows_in_pool, same_float8
from verification.random.attention import NO_NORMS
from verification.random.common import (
    DTYPES,
    Draws,
    Finding,
    Machine,
    chance,
    changed,
    copies,
    pick,
    refusal,
    same_bits,
)
from verification.random.layouts import SHARED, draw_layout, lay, lay_table
from verification.random.shapes import (
    draw_group,
    draw_head_dim,
    draw_heads,
    draw_rotary_dim,
    draw_scale,
    draw_window,
    draw_window_kind,
    is_affordable,
)

CACHES = ("k_cache", "v_cache")


@dataclass(frozen=True)
class Setting:
    """What the compiled kernel depends on: ``case`` holds the flags, and no sizes."""

    case: testing.Case
    group: int  # query heads of one key head, and len_q new tokens: tiles hold all of them
    len_q: int
    window: str
    starts: bool
    is_rotated: bool
    appends: bool
    page_size: int | None  # None: the caches are contiguous
    float8: str  # "none", or what has a scale of its own: "tensor" or "head"
    layouts: tuple[tuple[str, str], ...]
    table_layout: str
    most: int
    backends: tuple[str, ...]


@dataclass(frozen=True)
class GenerationCall:
    """A step: ``case`` has len_k = S_max, and the values behind ``masks_of``; ``lengths`` are cache_seqlens."""

    case: testing.Case
    setting: Setting
    lengths: tuple[int, ...]
    return_lse: bool
    explicit_rotary_dim: bool
    poison: bool  # NaN in cached rows that do not exist
    bshd: bool
    function: str = "rope_attention_with_kvcache"

    @property
    def text(self) -> str:
        setting = self.setting
        words = [self.case.name, f"cache_seqlens={','.join(map(str, self.lengths))}"]
        words.append(" ".join(f"{name}:{layout}" for name, layout in setting.layouts))
        words.append("rotated" if setting.is_rotated else "raw")
        words += [] if setting.page_size is None else [f"pages of {setting.page_size}"]
        words += [] if setting.float8 == "none" else [f"float8, a scale for each {setting.float8}"]
        flags = {"appends": setting.appends, "lse": self.return_lse, "poison": self.poison, "bshd": self.bshd,
                 f"tables:{setting.table_layout}": True, "R given": self.explicit_rotary_dim}  # fmt: skip
        return " ".join(words + [name for name, flag in flags.items() if flag])

    def make(self, machine: Machine) -> dict[str, Any]:
        """Arguments by name, tensors (B, H, N, D)."""
        case, setting, layouts = self.case, self.setting, dict(self.setting.layouts)
        inputs = testing.make_inputs(replace(case, layout="bhnd"), machine.device)
        masks = testing.masks_of(case, machine.device)
        caches = {"k_cache": inputs.k, "v_cache": inputs.v}
        seqlens = torch.tensor(self.lengths, dtype=torch.int32, device=machine.device)
        if self.poison and not any(layouts[name] in SHARED for name in CACHES):
            row = torch.arange(case.len_k, device=machine.device)
            gone = row >= seqlens.long()[:, None]
            if masks["kv_starts"] is not None:
                gone = gone | (row < masks["kv_starts"].long()[:, None])
            caches = {name: x.masked_fill(gone[:, None, :, None], math.nan) for name, x in caches.items()}
        new: dict[str, Tensor | None] = {"k": None, "v": None}
        if setting.appends:
            shape = (case.batch, case.heads_kv, case.len_q, case.head_dim)
            generator = torch.Generator(machine.device).manual_seed(case.seed + 1)
            for name in new:
                x = torch.randn(shape, generator=generator, device=machine.device, dtype=case.dtype)
                new[name] = lay(x, layouts[name])
        generator = torch.Generator(machine.device).manual_seed(case.seed + 2)
        stores: dict[str, Tensor | None] = {"block_table": None, "k_scale": None, "v_scale": None}
        if setting.float8 != "none":
            for name in CACHES:
                scale = 0.003 + 0.01 * torch.rand(
                    case.heads_kv if setting.float8 == "head" else 1, generator=generator, device=machine.device
                )
                caches[name], stores[f"{name[0]}_scale"] = quantise(caches[name], scale), scale
        if setting.page_size is not None:
            needed = self._needed(seqlens, masks["kv_starts"])
            pools, stores["block_table"] = in_pages(list(caches.values()), setting.page_size, needed, generator)
            caches = dict(zip(CACHES, pools))
        cos, sin = (lay_table(table, setting.table_layout) for table in (inputs.cos, inputs.sin))
        return {
            "q": lay(inputs.q, layouts["q"]),
            **{name: lay(x, layouts[name]) for name, x in caches.items()},
            "cos": cos,
            "sin": sin,
            **new,
            "cache_seqlens": seqlens,
            "cache_is_rotated": setting.is_rotated,
            "kv_starts": masks["kv_starts"],
            **stores,
            "causal": case.causal,
            "softmax_scale": case.softmax_scale,
            "rotary_dim": case.rotary if self.explicit_rotary_dim else None,
            "interleaved": case.interleaved,
            "window": case.window,
            "softcap": case.softcap,
            "sinks": masks["sinks"],
            **(testing.norms_of(case, machine.device) or NO_NORMS),
            "return_lse": self.return_lse,
        }

    def arguments(self, machine: Machine) -> tuple[Callable[..., Any], dict[str, Any]]:
        return fused_rope_attn.rope_attention_with_kvcache, self._as_passed(self.make(machine))

    def _as_passed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if not self.bshd:
            return arguments
        turned = {name: arguments[name] for name in ("q", *CACHES, "k", "v") if arguments[name] is not None}
        return arguments | {name: x.transpose(1, 2) for name, x in turned.items()} | {"layout": "bshd"}

    def _reference(self, arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
        given = dict(arguments)
        del given["return_lse"]
        for name in ("q", *CACHES, "k", "v"):
            if given[name] is not None and given[name].dtype == torch.float8_e4m3fn:
                given[name] = given[name].clone(memory_format=torch.contiguous_format)
            elif given[name] is not None:
                given[name] = given[name].to(dtype, copy=True, memory_format=torch.contiguous_format)
        if dtype == torch.float64:
            given |= {name: given[name].double() for name in ("cos", "sin")}
        given |= {"softmax_scale": self.case.scale, "rotary_dim": self.case.rotary}
        o, lse = reference.attention_with_kvcache(**given)
        return {"o": o, "lse": lse, **{name: given[name] for name in CACHES}}

    def run(self, machine: Machine) -> Iterator[Finding]:
        arguments = self.make(machine)
        ref64, eager = (self._reference(arguments, dtype) for dtype in (torch.float64, self.case.dtype))
        written = self._written(arguments, machine.device)
        draws = Draws(lambda: self._judged(self._reference(arguments, self.case.dtype), written), machine.device)
        expected, near = (self._judged(x, written) for x in (ref64, eager))
        for backend in self.setting.backends:
            given = self._fresh(arguments)
            passed = self._as_passed(given)
            if backend == "auto":
                function: Callable[..., Any] = fused_rope_attn.rope_attention_with_kvcache
            else:  # the choice of a backend is not public, and gives lse in any case
                function = _with_backend(backend)
            obstacle = self._expected_obstacle(machine, backend)
            if obstacle is not None:
                before = copies(passed)
                yield refusal(backend, function, passed, (obstacle[0],), (obstacle[1].split(",")[0],))
                yield Finding.that(backend, "caches", not changed(passed, before), "a refused call wrote")
                continue
            before = copies(given)
            with testing.poison_empty():
                returned = function(**passed)
            o, *lse = returned if isinstance(returned, tuple) else (returned,)
            out = {"o": o.transpose(1, 2) if self.bshd else o, **{name: given[name] for name in CACHES}}
            if lse:
                out["lse"] = lse[0]
            yield from self._compare(backend, self._judged(out, written), expected, near, draws)
            yield from self._look_at_caches(backend, given, before, eager, written)
            touched = changed(given, before, but=CACHES)
            yield Finding.that(backend, "inputs", not touched, f"{', '.join(touched)} changed")

    def _compare(
        self, backend: str, out: dict[str, Tensor], ref64: dict[str, Tensor], eager: dict[str, Tensor], draws: Draws
    ) -> Iterator[Finding]:
        for name, x in out.items():
            form = torch.float32 if name == "lse" else self.case.dtype
            yield Finding.that(backend, f"form of {name}", (x.shape, x.dtype) == (eager[name].shape, form),
                               f"{tuple(x.shape)}, {x.dtype}")  # fmt: skip
            compared = testing.compare(
                name, x, ref64[name], eager[name], grad=False, dtype=self.case.dtype, draws=draws.of(name)
            )
            yield Finding.of(backend, compared)

    def _look_at_caches(
        self, backend: str, given: dict[str, Any], before: dict[str, Tensor], eager: dict[str, Tensor], written: Tensor
    ) -> Iterator[Finding]:
        """What is copied is equal to the bit, and so is all that is not new. Memory beside the caches: see ``lay``."""
        for name in CACHES:
            new, old = given[name].transpose(1, 2), before[name].transpose(1, 2)
            kept = same_bits(new[~written], old[~written])
            yield Finding.that(backend, f"old rows of {name}", kept, "changed")
            if self.setting.float8 != "none" and name == "k_cache" and not self._copies_keys:
                x, y = (cache.transpose(1, 2)[written] for cache in (given[name], eager[name]))
                yield Finding.of(backend, same_float8(name, x, y))
            elif name == "v_cache" or self._copies_keys:
                copied = same_bits(new[written], eager[name].transpose(1, 2)[written])
                yield Finding.that(backend, f"new rows of {name}", copied, "are no copy")

    def _needed(self, seqlens: Tensor, starts: Tensor | None) -> Tensor:
        """Which pages (B, pages) of each sequence are read or written."""
        size, new = cast(int, self.setting.page_size), self.case.len_q if self.setting.appends else 0
        first = torch.arange(self.case.len_k // size, device=seqlens.device) * size
        lengths = seqlens.long().clamp(0, self.case.len_k)[:, None]
        low = torch.zeros_like(lengths)
        if starts is not None:
            low = torch.maximum(low, starts.long()[:, None])
        if self.case.window is not None and self.case.window[0] >= 0:
            low = torch.maximum(low, lengths - (0 if new else self.case.len_q) - self.case.window[0])
        written = (first + size > lengths) & (first < lengths + new)
        return written | ((first + size > low) & (first < lengths + new))

    @property
    def _copies_keys(self) -> bool:
        """Whether new keys are written as they came."""
        return not self.setting.is_rotated and self.case.norms is None

    def _written(self, arguments: dict[str, Any], device: str) -> Tensor:
        """(B, S_max), or (num_pages, page_size): True in the rows of the caches that the step writes."""
        row = torch.arange(self.case.len_k, device=device)
        first = torch.tensor(self.lengths, device=device).clamp(0, self.case.len_k)[:, None]
        written = (row >= first) & (row < first + self.case.len_q)
        written = written if self.setting.appends else torch.zeros_like(written)
        table = arguments["block_table"]
        return written if table is None else rows_in_pool(written, table, arguments["k_cache"])

    def _judged(self, results: dict[str, Tensor], written: Tensor) -> dict[str, Tensor]:
        """What a tolerance applies to: o, lse, and the new keys in the cache, (HKV, rows, D), if they are no copies."""
        found = {name: x for name, x in results.items() if name in ("o", "lse")}
        if not self._copies_keys and self.setting.float8 == "none":
            found["k_cache"] = results["k_cache"].transpose(1, 2)[written].transpose(0, 1)
        return found

    def _fresh(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with caches of their own, in the same memory layout, for one backend to write."""
        layouts = dict(self.setting.layouts)
        return arguments | {name: lay(arguments[name].clone(), layouts[name]) for name in CACHES}

    def _expected_obstacle(self, machine: Machine, backend: str) -> planning.Obstacle | None:
        if backend in ("auto", "reference"):
            return None
        if self.setting.float8 != "none" and machine.arch not in FLOAT8 and backend == "triton":
            return NotImplementedError, "float8_e4m3fn caches need one of"
        needs = planning.Needs(machine.arch, self.case.dtype, self.case.head_dim, cached=True)
        return planning.obstacle(backend, needs)


def _with_backend(backend: str) -> Callable[..., Any]:
    return lambda **arguments: run_step(backend=backend, **arguments)


class Generation:
    """The family of the generation step."""

    def draw_setting(self, rng: random.Random, machine: Machine) -> Setting:
        dtype = DTYPES[rng.choice(machine.dtypes)]
        head_dim = draw_head_dim(rng, machine)
        masks, appends, norms = not chance(rng, 0.3), chance(rng, 0.7), chance(rng, 0.3)
        case = testing.Case(
            1, 1, 1, 1, 1, head_dim,
            causal=chance(rng, 0.75), rotary_dim=draw_rotary_dim(rng, head_dim), interleaved=chance(rng, 0.35),
            dtype=dtype, table_dtype=dtype if chance(rng, 0.2) else torch.float32, table_batch=chance(rng, 0.2),
            full_width=chance(rng, 0.35), softcap=rng.choice([2.0, 15.0, 50.0]) if masks and chance(rng, 0.25) else 0.0,
            sinks=masks and chance(rng, 0.3), sinks_dtype=dtype if chance(rng, 0.3) else torch.float32,
            norms=rng.choice((0.0, 1.0)) if norms else None, norm_eps=rng.choice((1e-6, 1e-2)),
            norm_dtype=dtype if norms and chance(rng, 0.4) else torch.float32,
        )  # fmt: skip
        layouts = {name: draw_layout(rng) for name in ("q", "k", "v")}
        page_size = pick(rng, {None: 6, 16: 4, 32: 1, 64: 1, 17 + rng.randint(0, 30): 1})
        shared = not appends and page_size is None
        layouts |= {name: draw_layout(rng, shared=shared) for name in CACHES}
        weights = {"auto": 5.0 if machine.has_gpu else 0.5, "hopper": 0.2}
        weights |= {"triton": 5.0} if "triton" in machine.backends else {}
        backends = [pick(rng, weights)]
        if "reference" in machine.backends and chance(rng, 0.3):
            backends.append("reference")
        return Setting(
            case=case,
            page_size=page_size,
            float8=pick(rng, {"none": 7, "tensor": 1, "head": 2}),
            group=draw_group(rng, machine, 0.7),
            len_q=pick(rng, {1: 10, rng.randint(2, 8): 4, rng.randint(9, 40 if machine.has_gpu else 20): 1}),
            window=draw_window_kind(rng) if masks else "none",
            starts=masks and chance(rng, 0.35),
            is_rotated=chance(rng, 0.6),
            appends=appends,
            layouts=tuple(layouts.items()),
            table_layout=pick(rng, {"plain": 8, "columns": 1, "odd": 1}),
            most=pick(rng, {700: 10, 5000: 3, 20000: 1}) if machine.has_gpu else 70,
            backends=tuple(backends),
        )

    def draw_call(self, rng: random.Random, setting: Setting, machine: Machine) -> GenerationCall:
        case = setting.case
        while True:
            batch, heads_q, heads_kv = draw_heads(rng, machine, setting.group)
            if machine.has_gpu and chance(rng, 0.15):
                batch = rng.randint(5, 40)
            len_q = setting.len_q
            capacity = rng.randint(len_q, max(len_q, pick(rng, {setting.most: 2, 40: 1})))
            if setting.page_size is not None:
                capacity = -(-capacity // setting.page_size) * setting.page_size
            # In the interpreter each row of the output has a program of its own.
            rows = batch * heads_q * len_q
            fits = heads_kv * batch * capacity < 300_000 if machine.has_gpu else rows <= 16 or batch * heads_kv == 1
            if fits and is_affordable(machine, batch * heads_q, len_q, capacity):
                break
        room = capacity - len_q if setting.appends else capacity
        lengths = tuple(
            pick(rng, {rng.randint(0, room): 8, rng.randint(room // 2, room): 6, room: 2, 0: 1, capacity: 0.5,
                       capacity + 2: 0.2, -1: 0.2, max(0, capacity - 1): 0.3})
            for _ in range(batch)
        )  # fmt: skip
        starts = tuple(pick(rng, {0: 3, rng.randint(0, max(0, n)): 5, n + 1: 0.4, n + len_q + 3: 0.2, -2: 0.2})
                       for n in lengths)  # fmt: skip
        ambiguous = case.full_width and 2 * case.rotary <= case.head_dim
        return GenerationCall(
            case=replace(
                case, batch=batch, heads_q=heads_q, heads_kv=heads_kv, len_q=len_q, len_k=capacity,
                window=draw_window(rng, setting.window, capacity), kv_starts=starts if setting.starts else None,
                softmax_scale=draw_scale(rng, case.head_dim),
                tables=pick(rng, {"rope": 4, "yarn": 2, "random": 4}),
                extra_rows=pick(rng, {0: 4, 1: 1, rng.randint(0, 40): 1}), seed=rng.randint(1, 10**6),
            ),
            setting=setting,
            lengths=lengths,
            return_lse=chance(rng, 0.5),
            explicit_rotary_dim=ambiguous or chance(rng, 0.4),
            poison=chance(rng, 0.6),
            bshd=chance(rng, 0.3),
        )  # fmt: skip
