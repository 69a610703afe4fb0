"""Mutants that do what the module does, each with the reason: no test can kill them.

A run counts them apart, and fails where a test does kill one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Equivalent:
    """Changes of one line, or of one statement's lines, that make no difference."""

    module: str
    reason: str
    before: str
    after: tuple[str, ...]


EQUIVALENT: tuple[Equivalent, ...] = ()


def reason_of(module: str, before: str, after: str) -> str:
    """Why a mutant makes no difference; "" where nobody has said so."""
    return next((x.reason for x in _of(module) if x.before == before and after in x.after), "")


def _of(module: str) -> Iterator[Equivalent]:
    return (x for x in EQUIVALENT if x.module == module)
