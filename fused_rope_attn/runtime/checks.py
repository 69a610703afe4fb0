"""Checks of single arguments and the wording of refusals, which the validation of every package shares.

`TypeError` for a wrong type or dtype, `ValueError` for a wrong shape, range, device or combination. Each message names
the argument, what was expected and what came.

``Forms`` and ``Form`` check tensors. A form is a string of symbols, one for each axis in the order (B, H, N, D), for
example "B HQ NQ D". A symbol has one size in a call; "1" is a size of 1.
"""

import itertools
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import Tensor, strided

from fused_rope_attn.runtime import layouts
from fused_rope_attn.runtime.registration import is_plain

# float64 is for the reference (gradcheck, tolerances); planning refuses it for the kernels.
INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Names of numbers of rows in messages about packed tensors.
_PACKED = {"NQ": "T_q", "NK": "T_k", "N": "T"}


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


def lacks_tables(cos: Any, sin: Any, rotary_dim: int | None, interleaved: bool) -> bool:
    """Return whether a call has no tables, and so no rotation. Refuse one of two, and options that describe them."""
    if cos is not None and sin is not None:
        return False
    if cos is not None or sin is not None:
        refuse_one_of_two(cos=cos, sin=sin)
    if rotary_dim is not None:
        check_int("rotary_dim", rotary_dim, "an int or None")
    for name, value, default in (("rotary_dim", rotary_dim, None), ("interleaved", interleaved, False)):
        if value is not default:
            why = "nothing is rotated where cos and sin are None"
            raise ValueError(f"{name} must be {default}, because {why}, but is {value!r}")
    return True


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


def check_layout(layout: Any, known: tuple[str, ...] = layouts.LAYOUTS) -> None:
    if layout not in known:
        refuse_choice("layout", layout, known)


class Forms:
    """A table of the tensors that have the first one's dtype and device: their names and forms.

    also: by name, a further dtype that the tensor may have.
    """

    def __init__(self, also: Mapping[str, torch.dtype] | None = None, **forms: str):
        self._also = also or {}
        # By layout and number of tensors: names and axes of the tensors, for each of all their sizes the place of the
        # first size with the same symbol, and the places of all symbols. Place 0 is that of the size 1.
        self._places: dict[tuple[str, int], Any] = {}
        for layout, count in itertools.product(layouts.AXES, range(1, len(forms) + 1)):
            split = [form.split() for form in list(forms.values())[:count]]
            # Packed tokens have no batch axis, and messages have other names for their numbers of rows.
            one, words = ({"1", *(form[0] for form in split)}, _PACKED) if layout == "thd" else ({"1"}, {})
            symbols = ["1", *(form[i] for form in split for i in layouts.AXES[layout])]
            places = [0 if symbol in one else symbols.index(symbol) for symbol in symbols]
            distinct = dict.fromkeys(symbol for form in split for symbol in form if symbol != "1")
            found = [0 if symbol in one else symbols.index(symbol) for symbol in distinct]
            axes = [tuple(words.get(form[i], form[i]) for i in layouts.AXES[layout]) for form in split]
            self._places[layout, count] = list(zip(forms, axes)), places, found

    def check(self, layout: str, tensors: tuple[Any, ...]) -> tuple[int, ...]:
        """Check the first tensors of the table, in the caller's layout; return the sizes of symbols in their order.

        Raise TypeError or ValueError with the argument, the expectation and the given value.
        """
        table, places, found = self._places[layout, len(tensors)]
        first, sizes = tensors[0], [1]
        for (name, axes), x in zip(table, tensors):
            if type(x) is not Tensor or x.is_nested or x.layout is not strided:
                check_kinds(**{name: x})
            if x is first:
                of, dtype, device = name, x.dtype, x.device
                if dtype not in INPUT_DTYPES:
                    raise TypeError(f"{name} must be float16, bfloat16 or float32, but is {named(dtype)}")
            elif x.dtype is not dtype and x.dtype is not self._also.get(name):
                other = f" or {named(self._also[name])}" if name in self._also else ""
                raise TypeError(f"{name} must have {of}'s dtype {named(dtype)}{other}, but is {named(x.dtype)}")
            elif x.device != device:
                refuse_device(device, of, **{name: x})
            shape = x.shape
            if len(shape) != len(axes):
                expected = f"{name} must have shape {in_words(axes)}"
                raise ValueError(f"{expected}, but has {len(shape)} dimensions: {shown(shape)}")
            sizes += shape
        wanted = [*map(sizes.__getitem__, places)]
        if wanted != sizes:
            i = next(i for i, size in enumerate(sizes) if size != wanted[i])
            (number, axis), owner = divmod(i - 1, len(axes)), (places[i] - 1) // len(axes)
            name, axes = table[number]
            why = f" with {axes[axis]} = {wanted[i]} of {table[owner][0]}" if places[i] else ""
            raise ValueError(f"{name} must have shape {in_words(axes)}{why}, but has {shown(tensors[number].shape)}")
        return (*map(sizes.__getitem__, found),)


class Form:
    """The forms of one further tensor, on the device of a call's first one.

    Args:
        forms: alternatives, for example "B NK | 1 NK". A symbol without a known size may have any.
        dtypes: that it may have; None is the first tensor's.
    """

    def __init__(self, forms: str, *dtypes: torch.dtype | None):
        self._forms = [tuple(form.split()) for form in forms.split("|")]
        # Numbers are sizes themselves.
        self._numbers = {symbol: int(symbol) for form in self._forms for symbol in form if symbol.isdigit()}
        self._dtypes = dtypes

    def check(self, name: str, x: Any, of: str, first: Tensor, sizes: Mapping[str, int]) -> None:
        """Check one tensor. of: the name of the call's first one. sizes: of the symbols."""
        if type(x) is not Tensor or x.is_nested or x.layout is not strided:
            check_kinds(**{name: x})
        if x.dtype not in self._dtypes and not (None in self._dtypes and x.dtype == first.dtype):
            dtypes = dict.fromkeys(named(first.dtype if dtype is None else dtype) for dtype in self._dtypes)
            raise TypeError(f"{name} must be {' or '.join(dtypes)}, but is {named(x.dtype)}")
        if x.device != first.device:
            refuse_device(first.device, of, **{name: x})
        shape = x.shape
        for form in self._forms:
            if len(form) == len(shape):
                for symbol, size in zip(form, shape):
                    if size != sizes.get(symbol, self._numbers.get(symbol, size)):
                        break
                else:
                    return
        used = {symbol: sizes[symbol] for form in self._forms for symbol in form if symbol in sizes}
        expected = f"shape {' or '.join(map(in_words, self._forms))}"
        if used:
            expected += f" with {', '.join(f'{symbol} = {size}' for symbol, size in used.items())}"
        raise ValueError(f"{name} must have {expected}, but has {shown(shape)}")


def in_words(axes: tuple[str, ...]) -> str:
    """Return a shape of symbols as messages show it, for example "(B,)"."""
    return f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"
