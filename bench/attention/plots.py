"""Plots of attention: TFLOP/s over N, and the time and energy of rivals over ours, below 1 included."""

from __future__ import annotations

from collections import Counter
from typing import Any

from bench import plots
from bench.plots import Series
from bench.report import PASSES, Row, faster, ours, strongest, timed

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


def draw(rows: list[Row], mode: str) -> dict[str, Any]:
    """Return ``overview``, TFLOP/s of one family, and ``speedup_all``, every case; of rows under load ``energy``."""
    if mode == "load":
        return {"energy": energy(rows)}
    rows = [row for row in rows if "tflops" in row]
    return {"overview": overview(rows, mode), "speedup_all": speedups(rows, mode)}


def overview(rows: list[Row], mode: str) -> Any:
    """Draw TFLOP/s over N of the family with the most lengths; None without two lengths of both passes."""
    lengths: dict[str, set[int]] = {}
    for row in rows:
        if row["pass"] in PASSES:
            lengths.setdefault(row["family"], set()).add(row["len_q"])
    family = max(lengths, key=lambda name: len(lengths[name]), default="")
    members = [row for row in rows if row["family"] == family]
    if len(lengths.get(family, ())) < 2 or not all(timed(members, part) for part in PASSES):
        return None
    panels = {words: _lines(timed(members, part)) for part, words in PASSES.items()}
    row = members[0]
    heads = str(row["heads_q"]) if row["heads_q"] == row["heads_kv"] else f"{row['heads_q']}/{row['heads_kv']}"
    title = f"RoPE + attention, {family} (H {heads}, D {row['head_dim']})"
    return plots.lines(panels, _title(title, members, mode), "TFLOP/s")


def _lines(rows: list[Row]) -> list[Series]:
    """Return a line for each provider that has at least half of the cases; ours last, because it is drawn on top."""
    counts = Counter(row["provider"] for row in rows)
    best = set()
    for case in dict.fromkeys(row["case"] for row in rows):
        group = [row for row in rows if row["case"] == case]
        best |= {row["provider"] for role in ("rival", "bare") if (row := strongest(group, role))}
    present = [name for name, count in counts.items() if 2 * count >= max(counts.values())]
    present = [name for name in present if name in (*_SHOWN, *best) or name.startswith("fused")]
    series = []
    for name in sorted(present, key=lambda name: name == "fused"):
        mine = [row for row in rows if row["provider"] == name]
        label = "rope_attention (ours)" if name == "fused" else mine[0]["label"].replace("SDPA flash", "FA2 (SDPA)")
        points = [(row["len_q"], row["tflops"]) for row in mine]
        dashed = mine[0]["role"] == "bare"
        series.append(Series(label, COLOURS.get(name, "#96a0a9"), points, dashed, name == "fused"))
    return series


def speedups(rows: list[Row], mode: str) -> Any:
    """Draw for each case how much faster ours is than HF, FlashAttention-2, the strongest rival and bare attention."""
    panels = {}
    for part, words in PASSES.items():
        found = timed(rows, part)
        groups = [[row for row in found if row["case"] == case] for case in dict.fromkeys(r["case"] for r in found)]
        groups = [group for group in groups if ours(group)]
        series = []
        for label, colour, role, name in (
            ("HF rope + SDPA", COLOURS["hf_sdpa"], "rival", "hf_sdpa"),
            ("Liger rope + FlashAttention-2", COLOURS["liger_flash"], "rival", "liger_flash"),
            ("the strongest rotation + attention (at the right)", COLOURS["liger_fa4"], "rival", None),
            ("the fastest attention without a rotation", COLOURS["liger_cudnn"], "bare", None),
        ):
            points = []
            for group in groups:
                other = strongest([row for row in group if name in (None, row["provider"])], role)
                if other is not None:
                    points.append((group[0]["case"], faster(other, ours(group))))
            if points:
                series.append(Series(label, colour, points, role == "bare", role == "rival" and name is None))
        panels[words] = series
    if not any(panels.values()):
        return None
    title = _title("Speedup of rope_attention (shaded: ours is slower)", rows, mode)
    return plots.ratios(panels, title, "their time / ours (log)")


def energy(rows: list[Row]) -> Any:
    """Draw time and energy of every rival over ours at each case; None without a case that has both."""
    panels: dict[str, list[Series]] = {}
    cases = dict.fromkeys(row["case"] for row in rows)
    for part, words in PASSES.items():
        groups = [[row for row in timed(rows, part) if row["case"] == case] for case in cases]
        pairs = [(row, mine) for group in groups if (mine := ours(group)) for row in group if row["role"] != "ours"]
        for what, rounds in {"time": "rounds", "energy": "mj_rounds"}.items():
            series = panels[f"{words}, {what}"] = []
            for name in (name for name in COLOURS if any(row["provider"] == name for row, _ in pairs)):
                theirs = [(row, mine) for row, mine in pairs if row["provider"] == name]
                points = [(row["case"], faster(row, mine, rounds)) for row, mine in theirs]
                first = theirs[0][0]
                series.append(Series(first["label"], COLOURS[name], points, first["role"] == "bare"))
    if not any(panels.values()):
        return None
    title = f"Time and energy under load (shaded: ours takes more)\n{rows[0]['gpu']}, {rows[0]['dtype']}"
    return plots.ratios(panels, title, "theirs / ours (log)")


def _title(what: str, rows: list[Row], mode: str) -> str:
    row = rows[0]
    masks = {r["causal"] for r in rows}
    mask = {(True,): ", causal", (False,): ", no mask"}.get(tuple(masks), "")
    return f"{what}\n{row['gpu']}, {row['dtype']}{mask}, {'CUDA graphs' if mode == 'graph' else 'eager'}"
