"""The generated blocks of the documents about attention.

Each function makes one block from rows, and raises ValueError where they lack what it shows. Ratios are their time over
ours, medians over the rounds of one process; below 1 ours is slower, and that is printed the same way.
"""

from __future__ import annotations

import re

from bench.attention import cases
from bench.attention.providers import table
from bench.report import (
    PASSES,
    Group,
    Row,
    faster,
    groups,
    markdown,
    millijoules,
    milliseconds,
    ours,
    provenance,
    speedup,
    strongest,
    three_digits,
    timed,
)
from bench.timing import EVEN, quantile, ratio

_MINE = "fused"
# Eager times are shown in addition to those of CUDA graphs where ours differ by more than this share.
_EAGER_DIFFERS = 0.10
# The labels of the rows in full.
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
    """Say at how many shapes ours is not slower than each pair that people install."""
    standing = _standing(timed(rows, mode="graph"))
    lines = [
        [words, *(_at_shapes(standing[name], part) for part in PASSES)]
        for name, words in _NAMES.items()
        if name in standing
    ]
    if not lines:
        raise ValueError(f"no time of {_MINE} next to a rival that rotates")
    where = f"{rows[0]['gpu']}, {rows[0]['dtype']}, triton {rows[0]['triton']}, CUDA graphs"
    return markdown([f"`rope_attention` is not slower than ... ({where})", *PASSES.values()], lines)


def results(rows: list[Row]) -> str:
    """Show the shapes of the target: ours, the strongest rival, the fastest attention without a rotation."""
    blocks = []
    for part, words in PASSES.items():
        header = [f"**{words}**, ms", "`rope_attention`", "strongest with rotation", "fastest *without* rotation"]
        lines = []
        for case in cases.TABLE:
            graph, eager = ([r for r in timed(rows, part, mode) if r["case"] == case] for mode in ("graph", "eager"))
            mine, called = _one(graph, _MINE), _one(eager, _MINE)
            if mine is None:
                raise ValueError(f"no CUDA-graph time of {_MINE} at {case}, {words}")
            shape = f"({mine['batch']}, {mine['heads_q']}/{mine['heads_kv']}, {mine['len_q']}, {mine['head_dim']})"
            lines.append([f"{case} {shape}", *_cells(graph)])
            if called is not None and abs(called["ms"] / mine["ms"] - 1) > _EAGER_DIFFERS:
                lines.append([f"{case}, called eagerly", *_cells(eager)])
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
    """Say at how many of all shapes ours is not slower than each rival, and the range of the ratio."""
    found = _standing(timed(rows, mode="graph"))
    labels = {row["provider"]: row["label"] for row in rows}
    lines = []
    for name in table("plain"):
        if name in found:
            line = [labels[name]]
            for part in PASSES:
                ratios = [value for _, at, value in found[name] if at == part]
                line += [_count(found[name], part), f"{min(ratios):.2f} to {max(ratios):.2f}×" if ratios else ""]
            lines.append(line)
    header = ["against", "forward: not slower at", "their time / ours", "backward: not slower at", "their time / ours"]
    return f"{markdown(header, lines)}\n\n{provenance(rows)}"


def plan(rows: list[Row]) -> str:
    """Show what ``fused_rope_attn.plan`` answered during the measurement."""
    texts = [row["plan"] for row in timed(rows, "fwd", "graph") if row["case"] == _PLAN_CASE and row.get("plan")]
    if not texts:
        raise ValueError(f"no plan in the rows of {_PLAN_CASE}")
    text = re.sub(r", (reason|forward|backward)=", r",\n     \1=", texts[0])
    text = re.sub(r", (dkdv|dq|section_bytes)=", r",\n         \1=", text)
    return f"At {_PLAN_CASE} on an {rows[0]['gpu']}:\n\n```text\n{text}\n```"


def _one(rows: list[Row], provider: str) -> Row | None:
    return next((row for row in rows if row["provider"] == provider), None)


