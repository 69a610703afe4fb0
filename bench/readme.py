"""The generated figures of README.md: few enough for one screen. ``docs/benchmarks.md`` has the tables."""

from __future__ import annotations

from bench.report import Group, Row, card_name, faster, groups, markdown, strongest, three_digits
from bench.tables import committed, origins

_CASE, _OURS = "Llama3-8B-4K", "fused"
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
    header, mine, shown = ["ms (of our time)"], ["**`rope_attention`**"], {}
    lines, fa3 = {role: [words] for role, words in _ROLES.items()}, ["FlashAttention-3 for JAX, no rotation"]
    for card, rows in committed("attention").items():
        header += [f"{card_name(rows[0]['gpu'])} {part}" for part in ("forward", "backward", "sum")]
        passes = _passes(rows, "graph")
        shown[card] = [row for group in passes for row in group.values()]
        for group in passes:
            mine.append(f"**{three_digits(group[_OURS]['ms'])}**")
            for role, line in lines.items():
                if best := strongest(group.values(), role):
                    name = best["label"].split(" + ")[-1].removeprefix("bare ")
                    line.append(f"{three_digits(best['ms'])} ({faster(best, group[_OURS]):.0%}) {name}")
        load = _passes(committed("fa3")[card], "load")
        fa3 += [f"({faster(group['bare_fa3_jax'], group[_OURS]):.0%})" for group in load]
    row = next(iter(shown.values()))[0]
    shape = f"B {row['batch']}, {row['heads_q']}/{row['heads_kv']} heads, {row['len_q']} tokens, D {row['head_dim']}"
    return (
        f"{markdown(header, [mine, *lines.values(), fa3])}\n\n"
        f"Heads of Llama 3 8B ({shape}), {row['dtype']}, causal, CUDA graphs. FlashAttention-3 has a backward for JAX "
        f"only, which was timed back to back beside ours. {origins('attention', shown)}"
    )


def _passes(rows: list[Row], mode: str) -> list[Group]:
    """Return provider -> row of the case's forward, of its backward, and of their sum."""
    found = {part: group for (case, _, part, _), group in groups(rows, mode).items() if case == _CASE}
    forward, backward = found["fwd"], found["bwd"]
    sums = {name: row["ms"] + backward[name]["ms"] for name, row in forward.items() if name in backward}
    return [forward, backward, {name: forward[name] | {"ms": ms, "rounds": [ms]} for name, ms in sums.items()}]


def gains() -> str:
    """Show the times of the strongest rivals over ours, one line for each kind of work, on the first card."""
    lines = []
    for words, suite, case, shape, mine, mode in _GAINS:
        rows = next(iter(committed(suite).values()))
        every = sorted(groups(rows, mode).items(), reverse=True)  # forward first
        found = [group for (name, at, _, _), group in every if name == case and shape in at and mine in group]
        pairs = [(best, group[mine]) for group in found if (best := strongest(group.values()))]
        ratios = " / ".join(f"{faster(best, own):.2f}×" for best, own in pairs)
        lines.append([words, ratios, ", ".join(dict.fromkeys(best["label"] for best, _ in pairs))])
    return markdown(["on an H200, forward / backward", "their time over ours", "the strongest rival"], lines)
