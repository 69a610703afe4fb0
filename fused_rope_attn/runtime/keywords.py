"""Messages for unknown keywords: the library that has the keyword, and the equivalent in this package."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Keyword to (the library that has it, what to do instead).
Foreign = Mapping[str, tuple[str, str]]


def explain_keywords(
    foreign: Foreign, of: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: an unknown keyword raises a TypeError that says what to write instead.

    The signature is unchanged, and calls with known keywords pay for one more Python call. A call with an unknown
    keyword never reaches the function's body, so that no other TypeError is mistaken for it.

    Args:
        foreign: the keywords of other libraries.
        of: the function that defines the keywords, if the decorated one takes ``**options``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = tuple(inspect.signature(of or function).parameters)
        name = function.__name__

        @functools.wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            try:
                if of is not None:
                    inspect.signature(of).bind_partial(**options)
                return function(*arguments, **options)
            except TypeError:
                explained = _explanation(name, known, options, foreign)
                if explained is None:
                    raise
            raise TypeError(explained)

        return call

    return decorate


def bind(function: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
    """Return the arguments of a call by their names, defaults included, for a ``plan`` of the function's calls."""
    bound = inspect.signature(function).bind(*arguments, **options)
    bound.apply_defaults()
    return bound.arguments


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's parameters."""
    return tuple(inspect.signature(function).parameters)


def fill(record: Any, given: Mapping[str, Any]) -> Any:
    """Return a NamedTuple with those of its fields that are given."""
    return record(**{name: given[name] for name in record._fields if name in given})


def _explanation(function: str, known: tuple[str, ...], given: Iterable[str], foreign: Foreign) -> str | None:
    """Return the message; None if all keywords are known, or there is nothing to say about the others."""
    parts = []
    for keyword in given:
        if keyword in known:
            continue
        near = difflib.get_close_matches(keyword, known, 1, 0.75)
        if keyword in foreign:
            owner, instead = foreign[keyword]
            parts.append(f"{keyword}, which is {owner}: {instead}")
        elif near:
            parts.append(f"{keyword}, which it does not know: did you mean {near[0]}?")
    return f"{function}() got {'; and '.join(parts)}" if parts else None
