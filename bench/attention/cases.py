"""The (B, HQ/HKV, N, D) configurations that are measured, and the groups that select them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from bench.names import length_name
from bench.suite import matching
from fused_rope_attn.testing import Case


@dataclass(frozen=True)
class BenchCase:
    """A named problem; ``family`` is what stays equal along a plot's axis of lengths."""

    name: str
    family: str
    groups: tuple[str, ...]
    case: Case

    @property
    def shape(self) -> str:
        """``B2 H32/8 N4096 D128 causal bf16``."""
        return self.case.name

    @property
    def is_host(self) -> bool:
        """Whether it is ``HOST_CASE``, of which host time is measured."""
        return "host" in self.groups

    def flops(self, part: str) -> float:
        """Matrix-product FLOPs of ``"fwd"``, ``"bwd"`` or ``"both"``: 4 B HQ NQ NK D, half when causal, 2.5 times that
        backward. The rotation counts nothing."""
        c = self.case
        forward = 4.0 * c.batch * c.heads_q * c.len_q * c.len_k * c.head_dim * (0.5 if c.causal else 1.0)
        return forward * {"fwd": 1.0, "bwd": 2.5, "both": 3.5}[part]


def _case(family, batch, heads_q, heads_kv, length, head_dim, *groups, causal=True) -> BenchCase:
    case = Case(batch, heads_q, heads_kv, length, length, head_dim, causal=causal)
    return BenchCase(f"{family}-{length_name(length)}", family, groups, case)


# With _LONG, the nineteen of the project that this one starts from. Batches: 2 for the Llamas as published, 1 from
# where one sequence fills the card (16K at 32 heads, 4K at 64).
_SHORTER = (
    *(_case("Small", 4, 8, 8, n, 64, "nineteen", "small") for n in (512, 1024, 2048, 4096, 8192)),
    *(_case("Llama7B", 2, 32, 32, n, 128, "nineteen", "llama7b") for n in (512, 1024, 2048, 4096, 8192)),
    _case("Llama7B", 1, 32, 32, 16384, 128, "nineteen", "llama7b"),
    *(_case("Llama70B", 2, 64, 64, n, 128, "nineteen", "llama70b") for n in (512, 1024, 2048)),
    *(_case("Llama70B", 1, 64, 64, n, 128, "nineteen", "llama70b") for n in (4096, 8192)),
)
_LONG = (
    _case("Long", 1, 16, 16, 32768, 128, "nineteen", "long"),
    _case("Long", 1, 8, 8, 65536, 128, "nineteen", "long"),
    _case("Long", 1, 4, 4, 131072, 128, "nineteen", "long"),
)

_OTHERS = (
    _case("Llama3-8B", 2, 32, 8, 4096, 128, "gqa"),
    _case("Llama3-8B", 1, 32, 8, 16384, 128, "gqa"),
    # Phi-3-mini and Gemma-7B: head dimensions that fill no power of two, and the largest.
    *(_case("Phi3", 2, 32, 32, n, 96, "d96") for n in (1024, 4096)),
    *(_case("Gemma", 2, 16, 16, n, 256, "d256") for n in (1024, 4096)),
    # No mask: encoders, diffusion transformers.
    _case("Small-full", 4, 8, 8, 1024, 64, "full", causal=False),
    *(_case("Llama7B-full", 2, 32, 32, n, 128, "full", causal=False) for n in (1024, 4096)),
)

# The eight shapes at which the target is stated.
TABLE = (
    "Small-512",
    "Small-1K",
    "Llama7B-2K",
    "Llama7B-4K",
    "Llama70B-1K",
    "Llama3-8B-4K",
    "Llama3-8B-16K",
    "Long-64K",
)

# The long ones last: a time budget that runs out has then covered the most cases.
CASES: tuple[BenchCase, ...] = tuple(
    replace(case, groups=(*case.groups, "table")) if case.name in TABLE else case for case in _SHORTER + _OTHERS + _LONG
)
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(("table", "all", *(group for case in CASES for group in case.groups))))

# Small enough that the GPU waits for the host at every call: what is measured is Python, dispatch and launches.
HOST_CASE = BenchCase("Host", "Host", ("host",), Case(1, 4, 4, 128, 128, 64))


def select(groups: list[str], names: str, dtype: torch.dtype) -> list[BenchCase]:
    """Cases of any of the groups whose name contains any of the comma-separated words (none: all), in ``dtype``.

    ValueError for an unknown group or a selection without cases.
    """
    unknown = [group for group in groups if group not in GROUPS]
    if unknown:
        raise ValueError(f"unknown group {', '.join(unknown)}; groups are {', '.join(GROUPS)}")
    chosen = [case for case in CASES if "all" in groups or set(groups) & set(case.groups)]
    return [with_dtype(case, dtype) for case in matching(chosen, names)]


def named(names: list[str], dtype: torch.dtype) -> list[BenchCase]:
    """The cases with these names and those of these groups, in ``dtype`` and in the order of the table.

    ValueError that lists what there is for another name, or without any.
    """
    known = {case.name.lower() for case in CASES} | {*GROUPS}
    asked = {name.lower() for name in names}
    if not asked or asked - known:
        what = ", ".join(sorted(asked - known)) or "nothing"
        groups, all_names = ", ".join(GROUPS), ", ".join(case.name for case in CASES)
        raise ValueError(f"cases are given by name or group, not {what}; groups are {groups}, names are {all_names}")
    chosen = [case for case in CASES if "all" in asked or case.name.lower() in asked or asked & set(case.groups)]
    return [with_dtype(case, dtype) for case in chosen]


def with_dtype(case: BenchCase, dtype: torch.dtype) -> BenchCase:
    """The same problem in another dtype."""
    return replace(case, case=replace(case.case, dtype=dtype))
