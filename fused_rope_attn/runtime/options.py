"""The options of the public functions: each is stated once, as a row of a table of keywords.

A table is a ``TypedDict``. Type checkers take the keywords of overloads from it. The package takes its ``Option`` rows
when it is imported, and derives from them the checks, the records of a call and the operators' schemas. The public
functions spell their options out, with defaults and documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

import torch

from fused_rope_attn.runtime import checks
from fused_rope_attn.runtime.axes import Layout

RotationLayout = Literal["bhsd", "bshd", "sbhd", "thd"]
Backend = Literal["auto", "reference", "triton", "hopper"]
Strategy = Literal["auto", "inline", "prepass"]
CpMethod = Literal["auto", "all_gather", "all_to_all"]


@dataclass(frozen=True)
class Option:
    """One option of a public function. Its name and the type that a caller sees are next to the row.

    default: the value that a caller need not give.
    check: ``check(name, value, tensors)`` raises if the value is wrong. ``tensors`` is the call's record, which has
        q as ``(B, HQ, NQ, D)`` and the norms' weights. None where something else checks the option.
    normalise: ``normalise(value, tensors)`` is the value that the record of a call holds. None: it holds the value.
    operator: the option's type in the operators' schemas. None where no operator takes it.
    """

    default: Any = None
    check: Callable[[str, Any, Any], None] | None = None
    normalise: Callable[[Any, Any], Any] | None = None
    operator: str | None = None


def rows_of(table: Any) -> dict[str, Option]:
    """Return the rows of a table of keywords by their names, in its order; keywords without a row are left out."""
    hints = get_type_hints(table, include_extras=True)
    rows = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
    return {name: row for name, row in rows.items() if isinstance(row, Option)}


def _scale(value: Any, tensors: Any) -> float:
    if value is not None:
        return float(value)
    q_nope = getattr(tensors, "q_nope", None)
    return (tensors.q.shape[3] + (0 if q_nope is None else q_nope.shape[3])) ** -0.5


def _window(value: Any, _: Any) -> tuple[int, int] | None:
    """Return (left, right) as ints of Python; None for a window that hides nothing."""
    if value is None or (value[0] < 0 and value[1] < 0):
        return None
    return checks.as_int(value[0]), checks.as_int(value[1])


def _softcap(value: Any, _: Any) -> float:
    return float(value)


def _of_norms(value: Any, tensors: Any) -> float | None:
    """Return None without norms: a number, even a default, would become an input of a traced graph."""
    return None if tensors.q_norm is None else float(value)


def _deterministic(value: bool, _: Any) -> bool:
    return value or torch.are_deterministic_algorithms_enabled()


class ScoreOptions(TypedDict, total=False):
    """Options of every function of attention."""

    softmax_scale: Annotated[float | None, Option(None, checks.check_softmax_scale, _scale, "float")]
    rotary_dim: Annotated[int | None, Option()]  # ``check_tables`` finds it, because the tables' width decides
    interleaved: Annotated[bool, Option(False, checks.check_bool, None, "bool")]
    window: Annotated[tuple[int, int] | None, Option(None, checks.check_window, _window, "SymInt[]?")]
    softcap: Annotated[float, Option(0.0, checks.check_softcap, _softcap, "float")]
    norm_eps: Annotated[float, Option(1e-6, checks.check_norm_eps, _of_norms, "float?")]
    norm_offset: Annotated[float, Option(0.0, checks.check_norm_offset, _of_norms, "float?")]
    sinks: Annotated[torch.Tensor | None, Option(None, checks.check_sinks)]
    q_norm: Annotated[torch.Tensor | None, Option(None, checks.check_norm)]
    k_norm: Annotated[torch.Tensor | None, Option(None, checks.check_norm)]


class PackedOptions(ScoreOptions, total=False):
    """Options of ``rope_attention_varlen`` and of ``rope_attention``."""

    deterministic: Annotated[bool, Option(False, checks.check_bool, _deterministic, "bool")]
    backend: Annotated[Backend, Option("auto", checks.check_choice(get_args(Backend)), None, "str")]
    strategy: Annotated[Strategy, Option("auto", checks.check_choice(get_args(Strategy)), None, "str")]
    batch_invariant: Annotated[bool, Option(False, checks.check_bool, None, "bool")]


class VarlenOptions(PackedOptions, total=False):
    """Options of ``rope_attention_varlen``, and of no other function."""

    token_tables: bool


class AttentionOptions(PackedOptions, total=False):
    """Options of ``rope_attention``."""

    kv_starts: Annotated[torch.Tensor | None, Option(None, checks.check_bounds_of_keys)]
    kv_lens: Annotated[torch.Tensor | None, Option(None, checks.check_bounds_of_keys)]
    query_starts: Annotated[torch.Tensor | None, Option(None, checks.check_intervals)]
    query_ends: Annotated[torch.Tensor | None, Option(None, checks.check_intervals)]
    layout: Layout


class PackedLatentOptions(TypedDict, total=False):
    """Options of ``rope_attention_mla_varlen``. Their rows are those of ``CallOptions``."""

    softmax_scale: float | None
    interleaved: bool
    window: tuple[int, int] | None
    deterministic: bool
    backend: Backend


class LatentOptions(PackedLatentOptions, total=False):
    """Options of ``rope_attention_mla``."""

    kv_starts: torch.Tensor | None
    kv_lens: torch.Tensor | None
    layout: Layout


class _EveryCall(TypedDict, total=False):
    """Options that overloads spell out, because they are positional or decide the type of the result."""

    causal: Annotated[bool, Option(False, checks.check_bool, None, "bool")]
    return_lse: Annotated[bool, Option(False, checks.check_bool)]


class CallOptions(_EveryCall, AttentionOptions, total=False):
    """The table of attention: everything that a caller of ``rope_attention`` can choose."""

    # It decides the type of the result, so that overloads spell it out too.
    return_max_logit: Annotated[bool, Option(False, checks.check_bool, None, "bool")]


class StepOptions(ScoreOptions, total=False):
    """Options of ``rope_attention_with_kvcache``."""

    cache_is_rotated: bool
    kv_starts: torch.Tensor | None
    block_table: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    layout: Layout
    causal: bool
    backend: Backend
    batch_invariant: bool


class PackedCpOptions(ScoreOptions, total=False):
    """Options of ``rope_attention_varlen_cp``."""

    method: CpMethod
    deterministic: bool
    backend: Backend
    batch_invariant: bool


class CpOptions(PackedCpOptions, total=False):
    """Options of ``rope_attention_cp``."""

    sharding: str
    total_len: int | None
    layout: Layout
