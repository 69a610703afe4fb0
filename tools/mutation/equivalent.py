"""Mutants that do what the module does, each with the reason: no test can kill them. They are listed in equivalent.txt.

A run counts them apart, and fails where a test does kill one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).with_name("equivalent.txt")


@dataclass(frozen=True)
class Equivalent:
    """A change of a module's lines that makes no difference; lines as ``Mutant`` has them."""

    module: str
    before: str
    after: str
    reason: str


def parse(text: str) -> list[Equivalent]:
    """The entries of a list: blocks of a reason ("# "), a module, and lines before ("- ") and after ("+ ") a change."""
    found = []
    for block in text.split("\n\n"):
        reason: list[str] = []
        module = before = ""
        for line in block.splitlines():
            kind, rest = line[:2], line[2:].strip()
            if kind == "# ":
                reason.append(rest)
            elif kind == "- ":
                before = rest
            elif kind == "+ ":
                found.append(Equivalent(module, before, rest, " ".join(reason)))
            else:
                module = line.strip()
    return found


@functools.cache
def known() -> dict[tuple[str, str, str], str]:
    """The reason of each by (module, before, after)."""
    return {(x.module, x.before, x.after): x.reason for x in parse(LIST.read_text(encoding="utf-8"))}


def reason_of(module: str, before: str, after: str) -> str:
    """Why a mutant makes no difference; "" where nobody has said so."""
    return known().get((module, before, after), "")
