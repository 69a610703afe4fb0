"""Calls of ``apply_rope`` and ``apply_rope_qk``: rows, their gradients and those of norms, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from verification import testing
from verification.calls import Call, Made, Ran, References
from verification.testing import Finding

NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class RopeCheck(Call):
    """Tensors of ``len_q`` rows, the first of ``heads_q`` heads, the others of ``heads_kv``; tables of ``len_k`` rows.

    names: ("x",) is apply_rope. memory: of the tensors, then of their gradients. positions: "index", "ids", "row ids"
    (one row for the batch) or "two ids". seqlens: of packed sequences, in layout "thd". With full-width random tables
    the two halves have different angles.
    """

    names: tuple[str, ...] = ("q", "k")
    positions: str = "index"
    outside: bool = False  # some position ids have no row in the tables
    inverse: bool = False
    out: str = "none"  # "new" or "in place": a forward pass with ``out`` in addition to the differentiable one
    strided_norms: bool = False  # the weights are columns of something wider
    wanted: tuple[str, ...] = ("x", "q", "k", "v", *NORMS)
    backend: ClassVar[str] = "rotation"

    @property
    def function(self) -> str:
        return "apply_rope" if self.names == ("x",) else "apply_rope_qk"

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.names

    def make(self, device: str) -> Made:
        two = 2 if self.positions == "two ids" else 1
        case = replace(self, layout="bhnd", rotary_dim=self.rotary // two)
        tensors = {}
        for prefix, seed in (("", self.seed), ("d", self.seed + 1)):  # made as q, k and v of attention
            rows = testing.make_inputs(replace(case, len_k=self.len_q, seed=seed), device)
            tensors |= {f"{prefix}{name}": x for name, x in zip(self.names, rows)}
        if self.full_width and self.tables == "random":
            case = replace(case, full_width=False, rotary_dim=2 * case.rotary)
        inputs, generator = testing.make_inputs(case, device), torch.Generator(device).manual_seed(self.seed)
        if self.memory is None:  # contiguous as passed
            tensors = {name: self.back(self.as_passed(name, x).contiguous()) for name, x in tensors.items()}
        tensors = self.laid(tensors)
        ids = ends = None
        if self.positions != "index":
            low, high = (-2, self.len_k + 3) if self.outside else (0, max(self.len_k, 1))
            shape = () if self.positions == "row ids" else (self.batch, 2) if two == 2 else (self.batch,)
            ids = torch.randint(low, high, (*shape, self.len_q), generator=generator, device=device)
            ids = ids.int() if self.seed % 2 else ids
        if self.seqlens is not None:
            ends = testing.ends_of(self, device)["cu_seqlens_q"]
        given = {name: tensors[name] for name in self.names} | self.tables_of(inputs)
        given |= {"position_ids": ids, "cu_seqlens": ends}
        if self.function == "apply_rope_qk":
            norms = self.norms_of(device)
            if self.strided_norms and self.norms is not None:
                norms = {name: torch.stack([x] * 3, -1)[:, 0] for name, x in norms.items()}
            given |= norms
        return Made(given, {name: tensors[f"d{name}"] for name in self.names})

    def _outs(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the argument ``out``, if the call has one."""
        if self.out == "none":
            return {}
        xs = [given[name] for name in self.names]
        outs = xs if self.out == "in place" else [torch.zeros_like(x) for x in xs]
        return {"out": outs[0] if len(outs) == 1 else tuple(outs)}

    def arguments(self, device: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        function, given = super().arguments(device)
        return function, given | self._outs(given)

    def references(self, made: Made, device: str) -> References:
        values = {name: made.given[name].clone() for name in self.names}  # because the call may write in place
        ids = made.given["position_ids"]
        if ids is not None:
            ids = ids if ids.ndim == 3 else ids[None, None] if ids.ndim == 1 else ids[:, None]
        options = {"rotary_dim": self.rotary, "interleaved": self.interleaved, "inverse": self.inverse}
        options |= {"position_ids": ids, "cu_seqlens": made.given["cu_seqlens"]}
        options |= {"norm_eps": self.norm_eps, "norm_offset": self.norms}  # of those that have a weight
        tables = made.given["cos"], made.given["sin"]

        def run(dtype: torch.dtype | None) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            for name, x in values.items():
                given, weight = (x, made.upstream[name], *tables), made.given.get(f"{name}_norm")
                results = testing.run_rotation_reference(given, dtype, weight=weight, **options)
                found |= zip((name, f"d{name}", f"d{name}_norm"), results)
            return found

        return References(run, device, self.judged(made.given), may_be_nan=True)  # at positions outside the tables

    def further(self, ran: Ran) -> Iterator[Finding]:
        """Run it with ``out``, because the differentiable call cannot have it."""
        if not (outs := self._outs(ran.given)):
            return
        returned, named = ran.function(**(ran.given | outs)), outs["out"]
        returned, named = (x if isinstance(x, tuple) else (x,) for x in (returned, named))
        is_same = all(x is y for x, y in zip(returned, named))
        yield Finding("out", is_same, "another tensor was returned")
        for name, x in zip(self.names, returned):
            found = ran.references.compare(name, self.back(x))
            yield Finding(f"{name} in out", found.ok, found.detail)
        if self.out == "in place":  # these may change
            for name in self.names:
                ran.given[name].copy_(ran.before[name])
