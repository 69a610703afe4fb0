"""What a public function says of a keyword that is not its own: whose it is, and what does the same here."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Of a keyword: whose it is, and what to do instead.
Foreign = Mapping[str, tuple[str, str]]


def explain_keywords(
    foreign: Foreign, of: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: an unknown keyword raises a TypeError that says what to write instead; the signature stays as it is.

    Calls with known keywords pay for one more Python call. One with an unknown keyword cannot have been bound, so that
    no TypeError of the function's own is taken for it.

    Args:
        foreign: what is known of the keywords of other libraries.
        of: the function whose keywords are meant, where the decorated one passes any on, to what takes more of them.
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
    """Return a record, a NamedTuple, with those of its fields that are given."""
    return record(**{name: given[name] for name in record._fields if name in given})


def _explanation(function: str, known: tuple[str, ...], given: Iterable[str], foreign: Foreign) -> str | None:
    """The message, or None where every keyword is known or nothing is known of the others."""
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
