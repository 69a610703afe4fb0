"""The mutants of a module: cosmic-ray's operators at every place where they can change what the module does.

Mutants that do what the module does are listed in equivalent.txt, each with the reason: no test can kill them.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("equivalent.txt")
Place = tuple[int, int]  # line from 1, column from 0


@dataclass(frozen=True)
class Mutant:
    """A module with one change.

    operator: cosmic-ray's name of the change. line: where it begins. definition: the function or class around it.
    before, after: the changed lines as they were and as they are, joined and without indentation; they name the mutant
    in lists of survivors, also when lines above it change. source: the whole module.
    """

    module: str
    operator: str
    line: int
    definition: str
    before: str
    after: str
    source: str


def mutants_of(module: str, source: str) -> list[Mutant]:
    """Return all mutants of a module's source that compile, differ from each other, and might change what it does.

    Left out, because no test of behaviour could tell: annotations, ``__all__``, a warning's ``stacklevel``, the removal
    of ``triton.jit`` and ``record`` (the interpreter calls a device function that is a plain one as it is, and only the
    compiler refuses it), and the order or identity of names in the place of their equality.
    """
    spared = list(_spared(ast.parse(source)))
    found: dict[str, Mutant] = {}
    for statement, text in _statements(source):
        for operator, start, end, changed in _changes(text):
            first, last = (start[0] + statement.line, start[1]), (end[0] + statement.line, end[1])
            if any(a <= first and last <= b for a, b in spared):
                continue
            mutated = statement.before + changed + statement.behind
            if mutated in found or not _compiles(mutated):
                continue
            before, after = _difference(source, mutated)
            if _of_names(operator, before, after):
                continue
            found[mutated] = Mutant(module, operator, first[0], statement.name, before, after, mutated)
    return sorted(found.values(), key=lambda mutant: mutant.line)


@dataclass(frozen=True)
class _Statement:
    """A statement at the top level of a module: its name where it has one, the lines above it, the text around it."""

    name: str
    line: int
    before: str
    behind: str


def _statements(source: str) -> Iterator[tuple[_Statement, str]]:
    """Yield (position, text) of every statement at the top level: mutated alone, it is parsed the faster."""
    from cosmic_ray.ast import get_ast

    before = ""
    for node in get_ast(source).children:
        text = node.get_code()
        before, above = before + text, before
        inner = node.children[-1] if node.type == "decorated" else node
        name = inner.name.value if inner.type in ("funcdef", "classdef") else "(module)"
        yield _Statement(name, above.count("\n"), above, source[len(before) :]), text


def _changes(text: str) -> Iterator[tuple[str, Place, Place, str]]:
    """(operator, where its change begins, where it ends, the changed text) of all that the operators do to a text."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code

    nodes = list(ast_nodes(get_ast(text)))
    for name, operator in _operators():
        places = [(node, *place) for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, (node, start, end) in enumerate(places):
            if node.parent is not None and node.parent.type == "parameters":
                continue  # the star of a signature is no product
            changed = mutate_code(text, operator, occurrence)
            if changed is not None:
                yield name.partition("/")[2], start, end, changed


def _operators() -> Iterator[tuple[str, Any]]:
    """cosmic-ray's operators but those that need to be told which variables to change."""
    from cosmic_ray.plugins import get_operator, operator_names

    for name in operator_names():
        if not get_operator(name).arguments():
            yield name, get_operator(name)()


def _spared(tree: ast.Module) -> Iterator[tuple[Place, Place]]:
    """Yield the places that are not mutated: (first, last)."""
    for node in ast.walk(tree):
        expressions: list[ast.expr | None] = []
        if isinstance(node, ast.FunctionDef):
            expressions.append(node.returns)
            expressions += [x for x in node.decorator_list if ast.unparse(x) in ("triton.jit", "record")]
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            expressions.append(node.annotation)
        elif isinstance(node, ast.ClassDef):
            expressions += [x for x in node.decorator_list if ast.unparse(x) == "record"]
        elif isinstance(node, ast.keyword) and node.arg == "stacklevel":
            expressions.append(node.value)
        elif isinstance(node, ast.Assign) and [ast.unparse(x) for x in node.targets] == ["__all__"]:
            expressions.append(node.value)
        for x in expressions:
            if x is not None:
                # A decorator's "@" precedes it, and cosmic-ray's place of a decorator ends with its line.
                decorates = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and x in node.decorator_list
                assert x.end_lineno is not None and x.end_col_offset is not None
                last = (x.end_lineno + 1, 0) if decorates else (x.end_lineno, x.end_col_offset)
                yield (x.lineno, x.col_offset - decorates), last


def _compiles(source: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `is` with a literal, a call of a number
        try:
            compile(source, "mutant", "exec")
        except (SyntaxError, ValueError):
            return False
    return True


def _difference(source: str, mutated: str) -> tuple[str, str]:
    """Return the lines that differ, of both."""
    old, new = source.splitlines(), mutated.splitlines()
    above = _common(old, new)
    below = _common(old[: above - 1 if above else None : -1], new[: above - 1 if above else None : -1])
    before, after = (" ".join(line.strip() for line in lines[above : len(lines) - below]) for lines in (old, new))
    return before, after


def _common(a: list[str], b: list[str]) -> int:
    """Count the equal lines at the beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _of_names(operator: str, before: str, after: str) -> bool:
    """Return whether the change is from ``==`` or ``!=`` of names to their order, or to their being one object.

    Names are strings, which are never compared by their order in the alphabet, and dtypes, which are one object each.
    """
    _, _, kinds = operator.partition("ReplaceComparisonOperator_")
    old, _, new = kinds.partition("_")
    if old not in ("Eq", "NotEq") or new == ("NotEq" if old == "Eq" else "Eq"):
        return False
    at = next(i for i, pair in enumerate(zip(before, after)) if pair[0] != pair[1])
    left, right = before[:at].rstrip(" =!"), before[at:].lstrip(" =!")
    of_dtypes = left.endswith("dtype") or right.split(" ")[0].rstrip("):,").endswith("dtype")
    return left.endswith('"') or right.startswith('"') or of_dtypes and new == ("Is" if old == "Eq" else "IsNot")


@functools.cache
def equivalents() -> dict[tuple[str, str, str], str]:
    """Return the reason of each listed change by (module, before, after).

    The list has blocks of a reason ("# "), a module, and the lines before ("- ") and after ("+ ") each change.
    """
    found = {}
    for block in LIST.read_text(encoding="utf-8").split("\n\n"):
        reason = module = before = ""
        for line in block.splitlines():
            kind, rest = line[:2], line[2:].strip()
            if kind == "# ":
                reason = f"{reason} {rest}".strip()
            elif kind == "- ":
                before = rest
            elif kind == "+ ":
                found[module, before, rest] = reason
            else:
                module = line.strip()
    return found
