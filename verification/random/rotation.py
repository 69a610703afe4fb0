"""Random calls of ``apply_rope`` and ``apply_rope_qk``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fused_rope_attn
from fused_rope_attn import testing
from verification.random.common import DTYPES, Draws, Finding, Machine, chance, changed, copies, pick
from verification.random.layouts import draw_layout, lay, lay_table
from verification.random.shapes import draw_length, draw_rotary_dim

NORMS = ("q_norm", "k_norm")
# Where (B, H, N, D) go; packed tokens have no batch.
AXES = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "thd": (0, 2, 1, 3)}


@dataclass(frozen=True)
class Setting:
    """What the compiled kernel depends on. positions: "index", "ids", "row ids", "two ids" or "packed"."""

    names: tuple[str, ...]  # of the tensors: x; q and k; q, k and v
    dtype: torch.dtype
    head_dim: int
    rotary_dim: int
    interleaved: bool
    inverse: bool
    layout: str
    positions: str
    full_width: bool
    table_dtype: torch.dtype
    table_form: str  # "plain", "lead" (a leading 1) or "batch" (a leading B)
    table_layout: str
    memory: tuple[tuple[str, str], ...]
    out: str  # "none", "new" or "in place"
    heads: tuple[int, ...]
    most: int
    norm_dtype: torch.dtype | None  # of the weights; None where the call has no norms
    has_norm_strides: bool  # the weights are columns of something wider


@dataclass(frozen=True)
class RotationCall:
    """Sizes and data. ``lengths`` are of packed sequences; ``rows`` of the tables."""

    setting: Setting
    batch: int
    heads: tuple[int, ...]
    length: int
    rows: int
    lengths: tuple[int, ...]
    outside: bool  # some position ids have no row in the tables
    wanted: tuple[str, ...]
    explicit_rotary_dim: bool
    norm_eps: float
    norm_offset: float
    seed: int

    @property
    def function(self) -> str:
        return "apply_rope" if self.setting.names == ("x",) else "apply_rope_qk"

    @property
    def text(self) -> str:
        s = self.setting
        heads = "/".join(map(str, self.heads))
        words = [f"B{self.batch} H{heads} N{self.length} D{s.head_dim} R={s.rotary_dim} {str(s.dtype)[6:]} {s.layout}"]
        words += [f"positions:{s.positions}", f"tables:{self.rows} rows {s.table_form} {s.table_layout}"]
        words += [str(s.table_dtype)[6:], f"out:{s.out}", " ".join(f"{name}:{memory}" for name, memory in s.memory)]
        if s.norm_dtype is not None:
            words.append(f"norms:{str(s.norm_dtype)[6:]} eps={self.norm_eps:g} offset={self.norm_offset:g}")
        flags = {"interleaved": s.interleaved, "inverse": s.inverse, "full-width": s.full_width,
                 "some outside": self.outside, f"lengths={self.lengths}": bool(self.lengths),
                 f"grad:{','.join(self.wanted)}": bool(self.wanted), "R given": self.explicit_rotary_dim}  # fmt: skip
        return " ".join(words + [name for name, flag in flags.items() if flag] + [f"seed={self.seed}"])

    def make(self, machine: Machine) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor, Tensor | None]:
        """Tensors and gradients (B, H, N, D) by name, tables, and position ids (1|B, 1|2, N) or None."""
        s = self.setting
        generator = torch.Generator(machine.device).manual_seed(self.seed)

        def normal(*shape: int, dtype: torch.dtype = s.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=machine.device).to(dtype)

        xs = {name: normal(self.batch, heads, self.length, s.head_dim) for name, heads in zip(s.names, self.heads)}
        dos = {name: normal(*x.shape) for name, x in xs.items()}
        width = s.rotary_dim // (2 if s.positions == "two ids" else 1)
        batch = self.batch if s.table_form == "batch" else 1
        tables = [normal(batch, self.rows, width if s.full_width else width // 2, dtype=s.table_dtype) for _ in "cs"]
        if s.table_form == "plain":
            tables = [table[0] for table in tables]
        ids = None
        if s.positions in ("ids", "row ids", "two ids"):
            low, high = (-2, self.rows + 3) if self.outside else (0, max(self.rows, 1))
            shape = (1 if s.positions == "row ids" else self.batch, 2 if s.positions == "two ids" else 1, self.length)
            ids = torch.randint(low, high, shape, generator=generator, device=machine.device)
        memory = dict(s.memory)
        xs, dos = ({name: lay(x, memory[prefix + name]) for name, x in some.items()}
                   for prefix, some in (("", xs), ("d", dos)))  # fmt: skip
        return xs, dos, *(lay_table(table, s.table_layout) for table in tables), ids

    def _norms(self, machine: Machine) -> dict[str, Tensor]:
        """The norms' weights by the names of the arguments; none where the call has no norms."""
        s = self.setting
        if s.norm_dtype is None:
            return {}
        generator = torch.Generator(machine.device).manual_seed(self.seed + 1)
        step = 3 if s.has_norm_strides else 1
        weights = torch.randn(2, step * s.head_dim, generator=generator, device=machine.device).to(s.norm_dtype)
        return {name: weight[::step] for name, weight in zip(NORMS, weights)}

    def arguments(self, machine: Machine) -> tuple[Callable[..., Any], dict[str, Any]]:
        xs, _, cos, sin, ids = self.make(machine)
        given = self._arguments(xs, cos, sin, ids) | self._norms(machine)
        return getattr(fused_rope_attn, self.function), given | self._outs(given)

    def _arguments(self, xs: dict[str, Tensor], cos: Tensor, sin: Tensor, ids: Tensor | None) -> dict[str, Any]:
        s = self.setting
        if ids is not None:
            ids = ids if s.positions == "two ids" else ids[:, 0] if s.positions == "ids" else ids[0, 0]
            ids = ids.int() if self.seed % 2 else ids
        norms = {"q_norm": None, "k_norm": None, "norm_eps": self.norm_eps, "norm_offset": self.norm_offset}
        return {
            **{name: self._as_passed(x) for name, x in xs.items()},
            **(norms if len(xs) > 1 else {}),
            "cos": cos,
            "sin": sin,
            "rotary_dim": s.rotary_dim if self.explicit_rotary_dim else None,
            "interleaved": s.interleaved,
            "inverse": s.inverse,
            "layout": s.layout,
            "position_ids": ids,
            "cu_seqlens": self._ends(cos.device),
        }

    def _ends(self, device: torch.device) -> Tensor | None:
        if self.setting.positions != "packed":
            return None
        return torch.tensor((0, *self.lengths)).cumsum(0).int().to(device)

    def _outs(self, given: dict[str, Any]) -> dict[str, Any]:
        """The argument ``out``, where the call has one."""
        if self.setting.out == "none":
            return {}
        xs = [given[name] for name in self.setting.names]
        outs = xs if self.setting.out == "in place" else [torch.zeros_like(x) for x in xs]
        return {"out": outs[0] if len(outs) == 1 else tuple(outs)}

    def _as_passed(self, x: Tensor) -> Tensor:
        x = x.permute(AXES[self.setting.layout])
        return x[0] if self.setting.layout == "thd" else x

    def _back(self, x: Tensor) -> Tensor:
        axes = AXES[self.setting.layout]
        return (x[None] if self.setting.layout == "thd" else x).permute([axes.index(axis) for axis in range(4)])

    def run(self, machine: Machine) -> Iterator[Finding]:
        s = self.setting
        xs, dos, cos, sin, ids = self.make(machine)
        norms = self._norms(machine)
        given = self._arguments(xs, cos, sin, ids) | norms
        before = copies(given)
        options = {"rotary_dim": s.rotary_dim, "interleaved": s.interleaved, "position_ids": ids,
                   "cu_seqlens": self._ends(cos.device)}  # fmt: skip
        before_norm = {name: xs[name].clone() for name in s.names}  # what is written in place

        def references(dtype: torch.dtype | None) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            for name, x in before_norm.items():
                weight, norm = norms.get(f"{name}_norm"), {}
                if weight is not None:
                    norm = {"norm_eps": self.norm_eps, "norm_offset": self.norm_offset}
                results = testing.run_rotation_reference(
                    x, dos[name], cos, sin, dtype, weight=weight, inverse=s.inverse, **norm, **options
                )
                found |= {name: results.y, f"d{name}": results.dx}
                if results.dweight is not None:  # one row
                    found[f"d{name}_norm"] = results.dweight[None]
            return found

        ref64, eager = references(torch.float64), references(None)
        draws = Draws(lambda: references(None), machine.device)
        function = getattr(fused_rope_attn, self.function)
        with testing.poison_empty():
            out = self._results(function, given, dos)
        for name, x in out.items():
            dtype = s.norm_dtype if name.endswith("_norm") and s.norm_dtype is not None else s.dtype
            right = (eager[name].shape, dtype)
            yield Finding.that("auto", f"form of {name}", (x.shape, x.dtype) == right, f"{tuple(x.shape)}, {x.dtype}")
            nothing = ref64[name].isnan()  # positions outside the tables
            yield Finding.that("auto", f"NaN of {name}", torch.equal(x.isnan(), nothing), "NaN in other places")
            numbers = (y.masked_fill(nothing, 0) for y in (x, ref64[name], eager[name]))
            compared = testing.compare(
                name, *numbers, grad=name.startswith("d"), dtype=dtype,
                draws=lambda name=name, nothing=nothing: (y.masked_fill(nothing, 0) for y in draws.of(name)()),
            )  # fmt: skip
            yield Finding.of("auto", compared)
        touched = changed(given, before, but=s.names if s.out == "in place" else ())
        yield Finding.that("auto", "inputs", not touched, f"{', '.join(touched)} changed")

    def _results(
        self, function: Callable[..., Any], given: dict[str, Any], dos: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        names = self.setting.names
        outs = self._outs(given)
        leaves = {name: given[name].detach().requires_grad_() for name in self.wanted}
        returned = function(**(given | leaves | outs))
        turned = dict(zip(names, returned if isinstance(returned, (tuple, list)) else (returned,)))
        if outs:
            written = outs["out"] if isinstance(outs["out"], tuple) else (outs["out"],)
            if any(x is not y for x, y in zip(turned.values(), written)):
                raise AssertionError("what is returned is not what out= named")
        results = {name: self._back(x.detach()) for name, x in turned.items()}
        if leaves:
            of = [name for name in names if {name, f"{name}_norm"} & set(self.wanted)]
            found = torch.autograd.grad(
                [turned[name] for name in of], list(leaves.values()), [self._as_passed(dos[name]) for name in of]
            )
            results |= {f"d{name}": x[None] if name in NORMS else self._back(x) for name, x in zip(self.wanted, found)}
        return results


@dataclass(frozen=True)
class Rotation:
    """The family of one of the two functions."""

    several: bool

    def draw_setting(self, rng: random.Random, machine: Machine) -> Setting:
        dtype = pick(rng, {DTYPES[name]: 1.0 for name in machine.dtypes} | {torch.float64: 0.1})
        names = ("x",) if not self.several else pick(rng, {("q", "k"): 3, ("q", "k", "v"): 1})
        # Any head dim from 2 up is served, odd ones too.
        head_dim = pick(rng, {64: 4, 128: 4, 32: 3, 16: 2, 80: 2, 96: 1, 256: 1, 24: 1, 7: 1, 2: 0.5, 320: 0.5})
        layout = pick(rng, {"bhsd": 4, "bshd": 4, "sbhd": 2, "thd": 3})
        if layout == "thd":
            positions = pick(rng, {"packed": 4, "ids": 1, "row ids": 1})
        else:
            positions = pick(rng, {"index": 5, "ids": 2, "row ids": 1, "two ids": 1 if head_dim >= 4 else 0})
        rotary_dim = draw_rotary_dim(rng, head_dim // 2 * 2)
        if positions == "two ids":
            rotary_dim = max(4, rotary_dim // 4 * 4)
        out = pick(rng, {"none": 6, "new": 1, "in place": 2})
        memory = {name: draw_layout(rng, shared=out != "in place") for name in names}
        memory |= {f"d{name}": draw_layout(rng, gradient=True) for name in names}
        return Setting(
            names=names,
            dtype=dtype,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            interleaved=chance(rng, 0.4),
            inverse=chance(rng, 0.3),
            layout=layout,
            positions=positions,
            full_width=chance(rng, 0.4),
            table_dtype=dtype if dtype == torch.float64 or chance(rng, 0.25) else torch.float32,
            table_form=pick(rng, {"plain": 4, "lead": 1, "batch": 1}),
            table_layout=pick(rng, {"plain": 6, "columns": 1, "odd": 1}),
            memory=tuple(memory.items()),
            out=out,
            # Tiles are sized by heads, so that these belong to the setting.
            heads=tuple(rng.randint(1, 12 if machine.has_gpu else 4) for _ in range(2)),
            most=pick(rng, {600: 10, 3000: 1}) if machine.has_gpu else 40,
            norm_dtype=rng.choice((dtype, torch.float32)) if self.several and chance(rng, 0.5) else None,
            has_norm_strides=chance(rng, 0.1),
        )

    def draw_call(self, rng: random.Random, setting: Setting, machine: Machine) -> RotationCall:
        s = setting
        batch = 1 if s.layout == "thd" else pick(rng, {1: 6, 2: 5, 3: 2, 0: 0.3})
        length = pick(rng, {draw_length(rng, machine, s.most): 20, 0: 0.5})
        lengths: list[int] = []
        if s.positions == "packed":
            left = length
            for _ in range(rng.randint(0, 5)):
                lengths.append(rng.randint(0, left))
                left -= lengths[-1]
        if s.positions == "packed":
            rows = max(lengths, default=0) + rng.randint(0, 3)
        else:
            rows = length + rng.randint(0, 5) if s.positions == "index" else rng.randint(1, s.most)
        width = s.rotary_dim // 2 if s.positions == "two ids" else s.rotary_dim
        half = s.head_dim // 2 if s.positions == "two ids" else s.head_dim
        default = (2 * width <= half) if s.full_width else False
        leaves = s.names if s.norm_dtype is None else (*s.names, *NORMS)
        wanted = leaves if chance(rng, 0.7) else tuple(rng.sample(leaves, rng.randint(1, len(leaves))))
        return RotationCall(
            setting=s,
            batch=batch,
            heads=(s.heads[0], s.heads[1], s.heads[1])[: len(s.names)],
            length=length,
            rows=rows,
            lengths=tuple(lengths),
            outside=s.positions in ("ids", "row ids", "two ids") and chance(rng, 0.2),
            wanted=() if s.out != "none" else wanted,
            explicit_rotary_dim=default or chance(rng, 0.4),
            norm_eps=pick(rng, {1e-6: 4, 1e-5: 2, 0.0: 1, 1e-2: 1}),
            norm_offset=pick(rng, {0.0: 3, 1.0: 3, -0.25: 1}),
            seed=rng.randint(1, 10**6),
        )
