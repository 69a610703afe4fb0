"""The plot of norms: what they cost ours, and what everybody else takes over ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.plots import STYLE, pyplot, ratio_bar, save
from bench.report import PASSES, Row, timed
from bench.suites.norm.providers import OURS, PROVIDERS, WITHOUT
from bench.suites.norm.report import faster, groups

_COLOURS = {
    WITHOUT: "#d7263d",
    "norm_hf_fused": "#e58f99",
    "norm_hf_sdpa": "#adb5bd",
    "norm_liger_cudnn": "#f2a33a",
    "norm_liger_fa4": "#2a9d4b",
    "norm_compiled_cudnn": "#56a3d9",
}


def draw(rows: list[Row], directory: Path, mode: str | None = None) -> list[Path]:
    """``norm``: the time of everybody, ours without norms among them, over ours with norms, a bar each."""
    mode = mode or ("graph" if timed(rows, mode="graph") else "eager")
    return save({"norm": _bars(rows, mode)}, directory, mode)


def _bars(rows: list[Row], mode: str) -> Any:
    found = groups(rows, mode)
    names = [name for name in PROVIDERS if name != OURS and any(name in group for group in found.values())]
    cases = list(dict.fromkeys(key[:2] for key in found))
    if not names:
        return None
    plt = pyplot()
    with plt.rc_context(STYLE):
        size = (max(8.0, 1.5 * len(cases)), 9.0)
        figure, axes = plt.subplots(2, 1, figsize=size, sharex=True, layout="constrained")
        width = 0.84 / len(names)
        for axis, part in zip(axes, PASSES):
            for i, name in enumerate(names):
                label = PROVIDERS[name].label
                axis.bar(0, 0, color=_COLOURS[name], label=label)  # for the legend
                for j, case in enumerate(cases):
                    group = found.get((*case, part, mode), {})
                    if name in group:
                        place = j + (i - len(names) / 2 + 0.5) * width
                        ratio_bar(axis, place, faster(group, name), width, _COLOURS[name], 7)
            axis.axhline(1, color="#343a40", linewidth=1.2)
            axis.set_ylabel("time over ours with norms")
            axis.set_title(f"attention with norms of q and k, {PASSES[part]}")
        axes[1].set_xticks(range(len(cases)), [case for case, _ in cases], rotation=20)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        gpu = next(iter(found.values()))[OURS]["gpu"]
        figure.suptitle(f"Norm, rotate, attend: {gpu}", fontsize=16, fontweight="bold")
    return figure
