"""Checks of single arguments and the wording of refusals, which the validation of every package shares.

`TypeError` for a wrong type or dtype, `ValueError` for a wrong shape, range, device or combination. Each message names
the argument, what was expected and what came.
"""

import itertools
import math
import sys
import warnings
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import Tensor, strided

from fused_rope_attn.runtime.axes import LAYOUTS, form_of, in_layout
from fused_rope_attn.runtime.registration import is_plain

# float64 is for the reference (gradcheck, tolerances); planning refuses it for the kernels.
INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def heads_first(layout: str, suffix: str = "", length: str = "NK", **arguments: Tensor | None) -> tuple[Any, ...]:
    """Return views (B, H, N, D) of tensors in the caller's layout; None stays None.

    `suffix` and `length` as in `check_queries_and_keys`; new tokens, k and v without the suffix, have q's length.
    """
    if layout not in LAYOUTS:
        refuse_choice("layout", layout, LAYOUTS)
    given = {name: x for name, x in arguments.items() if x is not None}
    check_kinds(**given)
    for name, x in given.items():
        if x.ndim != 4:
            refuse_rank(layout, length if name.endswith(suffix) else "NQ", **{name: x})
    return tuple(None if x is None else x.transpose(1, 2) for x in arguments.values())


def check_queries_and_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    suffix: str = "",
    length: str = "NK",
    layout: str = "bhsd",
) -> None:
    """Check dtypes, devices and shapes of q, k and v, given as (B, H, N, D).

    suffix: of the names of k and v, "_cache" for caches. length: the name of their number of rows.
    layout: the caller's, in which messages show shapes.
    """
    dtype, device = q.dtype, q.device
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"q must be float16, bfloat16 or float32, but is {named(dtype)}")
    if k.dtype != dtype or v.dtype != dtype:
        refuse_dtype(dtype, **{f"k{suffix}": k, f"v{suffix}": v})
    if k.device != device or v.device != device or cos.device != device or sin.device != device:
        refuse_device(device, **{f"k{suffix}": k, f"v{suffix}": v, "cos": cos, "sin": sin})
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if len(q_shape) != 4 or len(k_shape) != 4 or len(v_shape) != 4:
        refuse_rank(layout, length, **{"q": q, f"k{suffix}": k, f"v{suffix}": v})
    batch, heads_q, _, head_dim = q_shape
    batch_k, heads_kv, _, head_dim_k = k_shape
    if batch_k != batch or head_dim_k != head_dim or v_shape != k_shape or heads_kv < 1 or heads_q % heads_kv:
        refuse_shapes(q_shape, k_shape, v_shape, suffix, layout)
    if heads_q < 1 or head_dim < 2 or head_dim % 2:
        refuse_heads(q_shape, layout)


def check_rotary_dim(rotary_dim: Any, head_dim: int) -> int:
    """Check an explicit rotary dim and return it."""
    rotary_dim = check_int("rotary_dim", rotary_dim, "an int or None")
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"rotary_dim must be even and between 2 and D = {head_dim}, but is {rotary_dim}")
    return rotary_dim


def check_tables(
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    batch: int,
    length: int,
    head_dim: int,
    rotary_dim: int | None,
    first: str,
    last: str,
) -> int:
    """Check cos and sin against the inputs' dtype and sizes, and resolve the rotary dim from their width.

    dtype: of the input that `first` names. length: positions of the input that `last` names; each needs a row.
    """
    table_dtype, shape = cos.dtype, cos.shape
    if table_dtype not in (torch.float32, dtype):
        raise TypeError(f"cos must be float32 or have {first}'s dtype {named(dtype)}, but is {named(table_dtype)}")
    if sin.dtype != table_dtype:
        raise TypeError(f"sin must have cos's dtype {named(table_dtype)}, but is {named(sin.dtype)}")
    if cos.requires_grad or sin.requires_grad:
        name = "cos" if cos.requires_grad else "sin"
        raise ValueError(f"{name} must not require a gradient: tables have none; pass {name}.detach()")
    rank = len(shape)
    if rank not in (2, 3) or (rank == 3 and shape[0] not in (1, batch)):
        raise ValueError(
            f"cos must have shape (S, R/2) or (S, R), perhaps with a leading 1 or B = {batch}, but has {shown(shape)}"
        )
    if sin.shape != shape:
        raise ValueError(f"sin must have cos's shape {shown(shape)}, but has {shown(sin.shape)}")
    if shape[-2] < length:
        raise ValueError(f"cos must have a row for each of {last}'s {length} positions, but has {shape[-2]} rows")

    width = shape[-1]
    if rotary_dim is None:
        if not 1 <= width <= head_dim:
            raise ValueError(f"cos must have between 1 and D = {head_dim} columns, but has {width}")
        rotary_dim = 2 * width if 2 * width <= head_dim else width
        if rotary_dim % 2:
            raise ValueError(
                f"cos with {width} columns is full-width for D = {head_dim}, and a full-width table must have an even "
                "number of columns"
            )
        return rotary_dim
    rotary_dim = check_rotary_dim(rotary_dim, head_dim)
    if width != rotary_dim and 2 * width != rotary_dim:
        raise ValueError(
            f"cos must have rotary_dim = {rotary_dim} or rotary_dim / 2 = {rotary_dim // 2} columns, but has {width}"
        )
    return rotary_dim


