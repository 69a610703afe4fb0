"""Rows of norms to text: for the terminal, and the generated block of the documents. Losses are printed like wins."""

from __future__ import annotations

from bench.report import PASSES, Row, comparison, milliseconds, not_timed, table, timed
from bench.suites.norm.providers import OURS, PROVIDERS, WITHOUT
from bench.tables import markdown, provenance
from bench.timing import EVEN, ratio

Key = tuple[str, str, str, str]  # case, shape, pass, mode
Group = dict[str, Row]  # by provider


def groups(rows: list[Row], mode: str | None = None) -> dict[Key, Group]:
    """(case, shape, pass, mode) -> provider -> its timed row."""
    found: dict[Key, Group] = {}
    for row in timed(rows, mode=mode):
        found.setdefault((row["case"], row["shape"], row["pass"], row["mode"]), {})[row["provider"]] = row
    return {key: group for key, group in found.items() if OURS in group}


def over_without(group: Group) -> float | None:
    """Time with norms over time without, of ours."""
    return ratio(group[OURS]["rounds"], group[WITHOUT]["rounds"]) if WITHOUT in group else None


def faster(group: Group, name: str) -> float:
    """A rival's time over ours with norms."""
    return ratio(group[name]["rounds"], group[OURS]["rounds"])


def strongest(group: Group) -> Row | None:
    """The fastest whose norms are not inside."""
    rivals = [row for name, row in group.items() if name not in (OURS, WITHOUT)]
    return min(rivals, key=lambda row: row["ms"], default=None)


def summary(rows: list[Row]) -> str:
    """A line for each case, pass and mode, then whoever was not timed, with the reason."""
    lines, losses = [], 0
    for (case, shape, part, mode), group in groups(rows).items():
        mine, cost, rival = group[OURS], over_without(group), strongest(group)
        line = [case, shape, part, mode, milliseconds(mine["ms"]), "" if cost is None else f"{cost:.3f}"]
        line.append(f"{mine['peak_mib']:.0f}")
        if rival is not None:
            losses += faster(group, rival["provider"]) < EVEN
            line += comparison(rival, mine)
        lines.append(line + [""] * (10 - len(line)))
    header = ["case", "shape", "pass", "mode", "ours ms", "/ without", "MiB", "strongest rival", "ms", "speedup"]
    blocks = [table(header, lines, left=4)] if lines else ["nothing was timed"]
    blocks.append(f"{len(lines)} lines, slower than the strongest rival in {losses}")
    return "\n\n".join([*blocks, *filter(None, ["\n".join(not_timed(rows))])])


def results(rows: list[Row]) -> str:
    """The generated table of the documents, of CUDA-graph times. ValueError without times of ours, or of two cards."""
    found = groups(rows, "graph")
    if not found or len({row["gpu"] for row in rows}) != 1:
        raise ValueError("rows must hold CUDA-graph times of rope_attention with norms, on one card")
    rivals = [name for name in PROVIDERS if name not in (OURS, WITHOUT) and any(name in g for g in found.values())]
    header = ["", "with norms, ms", "over without", "MiB", *(PROVIDERS[name].label for name in rivals)]
    lines = []
    for case, shape in dict.fromkeys(key[:2] for key in found):
        passes = [found[key] for part in PASSES if (key := (case, shape, part, "graph")) in found]
        costs = [over_without(group) for group in passes]
        line = [f"{case} ({shape})", " / ".join(f"{group[OURS]['ms']:#.3g}" for group in passes)]
        line.append(" / ".join("-" if cost is None else f"{cost:.3f}" for cost in costs))
        # At its peak forward and backward together hold this much beyond the inputs, o and gradients included.
        memory = {name: row["peak_mib"] for group in passes for name, row in group.items()}
        beside = f" ({memory[WITHOUT]:.0f})" if WITHOUT in memory else ""
        line.append(f"{memory[OURS]:.0f}{beside}")
        for name in rivals:
            values = [f"{faster(group, name):.2f}" for group in passes if name in group]
            loose = " ~" * any(name in group and group[name]["status"] == "loose" for group in passes)
            line.append(" / ".join(values) + "×" * bool(values) + loose)
        lines.append(line)
    loose = any(row["status"] == "loose" for group in found.values() for row in group.values())
    notes = (
        "Forward / backward. Over without: time with norms over that of the same call without. ×: their time over ours "
        "with norms, below 1 ours is slower; an empty field did not run. MiB: peak memory of forward and backward, o "
        "and gradients included, in brackets without norms. Times are of CUDA graphs, L2 flushed. "
        + ("~: outside the tolerance that ours is held to. " if loose else "")
    )
    packages = ("transformers", "liger-kernel", "flash-attn-4", "cuDNN")
    return f"{markdown(header, lines)}\n\n{notes}{provenance(rows, *packages)}"
