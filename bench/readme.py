"""``python -m bench readme``: the figures in README.md, written from committed rows and from nothing else.

A block begins with ``<!-- bench:NAME ... -->`` and ends with ``<!-- bench:end -->``; ``BLOCKS`` has the names. Ratios
are their time over ours, medians over rounds of one process; below 1 ours is slower, and is printed the same way.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench import cases, providers, report
from bench.environment import ROOT
from bench.timing import ratio

Row = dict[str, Any]
_MINE, _FLASH = "fused", "liger_flash"
_EVEN = 0.995  # from here on a ratio counts as not slower, as in report.py
_EAGER_DIFFERS = 0.10
_PASSES = {"fwd": "forward", "bwd": "backward"}
# In words: what the labels of the rows abbreviate.
_NAMES = {
    "hf_sdpa": "Hugging Face's rotation + SDPA",
    "liger_flash": "Liger's rotation + FlashAttention-2 (in PyTorch's SDPA)",
    "liger_cudnn": "Liger's rotation + cuDNN",
    "liger_fa4": "Liger's rotation + FlashAttention-4",
}
_HOST = ("hf_sdpa", "liger_flash", "liger_cudnn", "liger_fa4", "bare_flash", "bare_cudnn")
_PLAN_CASE = "Llama7B-4K"
_BLOCK = re.compile(r"(<!-- bench:(\w+)[^>]*-->\n)(.*?)(<!-- bench:end -->)", re.DOTALL)


def main(argv: list[str]) -> int:
    """Exit status: 0 README is (now) what the rows say, 1 ``--check`` found it is not, 2 nothing could be written."""
    parser = argparse.ArgumentParser(
        "python -m bench readme", description="Write README.md's figures from result files."
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="JSON lines; the first file that has a case supplies it"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where README.md and the rows differ"
    )
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="default: README.md")
    args = parser.parse_args(argv)
    try:
        old = args.readme.read_text(encoding="utf-8")
        new = rewrite(old, read_runs(args.files))
    except (OSError, ValueError) as error:
        print(f"bench readme: {error}", file=sys.stderr)
        return 2
    stale = [before[2] for before, after in zip(_BLOCK.finditer(old), _BLOCK.finditer(new)) if before[0] != after[0]]
    if args.check and stale:
        print(f"bench readme: {args.readme.name} does not match the rows in {', '.join(stale)}", file=sys.stderr)
        return 1
    if not args.check:
        args.readme.write_text(new, encoding="utf-8")
    print(f"{args.readme.name}: " + (f"rewrote {', '.join(stale)}" if stale else "matches the rows"))
    return 0


def read_runs(paths: Iterable[Path]) -> list[Row]:
    """Rows of several files, each case from one run: times of two runs are never compared.

    The first file that has a case supplies it; within a file the latest run of a case, pass and mode.
    """
    found: dict[tuple, list[Row]] = {}
    for path in paths:
        groups: dict[tuple, list[Row]] = {}
        for row in report.read_lines([path]):
            key = tuple(row[name] for name in ("case", "shape", "gpu", "pass", "mode"))
            groups.setdefault(key, []).append(row)
        rows_of: dict[tuple, list[Row]] = {}
        for key, group in groups.items():
            latest = max(row.get("date", "") for row in group)
            rows_of.setdefault(key[:3], []).extend(row for row in group if row.get("date", "") == latest)
        found = rows_of | found
    return [row for rows in found.values() for row in rows]


def rewrite(text: str, rows: list[Row]) -> str:
    """``text`` with every block's content replaced. ValueError: no blocks, an unknown or open one, or missing rows."""
    names = re.findall(r"<!-- bench:(\w+)", text)
    if not names:
        raise ValueError("no <!-- bench:NAME --> block to write")
    unknown = sorted(set(names) - set(BLOCKS) - {"end"})
    if unknown:
        raise ValueError(f"unknown block {', '.join(unknown)}; there are {', '.join(BLOCKS)}")
    if names[1::2] != ["end"] * (len(names) // 2) or len(names) % 2 or "end" in names[::2]:
        raise ValueError("every <!-- bench:NAME --> needs one <!-- bench:end --> after it, and blocks do not nest")
    for fact in ("gpu", "dtype"):
        values = {row[fact] for row in rows}
        if len(values) != 1:
            raise ValueError(f"rows must be of one {fact}, but are of {', '.join(sorted(values)) or 'none'}")
    return _BLOCK.sub(lambda block: f"{block[1]}\n{BLOCKS[block[2]](rows)}\n\n{block[4]}", text)


def headline(rows: list[Row]) -> str:
    """At how many shapes ours is not slower than what people would otherwise install."""
    standing = _standing(report.timed(rows, mode="graph"))
    lines = [
        [words, *(f"at {_count(standing[name], part)} shapes" for part in _PASSES)]
        for name, words in _NAMES.items()
        if name in standing
    ]
    if not lines:
        raise ValueError(f"no time of {_MINE} beside a rival that rotates")
    where = f"{rows[0]['gpu']}, {rows[0]['dtype']}, CUDA graphs"
    return markdown([f"`rope_attention` is not slower than ... ({where})", *_PASSES.values()], lines)


def results(rows: list[Row]) -> str:
    """Forward and backward at the shapes of the target: a common rival, the strongest one, the fastest bare one."""
    blocks = []
    common, label = _common(rows)
    for part, words in _PASSES.items():
        header = [
            f"**{words}**, ms",
            "`rope_attention`",
            label,
            "strongest with rotation",
            "fastest *without* rotation",
        ]
        lines = []
        for case in cases.TABLE:
            graph, eager = (
                [r for r in report.timed(rows, part, mode) if r["case"] == case] for mode in ("graph", "eager")
            )
            mine, called = _one(graph, _MINE), _one(eager, _MINE)
            if mine is None:
                raise ValueError(f"no CUDA-graph time of {_MINE} at {case}, {words}")
            shape = f"({mine['batch']}, {mine['heads_q']}/{mine['heads_kv']}, {mine['len_q']}, {mine['head_dim']})"
            lines.append([f"{case} {shape}", *_cells(graph, common)])
            if called is not None and abs(called["ms"] / mine["ms"] - 1) > _EAGER_DIFFERS:
                lines.append([f"{case}, called eagerly", *_cells(eager, common)])
        blocks.append(markdown(header, lines))
    loose = any(row["status"] == "loose" for row in report.timed(rows) if row["case"] in cases.TABLE)
    notes = [
        "In brackets TFLOP/s; ×: their time over ours, below 1 ours is slower. Times are of CUDA graphs; a second line "
        f"shows eager calls where ours differ by more than {_EAGER_DIFFERS:.0%}.\n",
        *(["~: outside the tolerance that ours is held to."] if loose else []),
        f"{provenance(rows, 'cuDNN', 'liger-kernel', 'flash-attn', 'flash-attn-4')} Shapes are (B, HQ/HKV, N, D).",
    ]
    return "\n\n".join([*blocks, "\n".join(notes)])


def standing(rows: list[Row]) -> str:
    """Every rival over every shape measured: at how many ours is not slower, and the range of the ratio."""
    found = _standing(report.timed(rows, mode="graph"))
    labels = {row["provider"]: row["label"] for row in rows}
    lines = []
    for name in providers.PROVIDERS:
        if name in found:
            line = [labels[name]]
            for part in _PASSES:
                ratios = [value for _, at, value in found[name] if at == part]
                line += [_count(found[name], part), f"{min(ratios):.2f} to {max(ratios):.2f}×" if ratios else ""]
            lines.append(line)
    header = ["against", "forward: not slower at", "their time / ours", "backward: not slower at", "their time / ours"]
    slower = [f"{case} {_PASSES[part]} ({value:.2f}×)" for case, part, value in found.get(_FLASH, ()) if value < _EVEN]
    label = labels.get(_FLASH, _FLASH)
    return f"{markdown(header, lines)}\n\nSlower than {label} (FlashAttention-2) at: {', '.join(slower) or 'no shape'}."


def host(rows: list[Row]) -> str:
    """Host time of an eager call on tensors so small that the GPU waits: what short sequences cost."""
    group = report.timed(rows, mode="host")
    mine = {part: _one(report.timed(group, part), _MINE) for part in ("fwd", "both")}
    if None in mine.values():
        raise ValueError(f"no host time of {_MINE}")
    lines = []
    for name in (_MINE, *_HOST):
        found = [_one(report.timed(group, part), name) for part in mine]
        if all(found):
            label = "`rope_attention`" if name == _MINE else found[0]["label"]
            lines.append([label, *(f"{1e3 * row['ms']:.0f}" for row in found)])
    return markdown(["host time of an eager call, µs", "forward, no gradient", "forward + backward"], lines)


def plan(rows: list[Row]) -> str:
    """What ``fused_rope_attn.plan`` answered during the measurement."""
    texts = [row["plan"] for row in report.timed(rows, "fwd", "graph") if row["case"] == _PLAN_CASE and row.get("plan")]
    if not texts:
        raise ValueError(f"no plan in the rows of {_PLAN_CASE}")
    text = re.sub(r", (reason|forward|backward)=", r",\n     \1=", texts[0])
    text = re.sub(r", (dkdv|dq|section_bytes)=", r",\n         \1=", text)
    return f"At {_PLAN_CASE} on an {rows[0]['gpu']}:\n\n```text\n{text}\n```"


def block_main(argv: list[str], name: str, block: Callable[[list[Row]], str], path: Path) -> int:
    """``python -m bench NAME readme``: a benchmark's only block, from ``<!-- NAME:results`` to ``<!-- NAME:end -->``.

    ``block`` makes its content of rows, or raises ValueError. Exit status as ``main``.
    """
    parser = argparse.ArgumentParser(f"python -m bench {name} readme")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON lines")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where README.md and rows differ")
    parser.add_argument("--readme", type=Path, default=path)
    args = parser.parse_args(argv)
    place = re.compile(rf"(<!-- {name}:results[^>]*-->\n)(.*?)(<!-- {name}:end -->)", re.DOTALL)
    try:
        old = args.readme.read_text(encoding="utf-8")
        if not place.search(old):
            raise ValueError(f"no <!-- {name}:results --> block with a <!-- {name}:end --> to write")
        content = block(report.read_lines(args.files))
    except (OSError, ValueError) as error:
        print(f"bench {name} readme: {error}", file=sys.stderr)
        return 2
    new = place.sub(lambda found: f"{found[1]}\n{content}\n\n{found[3]}", old)
    if args.check:
        return int(old != new)
    args.readme.write_text(new, encoding="utf-8")
    return 0


