"""The generated figures of README.md: few enough for one screen. ``docs/benchmarks.md`` has the tables."""

from __future__ import annotations

from bench.report import Row, card_name, faster, markdown, strongest, three_digits, timed
from bench.tables import committed, origins

_CASE, _OURS = "Llama3-8B-4K", "fused"
_PASSES = ("fwd", "bwd")
_ROLES = {"rival": "best with a rotation before it", "bare": "best *without* any rotation"}
# Work for which others need launches of their own: words, suite, case, part of the shape, our provider, mode.
_GAINS = (
    ("norms of queries and keys: Qwen3-0.6B's heads, 2K tokens", "norm", "Qwen3-0.6B-2K", "", "fused", "graph"),
    ("a training step of Qwen3-0.6B, 4K tokens", "models", "Qwen3-0.6B", "step-4K", "fused_liger", "eager"),
    ("a prompt with eight continuations (intervals)", "intervals", "prefix", "", "intervals", "eager"),
    ("latent attention of DeepSeek-V3, 1K tokens", "mla", "H128-1K", "", "fused", "graph"),
    ("a generation step after 32K tokens", "decode", "B1-32K", "", "fused", "graph"),
    ("generation of Llama-3.1-8B in transformers", "models", "Llama-3.1-8B", "decode-4K", "fused", "eager"),
)


def attention() -> str:
    """Show milliseconds of both passes and their sum for the heads of Llama 3 8B at 4K tokens, ours and the best."""
    cards = {card: _case(rows, "graph") for card, rows in committed("attention").items()}
    header, mine = ["ms (of our time)"], ["**`rope_attention`**"]
    lines = {role: [words] for role, words in _ROLES.items()}
    fa3 = ["FlashAttention-3 for JAX, no rotation"]
    for card, rows in cards.items():
        name = card_name(rows[0]["gpu"])
        header += [f"{name} {part}" for part in ("forward", "backward", "sum")]
        own = {row["pass"]: row for row in rows if row["provider"] == _OURS}
        both = sum(own[part]["ms"] for part in _PASSES)
        mine += [f"**{three_digits(ms)}**" for ms in (*(own[part]["ms"] for part in _PASSES), both)]
        for role, line in lines.items():
            for part in _PASSES:
                best = strongest([row for row in rows if row["pass"] == part], role)
                line.append(_cell(best["ms"], faster(best, own[part]), best["label"]) if best else "")
            line.append(_sum(rows, role, both))
        load = _case(committed("fa3")[card], "load")
        own = {row["pass"]: row for row in load if row["provider"] == _OURS}
        theirs = {row["pass"]: row for row in load if row["provider"] == "bare_fa3_jax"}
        ratios = [faster(theirs[part], own[part]) for part in _PASSES]
        total = sum(row["ms"] for row in theirs.values()) / sum(row["ms"] for row in own.values())
        fa3 += [f"({ratio:.0%})" for ratio in (*ratios, total)]
    row = next(iter(cards.values()))[0]
    shape = f"B {row['batch']}, {row['heads_q']}/{row['heads_kv']} heads, {row['len_q']} tokens, D {row['head_dim']}"
    return (
        f"{markdown(header, [mine, *lines.values(), fa3])}\n\n"
        f"Heads of Llama 3 8B ({shape}), {row['dtype']}, causal, CUDA graphs. FlashAttention-3 has a backward for JAX "
        f"only, which was timed back to back beside ours. {origins('attention', cards)}"
    )


def _case(rows: list[Row], mode: str) -> list[Row]:
    """Return the rows of the case. ValueError where ours lacks a pass."""
    found = [row for row in timed(rows, mode=mode) if row["case"] == _CASE]
    if {row["pass"] for row in found if row["provider"] == _OURS} < set(_PASSES):
        raise ValueError(f"no times of {_OURS} at {_CASE} in both passes")
    return found


def _cell(ms: float, over_ours: float, label: str) -> str:
    return f"{three_digits(ms)} ({over_ours:.0%}) {label.split(' + ')[-1].removeprefix('bare ')}"


def _sum(rows: list[Row], role: str, ours: float) -> str:
    """Return the least sum of both passes of one provider."""
    sums: dict[str, list[float]] = {}
    for row in rows:
        if row["role"] == role:
            sums.setdefault(row["label"], []).append(row["ms"])
    totals = {label: sum(ms) for label, ms in sums.items() if len(ms) == len(_PASSES)}
    best = min(totals, key=lambda label: totals[label], default="")
    return _cell(totals[best], totals[best] / ours, best) if best else ""


def gains() -> str:
    """Show the times of the strongest rivals over ours, one line for each kind of work, on the first card."""
    lines = []
    for words, suite, case, shape, mine, mode in _GAINS:
        rows = next(iter(committed(suite).values()))
        found = [row for row in timed(rows, mode=mode) if row["case"] == case and shape in row["shape"]]
        cells = []
        for part in sorted({row["pass"] for row in found}, reverse=True):  # forward first
            own = next((row for row in found if row["provider"] == mine and row["pass"] == part), None)
            best = strongest(row for row in found if row["pass"] == part)
            if own and best:
                cells.append((f"{faster(best, own):.2f}×", best["label"]))
        if not cells:
            raise ValueError(f"no times of {mine} beside a rival at {case}, {mode}")
        lines.append([words, " / ".join(ratio for ratio, _ in cells), ", ".join(dict.fromkeys(x for _, x in cells))])
    return markdown(["on an H200, forward / backward", "their time over ours", "the strongest rival"], lines)
