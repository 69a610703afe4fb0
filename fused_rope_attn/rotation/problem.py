"""One call of the rotation alone: its options, and its tensors.

A field with an ``Option`` row is an argument of the operators: ``SCHEMA``, ``to_arguments`` and ``from_arguments`` are
derived from these fields.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from fused_rope_attn.runtime.options import Option, rows_of

# The function that messages about derivatives name for calls with norms.
WITH_NORMS = "apply_rope_qk with norms"


class RotationOptions(NamedTuple):
    """Everything of one call but its tensors. layout: a key of ``LAYOUTS``.

    in_place: the outputs are the inputs, so that columns that pass through are there already. norm_eps and norm_offset:
    of the norms; None where the call has no weights, since a number, even a default, is an input to who traces it.
    """

    rotary_dim: Annotated[int, Option(operator="int")]
    interleaved: Annotated[bool, Option(operator="bool")]
    inverse: Annotated[bool, Option(operator="bool")]
    layout: Annotated[str, Option(operator="str")]
    in_place: bool = False
    norm_eps: Annotated[float | None, Option(operator="float?")] = None
    norm_offset: Annotated[float | None, Option(operator="float?")] = None


class RotationTensors(NamedTuple):
    """The tensors of one call: one to three xs of equal batch, length, head dim and dtype, and as many outs or None.

    position_ids ``(1|B, sections, N)`` or None; cu_seqlens ``(sequences + 1,)`` int32 or None. weights: none, or those
    of the norms of the first xs, ``(D,)`` each.
    """

    xs: Any
    outs: Any
    cos: Annotated[Any, Option(operator="Tensor")]
    sin: Annotated[Any, Option(operator="Tensor")]
    position_ids: Annotated[Any, Option(operator="Tensor?")]
    cu_seqlens: Annotated[Any, Option(operator="Tensor?")]
    weights: Annotated[Any, Option(operator="Tensor[]")] = ()


_TENSORS, _OPTIONS = rows_of(RotationTensors), rows_of(RotationOptions)
# The arguments of the operators after their inputs and outputs, in the order of ``to_arguments``.
SCHEMA = ", ".join(f"{row.operator} {name}" for name, row in (_TENSORS | _OPTIONS).items())


def to_arguments(options: RotationOptions, tensors: RotationTensors) -> tuple:
    """Return the operators' arguments after their inputs and outputs, as ``SCHEMA`` names them."""
    return (*[getattr(tensors, name) for name in _TENSORS], *[getattr(options, name) for name in _OPTIONS])


def from_arguments(xs: Any, outs: Any, *arguments: Any) -> tuple[RotationOptions, RotationTensors]:
    """Inverse of ``to_arguments``; ``outs`` is None where the call makes them."""
    options = RotationOptions(**dict(zip(_OPTIONS, arguments[len(_TENSORS) :])))
    return options, RotationTensors(xs, outs, *arguments[: len(_TENSORS)])
