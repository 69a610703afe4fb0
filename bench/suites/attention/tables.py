"""The generated blocks of the documents about attention: headline, results, standing, a plan.

Ratios are their time over ours, medians over rounds of one process; below 1 ours is slower, and that is printed the
same way.
"""

from __future__ import annotations

import re

from bench.attention import cases, providers
from bench.attention.standing import strongest
from bench.report import PASSES, Row, timed
from bench.tables import markdown, milliseconds, provenance
from bench.timing import EVEN, ratio

_MINE, _FLASH = "fused", "liger_flash"
# Eager times are shown beside those of CUDA graphs where ours differ by more than this share.
_EAGER_DIFFERS = 0.10
# In words: what the labels of the rows abbreviate.
_NAMES = {
    "hf_sdpa": "Hugging Face's rotation + SDPA",
    "liger_flash": "Liger's rotation + FlashAttention-2 (in PyTorch's SDPA)",
    "liger_cudnn": "Liger's rotation + cuDNN",
    "liger_fa3": "Liger's rotation + FlashAttention-3",
    "liger_fa4": "Liger's rotation + FlashAttention-4",
}
_PLAN_CASE = "Llama7B-4K"
_PACKAGES = ("cuDNN", "liger-kernel", "flash-attn", "fa3-fwd", "flash-attn-4")


def headline(rows: list[Row]) -> str:
    """At how many shapes ours is not slower than what people would otherwise install."""
    standing = _standing(timed(rows, mode="graph"))
    lines = [
        [words, *(_at_shapes(standing[name], part) for part in PASSES)]
        for name, words in _NAMES.items()
        if name in standing
    ]
    if not lines:
        raise ValueError(f"no time of {_MINE} beside a rival that rotates")
    where = f"{rows[0]['gpu']}, {rows[0]['dtype']}, triton {rows[0]['triton']}, CUDA graphs"
    return markdown([f"`rope_attention` is not slower than ... ({where})", *PASSES.values()], lines)


def results(rows: list[Row]) -> str:
    """Forward and backward at the shapes of the target: a common rival where one was timed, the strongest one, the
    fastest bare one."""
    blocks = []
    common = _common(rows)
    label = next((row["label"] for row in rows if row["provider"] == common), "")
    for part, words in PASSES.items():
        header = [
            f"**{words}**, ms",
            "`rope_attention`",
            *([] if common is None else [f"{label} (FlashAttention-2)" if common == _FLASH else label]),
            "strongest with rotation",
            "fastest *without* rotation",
        ]
        lines = []
        for case in cases.TABLE:
            graph, eager = ([r for r in timed(rows, part, mode) if r["case"] == case] for mode in ("graph", "eager"))
            mine, called = _one(graph, _MINE), _one(eager, _MINE)
            if mine is None:
                raise ValueError(f"no CUDA-graph time of {_MINE} at {case}, {words}")
            shape = f"({mine['batch']}, {mine['heads_q']}/{mine['heads_kv']}, {mine['len_q']}, {mine['head_dim']})"
            lines.append([f"{case} {shape}", *_cells(graph, common)])
            if called is not None and abs(called["ms"] / mine["ms"] - 1) > _EAGER_DIFFERS:
                lines.append([f"{case}, called eagerly", *_cells(eager, common)])
        blocks.append(markdown(header, lines))
    loose = any(row["status"] == "loose" for row in timed(rows) if row["case"] in cases.TABLE)
    notes = [
        "In brackets TFLOP/s; ×: their time over ours, below 1 ours is slower. Times are of CUDA graphs; a second line "
        f"shows eager calls where ours differ by more than {_EAGER_DIFFERS:.0%}.\n",
        *(["~: outside the tolerance that ours is held to."] if loose else []),
        f"{provenance(rows, *_PACKAGES)} Shapes are (B, HQ/HKV, N, D).",
    ]
    return "\n\n".join([*blocks, "\n".join(notes)])


