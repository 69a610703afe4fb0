"""Plots of the rotation: bandwidth over the length, and the share of a copy's bandwidth at the shapes of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.plots import STYLE, pyplot, save
from bench.report import PASSES, Row, timed
from bench.suites.rotation.providers import COPY, OURS, PROVIDERS

_COLOURS = {
    OURS: "#d7263d",
    "liger": "#f2a33a",
    "flash_attn": "#2a9d4b",
    "compiled": "#56a3d9",
    "hf": "#adb5bd",
    COPY: "#343a40",
}


def draw(rows: list[Row], directory: Path, mode: str | None = None) -> list[Path]:
    """``rope_wide``: GB/s over the length; ``rope_models``: share of a copy's bandwidth, a bar for everybody."""
    mode = mode or ("graph" if timed(rows, mode="graph") else "eager")
    rows = timed(rows, mode=mode)
    return save({"rope_wide": _wide(rows), "rope_models": _models(rows)}, directory, mode)


def _wide(rows: list[Row]) -> Any:
    rows = [row for row in rows if "wide" in row["groups"]]
    columns = list(dict.fromkeys((row["dtype"], row["style"]) for row in rows))
    if not columns:
        return None
    plt = pyplot()
    with plt.rc_context(STYLE):
        size = (4.2 * max(2, len(columns)), 8.0)
        figure, axes = plt.subplots(2, len(columns), figsize=size, squeeze=False, sharey=True, layout="constrained")
        for line, part in enumerate(PASSES):
            for (dtype, style), axis in zip(columns, axes[line]):
                chosen = [r for r in rows if (r["dtype"], r["style"], r["pass"]) == (dtype, style, part)]
                for name in (name for name in PROVIDERS if any(r["provider"] == name for r in chosen)):
                    points = sorted((r["length"], r["gb_s"]) for r in chosen if r["provider"] == name)
                    axis.plot(
                        *zip(*points), label=PROVIDERS[name].label, color=_COLOURS[name],
                        marker="" if name == COPY else "o", linestyle="--" if name == COPY else "-",
                        linewidth=3.2 if name == OURS else 1.8, zorder=5 if name == OURS else 3,
                    )  # fmt: skip
                axis.set_title(f"{dtype}, {style}, {PASSES[part]}")
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
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 1, figsize=(13.0, 8.0), sharex=True, layout="constrained")
        width = 0.8 / len(names)
        for axis, part in zip(axes, PASSES):
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
            axis.set_title(f"q and k together, {rows[0]['dtype']}, {PASSES[part]}")
        axes[1].set_xticks(range(len(cases)), [case for case, _ in cases], rotation=20)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
        figure.suptitle(f"Rotation alone: {rows[0]['gpu']}", fontsize=16, fontweight="bold")
    return figure
