"""One call of the rotation alone: its options, and its tensors.

``SCHEMA``, ``to_arguments`` and ``from_arguments`` are derived from the fields of both.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

from fused_rope_attn.runtime.options import OPERATOR_TYPES

# The function that messages about derivatives name for calls with norms.
WITH_NORMS = "apply_rope_qk with norms"


class RotationOptions(NamedTuple):
    """Everything of one call but its tensors. layout: a key of ``LAYOUTS``.

    in_place: the outputs are the inputs, so that columns that pass through are there already. norm_eps and norm_offset:
    of the norms; None where the call has no weights, since a number, even a default, is an input to who traces it.
    """

    rotary_dim: int
    interleaved: bool
    inverse: bool
    layout: str
    in_place: bool = False
    norm_eps: float | None = None
    norm_offset: float | None = None


class RotationTensors(NamedTuple):
    """The tensors of one call: one to three xs of equal batch, length, head dim and dtype, and as many outs or None.

    position_ids ``(1|B, sections, N)`` or None; cu_seqlens ``(sequences + 1,)`` int32 or None. weights: none, or those
    of the norms of the first xs, ``(D,)`` each.
    """

    xs: Any
    outs: Any
    cos: Any
    sin: Any
    position_ids: Any
    cu_seqlens: Any
    weights: Any = ()


_TENSORS = {"cos": "Tensor", "sin": "Tensor", "position_ids": "Tensor?", "cu_seqlens": "Tensor?", "weights": "Tensor[]"}
# Operators find ``in_place`` out by themselves.
_OPTIONS = {name: OPERATOR_TYPES[kind] for name, kind in get_type_hints(RotationOptions).items() if name != "in_place"}
# The arguments of the operators after their inputs and outputs, in the order of ``to_arguments``.
SCHEMA = ", ".join(f"{kind} {name}" for name, kind in (_TENSORS | _OPTIONS).items())


def to_arguments(options: RotationOptions, tensors: RotationTensors) -> tuple:
    """Return the operators' arguments after their inputs and outputs, as ``SCHEMA`` names them."""
    return (*[getattr(tensors, name) for name in _TENSORS], *[getattr(options, name) for name in _OPTIONS])


def from_arguments(xs: Any, outs: Any, *arguments: Any) -> tuple[RotationOptions, RotationTensors]:
    """Inverse of ``to_arguments``; ``outs`` is None where the call makes them."""
    options = RotationOptions(**dict(zip(_OPTIONS, arguments[len(_TENSORS) :])))
    return options, RotationTensors(xs, outs, *arguments[: len(_TENSORS)])
