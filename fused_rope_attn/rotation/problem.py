"""One call of the rotation alone: its options, its tensors, and every refusal of `apply_rope` and `apply_rope_qk`.

A refusal is raised before anything is written, launched or allocated. ``SCHEMA``, ``to_arguments`` and
``from_arguments`` are derived from the fields of both records.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from fused_rope_attn.runtime import checks, layouts
from fused_rope_attn.runtime.options import OPERATOR_TYPES

# The axes B, H, N and D of a tensor in each layout; packed tokens have no batch.
LAYOUTS: dict[str, Any] = {
    layout: tuple(order.index(i) if i in order else None for i in range(4)) for layout, order in layouts.AXES.items()
}
_SYMBOLS = {layout: ["BHND"[i] for i in order] for layout, order in layouts.AXES.items()}
_ONE, _PAIR = checks.Forms(x="B H N D"), checks.Forms(q="B HQ N D", k="B HKV N D", v="B HV N D")
_IDS = checks.Form("N | B N | 1 N | B 2 N | 1 2 N", torch.int32, torch.int64)
_ENDS, _WEIGHT = checks.Form("sequences+1", torch.int32), checks.Form("D", torch.float32, None)
_OUTS = {layout: checks.Form(" ".join(_SYMBOLS[layout]), None) for layout in LAYOUTS}
# The function that messages about derivatives name for calls with norms.
WITH_NORMS = "apply_rope_qk with norms"


class RotationOptions(NamedTuple):
    """Everything of one call but its tensors. layout: a key of ``LAYOUTS``.

    norm_eps and norm_offset: of the norms; None without weights, because torch.compile would turn a number, even a
    default, into a graph input. in_place: the outputs are the inputs, which hold the columns that pass through already.
    """

    rotary_dim: int
    interleaved: bool
    inverse: bool
    layout: str
    norm_eps: float | None = None
    norm_offset: float | None = None
    in_place: bool = False


class RotationTensors(NamedTuple):
    """The tensors of one call: one to three xs of equal batch, length, head dim and dtype, and as many outs or None.

    position_ids ``(1|B, sections, N)`` or None; cu_seqlens ``(sequences + 1,)`` int32 or None. weights: none, or those
    of the norms of the first xs, ``(D,)`` each. A caller of `apply_rope_qk` may leave each None and
    give position_ids fewer axes.
    """

    xs: Any
    outs: Any
    cos: Any
    sin: Any
    position_ids: Any
    cu_seqlens: Any
    weights: Any = ()

    @property
    def q_norm(self) -> Any:
        return self.weights[0] if self.weights else None


_TENSORS = {"cos": "Tensor", "sin": "Tensor", "position_ids": "Tensor?", "cu_seqlens": "Tensor?", "weights": "Tensor[]"}
# Operators find ``in_place`` out by themselves.
_OPTIONS = {name: OPERATOR_TYPES[kind] for name, kind in get_type_hints(RotationOptions).items() if name != "in_place"}
# The arguments of the operators after their inputs and outputs, in the order of ``to_arguments``.
SCHEMA = ", ".join(f"{kind} {name}" for name, kind in (_TENSORS | _OPTIONS).items())


def to_arguments(options: RotationOptions, tensors: RotationTensors) -> tuple:
    """Return the operators' arguments after their inputs and outputs, as ``SCHEMA`` names them."""
    return (*tensors[2:], *[getattr(options, name) for name in _OPTIONS])


def from_arguments(xs: Any, outs: Any, *arguments: Any) -> tuple[RotationOptions, RotationTensors]:
    """Undo ``to_arguments``; ``outs`` is None where the call makes them."""
    options = RotationOptions(**dict(zip(_OPTIONS, arguments[len(_TENSORS) :])))
    return options, RotationTensors(xs, outs, *arguments[: len(_TENSORS)])


