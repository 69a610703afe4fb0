"""Plots of attention: TFLOP/s over N, and speedups including those below 1."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from bench.attention.colours import COLOURS
from bench.attention.standing import ours, strongest
from bench.names import length_name
from bench.plots import STYLE, pyplot, ratio_bar, save
from bench.report import Row, timed
from bench.timing import ratio

_MARKERS = {"fused": "o", "hf": "^", "liger": "s", "compiled": "D", "bare": ""}
# A talk's figure holds about eight lines: these, and whoever else is the strongest anywhere.
_SHOWN = (
    "hf_sdpa",
    "hf_triton_fa2",
    "liger_flash",
    "liger_cudnn",
    "liger_fa4",
    "bare_cudnn",
    "bare_fa4",
)
# What a talk calls them, where that is not the label of the rows.
_NAMES = {"fused": "rope_attention (ours)", "liger_flash": "Liger rope + FA2 (SDPA flash)"}
_TITLES = {"fwd": "forward", "bwd": "backward", "both": "forward + backward"}
_CASES_A_LINE = 8
_TICKS = (0.125, 0.25, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20)


def draw_all(rows: list[Row], directory: Path, mode: str | None = None) -> list[Path]:
    """Write every figure that the rows allow and return the files. CUDA-graph times where there are any.

    ``overview``: one family, forward beside backward. ``tflops``: every family. ``speedup``: the cases of the group
    "table", and where there are others, ``speedup_all`` with all of them.
    """
    mode = mode or ("graph" if timed(rows, mode="graph") else "eager")
    figures: dict[str, Any] = {"overview": overview(timed(rows, mode=mode), mode)}
    for part in _TITLES:
        chosen = timed(rows, part, mode)
        if not chosen:
            continue
        table = [row for row in chosen if "table" in row["groups"]]
        figures[f"tflops_{part}"] = tflops_over_length(chosen, part, mode)
        figures[f"speedup_{part}"] = speedup_bars(table or chosen, part, mode)
        if table and len(table) < len(chosen):
            figures[f"speedup_all_{part}"] = speedup_bars(chosen, part, mode)
    return save(figures, directory, mode)


def overview(rows: list[Row], mode: str) -> Any:
    """TFLOP/s over N of the family with the most lengths, forward and backward side by side. None without both."""
    lengths = _lengths([row for row in rows if row["pass"] in ("fwd", "bwd")])
    family = max(lengths, key=lambda name: len(lengths[name]), default=None)
    if family is None or len(lengths[family]) < 2:
        return None
    members = [row for row in rows if row["family"] == family]
    parts = [part for part in ("fwd", "bwd") if timed(members, part)]
    if len(parts) < 2:
        return None
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(13.0, 6.0), sharey=True, layout="constrained")
        for part, axis in zip(parts, axes):
            _panel(axis, timed(members, part), lengths[family])
            axis.set_title(_TITLES[part], fontsize=15)
        axes[0].set_ylabel("TFLOP/s")
        _finish(figure)
        text = f"RoPE + attention, {family} ({_heads(members, family)})"
        figure.suptitle(_title(text, members, None, mode), fontsize=16, fontweight="bold")
    return figure


def tflops_over_length(rows: list[Row], part: str, mode: str) -> Any:
    """A panel for each family, its lengths on the axis, a line for each provider. None without a family of two."""
    lengths = _lengths(rows)
    panels = [family for family, found in lengths.items() if len(found) > 1]
    if not panels:
        return None
    plt = pyplot()
    columns = min(len(panels), 3)
    lines = math.ceil(len(panels) / columns)
    shown = _shown(rows)
    one_mask = len({row["causal"] for row in rows}) == 1
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            lines, columns, figsize=_size(lines), squeeze=False, sharey=True, layout="constrained"
        )
        for axis, family in zip(axes.flat, panels):
            members = [row for row in rows if row["family"] == family]
            _panel(axis, members, lengths[family], shown)
            mask = "" if one_mask else ", causal" if members[0]["causal"] else ", no mask"
            axis.set_title(f"{family}  ({_heads(rows, family)}{mask})")
        for axis in axes[:, 0]:
            axis.set_ylabel("TFLOP/s")
        for axis in list(axes.flat)[len(panels) :]:
            axis.remove()
        _finish(figure)
        figure.suptitle(_title("RoPE + attention", rows, part, mode), fontsize=16, fontweight="bold")
    return figure


def _panel(axis: Any, rows: list[Row], lengths: list[int], shown: list[str] | None = None) -> None:
    """Lines of one family and one pass."""
    for provider in shown or _shown(rows):
        points = sorted((r["len_q"], r["tflops"]) for r in rows if r["provider"] == provider)
        if points:
            axis.plot(*zip(*points), **_line(provider, rows))
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [length_name(n) for n in lengths])
    axis.minorticks_off()
    axis.set_xlabel("sequence length N")


def _finish(figure: Any) -> None:
    """From zero up on every axis (they share it), and one legend for all panels."""
    lines = [line for axis in figure.axes for line in axis.get_lines()]
    figure.axes[0].set_ylim(0, 1.05 * max(max(line.get_ydata()) for line in lines))
    handles = {line.get_label(): line for line in lines}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)


def speedup_bars(rows: list[Row], part: str, mode: str) -> Any:
    """For each case, how much faster ours is than HF, than FlashAttention-2, than the strongest rival and than bare
    attention; below 1 too."""
    cases = [case for case in dict.fromkeys(r["case"] for r in rows) if ours([r for r in rows if r["case"] == case])]
    series = _speedups(rows, cases)
    if not series:
        return None
    plt = pyplot()
    lines = math.ceil(len(cases) / _CASES_A_LINE)
    width = math.ceil(len(cases) / lines)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(lines, 1, figsize=_size(lines), squeeze=False, sharey=True, layout="constrained")
        values = [value for _, _, found in series for value in found.values()]
        for line, axis in enumerate(axes.flat):
            _bars(axis, cases[line * width : (line + 1) * width], series)
            axis.set_xlim(-0.6, width - 0.4)
            axis.set_yscale("log")
            axis.set_ylim(min(0.8, 0.85 * min(values)), max(1.25, 1.25 * max(values)))
            axis.axhline(1.0, color="#222222", linewidth=1.2)
            axis.yaxis.set_major_locator(plt.FixedLocator(_TICKS))
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
            axis.yaxis.set_minor_locator(plt.NullLocator())
            axis.grid(axis="x", visible=False)
        figure.supylabel("their time / ours  (log; hatched: ours is slower)", fontsize=12)
        handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for _, colour, _ in series]
        figure.legend(handles, [label for label, _, _ in series], loc="outside lower center", ncols=2)
        figure.suptitle(_title("Speedup of rope_attention", rows, part, mode), fontsize=16, fontweight="bold")
    return figure


def _bars(axis: Any, cases: list[str], series: list[tuple[str, str, dict[str, float]]]) -> None:
    width = 0.82 / len(series)
    for index, (_, colour, values) in enumerate(series):
        for position, case in enumerate(cases):
            if case not in values:
                continue
            x = position + (index - (len(series) - 1) / 2) * width
            ratio_bar(axis, x, values[case], width, colour, 9)
    axis.set_xticks(range(len(cases)), cases, fontsize=12)


def _speedups(rows: list[Row], cases: list[str]) -> list[tuple[str, str, dict[str, float]]]:
    """(legend, colour, case -> ratio) of each comparison that has a value."""
    found: dict[str, dict[str, float]] = {"hf_sdpa": {}, "liger_flash": {}, "rival": {}, "bare": {}}
    whose: dict[str, set[str]] = {role: set() for role in found}
    for case in cases:
        group = [r for r in rows if r["case"] == case]
        mine = ours(group)
        by_name = {r["provider"]: r for r in group}
        others = {
            "hf_sdpa": by_name.get("hf_sdpa"),
            "liger_flash": by_name.get("liger_flash"),
            "rival": strongest(group, rotates=True),
            "bare": strongest(group, rotates=False),
        }
        for role, other in others.items():
            if other is not None:
                found[role][case] = ratio(other["rounds"], mine["rounds"])
                whose[role].add(other["label"].removeprefix("bare "))
    labels = {r["provider"]: r["label"] for r in rows}
    names = {
        "hf_sdpa": (f"vs {labels.get('hf_sdpa', '')}", COLOURS["hf_sdpa"]),
        "liger_flash": (f"vs {_NAMES['liger_flash']}", COLOURS["liger_flash"]),
        "rival": (f"vs the strongest rope + attention: {_either(whose['rival'])}", COLOURS["liger_fa4"]),
        "bare": (f"vs the fastest attention without RoPE: {' or '.join(sorted(whose['bare']))}", COLOURS["bare_cudnn"]),
    }
    return [(*names[role], values) for role, values in found.items() if values]


def _either(labels: set[str]) -> str:
    """Labels of the form "rotation rope + attention", the parts that they share written once."""
    parts = [label.split(" rope + ") for label in sorted(labels)]
    if any(len(part) != 2 for part in parts):
        return " or ".join(sorted(labels))
    return " rope + ".join(" or ".join(sorted({part[i] for part in parts})) for i in (0, 1))


def _shown(rows: list[Row]) -> list[str]:
    """Whose lines are drawn. Who was measured at fewer than half of the cases has no line worth its place."""
    measured = Counter(r["provider"] for r in rows)
    present = [name for name, count in measured.items() if 2 * count >= max(measured.values())]
    mine = ["fused"] if "fused" in present else [name for name in present if name.startswith("fused")]
    best = set()
    for case in dict.fromkeys(r["case"] for r in rows):
        group = [r for r in rows if r["case"] == case]
        best |= {row["provider"] for rotates in (True, False) if (row := strongest(group, rotates=rotates))}
    others = [name for name in present if name in _SHOWN or name in best]
    return [name for name in others if name not in mine] + mine  # ours last: drawn on top


def _line(provider: str, rows: list[Row]) -> dict[str, Any]:
    kind = provider.split("_")[0]
    mine = kind == "fused"
    return {
        "label": _NAMES.get(provider) or next(r["label"] for r in rows if r["provider"] == provider),
        "color": COLOURS.get(provider, "#000000"),
        "marker": _MARKERS.get(kind, "x"),
        "markersize": 8 if mine else 5.5,
        "linewidth": 3.4 if mine else 1.8,
        "linestyle": "--" if kind == "bare" else "-",
        "zorder": 5 if mine else 3,
    }


def _lengths(rows: list[Row]) -> dict[str, list[int]]:
    return {family: sorted({r["len_q"] for r in rows if r["family"] == family}) for family in _families(rows)}


def _families(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(r["family"] for r in rows))


def _heads(rows: list[Row], family: str) -> str:
    members = [r for r in rows if r["family"] == family]
    heads = list(dict.fromkeys((r["heads_q"], r["heads_kv"]) for r in members))
    text = (
        "H varies"
        if len(heads) > 1
        else f"H {heads[0][0]}"
        if heads[0][0] == heads[0][1]
        else f"H {heads[0][0]}/{heads[0][1]}"
    )
    return f"{text}, D {members[0]['head_dim']}"


def _size(lines: int) -> tuple[float, float]:
    """Inches: 16:9 up to two lines of panels, taller beyond."""
    return 13.0, 7.3 * max(1.0, 0.45 * lines)


def _title(what: str, rows: list[Row], part: str | None, mode: str) -> str:
    row = rows[0]
    masks = {r["causal"] for r in rows}
    mask = {(True,): ", causal", (False,): ", no mask"}.get(tuple(masks), "")
    timing = "CUDA graphs" if mode == "graph" else "eager"
    what = f"{what}, {_TITLES[part]}" if part else what
    return f"{what}: {row['gpu']}, {row['dtype']}{mask}, {timing}"
