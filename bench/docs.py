"""``python -m bench docs``: write the generated tables and plots of the documents from committed rows.

A block begins with ``<!-- PART:NAME ... -->`` and ends with ``<!-- PART:end -->``. ``BLOCKS`` says which page has which
blocks, from which files of rows. Older files of rows are in the history of the repository.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from typing import Any

from bench.command import refuse
from bench.environment import RESULTS, ROOT, shown
from bench.report import read_file, timed

_ATTENTION, _OLDEST = "h200-2026-11-28-triton-3.9.0", "h200-2026-11-27-triton-3.6.0"
_ATTENTION_H100, _H100 = "h100-2026-11-27-triton-3.9.0", "h100-2026-11-26-triton-3.9.0"
_LATENT = "mla-h200-2026-11-28-triton-3.9.0"
# Page -> block -> the files of rows in ``bench/results``, and the function below ``bench`` that makes the content.
BLOCKS: dict[str, dict[str, tuple[str, str]]] = {
    "README.md": {
        "readme:attention": (f"{_ATTENTION} {_ATTENTION_H100}", "readme.attention"),
        "readme:llama": ("models-h200-2026-11-27-triton-3.9.0 models-h200-2026-11-23", "readme.llama"),
        "readme:qwen": ("models-h200-2026-11-23", "readme.qwen"),
        "bench:headline": (f"{_ATTENTION} {_ATTENTION_H100}", "attention.tables.headline"),
    },
    "docs/benchmarks.md": {
        "bench:results": (_ATTENTION, "attention.tables.results"),
        "bench:standing": (_ATTENTION, "attention.tables.standing"),
        "h100:results": (_ATTENTION_H100, "attention.tables.results"),
        "h100:standing": (_ATTENTION_H100, "attention.tables.standing"),
        "bench:gqa": ("gqa-h200-2026-11-28-triton-3.9.0", "attention.tables.all_results"),
        "h100:gqa": ("gqa-h100-2026-11-28-triton-3.9.0", "attention.tables.all_results"),
        "oldest:standing": (_OLDEST, "attention.tables.standing"),
        "fa3:results": ("fa3-h200-2026-11-26-triton-3.9.0", "attention.jax_fa3.results"),
        "h100:fa3": ("fa3-h100-2026-11-27-triton-3.9.0", "attention.jax_fa3.results"),
        "host:results": ("host-h200-2026-11-26-triton-3.9.0", "attention.tables.host"),
        "h100:host": (f"host-{_H100}", "attention.tables.host"),
        "energy:results": ("energy-h200-2026-11-27-triton-3.9.0", "attention.tables.energy"),
        "h100:energy": (f"energy-{_H100}", "attention.tables.energy"),
        "masks:results": ("masks-h200-2026-11-26-triton-3.9.0", "attention.tables.masks"),
        "h100:masks": (f"masks-{_H100}", "attention.tables.masks"),
        "norm:results": ("norm-h200-2026-11-26-triton-3.9.0", "attention.tables.norm"),
        "h100:norm": (f"norm-{_H100}", "attention.tables.norm"),
        "norm:oldest": ("norm-h200-2026-11-23-triton-3.6.0", "attention.tables.norm"),
        "decode:results": ("decode-h200-2026-11-26-triton-3.9.0", "decode.tables.results"),
        "decode:stored": ("decode-h200-2026-11-26-triton-3.9.0", "decode.tables.stored"),
        "h100:decode": (f"decode-{_H100}", "decode.tables.results"),
        "rope:results": ("rope-h200-2026-11-26-triton-3.9.0", "rope.tables.results"),
        "rope:norms": ("rope-norms-h200-2026-11-26-triton-3.9.0", "rope.tables.results"),
        "h100:rope": ("rope-h100-2026-11-27-triton-3.9.0", "rope.tables.results"),
        "h100:rope_norms": ("rope-norms-h100-2026-11-27-triton-3.9.0", "rope.tables.results"),
        "models:results": ("models-h200-2026-11-27-triton-3.9.0", "models.tables.results"),
        "h100:models": ("models-h100-2026-11-27-triton-3.9.0", "models.tables.results"),
        "models:norms": ("models-h200-2026-11-23", "models.tables.results"),
        "models:latent": ("models-latent-h200-2026-11-27-triton-3.9.0", "models.tables.results"),
        "h100:latent": ("models-latent-h100-2026-11-27-triton-3.9.0", "models.tables.results"),
        "models:steps": ("models-step-h200-2026-11-26-triton-3.9.0", "models.tables.training"),
        "h100:steps": ("models-step-h100-2026-11-28-triton-3.9.0", "models.tables.training"),
        "models:serving": ("serve-h200-2026-11-22", "models.tables.serving"),
        "h100:serving": ("serve-h100-2026-11-27-triton-3.9.0", "models.tables.serving"),
        "cp:results": ("cp-h200-2026-11-23", "cp.tables.results"),
        "corope:results": ("corope-h200-2026-11-21", "attention.tables.corope"),
        "h100:corope": ("corope-h100-2026-11-27-triton-3.9.0", "attention.tables.corope"),
    },
    "docs/guides/same-bits.md": {
        "step:results": ("decode-h200-2026-11-26-triton-3.9.0", "decode.tables.same_bits"),
        "h100:step": (f"decode-{_H100}", "decode.tables.same_bits"),
        "attention:results": ("same-bits-attention-h200-2026-11-27-triton-3.9.0", "attention.tables.same_bits"),
        "h100:attention": ("same-bits-attention-h100-2026-11-27-triton-3.9.0", "attention.tables.same_bits"),
    },
    "docs/guides/intervals.md": {
        "intervals:results": ("intervals-h200-2026-11-28-triton-3.9.0", "attention.tables.intervals"),
        "h100:results": (f"intervals-{_H100}", "attention.tables.intervals"),
    },
    "docs/guides/latent.md": {
        "mla:results": (_LATENT, "mla.results"),
        "h100:results": ("mla-h100-2026-11-28-triton-3.9.0", "mla.results"),
    },
}
# Figure in ``bench/results/plots`` -> the mode and the file of its rows, and the function that draws it.
PLOTS = {
    "overview_graph": ("graph", _ATTENTION, "attention.plots.overview"),
    "speedup_all_graph": ("graph", _ATTENTION, "attention.plots.speedups"),
    "energy_load": ("load", "energy-h200-2026-11-27-triton-3.9.0", "attention.plots.energy"),
    "latent_graph": ("graph", _LATENT, "attention.plots.speedups"),
    "rope_wide_graph": ("graph", "rope-h200-2026-11-26-triton-3.9.0", "rope.tables.draw"),
    "context_parallel_eager": ("eager", "cp-h200-2026-11-23", "cp.tables.draw"),
}
_PARTS = "|".join(dict.fromkeys(name.split(":")[0] for blocks in BLOCKS.values() for name in blocks))
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
        for name, (mode, file, function) in PLOTS.items() if args.plots else ():
            path = RESULTS / "plots" / f"{name}.png"
            made(function, file, mode).savefig(path)
            print(f"wrote {shown(path)}")
        for page in BLOCKS if not args.plots else ():
            old = (ROOT / page).read_text(encoding="utf-8")
            new = rewrite(page, old)
            pairs = zip(_BLOCK.finditer(old), _BLOCK.finditer(new))
            stale = ", ".join(before[1] for before, after in pairs if before[0] != after[0])
            if args.check and stale:
                print(f"bench docs: {page} does not match the rows in {stale}", file=sys.stderr)
                status = 1
            elif not args.check:
                (ROOT / page).write_text(new, encoding="utf-8")
                print(f"{page}: " + (f"rewrote {stale}" if stale else "matches the rows"))
    except ImportError as error:
        return refuse("docs", f"plots need matplotlib: pip install matplotlib ({error})")
    except (OSError, ValueError) as error:
        return refuse("docs", str(error))
    return status


def made(function: str, files: str, mode: str | None = None) -> Any:
    """Return what a function below ``bench`` makes from the rows of files; with ``mode`` from the timed ones of it."""
    module, _, name = function.rpartition(".")
    rows = [row for file in files.split() for row in read_file(RESULTS / f"{file}.jsonl")]
    return getattr(importlib.import_module(f"bench.{module}"), name)(rows if mode is None else timed(rows, mode=mode))


def rewrite(page: str, text: str) -> str:
    """Return ``text`` with the content of every block of ``page`` replaced.

    ValueError: a block of ``page`` is missing, twice there, unknown or open, or the rows lack what it shows.
    """
    blocks = BLOCKS[page]
    found = [match[1] for match in _BLOCK.finditer(text)]
    if sorted(found) != sorted(blocks) or len(_MARKER.findall(text)) != 2 * len(found):
        raise ValueError(
            f"{page} must have the blocks {', '.join(blocks)}, each once and closed by <!-- PART:end --> before the "
            f"next begins, but has {', '.join(found) or 'none'} and {len(_MARKER.findall(text))} markers"
        )

    def write(match: re.Match) -> str:
        files, function = blocks[match[1]]
        begin = f"<!-- {match[1]}: written by `python -m bench docs`, not by hand -->"
        return f"{begin}\n\n{made(function, files)}\n\n<!-- {match[2]}:end -->"

    return _BLOCK.sub(write, text)
