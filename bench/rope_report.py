"""Rows of ``bench rope`` to a table, to figures, and to README's block; losses are printed like wins."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bench import readme, report
from bench.plots import _STYLE, DPI, _pyplot
from bench.rope_providers import COPY, OURS, PROVIDERS
from bench.timing import ratio

Row = dict[str, Any]
_PASSES = {"fwd": "forward", "bwd": "backward"}
# A tensor of half of these bytes is larger than the L2 of any card in the configuration table.
_PAST_L2 = 256 << 20
_EVEN = 0.995  # from here on a ratio counts as not slower, as in report.py
_COLOURS = {
    OURS: "#d7263d",
    "liger": "#f2a33a",
    "flash_attn": "#2a9d4b",
    "compiled": "#56a3d9",
    "hf": "#adb5bd",
    COPY: "#343a40",
}


def groups(rows: list[Row], mode: str | None = None) -> dict[tuple[str, str, str, str], dict[str, Row]]:
    """(case, shape, pass, mode) -> provider -> its timed row."""
    found: dict[tuple[str, str, str, str], dict[str, Row]] = {}
    for row in report.timed(rows, mode=mode):
        found.setdefault((row["case"], row["shape"], row["pass"], row["mode"]), {})[row["provider"]] = row
    return found


def speedup(group: dict[str, Row], name: str) -> float | None:
    """Their time over ours, median over rounds."""
    return ratio(group[name]["rounds"], group[OURS]["rounds"]) if name in group and OURS in group else None


def strongest(group: dict[str, Row]) -> Row | None:
    """The fastest that rotates and is not ours."""
    rivals = [row for name, row in group.items() if name not in (OURS, COPY)]
    return min(rivals, key=lambda row: row["ms"], default=None)


def summary(rows: list[Row]) -> str:
    """A line for each problem, pass and mode, then whoever was not timed, with the reason."""
    lines, losses = [], 0
    for (case, shape, part, mode), group in groups(rows).items():
        mine, rival = group.get(OURS), strongest(group)
        if mine is None:
            continue
        line = [case, shape, part, mode, report.milliseconds(mine["ms"]), f"{mine['gb_s']:.0f}", _percent(mine)]
        if rival is not None:
            value = speedup(group, rival["provider"])
            losses += value < _EVEN
            mark = " ~" * (rival["status"] == "loose")
            line += [rival["label"] + mark, report.milliseconds(rival["ms"]), report.speedup(value)]
        lines.append(line + [""] * (10 - len(line)))
    header = ["case", "shape", "pass", "mode", "ours ms", "GB/s", "of copy", "strongest rival", "ms", "speedup"]
    blocks = [report.table(header, lines, left=4)] if lines else ["nothing was timed"]
    blocks.append(f"{len(lines)} lines, slower than the strongest rival in {losses}")
    notes = dict.fromkeys(
        f"! {row['label']}: {row['status']}: {row['detail']}" for row in rows if row["status"] not in ("ok", "loose")
    )
    return "\n\n".join([*blocks, *(["\n".join(notes)] if notes else [])])


def _percent(row: Row) -> str:
    return f"{100 * row['of_copy']:.0f}%" if row.get("of_copy") else "-"


def block(rows: list[Row]) -> str:
    """README's block. ValueError where the rows do not hold ours beside the copy, as CUDA graphs of one card."""
    found = {key: group for key, group in groups(rows, "graph").items() if OURS in group}
    gpus = {row["gpu"] for group in found.values() for row in group.values()}
    if len(gpus) != 1 or any(COPY not in group for group in found.values()):
        raise ValueError("rows must hold CUDA-graph times of apply_rope and of the copy, on one card")
    large = [group[OURS]["of_copy"] for group in found.values() if group[OURS]["bytes"] >= _PAST_L2]
    rivals = [name for name in PROVIDERS if name not in (OURS, COPY) and any(name in group for group in found.values())]
    words = []
    if large:
        words.append(
            f"Of the bandwidth of a copy, tensors past the L2 get {100 * min(large):.0f} to {100 * max(large):.0f} %."
        )
    for name in rivals:
        ratios = [value for group in found.values() if (value := speedup(group, name)) is not None]
        even = sum(value >= _EVEN for value in ratios)
        words.append(
            f"{PROVIDERS[name].label}: not slower at {even} of {len(ratios)}, {min(ratios):.2f} to {max(ratios):.2f}×."
        )
    header = ["", "`apply_rope`, ms", "of a copy, %", *(PROVIDERS[name].label for name in rivals)]
    lines = []
    for case, shape in dict.fromkeys(key[:2] for key in found):
        passes = [found[key] for part in _PASSES if (key := (case, shape, part, "graph")) in found]
        mine = passes[0][OURS]
        # Of the wide shape the first and the last length, of the models the style that they use.
        if mine["length"] not in (256, 1024) if "wide" in mine["groups"] else mine["style"] != "half":
            continue
        times = " / ".join(f"{group[OURS]['ms']:#.3g}" for group in passes)
        lines.append(
            [f"{case} ({shape})", times, " / ".join(f"{100 * group[OURS]['of_copy']:.0f}" for group in passes)]
        )
        for name in rivals:
            values = [(value, group[name]) for group in passes if (value := speedup(group, name)) is not None]
            loose = " ~" * any(row["status"] == "loose" for _, row in values)
            lines[-1].append(" / ".join(f"{value:.2f}" for value, _ in values) + "×" * bool(values) + loose)
    table = readme.markdown(header, lines)
    loose = any(row["status"] == "loose" for group in found.values() for row in group.values())
    notes = (
        "Forward / backward. ×: their time over ours, below 1 ours is slower. Times are of CUDA graphs, L2 flushed. "
        + ("~: outside the tolerance that ours is held to. " if loose else "")
        + readme.provenance(rows, "transformers", "liger-kernel", "flash-attn")
    )
    return f"{' '.join(words)}\n\n{table}\n\n{notes}"