def _cells(group: list[Row]) -> list[str]:
    """Return ours and the comparisons of one case, pass and mode."""
    mine = _one(group, _MINE)
    assert mine is not None  # the caller has asked
    cells = [f"{three_digits(mine['ms'])} ({mine['tflops']:.0f})"]
    for row in (strongest(group), strongest(group, "bare")):
        if row is None:
            cells.append("not measured")
            continue
        name = row["label"].removeprefix("bare ") + " ~" * (row["status"] == "loose")
        cells.append(f"{three_digits(row['ms'])}: **{faster(row, mine):.2f}×**, {name}")
    return cells


def _standing(rows: list[Row]) -> dict[str, list[tuple[str, str, float]]]:
    """Return rival -> (case, pass, their time / ours) wherever both were timed."""
    found: dict[str, list[tuple[str, str, float]]] = {}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["pass"]), []).append(row)
    for (case, part), group in groups.items():
        mine = _one(group, _MINE)
        for row in group if mine and part in PASSES else ():
            if row["role"] != "ours":
                found.setdefault(row["provider"], []).append((case, part, faster(row, mine)))
    return found


def _at_shapes(found: list[tuple[str, str, float]], part: str) -> str:
    return f"at {_count(found, part)} shapes" if any(at == part for _, at, _ in found) else "no such pass"


def _count(found: list[tuple[str, str, float]], part: str) -> str:
    ratios = [value for _, at, value in found if at == part]
    return f"{sum(value >= EVEN for value in ratios)} of {len(ratios)}" if ratios else "no such pass"


# Host time

_HOST_PASSES = {"fwd": "forward, no gradient", "fwd_grad": "forward with gradient", "both": "forward + backward"}


def host(rows: list[Row]) -> str:
    """Show the host time of eager calls with the quartiles of its bursts."""
    found = {(row["provider"], row["pass"]): row for row in timed(rows)}
    parts = [part for part in _HOST_PASSES if (_MINE, part) in found]
    if not parts:
        raise ValueError(f"no host time of {_MINE}")
    lines = []
    for name in table("host"):
        here = [found.get((name, part)) for part in parts]
        if any(here):
            label = "`rope_attention`" if name == _MINE else next(row["label"] for row in here if row)
            lines.append([label, *(_quartiles(row) for row in here)])
    header = [f"host time, µs (quartiles), at {rows[0]['shape']}", *(_HOST_PASSES[part] for part in parts)]
    return f"{markdown(header, lines)}\n\nEager calls of one thread. {provenance(rows, 'cuDNN')}"


def _quartiles(row: Row | None) -> str:
    return "" if row is None else f"{1e3 * row['ms']:.1f} ({1e3 * row['p25']:.1f} to {1e3 * row['p75']:.1f})"


# Energy


def energy(rows: list[Row]) -> str:
    """Show ours in ms and mJ, and the time and energy of every rival over it."""
    measured = timed(rows)
    rivals = {row["provider"]: row["label"] for row in measured if row["role"] != "ours"}
    lines = []
    for case in dict.fromkeys(row["case"] for row in measured):
        for part, words in PASSES.items():
            found = {row["provider"]: row for row in timed(measured, part) if row["case"] == case}
            mine = ours(found.values())
            if mine is None:
                continue
            cells = [f"{milliseconds(mine['ms'])} ms, {millijoules(mine['mj'])} mJ, {mine['watts']:.0f} W"]
            for name in rivals:
                row = found.get(name)
                pair = "" if row is None else f"{faster(row, mine):.2f} / {faster(row, mine, 'mj_rounds'):.2f}×"
                cells.append(pair + " ~" * (row is not None and row["status"] == "loose"))
            lines.append([f"{case}, {words}", *cells])
    if not lines:
        raise ValueError("no energy of rope_attention")
    loose = " ~: outside the tolerance that ours is held to." * any(row["status"] == "loose" for row in measured)
    note = f"Rivals: time / energy over ours, below 1 ours takes more.{loose}"
    packages = ("cuDNN", "liger-kernel", "fa3-fwd", "flash-attn-4")
    return f"{markdown(['', '`rope_attention`', *rivals.values()], lines)}\n\n{note} {provenance(rows, *packages)}"


