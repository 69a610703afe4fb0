"""Random calls of ``rope_attention`` and ``rope_attention_varlen``."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fused_rope_attn
from fused_rope_attn import testing
from fused_rope_attn.attention import planning, reference
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
    draw_bounds,
    draw_group,
    draw_head_dim,
    draw_heads,
    draw_length,
    draw_rotary_dim,
    draw_scale,
    draw_window,
    draw_window_kind,
    is_affordable,
)

GRADIENTS = ("q", "k", "v", "sinks", "q_norm", "k_norm")
NO_NORMS = {"q_norm": None, "k_norm": None, "norm_eps": 1e-6, "norm_offset": 0.0}
Variant = tuple[str, str]  # backend, strategy


@dataclass(frozen=True)
class Setting:
    """What compiled kernels of attention depend on. ``case`` holds the flags; its sizes mean nothing yet."""

    case: testing.Case
    grouped: bool  # how many heads a group has, kernels do not depend on
    window: str
    starts: bool
    lens: bool
    layouts: tuple[tuple[str, str], ...]
    table_layout: str
    lead: bool  # tables have a leading 1
    most: int  # the longest length
    deterministic: bool
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class AttentionCall:
    """A call: sizes, masks and data by ``case``, all else beside it. ``max_seqlens`` of packed sequences."""

    case: testing.Case
    setting: Setting
    wanted: tuple[str, ...]  # what requires a gradient
    return_lse: bool
    explicit_rotary_dim: bool
    poison: bool  # NaN in whatever no query sees, and in queries that see nothing
    bshd: bool
    max_seqlens: tuple[int, int] = (0, 0)

    @property
    def function(self) -> str:
        return "rope_attention" if self.case.seqlens is None else "rope_attention_varlen"

    @property
    def text(self) -> str:
        case, setting = self.case, self.setting
        words = [case.name, " ".join(f"{name}:{layout}" for name, layout in setting.layouts)]
        words.append(f"tables:{setting.table_layout}" + ("+lead" if setting.lead else ""))
        words.append(f"grad:{','.join(self.wanted) or 'none'}")
        flags = {"lse": self.return_lse, "poison": self.poison, "bshd": self.bshd, "R given": self.explicit_rotary_dim,
                 "deterministic": setting.deterministic}  # fmt: skip
        return " ".join(words + [name for name, flag in flags.items() if flag])

    def make(self, machine: Machine) -> tuple[testing.Inputs, dict[str, Any]]:
        """The inputs as they lie in memory, all (B, H, N, D), and the masks and norms."""
        case, layouts = self.case, dict(self.setting.layouts)
        inputs = testing.make_inputs(replace(case, layout="bhnd"), machine.device)
        masks = testing.masks_of(case, machine.device) | (testing.norms_of(case, machine.device) or NO_NORMS)
        tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "do")}
        if self.poison:
            for name, rows in self._unseen(machine.device).items():
                if not any(layout in SHARED for layout in layouts.values()):
                    tensors[name] = tensors[name].masked_fill(rows[:, None, :, None], math.nan)
        tensors = {name: lay(x, layouts[name]) for name, x in tensors.items()}
        tables = [lay_table(table, self.setting.table_layout) for table in (inputs.cos, inputs.sin)]
        if case.seqlens is not None:  # rows for the longest sequence are enough
            tables = [table[..., : self.max_seqlens[1] + case.extra_rows, :] for table in tables]
        if self.setting.lead and tables[0].ndim == 2:
            tables = [table[None] for table in tables]
        return testing.Inputs(**tensors, cos=tables[0], sin=tables[1]), masks

    def _unseen(self, device: str) -> dict[str, Tensor]:
        """Rows (1|B, N) of each tensor that may hold anything: True where nobody looks."""
        case = self.case
        if case.seqlens is not None:
            ends = [sum(pair[i] for pair in case.seqlens) for i in range(2)]
            behind_q, behind_k = (torch.arange(n, device=device)[None] >= end
                                  for n, end in zip((case.len_q, case.len_k), ends))  # fmt: skip
            return {"q": behind_q, "do": behind_q, "k": behind_k, "v": behind_k}
        masks = testing.masks_of(case, device)
        bounds = {name: masks[name] for name in ("kv_starts", "kv_lens")}
        position, low, high = reference.visible_range(
            case.len_q, case.len_k, case.causal, window=case.window, device=torch.device(device), **bounds
        )
        dead = low >= high
        absent = reference.absent_keys(case.len_k, position, window=case.window, **bounds)
        return {"q": dead, "do": dead} | ({} if absent is None else {"k": absent, "v": absent})

    def arguments(self, machine: Machine) -> tuple[Callable[..., Any], dict[str, Any]]:
        inputs, masks = self.make(machine)
        return self._arguments(inputs, masks, ("auto", "auto"))

    def _arguments(
        self, inputs: testing.Inputs, masks: dict[str, Any], variant: Variant
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        case = self.case
        q, k, v = (self._as_passed(x) for x in inputs[:3])
        arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "cos": inputs.cos, "sin": inputs.sin}
        options = {
            "causal": case.causal,
            "softmax_scale": case.softmax_scale,
            "rotary_dim": case.rotary if self.explicit_rotary_dim else None,
            "interleaved": case.interleaved,
            "return_lse": self.return_lse,
            "deterministic": self.setting.deterministic,
            "backend": variant[0],
            "strategy": variant[1],
            **masks,
        }
        if self.bshd:
            options["layout"] = "bshd"
        if case.seqlens is None:
            return fused_rope_attn.rope_attention, arguments | options
        ends = torch.tensor(((0, 0), *case.seqlens), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(q.device)
        arguments |= {
            "cu_seqlens_q": ends[:, 0].contiguous(),
            "cu_seqlens_k": ends[:, 1].contiguous(),
            "max_seqlen_q": self.max_seqlens[0],
            "max_seqlen_k": self.max_seqlens[1],
        }
        del options["kv_starts"], options["kv_lens"]
        return fused_rope_attn.rope_attention_varlen, arguments | options

    def _as_passed(self, x: Tensor) -> Tensor:
        """x (B, H, N, D) as the function takes it."""
        if self.case.seqlens is not None:
            return x[0].transpose(0, 1)
        return x.transpose(1, 2) if self.bshd else x

    def _expected_obstacle(self, machine: Machine, variant: Variant) -> planning.Obstacle | None:
        """What an explicit backend, or a strategy, must raise; None where the call runs."""
        backend, strategy = variant
        if backend == "reference" or variant == ("auto", "auto"):
            return None
        name, case = "hopper" if backend == "hopper" else "triton", self.case
        needs = planning.Needs(
            machine.arch, case.dtype, case.head_dim, strategy, case.seqlens is not None, False, case.len_k == 0
        )  # fmt: skip
        return planning.obstacle(name, needs)

    def run(self, machine: Machine) -> Iterator[Finding]:
        inputs, masks = self.make(machine)
        case = self.case
        ref64 = _by_name(testing.run_reference(inputs, case, torch.float64))
        eager = _by_name(testing.run_reference(inputs, case))
        draws = Draws(lambda: _by_name(testing.run_reference(inputs, case)), machine.device)
        for variant in self.setting.variants:
            label = " ".join(word for word in variant if word != "auto") or "auto"
            function, arguments = self._arguments(inputs, masks, variant)
            obstacle = self._expected_obstacle(machine, variant)
            if obstacle is not None:
                error, message = obstacle
                yield refusal(label, function, arguments, (error,), (message.split(",")[0],))
                continue
            before = copies(arguments)
            with testing.poison_empty():
                out = self._results(function, arguments, inputs.do)
            for name, x in out.items():
                if name == "lse":
                    right = (eager[name].shape, torch.float32, False)
                else:
                    dtypes = {"dsinks": case.sinks_dtype, "dq_norm": case.norm_dtype, "dk_norm": case.norm_dtype}
                    right = (eager[name].shape, dtypes.get(name, case.dtype), False)
                yield Finding.that(label, f"form of {name}", (x.shape, x.dtype, x.requires_grad) == right,
                                   f"{tuple(x.shape)}, {x.dtype}, requires_grad {x.requires_grad}")  # fmt: skip
                if x.shape != eager[name].shape:
                    continue
                compared = testing.compare(
                    name, x, ref64[name], eager[name], grad=name.startswith("d"), dtype=case.dtype,
                    draws=draws.of(name), zero=testing.noise_of_zero(name, case, inputs),
                )  # fmt: skip
                yield Finding.of(label, compared)
            touched = changed(arguments, before)
            yield Finding.that(label, "inputs", not touched, f"{', '.join(touched)} changed")
            if self.setting.deterministic:
                again = self._results(function, arguments, inputs.do)
                differ = [name for name, x in out.items() if not same_bits(x, again[name])]
                yield Finding.that(label, "rerun", not differ, f"{', '.join(differ)} differ in the second run")

    def _results(self, function: Callable[..., Any], arguments: dict[str, Any], do: Tensor) -> dict[str, Tensor]:
        """o, lse where asked for, and the wanted gradients: (B, H, N, D), and as one row those of sinks and norms."""
        leaves = {name: arguments[name].detach().requires_grad_() for name in self.wanted}
        returned = function(**(arguments | leaves))
        o, *lse = returned if self.return_lse else (returned,)
        found = dict(
            zip(self.wanted, torch.autograd.grad(o, list(leaves.values()), self._as_passed(do)) if leaves else ())
        )
        if not leaves and o.requires_grad:
            raise AssertionError("o requires a gradient, but no input does")
        results = {"o": self._back(o.detach())}
        if lse:
            results["lse"] = lse[0] if self.case.seqlens is None else lse[0][None]
        return results | {f"d{name}": x[None] if x.ndim == 1 else self._back(x) for name, x in found.items()}

    def _back(self, x: Tensor) -> Tensor:
        """Inverse of ``_as_passed``."""
        if self.case.seqlens is not None:
            return x.transpose(0, 1)[None]
        return x.transpose(1, 2) if self.bshd else x


def _by_name(results: testing.Results) -> dict[str, Tensor]:
    found = {name: x for name, x in zip(results._fields, results) if x is not None}
    weights = {name: getattr(results, name) for name in ("dsinks", "dq_norm", "dk_norm")}
    return found | {name: x[None] for name, x in weights.items() if x is not None}


@dataclass(frozen=True)
class Attention:
    """The family of one of the two functions."""

    packed: bool

    def draw_setting(self, rng: random.Random, machine: Machine) -> Setting:
        dtype = DTYPES[rng.choice(machine.dtypes)]
        head_dim = draw_head_dim(rng, machine)
        norms = chance(rng, 0.45)
        masks = not chance(rng, 0.3)  # the plain call is what most models make
        starts, lens = (masks and not self.packed and chance(rng, 0.3) for _ in range(2))
        case = testing.Case(
            1, 1, 1, 1, 1, head_dim,
            causal=chance(rng, 0.6), rotary_dim=draw_rotary_dim(rng, head_dim), interleaved=chance(rng, 0.45),
            dtype=dtype, table_dtype=dtype if chance(rng, 0.2) else torch.float32,
            table_batch=not self.packed and chance(rng, 0.2), full_width=chance(rng, 0.35),
            softcap=rng.choice([2.0, 15.0, 50.0]) if masks and chance(rng, 0.25) else 0.0,
            sinks=masks and chance(rng, 0.3), sinks_dtype=dtype if chance(rng, 0.3) else torch.float32,
            norms=0.0 if norms else None, norm_dtype=dtype if norms and chance(rng, 0.4) else torch.float32,
        )  # fmt: skip
        variants = _draw_variants(rng, machine)
        layouts = {name: draw_layout(rng, gradient=name == "do") for name in ("q", "k", "v", "do")}
        most = pick(rng, {600: 14, 1024: 1, 3000: 1}) if machine.has_gpu else 90
        return Setting(
            case=case,
            grouped=chance(rng, 0.5),
            window=draw_window_kind(rng) if masks else "none",
            starts=starts,
            lens=lens,
            layouts=tuple(layouts.items()),
            table_layout=pick(rng, {"plain": 8, "columns": 1, "odd": 1}),
            lead=chance(rng, 0.2),
            most=most,
            deterministic=chance(rng, 0.12),
            variants=variants,
        )

    def draw_call(self, rng: random.Random, setting: Setting, machine: Machine) -> AttentionCall:
        sizes = self._draw_packed if self.packed else self._draw_dense
        case, max_seqlens = sizes(rng, setting, machine)
        case = replace(
            case,
            softmax_scale=draw_scale(rng, case.head_dim),
            tables=pick(rng, {"rope": 4, "yarn": 2, "random": 4}),
            extra_rows=pick(rng, {0: 4, 1: 1, rng.randint(0, 40): 1}),
            seed=rng.randint(1, 10**6),
        )
        if case.norms is not None:
            case = replace(
                case, norms=pick(rng, {0.0: 3, 1.0: 3, 0.5: 1}), norm_eps=pick(rng, {1e-6: 4, 1e-5: 2, 0.0: 1, 1e-2: 1})
            )  # fmt: skip
        has = {"sinks": case.sinks, "q_norm": case.norms is not None, "k_norm": case.norms is not None}
        names = [name for name in GRADIENTS if has.get(name, True)]
        wanted = tuple(names) if chance(rng, 0.7) else tuple(name for name in names if chance(rng, 0.5))
        ambiguous = case.full_width and 2 * case.rotary <= case.head_dim
        return AttentionCall(
            case=case,
            setting=setting,
            wanted=wanted,
            return_lse=chance(rng, 0.5),
            explicit_rotary_dim=ambiguous or chance(rng, 0.4),
            poison=chance(rng, 0.5),
            bshd=not self.packed and chance(rng, 0.3),
            max_seqlens=max_seqlens,
        )

    def _draw_dense(
        self, rng: random.Random, setting: Setting, machine: Machine
    ) -> tuple[testing.Case, tuple[int, int]]:
        while True:
            group = draw_group(rng, machine, float(setting.grouped))
            batch, heads_q, heads_kv = draw_heads(rng, machine, group)
            len_k = draw_length(rng, machine, setting.most)
            kind = pick(rng, {"same": 9, "fewer": 5, "one": 2, "more": 3, "no keys": 0.3, "no queries": 0.3})
            len_q = {"same": len_k, "fewer": rng.randint(1, len_k), "one": 1, "no queries": 0}.get(
                kind, draw_length(rng, machine, setting.most)
            )
            len_k = 0 if kind == "no keys" else len_k
            if len_q > len_k and not setting.case.causal and not setting.lens:
                continue  # refused: see refusals.py
            if is_affordable(machine, batch * heads_q, len_q, len_k):
                break
        bounds: dict[str, Any] = {}
        if setting.starts:
            bounds["kv_starts"] = draw_bounds(rng, batch, len_k, upper=False)
        if setting.lens:
            bounds["kv_lens"] = draw_bounds(rng, batch, len_k, upper=True)
        window = draw_window(rng, setting.window, len_k)
        return replace(
            setting.case, batch=batch, heads_q=heads_q, heads_kv=heads_kv, len_q=len_q, len_k=len_k, window=window,
            **bounds,
        ), (0, 0)  # fmt: skip

    def _draw_packed(
        self, rng: random.Random, setting: Setting, machine: Machine
    ) -> tuple[testing.Case, tuple[int, int]]:
        while True:
            _, heads_q, heads_kv = draw_heads(rng, machine, draw_group(rng, machine, float(setting.grouped)))
            some = {1: 2, 2: 4, 3: 4, rng.randint(4, 12): 2, 0: 0.3} if machine.has_gpu else {1: 3, 2: 5, 3: 2, 0: 0.2}
            seqlens = []
            for _ in range(pick(rng, some)):
                len_k, other = (draw_length(rng, machine, setting.most) for _ in range(2))
                len_q = pick(rng, {len_k: 6, rng.randint(0, len_k): 2, 1: 1, other: 1})
                seqlens.append(pick(rng, {(len_q, len_k): 12, (0, len_k): 0.5, (len_q, 0): 0.5, (0, 0): 0.5}))
            tail_q, tail_k = (pick(rng, {0: 5, 1: 1, rng.randint(1, 20): 1}) for _ in range(2))
            len_q, len_k = tail_q + sum(pair[0] for pair in seqlens), tail_k + sum(pair[1] for pair in seqlens)
            if is_affordable(machine, heads_q, len_q, len_k):
                break
        longest = [max((pair[i] for pair in seqlens), default=0) for i in range(2)]
        more_q, more_k = (pick(rng, {0: 4, rng.randint(0, 50): 1}) for _ in range(2))
        # The reference takes its tables from the case: there must be as many rows as max_seqlen_k asks for.
        more_k = min(more_k, len_k - longest[1])
        return replace(
            setting.case, batch=1, heads_q=heads_q, heads_kv=heads_kv, len_q=len_q, len_k=len_k,
            seqlens=tuple(seqlens), window=draw_window(rng, setting.window, max(longest)),
        ), (longest[0] + more_q, longest[1] + more_k)  # fmt: skip


def _draw_variants(rng: random.Random, machine: Machine) -> tuple[Variant, ...]:
    """Each setting is compiled for one or two backends, so that there can be many settings: that costs the time."""
    weights: dict[Variant, float] = {}
    if "triton" in machine.backends:
        weights |= {("triton", "inline"): 3, ("triton", "prepass"): 3, ("triton", "auto"): 1, ("auto", "inline"): 0.5}
        weights |= {("auto", "auto"): 2 if machine.has_gpu else 0.5, ("auto", "prepass"): 0.5}
    if "hopper" in machine.backends:
        weights |= {("hopper", "auto"): 5, ("hopper", "prepass"): 0.5, ("hopper", "inline"): 0.2}
    elif "triton" in machine.backends:
        weights |= {("hopper", "auto"): 0.2}  # must be refused
    found: list[Variant] = []
    if weights:
        found.append(pick(rng, weights))
        if machine.has_gpu and chance(rng, 0.15):
            found.append(pick(rng, weights))
    if "reference" in machine.backends and (not found or chance(rng, 0.3 if machine.has_gpu else 0.5)):
        found.append(("reference", "auto"))
    return tuple(dict.fromkeys(found))
