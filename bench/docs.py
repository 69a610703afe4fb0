"""``python -m bench docs``: write the generated tables and plots of the documents from committed rows.

A block begins with ``<!-- PART:NAME ... -->`` and ends with ``<!-- PART:end -->``. ``BLOCKS`` says which page has which
blocks, from which file of rows. Older files of rows are in the history of the repository.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bench import plots
from bench.command import refuse
from bench.environment import RESULTS, ROOT, shown
from bench.report import Row, read_file, timed


class Block(NamedTuple):
    """Part of a page, made by ``function`` (a path below ``bench``) from the rows of ``file`` in ``bench/results``."""

    name: str
    page: str
    files: tuple[str, ...]
    function: str

    def content(self, rows: Mapping[str, list[Row]]) -> str:
        """Return the content. ``rows``: those of each file. ValueError where they lack something."""
        return _function(self.function)([row for file in self.files for row in rows[file]])


def _function(path: str) -> Callable[..., Any]:
    """Return a function by its path below ``bench``."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"bench.{module}"), name)


README, BENCHMARKS = "README.md", "docs/benchmarks.md"
_ATTENTION, _OLDEST = "h200-2026-11-23-triton-3.9.0", "h200-2026-11-23-triton-3.6.0"
_IN_README = ("readme:attention", "readme:llama", "readme:qwen", "bench:headline")
BLOCKS: tuple[Block, ...] = tuple(
    Block(
        name,
        README if name in _IN_README else BENCHMARKS,
        tuple(f"{file}.jsonl" for file in files.split()),
        function,
    )
    for name, files, function in (
        ("readme:attention", f"{_ATTENTION} h100-2026-11-25-triton-3.9.0", "readme.attention"),
        ("readme:llama", "models-h200-2026-11-21", "readme.llama"),
        ("readme:qwen", "models-norms-h200-2026-11-23", "readme.qwen"),
        ("bench:headline", _ATTENTION, "attention.tables.headline"),
        ("bench:results", _ATTENTION, "attention.tables.results"),
        ("bench:standing", _ATTENTION, "attention.tables.standing"),
        ("oldest:standing", _OLDEST, "attention.tables.standing"),
        ("host:results", "host-h200-2026-11-23-triton-3.9.0", "attention.tables.host"),
        ("energy:results", "energy-h200-2026-11-23-triton-3.9.0", "attention.tables.energy"),
        ("masks:results", "masks-h200-2026-11-21", "attention.tables.masks"),
        ("norm:results", "norm-h200-2026-11-23-triton-3.9.0", "attention.tables.norm"),
        ("norm:oldest", "norm-h200-2026-11-23-triton-3.6.0", "attention.tables.norm"),
        ("decode:results", "decode-h200-2026-11-23-triton-3.9.0", "decode.tables.results"),
        ("decode:stored", "decode-h200-2026-11-23-triton-3.9.0", "decode.tables.stored"),
        ("rope:results", "rope-h200-2026-11-21", "rope.tables.results"),
        ("rope:norms", "rope-norms-h200-2026-11-23", "rope.tables.results"),
        ("models:results", "models-h200-2026-11-21", "models.tables.results"),
        ("models:norms", "models-norms-h200-2026-11-23", "models.tables.results"),
        ("models:serving", "serve-h200-2026-11-22", "models.tables.serving"),
        ("cp:results", "cp-h200-2026-11-23", "cp.tables.results"),
        ("corope:results", "corope-h200-2026-11-21", "attention.tables.corope"),
    )
)
# Figures in ``bench/results/plots``: the file of rows, the function that draws them, and the mode of the rows.
PLOTS = (
    (_ATTENTION, "attention.plots.draw", "graph"),
    ("energy-h200-2026-11-23-triton-3.9.0", "attention.plots.draw", "load"),
    ("rope-h200-2026-11-21", "rope.tables.draw", "graph"),
    ("cp-h200-2026-11-23", "cp.tables.draw", "eager"),
)
_PARTS = "|".join(dict.fromkeys(block.name.split(":")[0] for block in BLOCKS))
_MARKER = re.compile(rf"<!-- (?:{_PARTS}):\w+")
_BLOCK = re.compile(rf"<!-- (({_PARTS}):\w+)[^>]*-->\n(?:(?!<!-- ).)*<!-- \2:end -->", re.DOTALL)


def main(argv: list[str]) -> int:
    """Write or check the pages. Exit status: 0 they agree with their rows, 1 one does not (``--check``), 2 cannot."""
    parser = argparse.ArgumentParser("python -m bench docs", description=__doc__.splitlines()[0].split(": ", 1)[1])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page and its rows differ")
    parser.add_argument("--plots", action="store_true", help="draw the figures instead")
    args = parser.parse_args(argv)
    status = 0
    try:
        for file, function, mode in PLOTS if args.plots else ():
            figures = _function(function)(timed(read_file(RESULTS / f"{file}.jsonl"), mode=mode), mode)
            print(*(f"wrote {shown(path)}" for path in plots.save(figures, RESULTS / "plots", mode)), sep="\n")
        if args.plots:
            return 0
        rows = {file: read_file(RESULTS / file) for block in BLOCKS for file in block.files}
        for page in dict.fromkeys(block.page for block in BLOCKS):
            old = (ROOT / page).read_text(encoding="utf-8")
            new = rewrite(page, old, rows)
            pairs = zip(_BLOCK.finditer(old), _BLOCK.finditer(new))
            stale = ", ".join(before[1] for before, after in pairs if before[0] != after[0])
            if args.check and stale:
                print(f"bench docs: {page} does not match the rows in {stale}", file=sys.stderr)
                status = 1
            elif not args.check:
                (ROOT / page).write_text(new, encoding="utf-8")
                print(f"{page}: " + (f"rewrote {stale}" if stale else "matches the rows"))
    except (OSError, RuntimeError, ValueError) as error:
        return refuse("docs", str(error))
    return status


def rewrite(page: str, text: str, rows: Mapping[str, list[Row]]) -> str:
    """Return ``text`` with the content of every block of ``page`` replaced. ``rows``: those of each file.

    ValueError: a block of ``page`` is missing, twice there, unknown or open, or the rows lack what it shows.
    """
    blocks = {block.name: block for block in BLOCKS if block.page == page}
    found = [match[1] for match in _BLOCK.finditer(text)]
    if sorted(found) != sorted(blocks) or len(_MARKER.findall(text)) != 2 * len(found):
        raise ValueError(
            f"{page} must have the blocks {', '.join(blocks)}, each once and closed by <!-- PART:end --> before the "
            f"next begins, but has {', '.join(found) or 'none'} and {len(_MARKER.findall(text))} markers"
        )

    def write(match: re.Match) -> str:
        block = blocks[match[1]]
        begin = f"<!-- {block.name}: written by `python -m bench docs`, not by hand -->"
        return f"{begin}\n\n{block.content(rows)}\n\n<!-- {match[2]}:end -->"

    return _BLOCK.sub(write, text)
