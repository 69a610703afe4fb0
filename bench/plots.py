"""The two plots of the documents: TFLOP/s over N, and the time of rivals over ours, below 1 included. Needs matplotlib.

Text is nearly black on white, because no single colour of text contrasts well with both a light and a dark page: on a
dark page a figure is a white card. Figures are narrow, so that their text can be read at a width of 400 pixels. There
is a panel for each pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.report import PASSES, Row, faster, groups, ours, strongest, timed
from bench.suite import length_name
from bench.timing import EVEN

_WIDTH = 6.5  # inches
_GREY, _TEXT, _LOSS = "#7d8590", "#1f2328", "#d7263d"
_STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.35,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "figure.dpi": 200,
    "grid.color": _GREY,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
} | dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _TEXT)
_TICKS = (0.125, 0.25, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20)
# By attention: blue is cuDNN; of FlashAttention teal is -3, green -4. Attention without a rotation is dashed.
_BLUE, _TEAL, _GREEN = "#3f8fd6", "#17a2a2", "#2fae58"
COLOURS = {f"liger_{name}": colour for name, colour in (("cudnn", _BLUE), ("fa3", _TEAL), ("fa4", _GREEN))}
COLOURS |= {name.replace("liger", "bare"): colour for name, colour in COLOURS.items()} | {"fused": "#e5383b"}
_ROLES = {
    "rival": ("the strongest rotation + attention (at the right)", _GREEN),
    "bare": ("the fastest attention without a rotation", _BLUE),
}


def overview(rows: list[Row]) -> Any:
    """Draw TFLOP/s over N of one family for every provider that has the pass."""
    members = [row for row in rows if row["family"] == "Llama7B"]
    title = f"RoPE + attention, Llama7B (H {members[0]['heads_q']}, D {members[0]['head_dim']})"
    with _figure(title, members, 2.2) as (figure, axes):
        for axis, part in zip(axes, PASSES):
            found = timed(members, part)
            lengths = sorted({row["len_q"] for row in found})
            for name, colour in COLOURS.items():
                mine = [row for row in found if row["provider"] == name]
                if not mine:
                    continue
                drawn = {"linestyle": "--", "marker": ""} if name.startswith("bare") else {"marker": "o"}
                drawn |= {"linewidth": 3.0, "zorder": 5} if name == "fused" else {"linewidth": 1.7, "zorder": 3}
                label = "rope_attention (ours)" if name == "fused" else mine[0]["label"]
                points = zip(*sorted((row["len_q"], row["tflops"]) for row in mine))
                axis.plot(*points, label=label, color=colour, markersize=4, **drawn)
            ticks = [length for length in lengths if length & (length - 1) == 0]
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [length_name(length) for length in ticks])
            axis.minorticks_off()
            axis.set_xlabel("tokens")
        axes[0].set_ylim(bottom=0)  # of both panels, after all lines: it ends the choice of the upper limit
        axes[0].set_ylabel("TFLOP/s")
    return figure


def speedups(rows: list[Row]) -> Any:
    """Draw for each case the times of the strongest rival and of the fastest bare attention over ours.

    The side of 1 on which ours is slower is shaded. The ratios to the strongest rival are also written at the right.
    """
    found = [
        (case, part, role, faster(best, mine))
        for (case, _, part, _), group in groups(rows).items()
        if (mine := ours(group.values()))
        for role in _ROLES
        if (best := strongest(group.values(), role))
    ]
    cases, values = list(dict.fromkeys(case for case, *_ in found)), [value for *_, value in found]
    low, high = min(0.85, 0.9 * min(values)), max(1.2, 1.1 * max(values))
    title = "Speedup of rope_attention (shaded: ours is slower)"
    with _figure(title, rows, 0.6 + 0.24 * len(cases)) as (figure, axes):
        for axis, part in zip(axes, PASSES):
            for case, _, role, value in (each for each in found if each[1] == part):
                (label, colour), y = _ROLES[role], cases.index(case)
                shift, face = (0.09, "none") if role == "bare" else (-0.09, colour)
                axis.scatter(value, y + shift, s=26, color=colour, facecolor=face, zorder=4, label=label)
                if role == "rival":
                    where = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": 9}
                    axis.text(1.01, y, f"{value:.2f}", color=_LOSS if value < EVEN else colour, **where)
            axis.set_xscale("log")
            axis.set_xlim(low, high)
            ticks = [tick for tick in _TICKS if low < tick < high]
            axis.set_xticks(ticks if len(ticks) < 6 else ticks[::2], minor=False)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.minorticks_off()
            axis.axvspan(low, 1, color=_LOSS, alpha=0.1, linewidth=0)
            axis.axvline(1, color=_GREY, linewidth=1.2)
            axis.set_yticks(range(len(cases)), cases, fontsize=10)
            axis.set_ylim(len(cases) - 0.4, -0.6)
            axis.set_xlabel("their time / ours (log)")
    return figure


@contextmanager
def _figure(title: str, rows: list[Row], height: float) -> Iterator[tuple[Any, Any]]:
    """Yield (figure, two axes), ``height`` inches high; then add titles and one legend."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height + 1.5), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        yield figure, axes
        for axis, name in zip(axes, PASSES.values()):
            axis.set_title(name)
        found = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels())}
        columns = 2 if max(map(len, found)) < 40 else 1
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns)
        mask = ", causal" if all(row["causal"] for row in rows) else ""
        about = f"{rows[0]['gpu']}, {rows[0]['dtype']}{mask}, CUDA graphs"
        figure.suptitle(f"{title}\n{about}", fontsize=13, fontweight="bold")
