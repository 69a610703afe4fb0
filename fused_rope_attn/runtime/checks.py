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

from fused_rope_attn.runtime.registration import is_plain


def check_heads(heads_q: int, heads_kv: int, head_dim: int, of_k: str = "k") -> None:
    """Check the numbers of heads and columns. of_k: the argument that holds the keys."""
    if heads_kv < 1 or heads_q % heads_kv:
        raise ValueError(f"{of_k} has {heads_kv} heads, but q's {heads_q} heads must be a multiple of it")
    check_columns("q", heads_q, head_dim)


def check_columns(name: str, heads: int, head_dim: int) -> None:
    """Check that a tensor has heads, and pairs of columns."""
    if heads < 1 or head_dim < 2 or head_dim % 2:
        expected = "at least one head and an even head dim of at least 2"
        raise ValueError(f"{name} must have {expected}, but has {heads} heads of {head_dim} columns")


def refuse_one_of_two(**pair: Any) -> NoReturn:
    """Refuse the one of two arguments that is None."""
    lacking, given = sorted(pair, key=lambda name: pair[name] is not None)
    raise ValueError(f"{lacking} must be given where {given} is, or neither, but is None")


def check_rotary_dim(rotary_dim: Any, head_dim: int) -> int:
    """Check an explicit rotary dim and return it."""
    rotary_dim = check_int("rotary_dim", rotary_dim, "an int or None")
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"rotary_dim must be even and between 2 and D = {head_dim}, but is {rotary_dim}")
    return rotary_dim


def check_tables(
    cos: Any, sin: Any, x: Tensor, batch: int, length: int, head_dim: int, rotary_dim: int | None, first: str, last: str
) -> int:
    """Check cos and sin against the inputs' dtype, device and sizes, and resolve the rotary dim from their width.

    x: the input that `first` names. length: positions of the input that `last` names; each needs a row.
    """
    dtype, device = x.dtype, x.device
    if not type(cos) is type(sin) is Tensor:
        check_kinds(cos=cos, sin=sin)
    if cos.device != device or sin.device != device:
        refuse_device(device, first, cos=cos, sin=sin)
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
        raise TypeError(f"{name} must be a bool, but is {kind_of(value)}")


def check_choice(choices: tuple[str, ...]) -> Callable[[str, Any, Any], None]:
    """Return the check of an argument that must be one of these words."""

    def check(name: str, value: Any, _: Any) -> None:
        if value not in choices:
            refuse_choice(name, value, choices)

    return check


def check_number(
    expected: str = "a float",
    limits: str = "finite",
    holds: Callable[[Any], bool] = lambda value: -math.inf < value < math.inf,  # torch.compile traces no math.isfinite
    of_norms: bool = False,
) -> Callable[..., None]:
    """Return the check of a real number that ``holds``. None passes if it is expected.

    of_norms: it is an option of norms. Without norms a graph must not read the number and make it an input.
    """

    def check(name: str, value: Any, tensors: Any = None) -> None:
        if of_norms and tensors.q_norm is None and torch.compiler.is_compiling():
            return
        if value is None and expected.endswith("None"):
            return
        # A number of Python or NumPy, or a traced one.
        if not isinstance(value, (float, int, torch.SymFloat, torch.SymInt, Real)) or isinstance(value, bool):
            raise TypeError(f"{name} must be {expected}, but is {kind_of(value)}")
        if not holds(value):
            raise ValueError(f"{name} must be {limits}, but is {value}")

    return check


check_softmax_scale = check_number("a float or None")
check_positive = check_number(limits="finite and positive", holds=lambda value: 0.0 < value < math.inf)
check_norm_offset = check_number(of_norms=True)
check_norm_eps = check_number(limits="at least 0 and finite", holds=lambda x: 0.0 <= x < math.inf, of_norms=True)


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


def check_ends(name: str, cu_seqlens: Tensor, rows: int, of: str) -> list[int] | None:
    """Check the values of `cu_seqlens` on the CPU and return them; return None on a GPU and in traced calls.

    They must begin with 0, never fall, and end at or before the `rows` of the argument `of`. On a GPU reading them
    would wait for the device, so kernels check them: `kernels.sequences.packed_tile`.
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


def check_kinds(**arguments: Any) -> None:
    """Check that each is a tensor, and neither nested, nor sparse, nor distributed."""
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, but is {kind_of(x)}")
        if x.is_nested:
            raise NotImplementedError(
                f"{name} must not be a nested tensor: sequences of different lengths are for rope_attention_varlen, "
                f"or for apply_rope with layout 'thd'; of a jagged tensor (B, N, H, D) these take {name}.values(), and "
                f"{name}.offsets().int() as cu_seqlens"
            )
        if x.layout is not strided:
            raise TypeError(f"{name} must be a dense tensor, but has the layout {named(x.layout)}; call to_dense()")
        module = sys.modules.get("torch.distributed.tensor")  # a program that has a DTensor has imported it
        if module is not None and isinstance(x, module.DTensor):
            raise NotImplementedError(
                f"{name} must be a tensor of this process, but is a DTensor: pass {name}.to_local() where heads or "
                "batch entries are sharded, and gather a sharded sequence first"
            )


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


def refuse_device(device: torch.device, first: str = "q", /, **arguments: Tensor) -> NoReturn:
    name, value = next((name, value) for name, value in arguments.items() if value.device != device)
    raise ValueError(f"{name} must be on {first}'s device {device}, but is on {value.device}")


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


def kind_of(value: Any) -> str:
    """Return a value's type for a message, with the package of a type that is not Python's: NumPy has a bool, too."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    return f"{name} {value!r}" if kind in (bool, int, float, str) else name


def named(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")


def shown(shape: tuple[int, ...]) -> str:
    return str(tuple(shape))
