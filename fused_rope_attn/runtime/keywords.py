"""Messages for unknown keywords, and records that are filled by name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Names that are less alike than this are no hint. "scale" and "softmax_scale" are alike by 0.556.
_ALIKE = 0.55


def explain_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: an unknown keyword raises a TypeError that names the closest of its arguments.

    The signature is unchanged, and calls with known keywords pay for one more Python call. A call with an unknown
    keyword never reaches the function's body, so that no other TypeError is mistaken for it.
    """
    known = parameters_of(function)

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return function(*arguments, **options)
        except TypeError:
            unknown = [name for name in options if name not in known]
            if not unknown:
                raise
        raise TypeError(f"{function.__name__}() does not take {' and '.join(_explained(x, known) for x in unknown)}")

    return call


def _explained(keyword: str, known: tuple[str, ...]) -> str:
    """Return the keyword, and the arguments that its writer may have meant, or all if none is close."""
    near = difflib.get_close_matches(keyword, known, cutoff=_ALIKE)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the arguments are {', '.join(known)}"
    return f"{keyword!r} ({hint})"


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's parameters."""
    return tuple(inspect.signature(function).parameters)


def fill(record: Any, given: Mapping[str, Any]) -> Any:
    """Return a NamedTuple with those of its fields that are given."""
    return record(**{name: given[name] for name in record._fields if name in given})