BLOCKS: dict[str, Callable[[list[Row]], str]] = {
    "headline": headline,
    "results": results,
    "standing": standing,
    "host": host,
    "plan": plan,
}


def _one(rows: list[Row], provider: str) -> Row | None:
    return next((row for row in rows if row["provider"] == provider), None)


def _common(rows: list[Row]) -> tuple[str, str]:
    """(name, label) of what people commonly have: FlashAttention-2 behind a fast rotation, where at least half of the
    shapes have a time of it, or Hugging Face's own."""
    timed = [row for row in report.timed(rows, mode="graph") if row["case"] in cases.TABLE]
    at = {name: {row["case"] for row in timed if row["provider"] == name} for name in (_MINE, _FLASH)}
    name = _FLASH if 2 * len(at[_FLASH]) >= len(at[_MINE]) else "hf_sdpa"
    label = next((row["label"] for row in rows if row["provider"] == name), name)
    return name, f"{label} (FlashAttention-2)" if name == _FLASH else label


def _cells(group: list[Row], common: str) -> list[str]:
    """Ours and the three comparisons of one case, pass and mode."""
    mine = _one(group, _MINE)
    rivals = [
        (_one(group, common), False),
        (report.strongest(group, rotates=True), True),
        (report.strongest(group, rotates=False), True),
    ]
    return [f"{_ms(mine['ms'])} ({mine['tflops']:.0f})", *(_against(row, mine, named) for row, named in rivals)]


