"""Plots of attention: TFLOP/s over N, and the time and energy of rivals over ours, below 1 included."""

from __future__ import annotations

from collections import Counter
from typing import Any

from bench import plots
from bench.plots import Series
from bench.report import PASSES, Group, Row, faster, groups, ours, strongest, timed

# By attention: blue is cuDNN; of FlashAttention amber is -2, teal -3, green -4. Red is ours.
COLOURS = {
    "fused": "#e5383b",
    "fused_inline": "#f46036",
    "fused_prepass": "#c2185b",
    "fused_hopper": "#ff5d8f",
    "hf_sdpa": "#96a0a9",
    "hf_flash_attn": "#a1887f",
    "liger_flash": "#f2a33a",
    "liger_cudnn": "#3f8fd6",
    "liger_fa3": "#17a2a2",
    "liger_fa4": "#2fae58",
    "compiled_cudnn": "#8e7cc3",
    "compiled_fa4": "#9ccc3c",
}
# Attention without a rotation has the colour of the same attention with Liger's, dashed.
COLOURS |= {name.replace("liger", "bare"): colour for name, colour in COLOURS.items() if name.startswith("liger")}
# A figure holds about eight lines: these, and the strongest of any case.
_SHOWN = ("hf_sdpa", "liger_flash", "liger_cudnn", "liger_fa4", "bare_cudnn", "bare_fa4")


def overview(rows: list[Row]) -> Any:
    """Draw TFLOP/s over N of the family with the most lengths."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row["family"], []).append(row)
    members = max(families.values(), key=lambda found: len({row["len_q"] for row in found}))
    row = members[0]
    heads = str(row["heads_q"]) if row["heads_q"] == row["heads_kv"] else f"{row['heads_q']}/{row['heads_kv']}"
    title = f"RoPE + attention, {row['family']} (H {heads}, D {row['head_dim']})"
    panels = {words: _lines(timed(members, part)) for part, words in PASSES.items()}
    return plots.lines(panels, _title(title, members), "TFLOP/s")


def _lines(rows: list[Row]) -> list[Series]:
    """Return a line for each provider that has at least half of the cases; ours last, because it is drawn on top."""
    every = groups(rows).values()
    best = {
        row["provider"] for group in every for role in ("rival", "bare") if (row := strongest(group.values(), role))
    }
    counts = Counter(row["provider"] for row in rows)
    series = []
    for name, count in sorted(counts.items(), key=lambda item: item[0] == "fused"):
        if 2 * count >= max(counts.values()) and (name in (*_SHOWN, *best) or name.startswith("fused")):
            found = [row for row in rows if row["provider"] == name]
            label = (
                "rope_attention (ours)" if name == "fused" else found[0]["label"].replace("SDPA flash", "FA2 (SDPA)")
            )
            points = [(row["len_q"], row["tflops"]) for row in found]
            series.append(Series(label, COLOURS[name], points, found[0]["role"] == "bare", name == "fused"))
    return series


def speedups(rows: list[Row]) -> Any:
    """Draw for each case how much faster ours is than HF, FlashAttention-2, the strongest rival and bare attention."""
    panels: dict[str, list[Series]] = {}
    for part, words in PASSES.items():
        series = panels[words] = []
        for label, colour, role, name in (
            ("HF rope + SDPA", COLOURS["hf_sdpa"], "rival", "hf_sdpa"),
            ("Liger rope + FlashAttention-2", COLOURS["liger_flash"], "rival", "liger_flash"),
            ("the strongest rotation + attention (at the right)", COLOURS["liger_fa4"], "rival", None),
            ("the fastest attention without a rotation", COLOURS["liger_cudnn"], "bare", None),
        ):
            points = []
            for case, group in _with_ours(rows, part).items():
                other = strongest((row for row in group.values() if name in (None, row["provider"])), role)
                points += [(case, faster(other, ours(group.values())))] if other else []
            if points:
                series.append(Series(label, colour, points, role == "bare", role == "rival" and name is None))
    title = _title("Speedup of rope_attention (shaded: ours is slower)", rows)
    return plots.ratios(panels, title, "their time / ours (log)")


def _with_ours(rows: list[Row], part: str) -> dict[str, Group]:
    """Return case -> the rows of a pass by provider, where ours was timed."""
    return {case: group for (case, _, at, _), group in groups(rows).items() if at == part and ours(group.values())}


def _title(what: str, rows: list[Row]) -> str:
    mask = ", causal" if all(row["causal"] for row in rows) else ""
    return f"{what}\n{rows[0]['gpu']}, {rows[0]['dtype']}{mask}, CUDA graphs"
