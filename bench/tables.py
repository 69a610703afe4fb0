"""The generated tables of the documents: ours, and the others' times over ours, with a group of columns for each card.

``Table`` says what is shown, so that all suites share one function. Ratios are medians over the rounds of one process;
below 1 ours is slower, and that is printed the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from statistics import geometric_mean
from typing import Any, NamedTuple

from bench import report, results
from bench.report import Group, Row
from bench.timing import EVEN

CARDS = ("h200", "h100")
# Parts that the labels of a column share are left out.
_PREFIX = re.compile(r"^(bare |Liger norm \+ )?(Liger rope \+ |rotate \+ write \+ |rotation apart \+ )?")
_UNITS = {"ms": "ms", "tokens_s": "tokens/s"}
_PARTS = "fwd fwd_grad bwd both"  # in this order
_ROLES = {"rival": "strongest with rotation", "bare": "fastest without"}


class Table(NamedTuple):
    """The content of a table, from the files ``SUITE-CARD``, with a line for each case and shape.

    cases: words, the cases that are shown, in this order; none: all. within: an expression that their shapes match.
    shapes: these are shown too. mine: the provider that the others are compared with. shows: the field of it that is
    shown. cost: the provider that is ours without the option; its column has our time over that. facts: fields of ours
    that are shown too, with their headers and formats. others: providers with columns of their own, by header. roles:
    the best of each role has a column. over: "rounds" compares times, "mj_rounds" energies.
    """

    suite: str
    cases: str = ""
    within: str = ""
    shapes: bool = False
    mine: str = "fused"
    mode: str = "graph"
    shows: str = "ms"
    cost: tuple[str, str] | None = None
    facts: dict[str, tuple[str, str]] = {}
    others: dict[str, str] = {}
    roles: tuple[str, ...] = ("rival", "bare")
    over: str = "rounds"


def committed(suite: str) -> dict[str, list[Row]]:
    """Return the rows of a suite by card. OSError where no card has any."""
    names = {card: f"{suite}-{card}" for card in CARDS if (results.RESULTS / f"{suite}-{card}.csv").exists()}
    if not names:
        raise FileNotFoundError(f"bench/results has no rows of {suite}")
    return {card: results.read(name) for card, name in names.items()}


def render(table: Table) -> str:
    """Return a table, its legend and the origins of its rows. ValueError where the rows lack what it shows."""
    lines: dict[str, dict[str, list[str]]] = {}
    header, shown, blank = [""], {}, {}
    for card, rows in committed(table.suite).items():
        found = _lines(table, rows)
        shown[card] = [row for passes in found.values() for group in passes for row in group.values()]
        columns = _columns(table, shown[card])
        blank[card] = [""] * len(columns)
        header += [f"{report.card_name(rows[0]['gpu'])}, {name}" if i == 0 else name for i, name in enumerate(columns)]
        for (case, shape), passes in found.items():
            cells = lines.setdefault(f"{case} ({shape})" if table.shapes else case, {})
            cells[card] = [make(passes) for make in columns.values()]
    every = [row for rows in shown.values() for row in rows]
    if missing := set(table.cases.split()) - {row["case"] for row in every}:
        raise ValueError(f"no times of {table.mine} at {', '.join(sorted(missing))} in the rows of {table.suite}")
    body = [[name, *(cell for card in shown for cell in line.get(card, blank[card]))] for name, line in lines.items()]
    legend = "~: outside the tolerance that ours is held to. " * bool(report.mark(*every))
    return f"{report.markdown(header, body)}\n\n{legend}{origins(table.suite, shown)}"


def _lines(table: Table, rows: list[Row]) -> dict[tuple[str, str], list[Group]]:
    """Return (case, shape) -> the groups of its passes, where ours was timed, in the order of the cases."""
    found: dict[tuple[str, str], list[Group]] = {}
    for (case, shape, _, _), group in report.groups(rows, table.mode).items():
        if table.mine in group and re.search(table.within, shape):
            found.setdefault((case, shape), []).append(group)
    for passes in found.values():
        passes.sort(key=lambda group: _PARTS.find(group[table.mine]["pass"]))
    names = table.cases.split() or dict.fromkeys(case for case, _ in found)
    return {key: found[key] for name in names for key in found if key[0] == name}


def _columns(table: Table, rows: list[Row]) -> dict[str, Callable[[list[Group]], str]]:
    """Return header -> the function that makes a cell from the groups of a case's passes, of columns with content."""
    fields = {field for row in rows for field in row}
    providers, roles = ({row[name] for row in rows} for name in ("provider", "role"))
    columns = {f"ours, {_UNITS[table.shows]}": partial(_figures, table.mine, table.shows, report.three_digits)}
    if table.cost:
        columns[table.cost[0]] = partial(_over, table, table.mine, table.cost[1], "{:.3f}")
    for name, (field, text) in table.facts.items():
        if field in fields:
            columns[name] = partial(_figures, table.mine, field, text.format, once=True)
    columns |= {
        name: partial(_over, table, who, table.mine, "{:.2f}") for name, who in table.others.items() if who in providers
    }
    return columns | {_ROLES[role]: partial(_best, table, role) for role in table.roles if role in roles}


