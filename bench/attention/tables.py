"""The generated blocks of the documents about attention.

Each function makes one block from rows, and raises ValueError where they lack what it shows. Ratios are their time over
ours, medians over the rounds of one process; below 1 ours is slower, and that is printed the same way.
"""

from __future__ import annotations

from bench.attention import cases
from bench.attention.providers import table
from bench.report import (
    PASSES,
    Group,
    Row,
    both,
    by_case,
    by_provider,
    card_name,
    faster,
    groups,
    legend,
    mark,
    markdown,
    millijoules,
    milliseconds,
    ours,
    provenance,
    strongest,
    three_digits,
    timed,
    times_ours,
)
from bench.timing import EVEN

_MINE = "fused"
# The labels of the rows in full.
_NAMES = {
    "hf_sdpa": "Hugging Face's rotation + SDPA",
    "liger_flash": "Liger's rotation + FlashAttention-2 (in PyTorch's SDPA)",
    "liger_cudnn": "Liger's rotation + cuDNN",
    "liger_fa3": "Liger's rotation + FlashAttention-3",
    "liger_fa4": "Liger's rotation + FlashAttention-4",
}
_PACKAGES = ("cuDNN", "liger-kernel", "flash-attn", "fa3-fwd", "flash-attn-4")


def headline(rows: list[Row]) -> str:
    """Say for each card at how many shapes ours is not slower than each pair that people install."""
    cards = {row["gpu"]: [one for one in rows if one["gpu"] == row["gpu"]] for row in rows}
    found = {card_name(gpu): _ratios(of_card) for gpu, of_card in cards.items()}
    lines = []
    for name, words in _NAMES.items():
        if all(name in ratios for ratios in found.values()):
            counts = [_count(ratios[name][part]) for ratios in found.values() for part in PASSES]
            lines.append([words, *(f"at {count} shapes" if count else "no such pass" for count in counts)])
    where = f"{rows[0]['dtype']}, triton {rows[0]['triton']}, CUDA graphs"
    header = [f"{card} {part}" for card in found for part in PASSES.values()]
    return markdown([f"`rope_attention` is not slower than ... ({where})", *header], lines)


def standing(rows: list[Row]) -> str:
    """Say at how many of all shapes ours is not slower than each rival, and the range of the ratio."""
    found = _ratios(rows)
    labels = {row["provider"]: row["label"] for row in rows}
    lines = []
    for name in (name for name in table("plain") if name in found):
        lines.append([labels[name]])
        for part in PASSES:
            values = found[name][part]
            lines[-1] += [_count(values) or "no such pass"]
            lines[-1] += [f"{min(values):.2f} to {max(values):.2f}×" if values else ""]
    header = ["against", "forward: not slower at", "their time / ours", "backward: not slower at", "their time / ours"]
    return f"{markdown(header, lines)}\n\n{provenance(rows)}"


def _ratios(rows: list[Row]) -> dict[str, dict[str, list[float]]]:
    """Return rival -> pass -> their time over ours at every shape, as CUDA graphs."""
    found: dict[str, dict[str, list[float]]] = {}
    for (_, _, part, _), group in groups(rows, "graph").items():
        for name, row in group.items() if _MINE in group and part in PASSES else ():
            if row["role"] != "ours":
                found.setdefault(name, {part: [] for part in PASSES})[part].append(faster(row, group[_MINE]))
    return found


def _count(ratios: list[float]) -> str:
    return f"{sum(value >= EVEN for value in ratios)} of {len(ratios)}" if ratios else ""


def results(rows: list[Row]) -> str:
    """Show the shapes of the target: ours, the strongest rival, the fastest attention without a rotation."""
    return _results(rows, cases.TABLE)


def all_results(rows: list[Row]) -> str:
    """Show what ``results`` does of all shapes."""
    return _results(rows, tuple(dict.fromkeys(row["case"] for row in rows)))


def _results(rows: list[Row], names: tuple[str, ...]) -> str:
    found = {(case, part): group for (case, _, part, _), group in groups(rows, "graph").items()}
    blocks = []
    for part, words in PASSES.items():
        lines = []
        for case in names:
            group = found.get((case, part), {})
            if _MINE not in group:
                raise ValueError(f"no CUDA-graph time of {_MINE} at {case}, {words}")
            mine = group[_MINE]
            shape = f"({mine['batch']}, {mine['heads_q']}/{mine['heads_kv']}, {mine['len_q']}, {mine['head_dim']})"
            lines.append([f"{case} {shape}", *_cells(group)])
        header = [f"**{words}**, ms", "`rope_attention`", "strongest with rotation", "fastest *without* rotation"]
        blocks.append(markdown(header, lines))
    notes = [
        "In brackets TFLOP/s; ×: their time over ours, below 1 ours is slower. Times are of CUDA graphs.\n",
        legend(row for row in timed(rows) if row["case"] in names).strip(),
        f"{provenance(rows, *_PACKAGES)} Shapes are (B, HQ/HKV, N, D).",
    ]
    return "\n\n".join([*blocks, "\n".join(filter(None, notes))])