def check_rotation(options: Any, tensors: RotationTensors, norm_eps: Any = None, norm_offset: Any = None) -> int:
    """Check a call of `apply_rope`, with one x, or of `apply_rope_qk`, which has norm_eps; return the rotary dim R.

    options and tensors hold what the caller gave. Raises TypeError or ValueError naming the argument, what was expected
    and what came.
    """
    xs, outs, cos, sin, position_ids, cu_seqlens, weights = tensors
    rotary_dim, layout = options.rotary_dim, options.layout
    checks.check_bool("interleaved", options.interleaved)
    checks.check_bool("inverse", options.inverse)
    checks.check_layout(layout, tuple(LAYOUTS))
    first, forms = ("x", _ONE) if len(xs) == 1 else ("q", _PAIR)
    batch, _, length, head_dim, *_ = forms.check(layout, tuple(xs))
    x = xs[0]
    if head_dim < 2:
        raise ValueError(f"{first} must have a head dim of at least 2, but has shape {checks.shown(x.shape)}")

    if position_ids is not None and cu_seqlens is not None:
        raise ValueError("position_ids must be None where cu_seqlens is given: both say where every token stands")
    if position_ids is not None:
        _IDS.check("position_ids", position_ids, first, x, {"B": batch, "N": length})
    if cu_seqlens is not None:
        if layout != "thd":
            raise ValueError(f"cu_seqlens must be None unless layout is 'thd', but layout is {layout!r}")
        _ENDS.check("cu_seqlens", cu_seqlens, first, x, {})
        if cu_seqlens.shape[0] < 1 or not cu_seqlens.is_contiguous():
            found = f"shape {checks.shown(cu_seqlens.shape)} and strides {cu_seqlens.stride()}"
            raise ValueError(f"cu_seqlens must be contiguous with shape (sequences+1,), but has {found}")
        checks.check_ends("cu_seqlens", cu_seqlens, length, first)
    elif layout == "thd" and position_ids is None:
        raise ValueError("cu_seqlens must be given for layout 'thd' (or position_ids), but is None")

    rows = length if position_ids is None and cu_seqlens is None else 0
    # Two ids: the tables serve one half of the rotary dims, which is rotated as if it were a head of its own.
    sections = 1 if position_ids is None or position_ids.ndim < 3 else 2
    if rotary_dim is not None:
        rotary_dim = checks.check_rotary_dim(rotary_dim, head_dim)
        if rotary_dim % (2 * sections):
            raise ValueError(f"rotary_dim must be a multiple of 4 for two position ids, but is {rotary_dim}")
        rotary_dim //= sections
    rotary_dim = checks.check_tables(cos, sin, x, batch, rows, head_dim // sections, rotary_dim, first, first)
    if weights:
        q_norm, k_norm = weights
        if (q_norm is None) != (k_norm is None):
            checks.refuse_one_of_two(q_norm=q_norm, k_norm=k_norm)
        if q_norm is not None:
            _WEIGHT.check("q_norm", q_norm, first, x, {"D": head_dim})
            _WEIGHT.check("k_norm", k_norm, first, x, {"D": head_dim})
        checks.check_norm_eps("norm_eps", norm_eps, tensors)
        checks.check_norm_offset("norm_offset", norm_offset, tensors)
    if outs is not None:
        _check_outs(xs, outs, weights, layout)
    return rotary_dim * sections


def _check_outs(xs: list[Tensor], outs: list[Any], weights: Sequence[Tensor | None], layout: str) -> None:
    for i, (x, out) in enumerate(zip(xs, outs)):
        name, out_name = ("x", "out") if len(xs) == 1 else ("qkv"[i], f"out[{i}]")
        _OUTS[layout].check(out_name, out, name, x, dict(zip(_SYMBOLS[layout], x.shape)))
        if out.numel() and any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape)):
            raise ValueError(f"{out_name} must not be expanded: several elements share memory, strides {out.stride()}")
        if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
            wanting = name if x.requires_grad else out_name
            raise ValueError(f"{out_name} must be None where {wanting} requires a gradient: there is none through out=")
    for name, weight in zip(("q_norm", "k_norm"), weights):
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"out must be None where {name} requires a gradient: there is none through out=")
