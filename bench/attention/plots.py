"""Plots of attention: TFLOP/s over N, speedups including those below 1, time and energy under load."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from bench.names import length_name
from bench.plots import STYLE, handles, pyplot, ratio_bar, save
from bench.report import PASSES, Row, faster, millijoules, milliseconds, ours, strongest, timed

# One colour for each provider: red is ours, blue cuDNN, grey HF; of FlashAttention amber is -2, teal -3,
# green -4.
COLOURS = {
    "fused": "#d7263d",
    "fused_inline": "#f46036",
    "fused_prepass": "#a4133c",
    "fused_hopper": "#ff5d8f",
    "hf_sdpa": "#adb5bd",
    "hf_flash_attn": "#6c757d",
    "liger_flash": "#f2a33a",
    "liger_cudnn": "#1f77b4",
    "liger_fa3": "#17a2a2",
    "liger_fa4": "#2a9d4b",
    "compiled_cudnn": "#56a3d9",
    "compiled_fa4": "#80c565",
    "bare_flash": "#8f5a08",
    "bare_cudnn": "#0b3c6f",
    "bare_fa3": "#0b5c5c",
    "bare_fa4": "#0f5c2e",
}
_MARKERS = {"fused": "o", "hf": "^", "liger": "s", "compiled": "D", "bare": ""}
# A slide holds about eight lines: these, and the strongest of any case.
_SHOWN = ("hf_sdpa", "liger_flash", "liger_cudnn", "liger_fa4", "bare_cudnn", "bare_fa4")
# Names in figures, where they differ from the label of the rows.
_NAMES = {"fused": "rope_attention (ours)", "liger_flash": "Liger rope + FA2 (SDPA flash)"}
_CASES_A_LINE = 8
_TICKS = (0.125, 0.25, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20)


def draw(rows: list[Row], directory: Path, mode: str | None = None) -> list[Path]:
    """Write every figure that the rows allow and return the files. Without ``mode`` CUDA graphs where there are any.

    ``overview``: TFLOP/s of one family, forward next to backward. ``speedup_all``: every case. ``energy``: under load.
    """
    loaded = timed(rows, mode="load")
    if mode == "load" or (mode is None and len(loaded) == len(timed(rows))):
        return save({f"energy_{part}": energy_bars(timed(loaded, part), part) for part in PASSES}, directory, "load")
    mode = mode or ("graph" if timed(rows, mode="graph") else "eager")
    rows = [row for row in timed(rows, mode=mode) if "tflops" in row]
    figures: dict[str, Any] = {"overview": overview(rows, mode)}
    for part in PASSES:
        figures[f"speedup_all_{part}"] = speedup_bars(timed(rows, part), part, mode)
    return save(figures, directory, mode)


def overview(rows: list[Row], mode: str) -> Any:
    """Draw TFLOP/s over N of the family with the most lengths, forward and backward side by side; None without both."""
    lengths: dict[str, set[int]] = {}
    for row in rows:
        if row["pass"] in PASSES:
            lengths.setdefault(row["family"], set()).add(row["len_q"])
    family = max(lengths, key=lambda name: len(lengths[name]), default="")
    members = [row for row in rows if row["family"] == family]
    if len(lengths.get(family, ())) < 2 or not all(timed(members, part) for part in PASSES):
        return None
    plt, ticks = pyplot(), sorted(lengths[family])
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(13.0, 6.0), sharey=True, layout="constrained")
        for part, axis in zip(PASSES, axes):
            found = timed(members, part)
            for provider in _shown(found):
                points = sorted((r["len_q"], r["tflops"]) for r in found if r["provider"] == provider)
                axis.plot(*zip(*points), **_line(provider, found))
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [length_name(n) for n in ticks])
            axis.minorticks_off()
            axis.set_xlabel("sequence length N")
            axis.set_title(PASSES[part], fontsize=15)
        axes[0].set_ylabel("TFLOP/s")
        highest = max(max(line.get_ydata()) for axis in axes for line in axis.get_lines())
        axes[0].set_ylim(0, 1.05 * highest)
        labels = {line.get_label(): line for axis in axes for line in axis.get_lines()}
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4)
        row = members[0]
        heads = str(row["heads_q"]) if row["heads_q"] == row["heads_kv"] else f"{row['heads_q']}/{row['heads_kv']}"
        text = f"RoPE + attention, {family} (H {heads}, D {row['head_dim']})"
        figure.suptitle(_title(text, members, mode), fontsize=16, fontweight="bold")
    return figure


def speedup_bars(rows: list[Row], part: str, mode: str) -> Any:
    """Draw for each case how much faster ours is than HF, FlashAttention-2, the strongest rival and bare attention."""
    cases = [case for case in dict.fromkeys(r["case"] for r in rows) if ours([r for r in rows if r["case"] == case])]
    series = _speedups(rows, cases)
    if not series:
        return None
    plt = pyplot()
    lines = math.ceil(len(cases) / _CASES_A_LINE)
    width = math.ceil(len(cases) / lines)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            lines, 1, figsize=(13.0, 7.3 * max(1.0, 0.45 * lines)), squeeze=False, sharey=True, layout="constrained"
        )
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
        legend = handles([colour for _, colour, _ in series])
        figure.legend(legend, [label for label, _, _ in series], loc="outside lower center", ncols=2)
        figure.suptitle(
            _title(f"Speedup of rope_attention, {PASSES[part]}", rows, mode), fontsize=16, fontweight="bold"
        )
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
    """Return (legend, colour, case -> ratio) of each comparison that has a value."""
    series = []
    for text, colour, role, name in (
        ("vs ", COLOURS["hf_sdpa"], "rival", "hf_sdpa"),
        ("vs ", COLOURS["liger_flash"], "rival", "liger_flash"),
        ("vs the strongest rope + attention: ", COLOURS["liger_fa4"], "rival", None),
        ("vs the fastest attention without RoPE: ", COLOURS["bare_cudnn"], "bare", None),
    ):
        values, labels = {}, set()
        for case in cases:
            group = [r for r in rows if r["case"] == case]
            other = strongest([r for r in group if name in (None, r["provider"])], role)
            if other is not None:
                values[case] = faster(other, ours(group))
                labels.add(other["label"].removeprefix("bare "))
        if values:
            series.append((text + _either(labels), colour, values))
    return series


def _either(labels: set[str]) -> str:
    """Join labels of the form "rotation rope + attention"; write the parts that they share once."""
    parts = [label.split(" rope + ") for label in sorted(labels)]
    if any(len(part) != 2 for part in parts):
        return " or ".join(sorted(labels))
    return " rope + ".join(" or ".join(sorted({part[i] for part in parts})) for i in (0, 1))


def _shown(rows: list[Row]) -> list[str]:
    """Return the providers that get a line: those with at least half of the cases."""
    measured = Counter(r["provider"] for r in rows)
    present = [name for name, count in measured.items() if 2 * count >= max(measured.values())]
    mine = ["fused"] if "fused" in present else [name for name in present if name.startswith("fused")]
    best = set()
    for case in dict.fromkeys(r["case"] for r in rows):
        group = [r for r in rows if r["case"] == case]
        best |= {row["provider"] for role in ("rival", "bare") if (row := strongest(group, role))}
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


def _title(what: str, rows: list[Row], mode: str) -> str:
    row = rows[0]
    masks = {r["causal"] for r in rows}
    mask = {(True,): ", causal", (False,): ", no mask"}.get(tuple(masks), "")
    timing = "CUDA graphs" if mode == "graph" else "eager"
    return f"{what}: {row['gpu']}, {row['dtype']}{mask}, {timing}"


def energy_bars(rows: list[Row], part: str) -> Any:
    """Draw times above energies, a bar for each rival over ours at each case; None without a case that has both."""
    groups = {case: [row for row in rows if row["case"] == case] for case in dict.fromkeys(row["case"] for row in rows)}
    mine = {case: ours(group) for case, group in groups.items()}
    groups = {case: [row for row in group if row["role"] != "ours"] for case, group in groups.items() if mine[case]}
    names = [name for name in COLOURS if any(row["provider"] == name for group in groups.values() for row in group)]
    if not names:
        return None
    plt, width = pyplot(), 0.82 / len(names)
    labels = {row["provider"]: row["label"] for row in rows}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 1, figsize=(13.0, 7.3), sharex=True, layout="constrained")
        for axis, (what, rounds) in zip(axes, {"time": "rounds", "energy": "mj_rounds"}.items()):
            for index, name in enumerate(names):
                shift = (index - (len(names) - 1) / 2) * width
                for position, (case, group) in enumerate(groups.items()):
                    for row in (row for row in group if row["provider"] == name):
                        value = faster(row, mine[case], rounds)
                        ratio_bar(axis, position + shift, value, width, COLOURS[name], 8)
            axis.axhline(1.0, color="#222222", linewidth=1.2)
            axis.set_ylabel(f"their {what} / ours")
            axis.margins(y=0.15)
            axis.grid(axis="x", visible=False)
        shown = {case: (milliseconds(mine[case]["ms"]), millijoules(mine[case]["mj"])) for case in groups}
        ticks = [f"{case}\n{ms} ms\n{mj} mJ" for case, (ms, mj) in shown.items()]
        axes[-1].set_xticks(range(len(ticks)), ticks, fontsize=10)
        legend = handles([COLOURS[name] for name in names])
        figure.legend(legend, [labels[name] for name in names], loc="outside lower center", ncols=4)
        title = f"Time and energy of a call under load, {PASSES[part]}: {rows[0]['gpu']}, {rows[0]['dtype']}"
        figure.suptitle(f"{title} (hatched: ours takes more)", fontsize=15, fontweight="bold")
    return figure