def _cells(group: Group) -> list[str]:
    """Return ours and the comparisons of one case, pass and mode."""
    mine = group[_MINE]
    cells = [f"{three_digits(mine['ms'])} ({mine['tflops']:.0f})"]
    for row in (strongest(group.values()), strongest(group.values(), "bare")):
        if row is None:
            cells.append("not measured")
            continue
        name = row["label"].removeprefix("bare ") + mark(row)
        cells.append(f"{three_digits(row['ms'])}: **{faster(row, mine):.2f}×**, {name}")
    return cells


_HOST_PASSES = {"fwd": "forward, no gradient", "fwd_grad": "forward with gradient", "both": "forward + backward"}


def host(rows: list[Row]) -> str:
    """Show the host time of eager calls with the quartiles of its bursts."""
    found = {name: passes for (_, _, name), passes in by_provider(rows).items()}
    parts = [part for part in _HOST_PASSES if part in found.get(_MINE, {})]
    if not parts:
        raise ValueError(f"no host time of {_MINE}")
    lines = []
    for name, passes in found.items():
        label = "`rope_attention`" if name == _MINE else next(iter(passes.values()))["label"]
        lines.append([label, *(_microseconds(passes.get(part)) for part in parts)])
    header = [f"host time, µs (quartiles), at {rows[0]['shape']}", *(_HOST_PASSES[part] for part in parts)]
    return f"{markdown(header, lines)}\n\nEager calls of one thread. {provenance(rows, 'cuDNN')}"


def _microseconds(row: Row | None) -> str:
    """Return the median and the quartiles."""
    return f"{1e3 * row['ms']:.1f} ({1e3 * row['p25']:.1f} to {1e3 * row['p75']:.1f})" if row else ""


def energy(rows: list[Row]) -> str:
    """Show ours in ms and mJ, and the time and energy of every rival over it."""
    rivals = {row["provider"]: row["label"] for row in timed(rows) if row["role"] != "ours"}
    lines = []
    for (case, _, part, _), group in groups(rows).items():
        mine = ours(group.values())
        if mine is None:
            continue
        lines.append([f"{case}, {PASSES[part]}"])
        lines[-1] += [f"{milliseconds(mine['ms'])} ms, {millijoules(mine['mj'])} mJ, {mine['watts']:.0f} W"]
        for row in map(group.get, rivals):
            ratios = row and f"{faster(row, mine):.2f} / {faster(row, mine, 'mj_rounds'):.2f}×{mark(row)}"
            lines[-1].append(ratios or "")
    note = f"Rivals: time / energy over ours, below 1 ours takes more. {legend(timed(rows))}"
    packages = ("cuDNN", "liger-kernel", "fa3-fwd", "flash-attn-4")
    return f"{markdown(['', '`rope_attention`', *rivals.values()], lines)}\n\n{note}{provenance(rows, *packages)}"


# Masks

# The title of each case, and the provider that the others are compared with.
_MASKS = {
    "window": ("A window", "window"),
    "packed": ("Packed sequences", "packed"),
    "overhead": ("Masks that hide nothing", "causal"),
}


def masks(rows: list[Row]) -> str:
    """Show a table for each case of masks."""
    blocks = []
    for case, (title, base) in _MASKS.items():
        found = {name: passes for (its, _, name), passes in by_provider(rows).items() if its == case}
        lines = []
        for passes in found.values():
            first = next(iter(passes.values()))
            kernels = "/".join(dict.fromkeys(row["backend"] for row in passes.values() if "backend" in row))
            lines.append([first["label"], kernels])
            for part in PASSES:
                lines[-1] += _mask_cells(passes.get(part), found.get(base, {}).get(part))
        if lines:
            header = [cell for words in PASSES.values() for cell in (f"{words}, ms", "p20-p80", f"/ {base}")]
            shape = next(row["shape"] for row in rows if row["case"] == case and row["role"] == "ours")
            blocks += [f"{title}, {shape}:", markdown([case, "kernels", *header], lines)]
    if not blocks:
        raise ValueError("no times of masks")
    note = "Eager calls. In the last column of each pass the time over that of the line that has 1.00."
    return "\n\n".join([*blocks, f"{note} {provenance(rows, 'liger-kernel', 'flash-attn-4')}"])