def check_bool(name: str, value: Any, _: Any = None) -> None:
    if not isinstance(value, bool):
        refuse_non_bool(**{name: value})


def check_choice(choices: tuple[str, ...]) -> Callable[[str, Any, Any], None]:
    """Return the check of an argument that must be one of these words."""

    def check(name: str, value: Any, _: Any) -> None:
        if value not in choices:
            refuse_choice(name, value, choices)

    return check


def check_softmax_scale(name: str, value: Any, _: Any) -> None:
    if value is not None:
        if not is_real(value):
            raise TypeError(f"{name} must be a float or None, but is {kind_of(value)}")
        if not is_finite(value):
            raise ValueError(f"{name} must be finite, but is {value}")


def check_softcap(name: str, value: Any, _: Any) -> None:
    if value != 0.0 or not is_real(value):
        if not is_real(value):
            raise TypeError(f"{name} must be a float, but is {kind_of(value)}")
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name} must be finite and positive, or 0.0 for none, but is {value}")


def check_norm_offset(name: str, value: Any, tensors: Any) -> None:
    if tensors.q_norm is None and tensors.k_norm is None and torch.compiler.is_compiling():
        return  # to read the number would make it an input of the graph, which would be compiled a second time
    if not is_real(value):
        raise TypeError(f"{name} must be a float, but is {kind_of(value)}")
    if not is_finite(value):
        raise ValueError(f"{name} must be finite, but is {value}")


def check_norm_eps(name: str, value: Any, tensors: Any) -> None:
    if tensors.q_norm is None and tensors.k_norm is None and torch.compiler.is_compiling():
        return
    check_norm_offset(name, value, tensors)  # a finite number, like the offset
    if value < 0:
        raise ValueError(f"{name} must be at least 0, but is {value}")


def check_norm(name: str, weight: Any, tensors: Any) -> None:
    """Check one of the two norm weights of a call."""
    other = "k_norm" if name == "q_norm" else "q_norm"
    if getattr(tensors, other) is None:
        raise ValueError(f"{other} must be given where {name} is, or neither, but is None")
    q = tensors.q
    check_tensor(name, weight, (torch.float32, q.dtype), q.device, "shape (D,)", (q.shape[-1],))


def check_window(name: str, window: Any, _: Any) -> None:
    if window is None:
        return
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"{name} must be a tuple (left, right) or None, but is {kind_of(window)}")
    if len(window) != 2:
        raise ValueError(f"{name} must have two elements (left, right), but has {len(window)}")
    for bound in window:
        if not is_int(bound):
            raise TypeError(f"{name} must hold two ints, but holds {kind_of(bound)}")
        if bound < -1:
            raise ValueError(f"{name} must hold sizes of 0 or more, or -1 for unbounded, but is {tuple(window)}")


def check_sinks(name: str, sinks: Any, tensors: Any) -> None:
    q = tensors.q
    check_tensor(name, sinks, (torch.float32, q.dtype), q.device, "shape (HQ,)", (q.shape[1],))


def check_bounds_of_keys(name: str, bounds: Any, tensors: Any) -> None:
    check_bounds(name, bounds, tensors.q.device, tensors.q.shape[0])