# Masks

# The most that a visited block may cost relative to one of full causal attention, and the least that a padded batch
# must take relative to a packed one.
_BLOCK_BAR, _PADDED_BAR = 1.3, 1.5
# The provider of each case that the others are compared with.
_BASES = {"window": "window", "packed": "packed", "overhead": "causal"}
_MASKS = {"window": "A window", "packed": "Packed sequences", "overhead": "Masks that hide nothing"}
_Found = dict[tuple[str, str], Row]  # by provider and pass


def masks(rows: list[Row]) -> str:
    """Show a table for each case of masks, and what it says about the bars that are set for it."""
    found: dict[str, _Found] = {}
    for row in timed(rows):
        found.setdefault(row["case"], {})[row["provider"], row["pass"]] = row
    blocks = []
    for case, here in found.items():
        shape = next(row["shape"] for row in here.values() if row["role"] == "ours")
        blocks += [f"{_MASKS[case]}, {shape}:", _masks_table(case, here)]
        if findings := "; ".join(_findings(case, here)):
            blocks.append(f"{findings[0].upper()}{findings[1:]}.")
    if not blocks:
        raise ValueError("no times of masks")
    note = "Eager calls. In the last column of each pass the time over that of the line that has 1.00."
    return "\n\n".join([*blocks, f"{note} {provenance(rows, 'liger-kernel', 'flash-attn-4')}"])


def _masks_table(case: str, found: _Found) -> str:
    """Show a line for each provider: its kernels, and of each pass its times and its time over the base's."""
    base = _BASES[case]
    lines = []
    for name in dict.fromkeys(name for name, _ in found):
        both = [found.get((name, part)) for part in PASSES]
        label = next(row for row in both if row)["label"]
        kernels = "/".join(dict.fromkeys(row["backend"] for row in both if row and "backend" in row))
        lines.append([label, kernels, *(cell for row in both for cell in _masks_cells(found, base, row))])
    header = [cell for words in PASSES.values() for cell in (f"{words}, ms", "p20-p80", f"/ {base}")]
    return markdown([case, "kernels", *header], lines)


