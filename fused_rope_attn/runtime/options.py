"""The options of the public functions: each is stated once, as a row of a table of keywords.

A table is a ``TypedDict``. Type checkers take the keywords of overloads from it. The package takes its ``Option`` rows
when it is imported, and derives from them the checks and the records of a call. The public functions spell their
options out, with defaults and documentation, and a field of ``Problem`` holds what kernels need of an option.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

import torch

from fused_rope_attn.runtime import checks
from fused_rope_attn.runtime.forms import Form
from fused_rope_attn.runtime.layouts import Layout

Backend = Literal["auto", "reference", "triton", "hopper"]
Strategy = Literal["auto", "inline", "prepass"]
CpMethod = Literal["auto", "all_gather", "all_to_all"]
# The types of an operator's arguments, in its schema.
OPERATOR_TYPES = {
    bool: "bool",
    int: "int",
    str: "str",
    float: "float",
    float | None: "float?",
    tuple[int, int] | None: "SymInt[]?",
}


@dataclass(frozen=True)
class Option:
    """One option of a public function. Its name and the type that a caller sees are next to the row.

    default: the value that a caller need not give.
    check: ``check(name, value, tensors)`` raises if the value is wrong, ``tensors`` has the norms' weights; or the
        ``Form`` of a tensor. None where something else checks the option.
    normalise: ``normalise(value, tensors)`` is the value that the record of a call holds, ``tensors`` has q as
        ``(B, HQ, NQ, D)`` and the norms' weights. None: it holds the value.
    """

    default: Any = None
    check: Callable[[str, Any, Any], None] | Form | None = None
    normalise: Callable[[Any, Any], Any] | None = None


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


def _of_norms(value: Any, tensors: Any) -> float | None:
    """Return None without norms: a number, even a default, would become an input of a traced graph."""
    return None if tensors.q_norm is None else float(value)


_CAP = checks.check_number(limits="finite and positive, or 0.0 for none", holds=lambda value: 0.0 <= value < math.inf)
_FLAG = Option(False, checks.check_bool)
_DETERMINISTIC = Option(False, checks.check_bool, lambda on, _: on or torch.are_deterministic_algorithms_enabled())
_BOUNDS = Option(None, Form("B", torch.int32))
_INTERVALS = Option(None, Form("B NK | 1 NK", torch.int32))
_NORM = Option(None, Form("D", torch.float32, None))


class CommonOptions(TypedDict, total=False):
    """Options of every function of attention."""

    softmax_scale: Annotated[float | None, Option(None, checks.check_softmax_scale, _scale)]
    interleaved: Annotated[bool, _FLAG]
    window: Annotated[tuple[int, int] | None, Option(None, checks.check_window, _window)]
    backend: Annotated[Backend, Option("auto", checks.check_choice(get_args(Backend)))]


class PaddedOptions(TypedDict, total=False):
    """Options of functions with a batch axis."""

    kv_starts: Annotated[torch.Tensor | None, _BOUNDS]
    kv_lens: Annotated[torch.Tensor | None, _BOUNDS]
    layout: Layout


class ScoreOptions(CommonOptions, total=False):
    """Options of every function except those of multi-head latent attention."""

    rotary_dim: Annotated[int | None, Option()]  # ``check_tables`` finds it, because the tables' width decides
    softcap: Annotated[float, Option(0.0, _CAP, lambda value, _: float(value))]
    norm_eps: Annotated[float, Option(1e-6, checks.check_norm_eps, _of_norms)]
    norm_offset: Annotated[float, Option(0.0, checks.check_norm_offset, _of_norms)]
    sinks: Annotated[torch.Tensor | None, Option(None, Form("HQ", torch.float32, None))]
    q_norm: Annotated[torch.Tensor | None, _NORM]
    k_norm: Annotated[torch.Tensor | None, _NORM]
    batch_invariant: Annotated[bool, _FLAG]


class PackedLatentOptions(CommonOptions, total=False):
    """Options of ``rope_attention_mla_varlen``."""

    deterministic: Annotated[bool, _DETERMINISTIC]


class LatentOptions(PackedLatentOptions, PaddedOptions, total=False):
    """Options of ``rope_attention_mla``."""


class PackedOptions(ScoreOptions, PackedLatentOptions, total=False):
    """Options of ``rope_attention_varlen`` and of ``rope_attention``."""

    strategy: Annotated[Strategy, Option("auto", checks.check_choice(get_args(Strategy)))]


class VarlenOptions(PackedOptions, total=False):
    """Options of ``rope_attention_varlen``."""

    token_tables: bool


class AttentionOptions(PackedOptions, PaddedOptions, total=False):
    """Options of ``rope_attention``."""

    query_starts: Annotated[torch.Tensor | None, _INTERVALS]
    query_ends: Annotated[torch.Tensor | None, _INTERVALS]


class CallOptions(AttentionOptions, total=False):
    """The table of attention. Overloads spell these out, because they are positional or decide the results."""

    causal: Annotated[bool, _FLAG]
    return_lse: Annotated[bool, _FLAG]
    return_max_logit: Annotated[bool, _FLAG]


class StepOptions(ScoreOptions, total=False):
    """Options of ``rope_attention_with_kvcache``."""

    cache_is_rotated: bool
    kv_starts: torch.Tensor | None
    block_table: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    layout: Layout
    causal: bool


class PackedCpOptions(ScoreOptions, total=False):
    """Options of ``rope_attention_varlen_cp``."""

    method: CpMethod
    deterministic: bool


class CpOptions(PackedCpOptions, total=False):
    """Options of ``rope_attention_cp``."""

    sharding: str
    total_len: int | None
    layout: Layout
