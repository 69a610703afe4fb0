"""One checker of tensors, which reads the forms of a function's arguments from a table.

A form is a string of symbols, one for each axis in the order (B, H, N, D), for example "B HQ NQ D". A symbol has one
size in a call; "1" is a size of 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, strided
from torch.compiler import is_compiling

from fused_rope_attn.runtime.checks import check_kinds, named, refuse_device, shown
from fused_rope_attn.runtime.layouts import AXES

# float64 is for the reference (gradcheck, tolerances); planning refuses it for the kernels.
INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Names of numbers of rows in messages about packed tensors.
_PACKED = {"NQ": "T_q", "NK": "T_k", "N": "T"}


class Forms:
    """A table of the tensors that have the first one's dtype and device: their names and forms.

    also: by name, a further dtype that the tensor may have.
    """

    def __init__(self, also: Mapping[str, torch.dtype] | None = None, **forms: str):
        self._forms = {name: tuple(form.split()) for name, form in forms.items()}
        self._also = also or {}
        # By layout and number of tensors: the number of axes of a tensor, for each of all their sizes the place of the
        # first size with the same symbol, and the places of all symbols. Place 0 is that of the size 1.
        self._places = {
            (layout, count): self._find(layout, count) for layout in AXES for count in range(1, len(forms) + 1)
        }

    def _find(self, layout: str, count: int) -> tuple[int, Any, Any]:
        forms = list(self._forms.values())[:count]
        one = {"1", *(form[0] for form in forms)} if layout == "thd" else {"1"}  # packed tokens have no batch axis
        symbols = ["1", *(form[i] for form in forms for i in AXES[layout])]
        places = [0 if symbol in one else symbols.index(symbol) for symbol in symbols]
        found = [0 if symbol in one else symbols.index(symbol) for symbol in _distinct(forms)]
        return len(AXES[layout]), itemgetter(*places), itemgetter(*found)

    def check(self, layout: str, tensors: tuple[Any, ...]) -> tuple[int, ...]:
        """Check the first tensors of the table, in the caller's layout; return the sizes of symbols in their order.

        Raise TypeError or ValueError with the argument, the expectation and the given value.
        """
        # Most calls are right: compare them at once. ``_examine`` says the same, more slowly, and names the fault.
        if is_compiling():
            return self._examine(layout, tensors)
        first = tensors[0]
        rank, same, found = self._places[layout, len(tensors)]
        try:
            dtype, device = first.dtype, first.device
            sizes: list[int] = [1]
            for x in tensors:
                if type(x) is not Tensor or x.layout is not strided:
                    break
                shape = x.shape
                if len(shape) != rank or (x is not first and (x.dtype is not dtype or x.device != device)):
                    break
                sizes += shape
            else:
                every = tuple(sizes)
                if same(every) == every and dtype in INPUT_DTYPES:
                    return found(every)
        except (AttributeError, RuntimeError):  # no tensor, or a nested one
            pass
        return self._examine(layout, tensors)

    def _examine(self, layout: str, tensors: tuple[Any, ...]) -> tuple[int, ...]:
        """Do what ``check`` does, tensor by tensor."""
        given = dict(zip(self._forms, tensors))
        check_kinds(**given)
        of, first = next(iter(given.items()))
        if first.dtype not in INPUT_DTYPES:
            raise TypeError(f"{of} must be float16, bfloat16 or float32, but is {named(first.dtype)}")
        known: dict[str, tuple[int, str]] = {"1": (1, "")} | ({"B": (1, "")} if layout == "thd" else {})
        for name, x in given.items():
            if x.dtype not in (first.dtype, self._also.get(name)):
                other = f" or {named(self._also[name])}" if name in self._also else ""
                raise TypeError(f"{name} must have {of}'s dtype {named(first.dtype)}{other}, but is {named(x.dtype)}")
            if x.device != first.device:
                refuse_device(first.device, of, **{name: x})
            axes = tuple(self._forms[name][i] for i in AXES[layout])
            if layout == "thd":
                axes = tuple(_PACKED.get(symbol, symbol) for symbol in axes)
            expected = f"{name} must have shape {in_words(axes)}"
            if x.ndim != len(axes):
                raise ValueError(f"{expected}, but has {x.ndim} dimensions: {shown(x.shape)}")
            for symbol, size in zip(axes, x.shape):
                length, owner = known.setdefault(symbol, (size, name))
                if size != length:
                    why = f" with {symbol} = {length} of {owner}" if owner else ""
                    raise ValueError(f"{expected}{why}, but has {shown(x.shape)}")
        symbols = _distinct(list(self._forms.values())[: len(tensors)])
        return tuple(known[_PACKED.get(x, x) if layout == "thd" else x][0] for x in symbols)


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


def _distinct(forms: list[tuple[str, ...]]) -> list[str]:
    """Return the symbols of forms, each once."""
    return list(dict.fromkeys(symbol for form in forms for symbol in form if symbol != "1"))


def in_words(axes: tuple[str, ...]) -> str:
    """Return a shape of symbols as messages show it, for example "(B,)"."""
    return f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"