def standing(rows: list[Row]) -> str:
    """Every rival over every shape measured: at how many ours is not slower, and the range of the ratio."""
    found = _standing(timed(rows, mode="graph"))
    labels = {row["provider"]: row["label"] for row in rows}
    lines = []
    for name in providers.PROVIDERS:
        if name in found:
            line = [labels[name]]
            for part in PASSES:
                ratios = [value for _, at, value in found[name] if at == part]
                line += [_count(found[name], part), f"{min(ratios):.2f} to {max(ratios):.2f}×" if ratios else ""]
            lines.append(line)
    header = ["against", "forward: not slower at", "their time / ours", "backward: not slower at", "their time / ours"]
    slower = [f"{case} {PASSES[part]} ({value:.2f}×)" for case, part, value in found.get(_FLASH, ()) if value < EVEN]
    label = labels.get(_FLASH, _FLASH)
    table = markdown(header, lines)
    if _FLASH not in found:
        return f"{table}\n\n{provenance(rows)}"
    at = ", ".join(slower) or "no shape"
    return f"{table}\n\nSlower than {label} (FlashAttention-2) at: {at}.\n\n{provenance(rows)}"


def plan(rows: list[Row]) -> str:
    """What ``fused_rope_attn.plan`` answered during the measurement."""
    texts = [row["plan"] for row in timed(rows, "fwd", "graph") if row["case"] == _PLAN_CASE and row.get("plan")]
    if not texts:
        raise ValueError(f"no plan in the rows of {_PLAN_CASE}")
    text = re.sub(r", (reason|forward|backward)=", r",\n     \1=", texts[0])
    text = re.sub(r", (dkdv|dq|section_bytes)=", r",\n         \1=", text)
    return f"At {_PLAN_CASE} on an {rows[0]['gpu']}:\n\n```text\n{text}\n```"


def _one(rows: list[Row], provider: str) -> Row | None:
    return next((row for row in rows if row["provider"] == provider), None)


def _common(rows: list[Row]) -> str | None:
    """What people commonly have: FlashAttention-2 behind a fast rotation, where at least half of the shapes have a time
    of it, or Hugging Face's own; None where neither was timed."""
    measured = [row for row in timed(rows, mode="graph") if row["case"] in cases.TABLE]
    at = {name: {row["case"] for row in measured if row["provider"] == name} for name in (_MINE, _FLASH, "hf_sdpa")}
    if 2 * len(at[_FLASH]) >= len(at[_MINE]):
        return _FLASH
    return "hf_sdpa" if at["hf_sdpa"] else None


def _cells(group: list[Row], common: str | None) -> list[str]:
    """Ours and the comparisons of one case, pass and mode."""
    mine = _one(group, _MINE)
    rivals = [
        *([] if common is None else [(_one(group, common), False)]),
        (strongest(group, rotates=True), True),
        (strongest(group, rotates=False), True),
    ]
    time = f"{milliseconds(mine['ms'])} ({mine['tflops']:.0f})"
    return [time, *(_against(row, mine, named) for row, named in rivals)]


def _against(row: Row | None, mine: Row, named: bool) -> str:
    if row is None:
        return "not measured"
    name = f", {row['label'].removeprefix('bare ')}" if named else ""
    loose = " ~" * (row["status"] == "loose")
    return f"{milliseconds(row['ms'])}: **{ratio(row['rounds'], mine['rounds']):.2f}×**{name}{loose}"


def _standing(rows: list[Row]) -> dict[str, list[tuple[str, str, float]]]:
    """Rival -> (case, pass, their time / ours) wherever both were timed."""
    found: dict[str, list[tuple[str, str, float]]] = {}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["pass"]), []).append(row)
    for (case, part), group in groups.items():
        mine = _one(group, _MINE)
        for row in group if mine and part in PASSES else ():
            if not row["ours"]:
                found.setdefault(row["provider"], []).append((case, part, ratio(row["rounds"], mine["rounds"])))
    return found


def _at_shapes(found: list[tuple[str, str, float]], part: str) -> str:
    return f"at {_count(found, part)} shapes" if any(at == part for _, at, _ in found) else "no such pass"


def _count(found: list[tuple[str, str, float]], part: str) -> str:
    ratios = [value for _, at, value in found if at == part]
    return f"{sum(value >= EVEN for value in ratios)} of {len(ratios)}" if ratios else "no such pass"