def _figures(mine: str, field: str, text: Callable[[Any], str], passes: list[Group], once: bool = False) -> str:
    """Return a field of ours in each pass. once: name equal ones once."""
    cells = [text(group[mine][field]) for group in passes if field in group[mine]]
    return " / ".join(dict.fromkeys(cells) if once else cells)


def _over(table: Table, who: str, by: str, text: str, passes: list[Group]) -> str:
    """Return a provider's time over that of another one."""
    found = [(group[who], group[by]) for group in passes if who in group and by in group]
    return " / ".join(text.format(report.faster(row, of, table.over)) + report.mark(row) for row, of in found) or "-"


def _best(table: Table, role: str, passes: list[Group]) -> str:
    """Return the time of the best of a role over ours, with labels, equal ones once: ``1.04 / 1.16 FA4``."""
    pairs = [(report.strongest(group.values(), role), group[table.mine]) for group in passes]
    found = [(row, own) for row, own in pairs if row]
    figures = [f"**{report.faster(row, own, table.over):.2f}**{report.mark(row)}" for row, own in found]
    labels = [_PREFIX.sub("", row["label"]) for row, _ in found]
    if len(set(labels)) == 1:
        return f"{' / '.join(figures)} {labels[0]}"
    return " / ".join(f"{figure} {label}" for figure, label in zip(figures, labels))


def origins(suite: str, rows: dict[str, list[Row]]) -> str:
    """Return where each card's rows are, and their releases of Triton, dates and commits."""
    parts = []
    for card, found in rows.items():
        triton = ", ".join(sorted({row["triton"] for row in found}))
        dates = ", ".join(sorted({row["date"][:10] for row in found}))
        commits = ", ".join(sorted({row["commit"][:7] for row in found}))
        link = f"[{report.card_name(found[0]['gpu'])}]({{results}}/{suite}-{card}.csv)"
        parts.append(f"{link} (Triton {triton}; {dates}; {commits})")
    return f"Rows: {', '.join(parts)}."


def standing(suite: str, names: Iterable[str]) -> str:
    """Say at how many of all shapes ours is not slower than each rival, and the range of the ratio."""
    header, lines, cards = ["ours is not slower at, theirs / ours"], {name: [""] for name in names}, committed(suite)
    for rows in cards.values():
        header += [f"{report.card_name(rows[0]['gpu'])} {words}" for words in report.PASSES.values()]
        every = report.groups(rows, "graph").items()
        for name, line in lines.items():
            labels = {row["label"] for row in report.timed(rows) if row["provider"] == name}
            line[0] = next(iter(labels), line[0])
            for part in report.PASSES:
                ratios = [report.faster(g[name], g["fused"]) for (_, _, at, _), g in every if at == part and name in g]
                count = f"{sum(x >= EVEN for x in ratios)} of {len(ratios)}"
                line.append(f"{count}, {min(ratios):.2f} to {max(ratios):.2f}" if ratios else "no such pass")
    return f"{report.markdown(header, list(lines.values()))}\n\n{origins(suite, cards)}"


def rotation(suite: str, without: str = "bare_fused") -> str:
    """Show geometric means and the worst over all shapes: the cost of the rotation, and the best others over ours."""
    header, shown = ["time over time, mean (worst)"], {}
    lines = {
        "ours / ours without rotation": ("ours", without, max),
        "fastest without rotation / ours without rotation": ("bare", without, min),
        "fastest without rotation / ours": ("bare", "fused", min),
        "strongest with rotation / ours": ("rival", "fused", min),
    }
    found: dict[str, list[str]] = {words: [] for words in lines}
    for card, rows in committed(suite).items():
        every = [g for g in report.groups(rows, "graph").values() if {"fused", without} <= g.keys()]
        if not every:
            continue
        shown[card] = [row for group in every for row in group.values()]
        header += [f"{report.card_name(rows[0]['gpu'])} {words}" for words in report.PASSES.values()]
        for part, (words, (role, mine, worst)) in product(report.PASSES, lines.items()):
            of_part = [(report.strongest(g.values(), role), g) for g in every if g["fused"]["pass"] == part]
            ratios = [report.faster(g["fused"] if role == "ours" else best, g[mine]) for best, g in of_part if best]
            found[words].append(f"{geometric_mean(ratios):.3f} ({worst(ratios):.3f})" if ratios else "-")
    return f"{report.markdown(header, [[words, *line] for words, line in found.items()])}\n\n{origins(suite, shown)}"