def check_intervals(name: str, bounds: Any, tensors: Any) -> None:
    """Check the first or the end of the interval of query rows of every key."""
    batch, len_k = tensors.q.shape[0], tensors.k.shape[2]
    one = isinstance(bounds, Tensor) and bounds.ndim == 2 and bounds.shape[0] == 1
    form, shape = "shape (B, NK) or (1, NK)", (1 if one else batch, len_k)
    check_tensor(name, bounds, (torch.int32,), tensors.q.device, form, shape)


def check_bounds(name: str, bounds: Any, device: torch.device, batch: int) -> None:
    check_tensor(name, bounds, (torch.int32,), device, "shape (B,)", (batch,))


def check_ends(name: str, cu_seqlens: Tensor, rows: int, of: str) -> list[int] | None:
    """Check the values of `cu_seqlens` on the CPU and return them; return None on a GPU and in traced calls.

    They must begin with 0, never fall, and end at or before the `rows` of the argument `of`. On a GPU reading them
    would wait for the device, so kernels check them: `kernels.lengths.packed_tile`.
    """
    if cu_seqlens.device.type != "cpu" or not is_plain(cu_seqlens):
        return None
    ends = cu_seqlens.tolist()
    if ends[0] != 0:
        raise ValueError(f"{name} must begin with 0, but begins with {ends[0]}")
    for begin, end in itertools.pairwise(ends):
        if end < begin:
            raise ValueError(
                f"{name} must never fall, but {end} follows {begin}: it holds where each sequence begins and the last "
                "one ends, not lengths"
            )
    if ends[-1] > rows:
        raise ValueError(f"{name} must end at or before {of}'s {rows} tokens, but ends at {ends[-1]}")
    return ends


def check_tensor(
    name: str,
    x: Any,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    form: str,
    shape: tuple[int | None, ...],
    of: str = "q",
) -> None:
    """Check a tensor's kind, dtype, device and shape.

    form: the shape in words, for messages. A size of `shape` that is None may be any. of: the argument that is on
    `device`.
    """
    check_kinds(**{name: x})
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(dict.fromkeys(map(named, dtypes)))}, but is {named(x.dtype)}")
    if x.device != device:
        refuse_device(device, of, **{name: x})
    if x.ndim != len(shape) or any(size not in (None, found) for size, found in zip(shape, x.shape)):
        expected = "" if None in shape else f"{' =' if form[-1] == ')' else ''} {tuple(shape)}"
        raise ValueError(f"{name} must have {form}{expected}, but has {shown(x.shape)}")


def check_kinds(**arguments: Any) -> None:
    """Check that each is a tensor, and neither nested, nor sparse, nor distributed."""
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            refuse_non_tensor(**{name: x})
        if x.is_nested:
            raise NotImplementedError(
                f"{name} must not be a nested tensor: sequences of different lengths are for rope_attention_varlen, "
                f"or for apply_rope with layout 'thd'; of a jagged tensor (B, N, H, D) these take {name}.values(), and "
                f"{name}.offsets().int() as cu_seqlens"
            )
        if x.layout is not strided:
            raise TypeError(f"{name} must be a dense tensor, but has the layout {named(x.layout)}; call to_dense()")
        if _is_distributed(x):
            raise NotImplementedError(
                f"{name} must be a tensor of this process, but is a DTensor: pass {name}.to_local() where heads or "
                "batch entries are sharded, and gather a sharded sequence first"
            )


def are_ordinary(first: Any, *others: Any) -> bool:
    """Return whether `check_kinds` accepts these tensors. Fast; may return False for tensors that it accepts."""
    for x in others:
        if type(x) is not Tensor or x.layout is not strided:
            return False
    return type(first) is Tensor and first.layout is strided and not first.is_nested


def _is_distributed(x: Tensor) -> bool:
    # A program that has a DTensor has imported this module.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


_said: set[str] = set()


def warn_once(subject: str, message: str) -> None:
    """Warn at the line that called the public function, once per process and subject."""
    if subject in _said:
        return
    _said.add(subject)
    package = __name__.partition(".")[0]
    frame, depth = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == package:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, UserWarning, stacklevel=depth)


def refuse_non_tensor(**arguments: Any) -> NoReturn:
    name, value = next((name, value) for name, value in arguments.items() if not isinstance(value, Tensor))
    raise TypeError(f"{name} must be a torch.Tensor, but is {kind_of(value)}")


