"""Random calls of ``write_kvcache``: every row of the caches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fused_rope_attn
from fused_rope_attn import testing
from fused_rope_attn.attention import planning
from fused_rope_attn.generation import reference
from fused_rope_attn.generation.api import run_write
from fused_rope_attn.generation.cache_reference import quantise
from fused_rope_attn.generation.configs import FLOAT8
from verification.pages import in_pages, rows_in_pool, same_float8
from verification.random.common import DTYPES, Finding, Machine, chance, changed, copies, pick, refusal, same_bits
from verification.random.layouts import draw_layout, lay, lay_table
from verification.random.shapes import draw_head_dim, draw_rotary_dim

CACHES = ("k_cache", "v_cache")


@dataclass(frozen=True)
class Setting:
    """What the compiled kernel depends on."""

    dtype: torch.dtype
    head_dim: int
    rotary_dim: int
    interleaved: bool
    table_dtype: torch.dtype
    is_rotated: bool
    packed: bool
    page_size: int | None
    float8: str  # "none", or what has a scale of its own: "tensor" or "head"
    layouts: tuple[tuple[str, str], ...]
    table_layout: str
    heads: int
    backends: tuple[str, ...]


@dataclass(frozen=True)
class WriteCall:
    """cached: rows in use of each sequence; new: tokens of each; length: of the padded or packed tensor."""

    setting: Setting
    cached: tuple[int, ...]
    new: tuple[int, ...]
    length: int
    capacity: int
    bshd: bool
    seed: int
    function: str = "write_kvcache"

    @property
    def text(self) -> str:
        s = self.setting
        words = [str(s.dtype).removeprefix("torch."), f"D{s.head_dim} R{s.rotary_dim} H{s.heads}"]
        words += [f"cached={','.join(map(str, self.cached))} new={','.join(map(str, self.new))} of {self.length}"]
        words += [f"S_max={self.capacity}", " ".join(f"{name}:{layout}" for name, layout in s.layouts)]
        words += ["packed" if s.packed else "padded", "rotated" if s.is_rotated else "raw"]
        words += [] if s.page_size is None else [f"pages of {s.page_size}"]
        words += [] if s.float8 == "none" else [f"float8, a scale for each {s.float8}"]
        return " ".join([*words, *(["interleaved"] * s.interleaved), *(["bshd"] * self.bshd), f"seed={self.seed}"])

    def make(self, machine: Machine) -> dict[str, Any]:
        """Arguments by name, tensors (B, H, N, D) or packed (T, H, D); what does not exist holds NaN."""
        s, layouts, batch = self.setting, dict(self.setting.layouts), len(self.cached)
        generator = torch.Generator(machine.device).manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=machine.device)

        def ints(values: tuple[int, ...]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=machine.device)

        found: dict[str, Any] = {"cu_seqlens": None, "new_lens": None, "block_table": None}
        for name in ("k", "v"):
            if s.packed:
                x = normal(1, s.heads, self.length, s.head_dim)
                x[:, :, sum(self.new) :] = math.nan
                found[name] = lay(x.to(s.dtype), layouts[name])[0].transpose(0, 1)
            else:
                x = normal(batch, s.heads, self.length, s.head_dim)
                for b, count in enumerate(self.new):
                    x[b, :, count:] = math.nan
                found[name] = lay(x.to(s.dtype), layouts[name])
        if s.packed:
            found["cu_seqlens"] = torch.cat((ints((0,)), ints(self.new).cumsum(0).int()))
        else:
            found["new_lens"] = ints(self.new)
        stores: dict[str, Tensor | None] = {"k_scale": None, "v_scale": None}
        caches = [normal(batch, s.heads, self.capacity, s.head_dim).to(s.dtype) for _ in CACHES]
        if s.float8 != "none":
            for i, name in enumerate(stores):
                count = s.heads if s.float8 == "head" else 1
                scale = 0.003 + 0.01 * torch.rand(count, generator=generator, device=machine.device)
                caches[i], stores[name] = quantise(caches[i], scale), scale
        if s.page_size is not None:
            needed = self._written(machine.device).unflatten(1, (-1, s.page_size)).any(-1)
            caches, found["block_table"] = in_pages(caches, s.page_size, needed, generator)
        angle = 2 * math.pi * torch.rand((self.capacity, s.rotary_dim // 2), generator=generator, device=machine.device)
        tables = {"cos": angle.cos(), "sin": angle.sin()}
        return {
            **found,
            **{name: lay(x, layouts[name]) for name, x in zip(CACHES, caches)},
            **{name: lay_table(x.to(s.table_dtype), s.table_layout) for name, x in tables.items()},
            **stores,
            "cache_seqlens": ints(self.cached),
            "cache_is_rotated": s.is_rotated,
            "rotary_dim": s.rotary_dim,
            "interleaved": s.interleaved,
        }

    def _written(self, device: str) -> Tensor:
        """(B, S_max): the rows that are written."""
        row = torch.arange(self.capacity, device=device)
        first, new = (torch.tensor(x, device=device)[:, None] for x in (self.cached, self.new))
        first = first.clamp(0, self.capacity)
        return (row >= first) & (row < first + new)

    def _as_passed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if not self.bshd:
            return arguments
        turned = CACHES if self.setting.packed else (*CACHES, "k", "v")
        return arguments | {name: arguments[name].transpose(1, 2) for name in turned} | {"layout": "bshd"}

    def arguments(self, machine: Machine) -> tuple[Callable[..., Any], dict[str, Any]]:
        return fused_rope_attn.write_kvcache, self._as_passed(self.make(machine))

    def _reference(self, arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
        given = dict(arguments)
        if self.setting.packed:
            given |= {name: given[name].transpose(0, 1).unsqueeze(0) for name in ("k", "v")}
        for name in ("k", "v", *CACHES):
            stays = given[name].dtype == torch.float8_e4m3fn
            given[name] = given[name].to(given[name].dtype if stays else dtype, copy=True)
        if dtype == torch.float64:
            given |= {name: given[name].double() for name in ("cos", "sin")}
        reference.write_kvcache(**given)
        return {name: given[name].transpose(1, 2) for name in CACHES}

    def run(self, machine: Machine) -> Iterator[Finding]:
        s, arguments = self.setting, self.make(machine)
        ref64, eager = (self._reference(arguments, dtype) for dtype in (torch.float64, s.dtype))
        written = self._written(machine.device)
        if arguments["block_table"] is not None:
            written = rows_in_pool(written, arguments["block_table"], arguments["k_cache"])
        for backend in s.backends:
            layouts = dict(s.layouts)
            given = arguments | {name: lay(arguments[name].clone(), layouts[name]) for name in CACHES}
            before, passed = copies(given), self._as_passed(given)
            obstacle = self._expected_obstacle(machine, backend)
            if obstacle is not None:
                yield refusal(backend, run_write, passed | {"backend": backend}, (obstacle[0],), (obstacle[1],))
                continue
            run_write(**passed, backend=backend)
            for name in CACHES:
                new, old = given[name].transpose(1, 2), before[name].transpose(1, 2)
                kept = same_bits(new[~written], old[~written])
                yield Finding.that(backend, f"old rows of {name}", kept, "changed")
                rows, exact, near = (x[written].transpose(0, 1) for x in (new, ref64[name], eager[name]))
                if name == "v_cache" or not s.is_rotated:
                    yield Finding.that(backend, f"new rows of {name}", same_bits(rows, near), "are no copy")
                elif s.float8 != "none":
                    yield Finding.of(backend, same_float8(name, rows, near))
                else:
                    compared = testing.compare(name, rows, exact, near, grad=False, dtype=s.dtype)
                    yield Finding.of(backend, compared)
            touched = changed(given, before, but=CACHES)
            yield Finding.that(backend, "inputs", not touched, f"{', '.join(touched)} changed")

    def _expected_obstacle(self, machine: Machine, backend: str) -> planning.Obstacle | None:
        if backend != "triton":
            return None
        if self.setting.float8 != "none" and machine.arch not in FLOAT8:
            return NotImplementedError, "float8_e4m3fn caches need one of"
        needs = planning.Needs(machine.arch, self.setting.dtype, self.setting.head_dim, cached=True)
        found = planning.obstacle(backend, needs)
        return None if found is None else (found[0], found[1].split(",")[0])


class Writing:
    """The family of ``write_kvcache``. Its refusals are in tests/generation/test_pages.py."""

    def draw_setting(self, rng: random.Random, machine: Machine) -> Setting:
        dtype = DTYPES[rng.choice(machine.dtypes)]
        head_dim = draw_head_dim(rng, machine)
        layouts = {name: draw_layout(rng) for name in ("k", "v")}
        layouts |= {name: draw_layout(rng, shared=False) for name in CACHES}
        backends = ["triton" if "triton" in machine.backends else "auto"]
        if "reference" in machine.backends and chance(rng, 0.3):
            backends.append("reference")
        return Setting(
            dtype=dtype,
            head_dim=head_dim,
            rotary_dim=draw_rotary_dim(rng, head_dim),
            interleaved=chance(rng, 0.35),
            table_dtype=dtype if chance(rng, 0.2) else torch.float32,
            is_rotated=chance(rng, 0.7),
            packed=chance(rng, 0.5),
            page_size=pick(rng, {None: 3, 16: 4, 64: 1, 17 + rng.randint(0, 30): 1}),
            float8=pick(rng, {"none": 6, "tensor": 1, "head": 2}),
            layouts=tuple(layouts.items()),
            table_layout=pick(rng, {"plain": 8, "columns": 1, "odd": 1}),
            heads=rng.randint(1, 9 if machine.has_gpu else 5),
            backends=tuple(backends),
        )

    def draw_call(self, rng: random.Random, setting: Setting, machine: Machine) -> WriteCall:
        most = pick(rng, {600: 5, 3000: 1}) if machine.has_gpu else 60
        batch = rng.randint(1, 12 if machine.has_gpu else 3)
        page_size = setting.page_size or 1
        capacity = -(-rng.randint(1, most) // page_size) * page_size
        new = tuple(pick(rng, {rng.randint(0, capacity): 6, 0: 1, capacity + 5: 0.5}) for _ in range(batch))
        cached = tuple(pick(rng, {0: 4, rng.randint(0, capacity): 4, -2: 0.3, capacity + 3: 0.3}) for _ in new)
        return WriteCall(
            setting=setting,
            cached=cached,
            new=new,
            length=(sum(new) if setting.packed else max(new)) + pick(rng, {0: 2, 7: 1}),
            capacity=capacity,
            bshd=chance(rng, 0.4),
            seed=rng.randint(1, 10**6),
        )