def plot_main(argv: list[str], directory: Path) -> int:
    """Exit status 0, or 2 where there is nothing to draw."""
    parser = argparse.ArgumentParser("python -m bench rope plot")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON lines")
    parser.add_argument("--plot-dir", type=Path, default=directory)
    args = parser.parse_args(argv)
    try:
        return 0 if draw(report.read_lines(args.files), args.plot_dir) else 2
    except (OSError, ValueError, RuntimeError) as error:
        print(f"bench rope plot: {error}", file=sys.stderr)
        return 2


def draw(rows: list[Row], directory: Path) -> list[Path]:
    """``rope_wide``: GB/s over the length; ``rope_models``: share of a copy's bandwidth, a bar for everybody."""
    mode = "graph" if report.timed(rows, mode="graph") else "eager"
    rows = report.timed(rows, mode=mode)
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for name, figure in (("rope_wide", _wide(rows)), ("rope_models", _models(rows))):
        if figure is not None:
            path = directory / f"{name}_{mode}.png"
            figure.savefig(path, dpi=DPI, facecolor="white")
            _pyplot().close(figure)
            files.append(path)
            print(f"wrote {path}")
    return files


def _wide(rows: list[Row]) -> Any:
    rows = [row for row in rows if "wide" in row["groups"]]
    columns = list(dict.fromkeys((row["dtype"], row["style"]) for row in rows))
    if not columns:
        return None
    plt = _pyplot()
    with plt.rc_context(_STYLE):
        size = (4.2 * max(2, len(columns)), 8.0)
        figure, axes = plt.subplots(2, len(columns), figsize=size, squeeze=False, sharey=True, layout="constrained")
        for line, part in enumerate(_PASSES):
            for (dtype, style), axis in zip(columns, axes[line]):
                chosen = [r for r in rows if (r["dtype"], r["style"], r["pass"]) == (dtype, style, part)]
                for name in (name for name in PROVIDERS if any(r["provider"] == name for r in chosen)):
                    points = sorted((r["length"], r["gb_s"]) for r in chosen if r["provider"] == name)
                    axis.plot(
                        *zip(*points), label=PROVIDERS[name].label, color=_COLOURS[name],
                        marker="" if name == COPY else "o", linestyle="--" if name == COPY else "-",
                        linewidth=3.2 if name == OURS else 1.8, zorder=5 if name == OURS else 3,
                    )  # fmt: skip
                axis.set_title(f"{dtype}, {style}, {_PASSES[part]}")
                axis.set_ylim(bottom=0)
                axis.set_xlabel("tokens")
        for axis in axes[:, 0]:
            axis.set_ylabel("GB/s")
        handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels())}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6)
        figure.suptitle(f"Rotation alone, 10 x 96 heads x 128: {rows[0]['gpu']}", fontsize=16, fontweight="bold")
    return figure


def _models(rows: list[Row]) -> Any:
    rows = [row for row in rows if "models" in row["groups"] and row["style"] == "half" and row.get("of_copy")]
    names = [name for name in PROVIDERS if name != COPY and any(row["provider"] == name for row in rows)]
    cases = list(dict.fromkeys((row["case"], row["shape"]) for row in rows))
    if not names or not cases:
        return None
    plt = _pyplot()
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(2, 1, figsize=(13.0, 8.0), sharex=True, layout="constrained")
        width = 0.8 / len(names)
        for axis, part in zip(axes, _PASSES):
            for i, name in enumerate(names):
                found = {(r["case"], r["shape"]): r for r in rows if r["provider"] == name and r["pass"] == part}
                places = [
                    (j + (i - len(names) / 2 + 0.5) * width, found[key]) for j, key in enumerate(cases) if key in found
                ]
                axis.bar(
                    [place for place, _ in places], [100 * row["of_copy"] for _, row in places], width * 0.92,
                    color=_COLOURS[name], label=PROVIDERS[name].label,
                )  # fmt: skip
            axis.axhline(100, color=_COLOURS[COPY], linestyle="--", linewidth=1.2)
            axis.set_ylabel("% of a copy's bandwidth")
            axis.set_title(f"q and k together, {rows[0]['dtype']}, {_PASSES[part]}")
        axes[1].set_xticks(range(len(cases)), [case for case, _ in cases], rotation=20)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
        figure.suptitle(f"Rotation alone: {rows[0]['gpu']}", fontsize=16, fontweight="bold")
    return figure