def refuse_non_bool(**arguments: Any) -> NoReturn:
    name, value = next((name, value) for name, value in arguments.items() if not isinstance(value, bool))
    raise TypeError(f"{name} must be a bool, but is {kind_of(value)}")


def refuse_device(device: torch.device, first: str = "q", /, **arguments: Tensor) -> NoReturn:
    name, value = next((name, value) for name, value in arguments.items() if value.device != device)
    raise ValueError(f"{name} must be on {first}'s device {device}, but is on {value.device}")


def refuse_dtype(dtype: torch.dtype, **arguments: Tensor) -> NoReturn:
    name, value = next((name, value) for name, value in arguments.items() if value.dtype != dtype)
    raise TypeError(f"{name} must have q's dtype {named(dtype)}, but is {named(value.dtype)}")


def refuse_rank(layout: str, length: str, **arguments: Tensor) -> NoReturn:
    """Refuse a tensor without four axes. length: the name of the number of rows of k, v or a cache."""
    name, value = next((name, value) for name, value in arguments.items() if value.ndim != 4)
    form = form_of("HQ", "NQ", layout) if name == "q" else form_of("HKV", length, layout)
    raise ValueError(f"{name} must have shape {form}, but has {value.ndim} dimensions: {shown(value.shape)}")


def refuse_heads(q_shape: torch.Size, layout: str) -> NoReturn:
    raise ValueError(
        "q must have at least one head and an even head dim of at least 2, but has shape "
        f"{shown(in_layout(q_shape, layout))}"
    )


def refuse_shapes(q: torch.Size, k: torch.Size, v: torch.Size, kind: str, layout: str) -> NoReturn:
    """Refuse shapes that do not fit. kind: a suffix of the names of k and v, "_cache" for caches."""
    if k[0] != q[0]:
        raise ValueError(f"k{kind} must have q's batch size {q[0]}, but has {k[0]}")
    if k[3] != q[3]:
        raise ValueError(f"k{kind} must have q's head dim {q[3]}, but has {k[3]}")
    if v != k:
        k_shape, v_shape = (shown(in_layout(shape, layout)) for shape in (k, v))
        raise ValueError(f"v{kind} must have k{kind}'s shape {k_shape}, but has {v_shape}")
    raise ValueError(f"k{kind} has {k[1]} heads, but q's {q[1]} heads must be a multiple of it")


def refuse_choice(name: str, value: Any, choices: tuple[str, ...]) -> NoReturn:
    expected = " or ".join(", ".join(repr(choice) for choice in choices).rsplit(", ", 1))
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, {expected}, but is {kind_of(value)}")
    raise ValueError(f"{name} must be {expected}, but is {value!r}")


def is_int(value: Any) -> bool:
    """Return whether value is an integer of Python or NumPy, or a traced one. Bools and tensors are not accepted."""
    return isinstance(value, (int, torch.SymInt, Integral)) and not isinstance(value, bool)


def as_int(value: Any) -> Any:
    """Return an integer as a Python int, because operators take no other; a traced integer stays as it is."""
    return value if isinstance(value, (int, torch.SymInt)) else int(value)


def check_int(name: str, value: Any, expected: str = "an int") -> Any:
    """Check that an argument is an integer and return it as `as_int` does."""
    if not is_int(value):
        raise TypeError(f"{name} must be {expected}, but is {kind_of(value)}")
    return as_int(value)


def is_finite(value: Any) -> bool:
    """Say whether a number is neither infinite nor NaN. ``math.isfinite`` refuses numbers that torch.compile traces."""
    return bool(-math.inf < value < math.inf)


def is_real(value: Any) -> bool:
    """Return whether value is a real number of Python or NumPy, or a traced one. Bools and tensors are not accepted."""
    return isinstance(value, (float, int, torch.SymFloat, torch.SymInt, Real)) and not isinstance(value, bool)


def kind_of(value: Any) -> str:
    """Return a value's type for a message, with the package of a type that is not Python's: NumPy has a bool, too."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    return f"{name} {value!r}" if kind in (bool, int, float, str) else name


def named(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")


def shown(shape: tuple[int, ...]) -> str:
    return str(tuple(shape))
