"""Checks of ``rope_attention`` and ``rope_attention_varlen``: outputs and gradients of every backend and strategy."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fused_rope_attn
from fused_rope_attn import testing
from fused_rope_attn.attention import planning, reference
from verification.calls import Check, Finding, Ran, References, same_bits
from verification.memory import SHARED, lay, lay_table

TENSORS = ("q", "k", "v", "do")
WEIGHTS = ("sinks", "q_norm", "k_norm")
NO_NORMS = {"q_norm": None, "k_norm": None, "norm_eps": 1e-6, "norm_offset": 0.0}
# A case with more scores is compared in some heads, whole, that include the first and the last: in float64 these take a
# second or two.
MOST_SCORES = 1 << 33

Heads = tuple[slice, slice]  # of the batch, of the key-value heads


@dataclass(frozen=True)
class AttentionCheck(Check, testing.Case):
    """A call: sizes, masks and data as in ``Case``, which is packed where it has ``seqlens``."""

    name: str = ""
    size: str = "small"
    memory: tuple[str, ...] | None = None  # the layouts of q, k, v and do; None: all as ``layout`` says
    packed_heads: int = 0  # q, k and v are views of one tensor (B, N, packed_heads, D), as a fused projection makes it
    table_memory: str = "plain"
    leading_one: bool = False  # tables (1, S, W)
    infers_rotary_dim: bool = False  # the call leaves R to the width of the tables, unless this is ambiguous
    wanted: tuple[str, ...] = (*TENSORS[:3], *WEIGHTS)  # the tensors that require a gradient, where the call has them
    return_lse: bool = True
    hides_nan: bool = False  # NaN in keys that no query sees, and in queries that see none
    bshd: bool = False
    max_seqlens: tuple[int, int] | None = None  # of packed sequences; None: those of the longest
    deterministic: bool = False
    only: tuple[torch.dtype, ...] = ()  # the dtypes that the case makes sense in; empty: all
    variants: tuple[tuple[str, str], ...] = (("reference", "auto"),)  # (backend, strategy)

    @property
    def function(self) -> str:
        return "rope_attention" if self.seqlens is None else "rope_attention_varlen"

    @property
    def longest(self) -> tuple[int, int]:
        """max_seqlen_q and max_seqlen_k."""
        if self.max_seqlens is not None:
            return self.max_seqlens
        return tuple(max((pair[i] for pair in self.seqlens or ()), default=0) for i in range(2))

    def make(self, device: str) -> tuple[testing.Inputs, dict[str, Any]]:
        """Return the inputs (B, H, N, D) in their memory layouts, and masks and norms by the names of arguments."""
        case = self if self.memory is None else replace(self, layout="bhnd")
        inputs = testing.make_inputs(case, device)
        masks = testing.masks_of(self, device) | (testing.norms_of(self, device) or NO_NORMS)
        tensors = {name: getattr(inputs, name) for name in TENSORS}
        if self.hides_nan and not set(self.memory or ()) & {*SHARED}:
            for name, rows in self._unseen(device).items():
                tensors[name] = tensors[name].masked_fill(rows[:, None, :, None], math.nan)
        if self.memory is not None:
            tensors = {name: lay(x, layout) for (name, x), layout in zip(tensors.items(), self.memory)}
        if self.packed_heads:
            tensors |= self._fused(tensors)
        tables = [lay_table(table, self.table_memory) for table in (inputs.cos, inputs.sin)]
        if self.seqlens is not None:  # rows for the longest sequence are enough
            tables = [table[..., : self.longest[1] + self.extra_rows, :] for table in tables]
        if self.leading_one and tables[0].ndim == 2:
            tables = [table[None] for table in tables]
        return testing.Inputs(**tensors, cos=tables[0], sin=tables[1]), masks

    def _fused(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        packed = tensors["q"].new_empty(self.batch, self.len_k, self.packed_heads, self.head_dim)
        views, first = {}, 0
        for name in TENSORS[:3]:
            last = first + self.packed_heads // 3
            # The last heads of each third, so that the largest offsets are used.
            views[name] = packed[:, :, last - tensors[name].shape[1] : last].transpose(1, 2).copy_(tensors[name])
            first = last
        return views

    def _unseen(self, device: str) -> dict[str, Tensor]:
        """Return the rows (1|B, N) of each tensor that no query or no key sees, as True."""
        if self.seqlens is not None:
            ends = [sum(pair[i] for pair in self.seqlens) for i in range(2)]
            past_q, past_k = (
                torch.arange(n, device=device)[None] >= end for n, end in zip((self.len_q, self.len_k), ends)
            )
            return {"q": past_q, "do": past_q, "k": past_k, "v": past_k}
        bounds = {name: x for name, x in testing.masks_of(self, device).items() if name.startswith("kv_")}
        position, low, high = reference.visible_range(
            self.len_q, self.len_k, self.causal, window=self.window, device=torch.device(device), **bounds
        )
        absent = reference.absent_keys(self.len_k, position, window=self.window, **bounds)
        found = {"q": low >= high, "do": low >= high}
        return found | ({} if absent is None else {"k": absent, "v": absent})

    def call(
        self, made: tuple[testing.Inputs, dict[str, Any]], variant: tuple[str, str]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        inputs, masks = made
        is_ambiguous = self.full_width and 2 * self.rotary <= self.head_dim
        arguments = {
            **{name: self._as_passed(getattr(inputs, name)) for name in TENSORS[:3]},
            "cos": inputs.cos,
            "sin": inputs.sin,
            "causal": self.causal,
            "softmax_scale": self.softmax_scale,
            "rotary_dim": None if self.infers_rotary_dim and not is_ambiguous else self.rotary_dim,
            "interleaved": self.interleaved,
            "return_lse": self.return_lse,
            "deterministic": self.deterministic,
            "backend": variant[0],
            "strategy": variant[1],
            **masks,
        }
        if self.seqlens is None:
            return fused_rope_attn.rope_attention, arguments | ({"layout": "bshd"} if self.bshd else {})
        ends = torch.tensor(((0, 0), *self.seqlens), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for i, name in enumerate(("q", "k")):
            arguments |= {f"cu_seqlens_{name}": ends[:, i].contiguous().to(inputs.q.device)}
            arguments |= {f"max_seqlen_{name}": self.longest[i]}
        del arguments["kv_starts"], arguments["kv_lens"]
        return fused_rope_attn.rope_attention_varlen, arguments

    def _as_passed(self, x: Tensor) -> Tensor:
        """x (B, H, N, D) as the function takes it."""
        if self.seqlens is not None:
            return x[0].transpose(0, 1)
        return x.transpose(1, 2) if self.bshd else x

    def _back(self, x: Tensor) -> Tensor:
        """Undo ``_as_passed``; a vector becomes one row."""
        if x.ndim == 1:
            return x[None]
        if self.seqlens is not None:
            return x.transpose(0, 1)[None]
        return x.transpose(1, 2) if self.bshd else x

    def obstacle(self, arch: str, variant: tuple[str, str]) -> planning.Obstacle | None:
        """Return what an explicit backend or strategy must raise, or None."""
        if variant[0] == "reference" or variant == ("auto", "auto"):
            return None
        needs = planning.Needs(
            arch, self.dtype, self.head_dim, variant[1], packed=self.seqlens is not None, no_keys=self.len_k == 0
        )
        return planning.obstacle("hopper" if variant[0] == "hopper" else "triton", needs)

    def references(self, made: tuple[testing.Inputs, dict[str, Any]], device: str) -> AttentionReferences:
        return AttentionReferences(self, made[0], device)

    def results(
        self, function: Callable[..., Any], given: dict[str, Any], made: tuple[testing.Inputs, dict[str, Any]]
    ) -> dict[str, Tensor]:
        """Return o, lse if the call returns it, and the gradients: (B, H, N, D), and one row each of weights."""
        leaves = {name: given[name].detach() for name in self.wanted if given[name] is not None}
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "q .* positions and k", UserWarning)  # more queries than keys
            returned = function(**(given | leaves))
        o, *lse = returned if self.return_lse else (returned,)
        if o.requires_grad and not leaves:
            raise AssertionError("o requires a gradient, but no input does")
        do = self._as_passed(made[0].do)
        gradients = torch.autograd.grad(o, list(leaves.values()), do) if leaves else ()
        found = {"o": self._back(o.detach())}
        if lse:
            found["lse"] = lse[0].detach() if self.seqlens is None else lse[0].detach()[None]
        # Weights' gradients are sums over all heads, and large cases compare only some heads.
        names = [name for name in leaves if self.size == "small" or name not in WEIGHTS]
        return found | {f"d{name}": self._back(x) for name, x in zip(leaves, gradients) if name in names}

    def further(self, ran: Ran) -> Iterator[Finding]:
        if not self.deterministic:
            return
        again = self.results(ran.function, ran.given, ran.made)
        changed = sum(0 if same_bits(x, again[name]) else int((x != again[name]).sum()) for name, x in ran.out.items())
        detail = f"{changed} elements differ" if changed else "bitwise equal"
        yield Finding(ran.label, testing.Comparison("rerun", float(changed), 0.0, 0.0, 0.0, not changed, detail))

    def compared_heads(self) -> list[Heads]:
        every = self.batch * self.heads_kv
        scores = max(1, self.heads_q // self.heads_kv * self.len_q * self.len_k)
        if every * scores <= MOST_SCORES:
            return [(slice(0, self.batch), slice(0, self.heads_kv))]
        count = max(1, min(8, MOST_SCORES // scores))
        chosen = [every - 1] if count == 1 else [i * (every - 1) // (count - 1) for i in range(count)]
        pairs = [divmod(i, self.heads_kv) for i in chosen]
        return [(slice(b, b + 1), slice(h, h + 1)) for b, h in pairs]

    def of_heads(self, x: Tensor, heads: Heads, *, of_keys: bool) -> Tensor:
        """Return the part of x (B, HQ|HKV, ...) that belongs to these key-value heads."""
        batch, keys = heads
        group = 1 if of_keys else self.heads_q // self.heads_kv
        return x[batch, keys.start * group : keys.stop * group]

    def part(self, inputs: testing.Inputs, heads: Heads) -> tuple[AttentionCheck, testing.Inputs]:
        """Return the case and the inputs of some heads."""
        batch, keys = heads
        some = {name: self.of_heads(getattr(inputs, name), heads, of_keys=name in ("k", "v")) for name in TENSORS}
        tables = {name: getattr(inputs, name) for name in ("cos", "sin")}
        if self.table_batch:
            tables = {name: x[batch] for name, x in tables.items()}
        bounds = {name: x[batch] for name in ("kv_starts", "kv_lens") if (x := getattr(self, name)) is not None}
        sizes = {"batch": batch.stop - batch.start, "heads_kv": keys.stop - keys.start}
        sizes["heads_q"] = sizes["heads_kv"] * (self.heads_q // self.heads_kv)
        return replace(self, **sizes, **bounds), testing.Inputs(**some, **tables)


class AttentionReferences:
    """``References`` of the compared heads, which are computed apart from each other."""

    def __init__(self, check: AttentionCheck, inputs: testing.Inputs, device: str):
        self.check, self.inputs, self.heads = check, inputs, check.compared_heads()
        self.parts = [self._of_part(*check.part(inputs, heads), device) for heads in self.heads]

    @staticmethod
    def _of_part(case: AttentionCheck, part: testing.Inputs, device: str) -> References:
        def run(dtype: torch.dtype | None) -> dict[str, Tensor]:
            return _by_name(testing.run_reference(part, case, dtype))

        zero = functools.partial(testing.noise_of_zero, case=case, inputs=part)
        return References(run, device, lambda name: case.dtype, zero)

    def shape(self, name: str) -> torch.Size:
        if name[1:] in WEIGHTS:
            return self.parts[0].shape(name)
        like = self.inputs.k if name in ("dk", "dv") else self.inputs.q
        return like.shape[:3] if name == "lse" else like.shape

    def findings(self, label: str, name: str, x: Tensor) -> Iterator[Finding]:
        """One finding for all parts: the largest errors, and the worst row with its detail."""
        found = []
        for heads, part in zip(self.heads, self.parts):
            is_weight = name[1:] in WEIGHTS
            held = x if is_weight else self.check.of_heads(x, heads, of_keys=name in ("dk", "dv"))
            found.append(part.compare(name, held))
        worst = max([one for one in found if not one.ok] or found, key=lambda one: one.row_ratio)
        # Heads that are not compared must at least be written, and numbers.
        if len(found) > 1 and name != "lse" and not bool(torch.isfinite(x).all()):
            worst = replace(worst, ok=False, detail=f"not finite everywhere; {worst.detail}")
        figures = {key: max(getattr(one, key) for one in found) for key in ("error", "eager_error")}
        yield Finding(label, replace(worst, **figures))


def _by_name(results: testing.Results) -> dict[str, Tensor]:
    found = {name: x for name, x in zip(results._fields, results) if x is not None}
    weights = {f"d{name}": getattr(results, f"d{name}") for name in WEIGHTS}
    return found | {name: x[None] for name, x in weights.items() if x is not None}
