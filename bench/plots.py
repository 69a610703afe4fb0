"""Plots from result rows: TFLOP/s over N, and speedups including those below 1. Needs matplotlib, nothing else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bench.report import ours, strongest, timed
from bench.timing import ratio

Row = dict[str, Any]

# One colour for each provider, in every plot: red is ours, blue cuDNN, green FlashAttention-4, violet Triton, grey HF.
COLOURS = {
    "fused": "#d7263d",
    "fused_inline": "#f46036",
    "fused_prepass": "#a4133c",
    "hf_sdpa": "#adb5bd",
    "hf_flash_attn": "#6c757d",
    "hf_triton_fa2": "#b892ff",
    "liger_flash": "#8ecae6",
    "liger_cudnn": "#1f77b4",
    "liger_fa4": "#2a9d4b",
    "compiled_cudnn": "#56a3d9",
    "compiled_fa4": "#80c565",
    "bare_flash": "#343a40",
    "bare_cudnn": "#0b3c6f",
    "bare_fa4": "#0f5c2e",
    "bare_triton_fa2": "#6a3d9a",
}
_MARKERS = {"fused": "o", "hf": "^", "liger": "s", "compiled": "D", "bare": ""}
# A talk's figure holds about eight lines: these, and whoever else is the strongest anywhere.
_SHOWN = (
    "hf_sdpa",
    "hf_flash_attn",
    "hf_triton_fa2",
    "liger_cudnn",
    "liger_fa4",
    "bare_cudnn",
    "bare_fa4",
)
_TITLES = {"fwd": "forward", "bwd": "backward", "both": "forward + backward"}
_CASES_A_LINE = 10
DPI = 150


def draw_all(rows: list[Row], directory: Path, mode: str | None = None) -> list[Path]:
    """Write every figure that the rows allow and return the files. CUDA-graph times where there are any."""
    mode = mode or ("graph" if timed(rows, mode="graph") else "eager")
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for part in _TITLES:
        chosen = timed(rows, part, mode)
        if not chosen:
            continue
        for draw, name in ((tflops_over_length, "tflops"), (speedup_bars, "speedup")):
            figure = draw(chosen, part, mode)
            if figure is not None:
                path = directory / f"{name}_{part}_{mode}.png"
                figure.savefig(path, dpi=DPI, facecolor="white")
                files.append(path)
                _pyplot().close(figure)
    return files


def tflops_over_length(rows: list[Row], part: str, mode: str) -> Any:
    """A panel for each family, its lengths on the axis, a line for each provider. None without a family of two."""
    lengths = {family: sorted({r["len_q"] for r in rows if r["family"] == family}) for family in _families(rows)}
    panels = [family for family, found in lengths.items() if len(found) > 1]
    if not panels:
        return None
    plt = _pyplot()
    columns = min(len(panels), 3)
    lines = math.ceil(len(panels) / columns)
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(lines, columns, figsize=_size(lines), squeeze=False, layout="constrained")
        shown = _shown(rows)
        for axis, family in zip(axes.flat, panels):
            for provider in shown:
                points = sorted(
                    (r["len_q"], r["tflops"]) for r in rows if (r["family"], r["provider"]) == (family, provider)
                )
                if points:
                    axis.plot(*zip(*points), **_line(provider, rows))
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths[family], [_length(n) for n in lengths[family]])
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            axis.set_title(f"{family}  ({_heads(rows, family)})")
            axis.set_xlabel("sequence length N")
            axis.set_ylabel("TFLOP/s")
        for axis in list(axes.flat)[len(panels) :]:
            axis.remove()
        handles = {line.get_label(): line for axis in figure.axes for line in axis.get_lines()}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
        figure.suptitle(_title("RoPE + attention", rows, part, mode), fontsize=16, fontweight="bold")
    return figure


def speedup_bars(rows: list[Row], part: str, mode: str) -> Any:
    """For each case, how much faster ours is than HF, than the strongest rival and than bare attention; below 1 too."""
    cases = [case for case in dict.fromkeys(r["case"] for r in rows) if ours([r for r in rows if r["case"] == case])]
    series = _speedups(rows, cases)
    if not series:
        return None
    plt = _pyplot()
    lines = math.ceil(len(cases) / _CASES_A_LINE)
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(lines, 1, figsize=_size(lines), squeeze=False, sharey=True, layout="constrained")
        values = [value for _, _, found in series for value in found.values()]
        for line, axis in enumerate(axes.flat):
            _bars(axis, cases[line * _CASES_A_LINE : (line + 1) * _CASES_A_LINE], series)
            axis.set_yscale("log")
            axis.set_ylim(min(0.8, 0.85 * min(values)), max(1.25, 1.25 * max(values)))
            axis.axhline(1.0, color="#222222", linewidth=1.2)
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
            axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}x" if value in (0.5, 0.7, 2, 3, 5, 7) else "")
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
            value = values[case]
            x = position + (index - (len(series) - 1) / 2) * width
            lost = value < 0.995
            hatch = "//" if lost else None
            axis.bar(x, value - 1, width * 0.94, bottom=1, color=colour, hatch=hatch, edgecolor="white")
            axis.annotate(
                f"{value:.2f}",
                (x, value),
                xytext=(0, -3 if lost else 3),
                textcoords="offset points",
                ha="center",
                va="top" if lost else "bottom",
                fontsize=9 if len(series) < 4 else 8,
                color="#b00020" if lost else "#222222",
            )
    axis.set_xlim(-0.6, _CASES_A_LINE - 0.4 if len(cases) == _CASES_A_LINE else len(cases) - 0.4)
    axis.set_xticks(range(len(cases)), cases, fontsize=12 if len(cases) < 9 else 10)


def _speedups(rows: list[Row], cases: list[str]) -> list[tuple[str, str, dict[str, float]]]:
    """(legend, colour, case -> ratio) of each comparison that has a value."""
    found: dict[str, dict[str, float]] = {"hf_sdpa": {}, "hf_flash_attn": {}, "rival": {}, "bare": {}}
    whose: dict[str, set[str]] = {role: set() for role in found}
    for case in cases:
        group = [r for r in rows if r["case"] == case]
        mine = ours(group)
        by_name = {r["provider"]: r for r in group}
        others = {
            "hf_sdpa": by_name.get("hf_sdpa"),
            "hf_flash_attn": by_name.get("hf_flash_attn"),
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
        "hf_flash_attn": (f"vs {labels.get('hf_flash_attn', '')}", COLOURS["hf_flash_attn"]),
        "rival": (f"vs the strongest rope + attention: {' or '.join(sorted(whose['rival']))}", COLOURS["liger_fa4"]),
        "bare": (f"vs the fastest attention without RoPE: {' or '.join(sorted(whose['bare']))}", COLOURS["bare_cudnn"]),
    }
    return [(*names[role], values) for role, values in found.items() if values]


def _shown(rows: list[Row]) -> list[str]:
    present = list(dict.fromkeys(r["provider"] for r in rows))
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
        "label": next(r["label"] for r in rows if r["provider"] == provider),
        "color": COLOURS.get(provider, "#000000"),
        "marker": _MARKERS.get(kind, "x"),
        "markersize": 8 if mine else 5.5,
        "linewidth": 3.4 if mine else 1.8,
        "linestyle": "--" if kind == "bare" else "-",
        "zorder": 5 if mine else 3,
    }


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


def _length(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def _title(what: str, rows: list[Row], part: str, mode: str) -> str:
    row = rows[0]
    masks = {r["causal"] for r in rows}
    mask = {(True,): ", causal", (False,): ", no mask"}.get(tuple(masks), "")
    timing = "CUDA graphs" if mode == "graph" else "eager"
    return f"{what}, {_TITLES[part]}: {row['gpu']}, {row['dtype']}{mask}, {timing}"


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


_STYLE = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6e8",
    "legend.frameon": False,
    "legend.fontsize": 11,
    "hatch.color": "white",
}
