"""Checks of ``apply_rope`` and ``apply_rope_qk``: rows, their gradients and those of norms, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import fused_rope_attn
from fused_rope_attn import testing
from verification.calls import Check, Finding, Ran, References, normal
from verification.memory import lay, lay_table

NORMS = ("q_norm", "k_norm")
# The axes of (B, H, N, D) in each layout; packed tokens have no batch.
AXES = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "thd": (0, 2, 1, 3)}


@dataclass(frozen=True)
class RopeCheck(Check):
    """q and k, or the tensors of ``names``, of (B, H, N, D).

    positions: "index", "ids", "row ids" (one row for the batch) or "two ids". lengths: of packed sequences, in layout
    "thd". norms: their weights' dtype, ``float32`` or ``input``; "" for none.
    """

    name: str
    batch: int = 2
    heads: tuple[int, ...] = (3, 1)
    length: int = 37
    head_dim: int = 32
    rotary_dim: int = 32
    interleaved: bool = False
    layout: str = "bhsd"
    positions: str = "index"
    full_width: bool = False
    random_tables: bool = False
    out: str = "none"  # "new" or "in place": a forward pass with ``out`` in addition to the differentiable one
    size: str = "small"
    norms: str = ""
    norm_offset: float = 0.0
    norm_eps: float = 1e-6
    strided_norms: bool = False  # the weights are columns of something wider
    names: tuple[str, ...] = ("q", "k")  # ("x",) is apply_rope
    lengths: tuple[int, ...] | None = None
    rows: int | None = None  # of the tables; None: as many as there are positions
    outside: bool = False  # some position ids have no row in the tables
    inverse: bool = False
    table_form: str = "plain"  # "lead": a leading 1; "batch": a leading B
    table_memory: str = "plain"
    table_dtype: torch.dtype = torch.float32
    memory: tuple[str, ...] | None = None  # of the tensors, then of their gradients; None: contiguous as passed
    wanted: tuple[str, ...] = ("x", "q", "k", "v", *NORMS)
    infers_rotary_dim: bool = False
    dtype: torch.dtype = torch.float16
    seed: int = 0
    backend: ClassVar[str] = "rotation"
    variants: ClassVar[tuple[tuple[str, str], ...]] = (("rotation", "auto"),)

    @property
    def function(self) -> str:
        return "apply_rope" if self.names == ("x",) else "apply_rope_qk"

    def make(self, device: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """Return tensors and their gradients (B, H, N, D) by name, and the other arguments by name."""
        generator = torch.Generator(device).manual_seed(self.seed)
        rows = max(self.length, 1) if self.rows is None else self.rows
        xs, dos = ({} for _ in range(2))
        layouts = self.memory or (None,) * (2 * len(self.names))
        for found, memory in ((xs, layouts), (dos, layouts[len(self.names) :])):
            for name, heads, layout in zip(self.names, self.heads, memory):
                x = normal(generator, self.batch, heads, self.length, self.head_dim, dtype=self.dtype)
                found[name] = self._back(self._as_passed(x).contiguous()) if layout is None else lay(x, layout)
        two = 2 if self.positions == "two ids" else 1
        width = self.rotary_dim // two
        tables = fused_rope_attn.rope_tables(rows, width, device=device)
        if self.full_width:
            tables = [torch.cat((table, table), -1) for table in tables]
        lead = {"plain": (), "lead": (1,), "batch": (self.batch,)}[self.table_form]
        tables = [table.expand(*lead, *table.shape) for table in tables]
        if self.random_tables:
            tables = [normal(generator, *table.shape) for table in tables]
        ids = None
        if self.positions != "index":
            low, high = (-2, rows + 3) if self.outside else (0, max(rows, 1))
            shape = () if self.positions == "row ids" else (self.batch, 2) if two == 2 else (self.batch,)
            ids = torch.randint(low, high, (*shape, self.length), generator=generator, device=device)
            ids = ids.int() if self.seed % 2 else ids
        half = self.head_dim // two
        is_ambiguous = self.full_width and 2 * width <= half
        others = {
            "cos": lay_table(tables[0].to(self.table_dtype), self.table_memory),
            "sin": lay_table(tables[1].to(self.table_dtype), self.table_memory),
            "rotary_dim": None if self.infers_rotary_dim and not is_ambiguous else self.rotary_dim,
            "interleaved": self.interleaved,
            "inverse": self.inverse,
            "layout": self.layout,
            "position_ids": ids,
            "cu_seqlens": self._ends(device),
        }
        if self.function == "apply_rope_qk":
            others |= {"norm_eps": self.norm_eps, "norm_offset": self.norm_offset} | self._weights(generator)
        return xs, dos, others

    def _weights(self, generator: torch.Generator) -> dict[str, Tensor | None]:
        step = 3 if self.strided_norms else 1
        dtype = self.dtype if self.norms == "input" else torch.float32
        return {
            name: normal(generator, step * self.head_dim, dtype=dtype)[::step] if self.norms else None for name in NORMS
        }

    def _ends(self, device: str) -> Tensor | None:
        if self.lengths is None:
            return None
        return torch.tensor((0, *self.lengths)).cumsum(0).int().to(device)

    def _as_passed(self, x: Tensor) -> Tensor:
        x = x.permute(AXES[self.layout])
        return x[0] if self.layout == "thd" else x

    def _back(self, x: Tensor) -> Tensor:
        """Undo ``_as_passed``; a vector becomes one row."""
        if x.ndim == 1:
            return x[None]
        axes = AXES[self.layout]
        return (x[None] if self.layout == "thd" else x).permute([axes.index(axis) for axis in range(4)])

    def _outs(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the argument ``out``, if the call has one."""
        if self.out == "none":
            return {}
        xs = [given[name] for name in self.names]
        outs = xs if self.out == "in place" else [torch.zeros_like(x) for x in xs]
        return {"out": outs[0] if len(outs) == 1 else tuple(outs)}

    def call(self, made: Any, variant: tuple[str, str]) -> tuple[Callable[..., Any], dict[str, Any]]:
        xs, _, others = made
        given = {name: self._as_passed(x) for name, x in xs.items()} | others
        return getattr(fused_rope_attn, self.function), given

    def arguments(self, device: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        function, given = super().arguments(device)
        return function, given | self._outs(given)

    def references(self, made: Any, device: str) -> References:
        xs, dos, others = made
        values = {name: x.clone() for name, x in xs.items()}  # because the call may write in place
        ids = others["position_ids"]
        if ids is not None:
            ids = ids if ids.ndim == 3 else ids[None, None] if ids.ndim == 1 else ids[:, None]
        options = {"rotary_dim": self.rotary_dim, "interleaved": self.interleaved, "inverse": self.inverse}
        options |= {"position_ids": ids, "cu_seqlens": others["cu_seqlens"]}

        def run(dtype: torch.dtype | None) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            for name, x in values.items():
                weight = others.get(f"{name}_norm")
                norm = {} if weight is None else {"norm_eps": self.norm_eps, "norm_offset": self.norm_offset}
                results = testing.run_rotation_reference(
                    x, dos[name], others["cos"], others["sin"], dtype, weight=weight, **norm, **options
                )
                found |= {name: results.y, f"d{name}": results.dx}
                if results.dweight is not None:
                    found[f"d{name}_norm"] = results.dweight[None]
            return found

        def judged(name: str) -> torch.dtype:
            return others[name[1:]].dtype if name.endswith("_norm") else self.dtype

        return References(run, device, judged, may_be_nan=True)  # at positions outside the tables

    def results(self, function: Callable[..., Any], given: dict[str, Any], made: Any) -> dict[str, Tensor]:
        leaves = {name: given[name].detach() for name in self.wanted if given.get(name) is not None}
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        returned = function(**(given | leaves))
        turned = dict(zip(self.names, returned if isinstance(returned, tuple) else (returned,)))
        found = {name: self._back(x.detach()) for name, x in turned.items()}
        of = [name for name in self.names if {name, f"{name}_norm"} & leaves.keys()]
        if of:
            dys = [self._as_passed(made[1][name]) for name in of]
            gradients = torch.autograd.grad([turned[name] for name in of], list(leaves.values()), dys)
            found |= {f"d{name}": self._back(x) for name, x in zip(leaves, gradients)}
        return found

    def further(self, ran: Ran) -> Iterator[Finding]:
        """Run it with ``out``, because the differentiable call cannot have it."""
        if not (outs := self._outs(ran.given)):
            return
        returned, named = ran.function(**(ran.given | outs)), outs["out"]
        returned, named = (x if isinstance(x, tuple) else (x,) for x in (returned, named))
        is_same = all(x is y for x, y in zip(returned, named))
        yield Finding.that(ran.label, "out", is_same, "another tensor was returned")
        for name, x in zip(self.names, returned):
            yield Finding(ran.label, ran.references.compare(name, self._back(x)), is_tensor=False)
        if self.out == "in place":  # these may change
            for name in self.names:
                ran.given[name].copy_(ran.before[name])
