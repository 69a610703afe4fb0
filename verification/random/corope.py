"""Random calls of ``experimental.corope_attention``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_rope_attn import testing
from fused_rope_attn.experimental.corope import api, corope_attention, reference
from verification.random.common import DTYPES, Draws, Finding, Machine, chance, changed, copies, pick
from verification.random.layouts import draw_layout, lay
from verification.random.shapes import draw_group, draw_heads, draw_length, is_affordable

NAMES = ("q", "k", "v")


@dataclass(frozen=True)
class Setting:
    """What the compiled kernels depend on."""

    dtype: torch.dtype
    head_dim: int
    group: int
    layouts: tuple[tuple[str, str], ...]
    kernels: bool  # in the interpreter, where the public function takes the reference, the kernels themselves


@dataclass(frozen=True)
class CoRopeCall:
    """Sizes and data."""

    setting: Setting
    batch: int
    heads_q: int
    heads_kv: int
    length: int
    base: float
    softmax_scale: float | None
    wanted: tuple[str, ...]
    seed: int
    function: str = "corope_attention"

    @property
    def text(self) -> str:
        s = self.setting
        words = [f"B{self.batch} H{self.heads_q}/{self.heads_kv} N{self.length} D{s.head_dim} {str(s.dtype)[6:]}"]
        words += [f"base={self.base} scale={self.softmax_scale} grad:{','.join(self.wanted)} seed={self.seed}"]
        return " ".join(words + [f"{name}:{layout}" for name, layout in s.layouts])

    def make(self, machine: Machine) -> dict[str, Tensor]:
        s = self.setting
        generator = torch.Generator(machine.device).manual_seed(self.seed)
        found = {}
        for name, layout in s.layouts:
            heads = self.heads_kv if name in ("k", "v") else self.heads_q
            shape = (self.batch, heads, self.length, s.head_dim)
            found[name] = lay(torch.randn(shape, generator=generator, device=machine.device).to(s.dtype), layout)
        return found

    def arguments(self, machine: Machine) -> tuple[Callable[..., Any], dict[str, Any]]:
        made = self.make(machine)
        return corope_attention, {name: made[name] for name in NAMES} | self._options()

    def _options(self) -> dict[str, Any]:
        return {"base": self.base, "softmax_scale": self.softmax_scale}

    def run(self, machine: Machine) -> Iterator[Finding]:
        s, made = self.setting, self.make(machine)
        scale = s.head_dim**-0.5 if self.softmax_scale is None else float(self.softmax_scale)
        do = made.pop("do")
        before = copies(made)

        def results(function: Callable[..., Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
            tensors = {name: x.detach() if x.dtype == dtype else x.to(dtype) for name, x in made.items()}
            leaves = {name: tensors[name].requires_grad_() for name in self.wanted}
            o = function(**(tensors | leaves))
            found = torch.autograd.grad(o, list(leaves.values()), do.to(dtype)) if leaves else ()
            return {"o": o.detach()} | {f"d{name}": x for name, x in zip(self.wanted, found)}

        def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return reference.attention(q, k, v, base=float(self.base), softmax_scale=scale)

        def kernels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return api.CoRopeAttention.apply(q, k, v, float(self.base), scale)

        def public(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return corope_attention(q, k, v, **self._options())

        ref64, eager = results(right, torch.float64), results(right, s.dtype)
        draws = Draws(lambda: results(right, s.dtype), machine.device)
        label = "triton" if s.kernels else "auto"
        with testing.poison_empty():
            out = results(kernels if s.kernels else public, s.dtype)
        for name, x in out.items():
            compared = testing.compare(
                name, x, ref64[name], eager[name], grad=name.startswith("d"), dtype=s.dtype, draws=draws.of(name)
            )
            yield Finding.of(label, compared)
        touched = changed(made, before)
        yield Finding.that(label, "inputs", not touched, f"{', '.join(touched)} changed")


class CoRope:
    """The family of Co-RoPE."""

    def draw_setting(self, rng: random.Random, machine: Machine) -> Setting:
        head_dim = pick(rng, {32: 4, 64: 3, 96: 1, 128: 1, 40: 1, 16: 0.5})
        layouts = {name: draw_layout(rng, gradient=name == "do") for name in (*NAMES, "do")}
        served = "triton" in machine.backends and 32 <= head_dim <= 128
        return Setting(
            dtype=DTYPES[rng.choice(machine.dtypes)],
            head_dim=head_dim,
            group=draw_group(rng, machine, 0.6),
            layouts=tuple(layouts.items()),
            kernels=served and not machine.has_gpu and chance(rng, 0.8),
        )

    def draw_call(self, rng: random.Random, setting: Setting, machine: Machine) -> CoRopeCall:
        while True:
            batch, heads_q, heads_kv = draw_heads(rng, machine, setting.group)
            length = draw_length(rng, machine, 400 if machine.has_gpu else 40)
            if is_affordable(machine, batch * heads_q * (setting.head_dim if machine.has_gpu else 1), length, length):
                break
        return CoRopeCall(
            setting=setting,
            batch=max(batch, 1),
            heads_q=heads_q,
            heads_kv=heads_kv,
            length=length,
            base=rng.choice([10000.0, 10000.0, 500.0, 500000, 10.0]),
            softmax_scale=pick(rng, {None: 4, 0.1: 1, 0.0: 0.5, -0.1: 0.5}),
            wanted=NAMES if chance(rng, 0.8) else tuple(name for name in NAMES if chance(rng, 0.6)),
            seed=rng.randint(1, 10**6),
        )
