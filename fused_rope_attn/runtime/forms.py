"""One checker of tensors, which reads the forms of a function's arguments from a table.

A form is a string of symbols, one for each axis in the order (B, H, N, D), for example "B HQ NQ D". A symbol has one
size in a call; "1" is a size of 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, strided

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
        self._also = also or {}
        # By layout and number of tensors: names and axes of the tensors, for each of all their sizes the place of the
        # first size with the same symbol, and the places of all symbols. Place 0 is that of the size 1.
        self._places: dict[tuple[str, int], Any] = {}
        for layout, count in itertools.product(AXES, range(1, len(forms) + 1)):
            split = [form.split() for form in list(forms.values())[:count]]
            # Packed tokens have no batch axis, and messages have other names for their numbers of rows.
            one, words = ({"1", *(form[0] for form in split)}, _PACKED) if layout == "thd" else ({"1"}, {})
            symbols = ["1", *(form[i] for form in split for i in AXES[layout])]
            places = [0 if symbol in one else symbols.index(symbol) for symbol in symbols]
            distinct = dict.fromkeys(symbol for form in split for symbol in form if symbol != "1")
            found = [0 if symbol in one else symbols.index(symbol) for symbol in distinct]
            axes = [tuple(words.get(form[i], form[i]) for i in AXES[layout]) for form in split]
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
