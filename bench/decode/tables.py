"""The generated tables of the documents about a step of generation."""

from __future__ import annotations

from baselines.attentions import UNSPLIT
from bench.decode.providers import OURS, RAW, READ, SAME_BITS
from bench.report import Row, comparison, faster, groups, markdown, milliseconds, provenance, strongest, timed


def results(rows: list[Row]) -> str:
    """Show our step, the shares of a copy's bandwidth, and the strongest rival, as CUDA graphs."""
    lines = []
    for (case, shape, _, _), group in groups(rows, "graph").items():
        mine = group.get(OURS)
        if mine is None:
            continue
        shown = (mine, group.get(RAW), group.get(READ))
        shares = [f"{100 * row['of_copy']:.0f}%" if row and row.get("of_copy") else "-" for row in shown]
        rival = strongest(group.values())
        beside = ["", "", ""] if rival is None else comparison(rival, mine)
        lines.append([case, shape, milliseconds(mine["ms"]), f"{mine['gb_s']:.0f}", *shares, *beside])
    header = ["case", "shape", "ours ms", "GB/s", "of copy", "raw", "read", "strongest rival", "ms", "speedup"]
    note = (
        "Times are of CUDA graphs, L2 flushed by reading. of copy: the share of the bandwidth of a copy of as many "
        "bytes; raw: that with keys that are rotated in the loop; read: that of a plain read. The strongest rival also "
        "rotates and writes the new token; speedup: its time over ours, below 1 a loss."
    )
    return f"{markdown(header, lines)}\n\n{note} {provenance(rows, 'cuDNN', 'flash-attn-4')}"


def stored(rows: list[Row]) -> str:
    """Show our step on caches in pages and in float8, over that on contiguous ones, as CUDA graphs."""
    kept = [row for row in timed(rows, mode="graph") if row.get("stored") and SAME_BITS not in row["provider"]]
    names = dict.fromkeys(row["provider"] for row in kept)
    lines = []
    for (case, shape, _, _), group in groups(rows, "graph").items():
        if OURS in group and any(name in group for name in names):
            shown = [f"{faster(group[name], group[OURS]):.3f}" if name in group else "-" for name in names]
            lines.append([case, shape, milliseconds(group[OURS]["ms"]), *shown])
    note = (
        "Times over that of our step onto the contiguous bfloat16 cache. Pools are stored as (pages, rows, heads, "
        "columns), in random order; pageN: pages of N rows. gather_sdpa: pages of 16 gathered into a contiguous cache, "
        "rotation, write and SDPA. mixed64-64K: 64 sequences of 64K / i tokens, the last of 1."
    )
    header = ["case", "shape", "contiguous ms", *(name.removeprefix(f"{OURS}_") for name in names)]
    return f"{markdown(header, lines)}\n\n{note} {provenance(rows, 'cuDNN')}"


def same_bits(rows: list[Row]) -> str:
    """Show the time of a step with batch_invariant and without it, and of rivals that never split keys."""
    lines, labels = [], {row["provider"]: row["label"] for row in rows}
    pairs = [(name, f"{name}_{SAME_BITS}") for name in (OURS, f"{OURS}_page16") if f"{name}_{SAME_BITS}" in labels]
    rivals = [name for name in UNSPLIT if any(row["provider"] == name for row in timed(rows))]
    for (case, _, _, _), group in groups(rows, "graph").items():
        if all(name in group for pair in pairs for name in pair):
            lines.append([case])
            for without, name in pairs:
                times = (f"{1e3 * group[each]['ms']:.1f}" for each in (without, name))
                lines[-1] += [*times, f"{faster(group[name], group[without]):.2f}"]
            lines[-1] += [f"{1e3 * group[name]['ms']:.1f}" if name in group else "" for name in rivals]
    header = ["µs"]
    for words in ("", ", pages of 16")[: len(pairs)]:
        header += [f"without{words}", "with", "ratio"]
    note = (
        "Steps of one token, heads 32/8, D 128, CUDA graphs, L2 flushed by reading. B8-4K: 8 sequences of 4096 keys. "
        "Rivals rotate and write the new token in launches of their own."
    )
    return f"{markdown([*header, *map(labels.get, rivals)], lines)}\n\n{note} {provenance(rows, 'fa3-fwd')}"