def _masks_cells(found: _Found, base: str, row: Row | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    reference = found.get((base, row["pass"]))
    times = f"{milliseconds(row['p20'])}-{milliseconds(row['p80'])}"
    relative = "" if reference is None else f"{faster(row, reference):.2f}"
    return [milliseconds(row["ms"]) + " ~" * (row["status"] == "loose"), times, relative]


def _block_cost(found: _Found, part: str) -> float | None:
    """Return the time for each visited score with the window over that without, or None without both times."""
    window, causal = (found.get((name, part)) for name in ("window", "causal"))
    if not (window and causal and window.get("visited") and causal.get("visited")):
        return None
    return faster(window, causal) * causal["visited"] / window["visited"]


def _both_passes(found: _Found, name: str) -> list[float] | None:
    """Return forward + backward of every round."""
    passes = [found.get((name, part)) for part in PASSES]
    return [sum(pair) for pair in zip(*(row["rounds"] for row in passes if row))] if all(passes) else None


def _findings(case: str, found: _Found) -> list[str]:
    texts = []
    if case == "window":
        for part, words in PASSES.items():
            if (value := _block_cost(found, part)) is not None:
                verdict = "ok" if value <= _BLOCK_BAR else "MISSED"
                texts.append(
                    f"{words}: a visited block costs {value:.2f} of full causal's (at most {_BLOCK_BAR}: {verdict})"
                )
    if case == "packed" and (packed := _both_passes(found, "packed")):
        if padded := _both_passes(found, "padded"):
            value = ratio(padded, packed)
            verdict = "ok" if value >= _PADDED_BAR else "MISSED"
            texts.append(f"forward + backward: {value:.2f}x the padded batch (at least {_PADDED_BAR}: {verdict})")
        labels = {name: row["label"] for (name, _), row in found.items() if row["role"] != "ours"}
        rivals = {name: times for name in labels if (times := _both_passes(found, name))}
        if rivals:
            best = min(rivals, key=lambda name: quantile(rivals[name], 0.5))
            texts.append(f"forward + backward: {speedup(ratio(rivals[best], packed))} against {labels[best]}")
    return texts


# Norms of q and k

_NORMED, _WITHOUT = "fused", "fused_without"


def norm_groups(rows: list[Row], mode: str) -> dict[tuple[str, str, str, str], Group]:
    """Return (case, shape, pass, mode) -> provider -> row, where ours with norms was timed."""
    return {key: group for key, group in groups(rows, mode).items() if _NORMED in group}


def norm(rows: list[Row]) -> str:
    """Show what norms cost inside, and what those of others take, as CUDA graphs."""
    found = norm_groups(rows, "graph")
    if not found or len({row["gpu"] for row in rows}) != 1:
        raise ValueError("rows must hold CUDA-graph times of rope_attention with norms, on one card")
    rivals = {name: provider.label for name, provider in table("norm").items() if name not in (_NORMED, _WITHOUT)}
    rivals = {name: label for name, label in rivals.items() if any(name in group for group in found.values())}
    header = ["", "with norms, ms", "over without", "MiB", *rivals.values()]
    lines = []
    for case, shape in dict.fromkeys(key[:2] for key in found):
        passes = [found[key] for part in PASSES if (key := (case, shape, part, "graph")) in found]
        costs = [f"{faster(g[_NORMED], g[_WITHOUT]):.3f}" if _WITHOUT in g else "-" for g in passes]
        line = [f"{case} ({shape})", " / ".join(f"{group[_NORMED]['ms']:#.3g}" for group in passes)]
        line.append(" / ".join(costs))
        memory = {name: row["peak_mib"] for group in passes for name, row in group.items()}
        without = f" ({memory[_WITHOUT]:.0f})" if _WITHOUT in memory else ""
        line.append(f"{memory[_NORMED]:.0f}{without}")
        for name in rivals:
            values = [f"{faster(group[name], group[_NORMED]):.2f}" for group in passes if name in group]
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


# Co-RoPE


def corope(rows: list[Row]) -> str:
    """Show Co-RoPE and its definition in eager PyTorch; where the definition was not timed, the reason."""
    if not any(row["role"] == "ours" for row in timed(rows)) or len({row["gpu"] for row in rows}) != 1:
        raise ValueError("rows must hold times of corope, on one card")
    lines = []
    for case, shape in dict.fromkeys((row["case"], row["shape"]) for row in rows):
        here = [row for row in rows if (row["case"], row["shape"]) == (case, shape)]
        mine = {row["pass"]: row for row in timed(here) if row["role"] == "ours"}
        for name in dict.fromkeys(row["provider"] for row in here):
            first = next(row for row in here if row["provider"] == name)
            found = {row["pass"]: row for row in timed(here) if row["provider"] == name}
            cells = []
            for part in PASSES:
                text = three_digits(found[part]["ms"]) if part in found else "-"
                if part in found and part in mine and first["role"] != "ours":
                    text += f" ({faster(found[part], mine[part]):.1f}×)"
                cells.append(text)
            memory = f"{next(iter(found.values()))['peak_mib']:.0f}" if found else ""
            cells = cells if found else [f"{first['status']}: {first['detail']}", ""]
            lines.append([shape, first["label"], *cells, memory])
    return (
        f"{markdown(['shape', '', 'forward, ms', 'backward, ms', 'peak memory, MiB'], lines)}\n\n"
        "×: their time over ours. Memory is beyond the inputs, for forward and backward, o and gradients included. "
        f"{provenance(rows)}"
    )
