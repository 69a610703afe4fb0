"""One call of the rotation alone: its options, and its tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

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


# The arguments of the operators behind their inputs and outputs, in the order of ``flatten``.
SCHEMA = (
    "Tensor cos, Tensor sin, Tensor? position_ids, Tensor? cu_seqlens, int rotary_dim, bool interleaved, bool inverse, "
    "str layout, Tensor[] weights, float? norm_eps, float? norm_offset"
)


def flatten(options: RotationOptions, tensors: RotationTensors) -> tuple:
    """The operators' arguments behind their inputs and outputs, as ``SCHEMA`` names them."""
    return (
        tensors.cos, tensors.sin, tensors.position_ids, tensors.cu_seqlens, options.rotary_dim, options.interleaved,
        options.inverse, options.layout, tensors.weights, options.norm_eps, options.norm_offset,
    )  # fmt: skip


def rebuild(
    xs,
    outs,
    cos,
    sin,
    position_ids,
    cu_seqlens,
    rotary_dim,
    interleaved,
    inverse,
    layout,
    weights,
    norm_eps,
    norm_offset,
) -> tuple[RotationOptions, RotationTensors]:
    """Inverse of ``flatten``; ``outs`` is None where the call makes them."""
    options = RotationOptions(
        rotary_dim, interleaved, inverse, layout, norm_eps=norm_eps, norm_offset=norm_offset
    )  # fmt: skip
    return options, RotationTensors(xs, outs, cos, sin, position_ids, cu_seqlens, weights)