def _mask_cells(row: Row | None, base: Row | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    times = f"{milliseconds(row['p20'])}-{milliseconds(row['p80'])}"
    return [milliseconds(row["ms"]) + mark(row), times, "" if base is None else f"{faster(row, base):.2f}"]


def intervals(rows: list[Row]) -> str:
    """Show ours with intervals, its time for each visited block over causal attention's, and what others take."""
    mine, lines = "intervals", []
    others = {"varlen": "ours, varlen", "rows": "ours, separate rows"}
    others |= {row["provider"]: row["label"] for row in timed(rows) if row["role"] == "rival"}
    for (case, _), passes in by_case(rows, "eager", mine).items():
        row = passes[0][mine]
        blocks = [faster(g[mine], g["causal"]) / row["visited"] for g in passes if "causal" in g]
        lines.append([f"{case}, {row['len_q']} tokens", f"{row['visited']:.3f}"])
        lines[-1] += [both(passes, mine, lambda row: three_digits(row["ms"])), " / ".join(f"{x:.2f}" for x in blocks)]
        lines[-1] += [times_ours(passes, name, mine) for name in others]
    header = ["", "visited", "intervals, ms", "a block / causal's", *others.values()]
    notes = (
        "Forward / backward, eager calls. Visited: blocks of 128 keys that rows of a tile of 128 see, over those of "
        f"causal attention. ×: their time over ours, below 1 ours is slower. {legend(timed(rows))}"
    )
    return f"{markdown(header, lines)}\n\n{notes}{provenance(rows, 'liger-kernel', 'flash-attn-4')}"


# Norms of q and k, and Co-RoPE


def _costs(rows: list[Row], kind: str, mine: str, without: str) -> tuple[list[str], dict[tuple, list[str]]]:
    """Return a header, and a line for each (case, shape): the time with an option, its cost, and rivals over it.

    mine, without: the providers with the option and without it.
    """
    found = by_case(rows, "graph", mine)
    present = {name: row for passes in found.values() for group in passes for name, row in group.items()}
    rivals = {name: each.label for name, each in table(kind).items() if name in present.keys() - {mine, without}}
    lines = {}
    for (case, shape), passes in found.items():
        costs = (f"{faster(g[mine], g[without]):.3f}" if without in g else "-" for g in passes)
        line = [f"{case} ({shape})", both(passes, mine, lambda row: three_digits(row["ms"])), " / ".join(costs)]
        lines[case, shape] = line + [times_ours(passes, name, mine) for name in rivals]
    return ["", "with, ms", "over without", *rivals.values()], lines


def same_bits(rows: list[Row]) -> str:
    """Show what batch_invariant costs, and what attentions that never split keys take, as CUDA graphs."""
    header, lines = _costs(rows, "unsplit", "fused_same_bits", _MINE)
    note = (
        "Forward / backward. Over without: time with the option over that without. ×: their time over ours with it, "
        "below 1 ours is slower; an empty field did not run. CUDA graphs, L2 flushed. "
        f"{legend(timed(rows))}"
    )
    return f"{markdown(header, [*lines.values()])}\n\n{note}{provenance(rows, 'fa3-fwd')}"


def norm(rows: list[Row]) -> str:
    """Show what norms cost inside, and what those of others take, as CUDA graphs."""
    without = "fused_without"
    header, lines = _costs(rows, "norm", _MINE, without)
    for case, passes in by_case(rows, "graph", _MINE).items():
        memory = {name: row["peak_mib"] for group in passes for name, row in group.items()}
        lines[case].insert(3, f"{memory[_MINE]:.0f}" + (f" ({memory[without]:.0f})" if without in memory else ""))
    notes = (
        "Forward / backward. Over without: time with norms over that of the same call without. ×: their time over ours "
        "with norms, below 1 ours is slower; an empty field did not run. MiB: peak memory of forward and backward, o "
        "and gradients included, in brackets without norms. Times are of CUDA graphs, L2 flushed. "
        f"{legend(timed(rows))}"
    )
    header[1:3] = "with norms, ms", "over without", "MiB"
    return f"{markdown(header, [*lines.values()])}\n\n{notes}" + provenance(
        rows, "transformers", "liger-kernel", "flash-attn-4", "cuDNN"
    )


def corope(rows: list[Row]) -> str:
    """Show Co-RoPE and its definition in eager PyTorch; where the definition was not timed, the reason."""
    if not any(row["role"] == "ours" for row in timed(rows)):
        raise ValueError("rows must hold times of corope")
    found = by_provider(rows)
    lines = []
    for (case, shape, name), first in {(r["case"], r["shape"], r["provider"]): r for r in reversed(rows)}.items():
        passes, mine = found.get((case, shape, name), {}), found.get((case, shape, "corope"), {})
        here = list(passes.values())
        cells = []
        for part in PASSES:
            row = passes.get(part)
            times = f" ({faster(row, mine[part]):.1f}×)" if row and part in mine and name != "corope" else ""
            cells.append(three_digits(row["ms"]) + times if row else "-")
        memory = f"{here[0]['peak_mib']:.0f}" if here else ""
        cells = cells if here else [f"{first['status']}: {first['detail']}", ""]
        lines.insert(0, [shape, first["label"], *cells, memory])
    return (
        f"{markdown(['shape', '', 'forward, ms', 'backward, ms', 'peak memory, MiB'], lines)}\n\n"
        "×: their time over ours. Memory is beyond the inputs, for forward and backward, o and gradients included. "
        f"{provenance(rows)}"
    )