def _ms(value: float) -> str:
    """Three significant digits: 0.0133, 0.440, 16.4, 114."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:.0f}"


def _against(row: Row | None, mine: Row, named: bool) -> str:
    if row is None:
        return "not measured"
    name = f", {row['label'].removeprefix('bare ')}" if named else ""
    return f"{_ms(row['ms'])}: **{ratio(row['rounds'], mine['rounds']):.2f}×**{name}{' ~' * (row['status'] == 'loose')}"


def _standing(rows: list[Row]) -> dict[str, list[tuple[str, str, float]]]:
    """Rival -> (case, pass, their time / ours) wherever both were timed."""
    found: dict[str, list[tuple[str, str, float]]] = {}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["pass"]), []).append(row)
    for (case, part), group in groups.items():
        mine = _one(group, _MINE)
        for row in group if mine and part in _PASSES else ():
            if not row["ours"]:
                found.setdefault(row["provider"], []).append((case, part, ratio(row["rounds"], mine["rounds"])))
    return found


def _count(found: list[tuple[str, str, float]], part: str) -> str:
    ratios = [value for _, at, value in found if at == part]
    return f"{sum(value >= _EVEN for value in ratios)} of {len(ratios)}"


def provenance(rows: list[Row], *packages: str) -> str:
    """Where rows come from, for under a table: card, dtype where they share one, versions, dates and commits.

    ``packages``: which of the others are named where the rows have them, "cuDNN" among them.
    """
    row = rows[0]
    versions = {name: version for r in rows for name, version in (r.get("packages") or {}).items()}
    cudnn = row.get("cudnn") or 0
    if cudnn:
        versions["cuDNN"] = f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}"
    dtypes = {r.get("dtype") for r in rows}
    facts = [
        row["gpu"],
        *(dtypes if len(dtypes) == 1 and None not in dtypes else ()),
        *(f"{name} {row.get(name)}" for name in ("driver", "torch", "triton")),
        *(f"{name} {versions[name]}" for name in packages if name in versions),
    ]
    dates = sorted({r.get("date", "")[:10] for r in rows} - {""})
    commits = sorted({r.get("commit") or "not recorded" for r in rows})
    return f"{', '.join(facts)}. Measured {' and '.join(dates)}, commit {' and '.join(commits)}."


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """A table whose first column is to the left."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))
