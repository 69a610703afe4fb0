"""``python -m bench docs``: the generated tables of the documents, written from committed rows and from nothing else.

A block begins with ``<!-- PART:NAME ... -->`` and ends with ``<!-- PART:end -->``. ``BLOCKS`` says which page has which
blocks, ``CURRENT`` which file of rows is the current one of each suite.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.command import refuse
from bench.environment import RESULTS, ROOT
from bench.report import Row, read_runs

# The rows that the documents show, by suite. Older files of rows stay for the experiments that name them.
CURRENT: dict[str, Path] = {
    "attention": RESULTS / "h200-2026-11-23-triton-3.9.0.jsonl",
    "attention on the oldest Triton": RESULTS / "h200-2026-11-23-triton-3.6.0.jsonl",
    "host": RESULTS / "host-h200-2026-11-23-triton-3.9.0.jsonl",
    "energy": RESULTS / "energy-h200-2026-11-23-triton-3.9.0.jsonl",
    "masks": RESULTS / "masks-h200-2026-11-21.jsonl",
    "norm": RESULTS / "norm-h200-2026-11-23-triton-3.9.0.jsonl",
    "norm on the oldest Triton": RESULTS / "norm-h200-2026-11-23-triton-3.6.0.jsonl",
    "rotation": RESULTS / "rope-h200-2026-11-21.jsonl",
    "rotation with norms": RESULTS / "rope-norms-h200-2026-11-23.jsonl",
    "generation": RESULTS / "decode-h200-2026-11-23-triton-3.9.0.jsonl",
    "models": RESULTS / "models-h200-2026-11-21.jsonl",
    "models with norms": RESULTS / "models-norms-h200-2026-11-23.jsonl",
    "serving": RESULTS / "serve-h200-2026-11-22.jsonl",
    "cp": RESULTS / "cp-h200-2026-11-23.jsonl",
    "corope": RESULTS / "corope-h200-2026-11-21.jsonl",
}


@dataclass(frozen=True)
class Block:
    """``function`` of ``module``, a module below ``bench.suites``, makes the content from the rows of ``suite``; it
    raises ValueError where they lack something. ``page`` is relative to the repository."""

    name: str
    page: str
    suite: str
    module: str
    function: str

    def content(self, rows: list[Row]) -> str:
        make: Callable[[list[Row]], str] = getattr(
            importlib.import_module(f"bench.suites.{self.module}"), self.function
        )
        return make(rows)


README, BENCHMARKS = "README.md", "docs/benchmarks.md"
BLOCKS: tuple[Block, ...] = (
    Block("bench:headline", README, "attention", "attention.tables", "headline"),
    Block("bench:results", BENCHMARKS, "attention", "attention.tables", "results"),
    Block("bench:standing", BENCHMARKS, "attention", "attention.tables", "standing"),
    Block("oldest:standing", BENCHMARKS, "attention on the oldest Triton", "attention.tables", "standing"),
    Block("host:results", BENCHMARKS, "host", "host", "results"),
    Block("energy:results", BENCHMARKS, "energy", "energy.report", "results"),
    Block("bench:plan", BENCHMARKS, "attention", "attention.tables", "plan"),
    Block("masks:results", BENCHMARKS, "masks", "masks.report", "results"),
    Block("norm:results", BENCHMARKS, "norm", "norm.report", "results"),
    Block("norm:oldest", BENCHMARKS, "norm on the oldest Triton", "norm.report", "results"),
    Block("decode:results", BENCHMARKS, "generation", "generation.report", "results"),
    Block("decode:stored", BENCHMARKS, "generation", "generation.report", "stored"),
    Block("rope:results", BENCHMARKS, "rotation", "rotation.tables", "results"),
    Block("rope:norms", BENCHMARKS, "rotation with norms", "rotation.tables", "results"),
    Block("models:results", BENCHMARKS, "models", "models.report", "results"),
    Block("models:norms", BENCHMARKS, "models with norms", "models.report", "results"),
    Block("models:serving", BENCHMARKS, "serving", "models.report", "serving"),
    Block("cp:results", BENCHMARKS, "cp", "context_parallel.tables", "results"),
    Block("corope:results", BENCHMARKS, "corope", "corope", "results"),
)
_PARTS = "|".join(dict.fromkeys(block.name.split(":")[0] for block in BLOCKS))
_MARKER = re.compile(rf"<!-- ((?:{_PARTS}):\w+)[^>]*-->")
_BLOCK = re.compile(rf"(<!-- (({_PARTS}):\w+)[^>]*-->\n)(.*?)(<!-- \3:end -->)", re.DOTALL)


def main(argv: list[str]) -> int:
    """Exit status: 0 the pages are (now) what their rows say, 1 ``--check`` found one that is not, 2 cannot write."""
    parser = argparse.ArgumentParser("python -m bench docs", description=__doc__.splitlines()[0].split(": ", 1)[1])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page and its rows differ")
    args = parser.parse_args(argv)
    try:
        rows = {suite: read_runs([path]) for suite, path in CURRENT.items()}
        pages = {}
        for name in dict.fromkeys(block.page for block in BLOCKS):
            old = (ROOT / name).read_text(encoding="utf-8")
            pages[name] = old, rewrite(name, old, rows)
    except (OSError, ValueError) as error:
        return refuse("docs", str(error))
    stale = {name: changed(old, new) for name, (old, new) in pages.items() if old != new}
    if args.check:
        for name, blocks in stale.items():
            print(f"bench docs: {name} does not match the rows in {', '.join(blocks)}", file=sys.stderr)
        return int(bool(stale))
    for name, (_, new) in pages.items():
        if name in stale:
            (ROOT / name).write_text(new, encoding="utf-8")
        print(f"{name}: " + (f"rewrote {', '.join(stale[name])}" if name in stale else "matches the rows"))
    return 0


def rewrite(page: str, text: str, rows: Mapping[str, list[Row]]) -> str:
    """``text`` with the content of every block of ``page`` replaced. ``rows``: those of each suite.

    ValueError: a block of ``page`` is missing, twice there, unknown or open, or the rows lack what it shows.
    """
    blocks = {block.name: block for block in BLOCKS if block.page == page}
    markers = _MARKER.findall(text)
    opened, closed = markers[::2], markers[1::2]
    if sorted(opened) != sorted(blocks):
        raise ValueError(
            f"{page} must have the blocks {', '.join(blocks)}, each once and closed before the next begins, but has "
            f"{', '.join(opened) or 'none'}"
        )
    if closed != [f"{name.split(':')[0]}:end" for name in opened]:
        raise ValueError(f"{page}: every <!-- PART:NAME --> needs one <!-- PART:end --> after it; blocks do not nest")
    for name in opened:
        _check_one_machine(blocks[name].suite, rows[blocks[name].suite])

    def write(found: re.Match) -> str:
        block = blocks[found[2]]
        begin = f"<!-- {block.name}: written by `python -m bench docs`, not by hand -->"
        return f"{begin}\n\n{block.content(rows[block.suite])}\n\n{found[5]}"

    return _BLOCK.sub(write, text)


def changed(old: str, new: str) -> list[str]:
    """The blocks whose content differs."""
    return [before[2] for before, after in zip(_BLOCK.finditer(old), _BLOCK.finditer(new)) if before[0] != after[0]]


def _check_one_machine(suite: str, rows: list[Row]) -> None:
    cards = sorted({row["gpu"] for row in rows})
    if len(cards) != 1:
        raise ValueError(f"rows of {suite} must be of one gpu, but are of {', '.join(cards) or 'none'}")
