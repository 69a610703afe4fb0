"""Calls of attention, of latent attention and of Co-RoPE, packed or not: outputs and gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fused_rope_attn.attention import reference
from fused_rope_attn.experimental.corope import CoRopeAttention, reference as corope_reference
from verification import testing
from verification.calls import FUNCTIONS, Call, Made, Ran, References, same_bits
from verification.memory import SHARED
from verification.testing import ROWS, Finding

TENSORS = ("q", "k", "v", "do")
WEIGHTS = ("sinks", "q_norm", "k_norm")
# A case with more scores is compared in some heads, whole, that include the first and the last: in float64 these take a
# second or two.
MOST_SCORES = 1 << 33


@dataclass(frozen=True)
class AttentionCheck(Call):
    """A call of attention, which is packed where it has ``seqlens``. memory: of q, k, v and do."""

    hides_nan: bool = False  # NaN in keys that no query sees, and in queries that see none
    max_seqlens: tuple[int, int] | None = None  # of packed sequences; None: those of the longest
    deterministic: bool = False
    return_max_logit: bool = False
    only: tuple[torch.dtype, ...] = ()  # the dtypes that the case makes sense in; empty: all
    wanted: tuple[str, ...] = (*TENSORS[:3], *WEIGHTS)
    variants: tuple[tuple[str, str], ...] = (("reference", "auto"),)

    @property
    def function(self) -> str:
        return "rope_attention" if self.seqlens is None else "rope_attention_varlen"

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("o", *["lse"] * self.return_lse, *["max_logit"] * self.return_max_logit)

    @property
    def longest(self) -> tuple[int, int]:
        """max_seqlen_q and max_seqlen_k."""
        if self.max_seqlens is not None:
            return self.max_seqlens
        return tuple(max((pair[i] for pair in self.seqlens or ()), default=0) for i in range(2))

    def make(self, device: str) -> Made:
        return self.made(testing.make_inputs(self if self.memory is None else replace(self, layout="bhnd"), device))

    def made(self, inputs: testing.Inputs) -> Made:
        """Return the data of the call for these inputs."""
        device, tensors = inputs.q.device, {name: getattr(inputs, name) for name in TENSORS}
        if self.hides_nan and not set(self.memory or ()) & {*SHARED}:
            for name, rows in self._unseen(device).items():
                tensors[name] = tensors[name].masked_fill(rows[:, None, :, None], math.nan)
        tensors = self.laid(tensors)
        tables, do = self.tables_of(inputs), tensors.pop("do")
        masks = {name: x for name, x in testing.masks_of(self, device).items() if name in (*WEIGHTS, *_BOUNDS)}
        if self.seqlens is not None:
            masks = {name: masks[name] for name in WEIGHTS if name in masks} | self._ends(device)
        upstream = {"o": do} if inputs.dlse is None else {"o": do, "lse": inputs.dlse}
        return Made(tensors | tables | masks | self.norms_of(device), upstream)

    def tables_of(self, inputs: testing.Inputs | testing.LatentInputs) -> dict[str, Any]:
        rows = self.len_k if self.token_tables else self.longest[1] + self.extra_rows
        tables = super().tables_of(inputs)
        is_whole = self.seqlens is None or inputs.cos is None
        return tables if is_whole else {name: x[..., :rows, :] for name, x in tables.items()}

    def _ends(self, device: torch.device) -> dict[str, Any]:
        return testing.ends_of(self, device) | {f"max_seqlen_{x}": self.longest[i] for i, x in enumerate("qk")}

    def _unseen(self, device: torch.device) -> dict[str, Tensor]:
        """Return the rows (1|B, N) of each tensor that no query or no key sees, as True."""
        if self.seqlens is not None:
            end_q, end_k = (sum(lengths) for lengths in zip((0, 0), *self.seqlens))
            past_q = torch.arange(self.len_q, device=device)[None] >= end_q
            past_k = torch.arange(self.len_k, device=device)[None] >= end_k
            return {"q": past_q, "do": past_q, "k": past_k, "v": past_k}
        bounds = {name: x for name, x in testing.masks_of(self, device).items() if name in _BOUNDS}
        positions = reference.positions(self.len_q, self.len_k, bounds["kv_lens"], device)
        bounds["has_tables"] = self.rotary > 0
        visible = reference.visible_pairs(*positions, self.causal, window=self.window, **bounds)
        dead, absent = ~visible.any(-1), ~visible.any(-2)
        return {"q": dead, "do": dead} | ({"k": absent, "v": absent} if self.len_q else {})

    def planned(self) -> dict[str, Any]:
        return {"len_k": self.len_k}

    def references(self, made: Made, device: str) -> References:
        """Compute the references of all heads, or of the compared ones, which become batch entries."""
        heads, group = self.compared_heads(), self.heads_q // self.heads_kv

        def part(name: str, x: Tensor) -> Tensor:
            if heads is None or name[1:] in WEIGHTS:
                return x
            own = 1 if name in ("k", "v", "dk", "dv") else group
            if name == "max_logit" and case.seqlens is not None:
                return torch.cat([x[:, :, h * own : (h + 1) * own] for _, h in heads])
            return torch.stack([x[b, h * own : (h + 1) * own] for b, h in heads])

        case, given = self, made.given
        rows = given | {f"d{name}": x for name, x in made.upstream.items()}
        some = {name: part(name, x) for name, x in rows.items() if name in (*TENSORS, "dlse")}
        tables = {name: given[name] for name in ("cos", "sin")}
        if heads is not None:
            batches = [b for b, _ in heads]
            bounds = {name: getattr(self, name) for name in _BOUNDS[:2]}
            bounds = {name: x and tuple(x[b] for b in batches) for name, x in bounds.items()}
            case = replace(self, batch=len(heads), heads_q=group, heads_kv=1, **bounds)
            if self.table_batch and self.rotary:
                tables = {name: x[batches] for name, x in tables.items()}
        dlse = some.pop("dlse", None)
        inputs = testing.Inputs(**some, **tables).with_dlse(dlse)

        run = functools.partial(testing.run_reference, inputs, case)
        zero = functools.partial(testing.noise_of_zero, case=case, inputs=inputs)
        return References(run, device, self.judged(given), zero, part=part)

    def compared_heads(self) -> list[tuple[int, int]] | None:
        """Return (batch entry, key head) of those that are compared; None: all."""
        every = self.batch * self.heads_kv
        scores = max(1, self.heads_q // self.heads_kv * self.len_q * self.len_k)
        if every * scores <= MOST_SCORES:
            return None
        count = 1 if self.seqlens is not None else max(1, min(8, MOST_SCORES // scores))
        chosen = [every - 1] if count == 1 else [i * (every - 1) // (count - 1) for i in range(count)]
        return [divmod(i, self.heads_kv) for i in chosen]

    def results(self, function: Callable[..., Any], given: dict[str, Any], made: Made) -> dict[str, Tensor]:
        found = super().results(function, given, made)
        # Weights' gradients are sums over all heads, and large cases compare only some heads.
        return {name: x for name, x in found.items() if self.size == "small" or name[1:] not in WEIGHTS}

    def further(self, ran: Ran) -> Iterator[Finding]:
        if not self.deterministic:
            return
        again = self.results(ran.function, ran.given, ran.made)
        changed = sum(0 if same_bits(x, again[name]) else int((x != again[name]).sum()) for name, x in ran.out.items())
        yield Finding("rerun", not changed, f"{changed} elements differ", float(changed), 0.0, 0.0, 0.0)


_BOUNDS = ("kv_starts", "kv_lens", "query_starts", "query_ends")


@dataclass(frozen=True)
class LatentCheck(testing.LatentCase, AttentionCheck):
    """A call of multi-head latent attention. memory: of the five tensors and of do, in the order of ``ROWS``."""

    wanted: tuple[str, ...] = ROWS
    variants: tuple[tuple[str, str], ...] = (("auto", "auto"),)

    @property
    def function(self) -> str:
        return "rope_attention_mla" if self.seqlens is None else "rope_attention_mla_varlen"

    def make(self, device: str) -> Made:
        inputs = testing.make_latent_inputs(self, device)
        return self.made(inputs._replace(**self.laid({name: getattr(inputs, name) for name in (*ROWS, "do")})))

    def made(self, inputs: testing.LatentInputs) -> Made:
        given, device = inputs._asdict() | self.tables_of(inputs), inputs.v.device
        upstream = {"o": given.pop("do"), "lse": given.pop("dlse")}
        masks = testing.bounds_of(self, device) if self.seqlens is None else self._ends(device)
        return Made(given | masks, {name: x for name, x in upstream.items() if x is not None})

    def planned(self) -> dict[str, Any]:
        own = {"nope_dim": self.nope, "value_dim": self.value, "softmax_scale": self.scale}
        return super().planned() | own

    def references(self, made: Made, device: str) -> References:
        given, upstream = made.given, made.upstream
        inputs = testing.LatentInputs(*(given[x] for x in (*ROWS, "cos", "sin")), upstream["o"], upstream.get("lse"))
        run = functools.partial(testing.run_latent_reference, inputs, self)
        zero = functools.partial(testing.noise_of_zero, case=self, inputs=inputs)
        return References(run, device, self.judged(given), zero)


@dataclass(frozen=True)
class CoRopeCheck(Call):
    """A call of Co-RoPE; on a GPU by the public function. memory: of q, k, v and do."""

    base: float = 10000.0
    public: bool = False  # also on the CPU, where the public function takes the reference, and not the kernels
    wanted: tuple[str, ...] = TENSORS[:3]
    backend: ClassVar[str] = "corope"
    function: ClassVar[str] = "corope_attention"

    def make(self, device: str) -> Made:
        inputs = testing.make_inputs(self if self.memory is None else replace(self, layout="bhnd"), device)
        tensors = self.laid({name: getattr(inputs, name) for name in TENSORS})
        return Made({name: tensors[name] for name in TENSORS[:3]}, {"o": tensors["do"]})

    def entry(self, variant: tuple[str, str]) -> Callable[..., Any]:
        def kernels(q: Tensor, k: Tensor, v: Tensor, base: float, softmax_scale: float | None) -> Tensor:
            if q.is_cuda or self.public:
                return FUNCTIONS[self.function](q, k, v, base=base, softmax_scale=softmax_scale)
            return CoRopeAttention.apply(q, k, v, float(base), float(self.scale))

        return kernels

    def reference(self, made: Made, dtype: torch.dtype) -> dict[str, Tensor]:
        options = {"base": float(self.base), "softmax_scale": float(self.scale)}
        right = functools.partial(corope_reference.corope, **options)
        return self.results(right, {name: x.to(dtype) for name, x in made.given.items()}, made)
