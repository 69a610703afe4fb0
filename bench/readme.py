"""The generated figures of README.md: few enough for one screen. ``docs/benchmarks.md`` has the tables."""

from __future__ import annotations

from functools import partial

from bench.report import PASSES, Row, card_name, faster, markdown, provenance, three_digits, timed

_CASE = "Llama3-8B-4K"
_OURS = "fused"
_RIVALS = {
    "liger_fa3": "Liger's rotation + FlashAttention-3",
    "liger_fa4": "Liger's rotation + FlashAttention-4",
}
_WORK = {"train-4K": "training", "prefill-16K": "a prompt of 16K tokens", "decode-4K": "generation after 4K tokens"}
# The rivals of a patched model: the unpatched one, and one with those of Liger's kernels that were measured.
_UNPATCHED = {"sdpa": "SDPA", "liger": "Liger's rotation and SDPA", "liger_norm": "Liger's norms, rotation and SDPA"}


def attention(rows: list[Row]) -> str:
    """Show milliseconds of both passes for the heads of Llama 3 8B at 4K tokens, on each card, and those of rivals."""
    rows = [row for row in timed(rows, mode="graph") if row["case"] == _CASE]
    cards: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows:
        cards.setdefault(row["gpu"], {})[row["provider"], row["pass"]] = row
    if not cards or any((_OURS, part) not in found for found in cards.values() for part in PASSES):
        raise ValueError(f"no CUDA-graph time of {_OURS} at {_CASE} in both passes")
    lines = [["**`rope_attention`**"], *([label] for label in _RIVALS.values())]
    for found in cards.values():
        mine = [found[_OURS, part] for part in PASSES]
        both = sum(row["ms"] for row in mine)
        lines[0] += [f"**{three_digits(ms)}**" for ms in (*(row["ms"] for row in mine), both)]
        for line, rival in zip(lines[1:], _RIVALS):
            theirs = [found.get((rival, part)) for part in PASSES]
            line += [_time(row["ms"], faster(row, own)) if row else "no such pass" for row, own in zip(theirs, mine)]
            total = sum(row["ms"] for row in theirs) if all(theirs) else None
            line.append(_time(total, total / both) if total else "")
    row = rows[0]
    shape = f"B {row['batch']}, {row['heads_q']}/{row['heads_kv']} heads, {row['len_q']} tokens, D {row['head_dim']}"
    names = map(card_name, cards)
    header = ["ms (theirs / ours)", *(f"{name} {part}" for name in names for part in (*PASSES.values(), "sum"))]
    origins = " ".join(provenance([found[_OURS, part] for part in PASSES]) for found in cards.values())
    return f"{markdown(header, lines)}\n\nHeads of Llama 3 8B ({shape}), causal, CUDA graphs. {origins}"


def _time(ms: float, over_ours: float) -> str:
    return f"{three_digits(ms)} ({over_ours:.0%})"


def _model(name: str, rows: list[Row]) -> str:
    """Say in one line how many times as many tokens a second a patched model makes."""
    found = {(row["pass"], row["provider"]): row for row in timed(rows) if row["case"] == name}
    works = [work for work in _WORK if (work, _OURS) in found]
    rivals = [rival for rival in _UNPATCHED if works and all((work, rival) in found for work in works)]
    if not rivals:
        raise ValueError(f"no times of {_OURS} next to an unpatched {name}")
    gains = [
        f"{_WORK[work]} " + " / ".join(f"{faster(found[work, rival], found[work, _OURS]):.2f}×" for rival in rivals)
        for work in works
    ]
    labels = " / ".join(f"with {_UNPATCHED[rival]}" for rival in rivals)
    return f"- **{name}** in tokens per second, over the model {labels}: {', '.join(gains)}."


llama = partial(_model, "Llama-3.2-1B")
qwen = partial(_model, "Qwen3-0.6B")
