"""Rows of masks to text: a table for each figure, and what it says about the bars that are set for it."""

from __future__ import annotations

from bench.report import PASSES, Row, milliseconds, not_timed, speedup, table, timed
from bench.tables import markdown, provenance
from bench.timing import quantile, ratio

# The most that a visited block may cost beside one of full causal attention, and the least that a padded batch must
# take beside a packed one.
BLOCK_BAR, PADDED_BAR = 1.3, 1.5
# The provider of each figure that the others are compared with.
_BASES = {"window": "window", "packed": "packed", "overhead": "causal"}
_WORDS = {"window": "A window", "packed": "Packed sequences", "overhead": "Masks that hide nothing"}
Found = dict[tuple[str, str], Row]  # by provider and pass


def summary(rows: list[Row]) -> str:
    """A table for each figure, and what it says about the bars; then whoever was not timed, with the reason."""
    blocks = []
    for figure, found in _figures(rows).items():
        header, lines = _lines(figure, found)
        findings = [f"  {text}" for text in _findings(figure, found)]
        blocks.append("\n".join([table(header, lines, left=2), *findings]))
    return "\n\n".join([*blocks, *filter(None, ["\n".join(not_timed(rows, with_case=True))])]) or "nothing was timed"


def results(rows: list[Row]) -> str:
    """The generated tables of the documents. ValueError without a time."""
    blocks = []
    for figure, found in _figures(rows).items():
        shape = next(row["shape"] for row in found.values() if row["ours"])
        blocks += [f"{_WORDS[figure]}, {shape}:", markdown(*_lines(figure, found))]
        if findings := _findings(figure, found):
            text = "; ".join(findings)
            blocks.append(f"{text[0].upper()}{text[1:]}.")
    if not blocks:
        raise ValueError("no times of bench masks")
    note = "Eager calls. In the last column of each pass the time over that of the line that has 1.00."
    return "\n\n".join([*blocks, f"{note} {provenance(rows, 'liger-kernel', 'flash-attn-4')}"])


def _figures(rows: list[Row]) -> dict[str, Found]:
    """The timed rows of each figure, by provider and pass."""
    figures: dict[str, Found] = {}
    for row in timed(rows):
        figures.setdefault(row["case"], {})[row["provider"], row["pass"]] = row
    return figures


def _lines(figure: str, found: Found) -> tuple[list[str], list[list[str]]]:
    """(header, a line for each provider): its kernels, and of each pass its times and its time over the base's."""
    base = _BASES[figure]
    lines = []
    for name in dict.fromkeys(name for name, _ in found):
        both = [found.get((name, part)) for part in PASSES]
        label = next(row for row in both if row)["label"]
        kernels = "/".join(dict.fromkeys(row["backend"] for row in both if row and "backend" in row))
        lines.append([label, kernels, *(cell for row in both for cell in _cells(found, base, row))])
    header = [cell for words in PASSES.values() for cell in (f"{words}, ms", "p20-p80", f"/ {base}")]
    return [figure, "kernels", *header], lines


def _cells(found: Found, base: str, row: Row | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    reference = found.get((base, row["pass"]))
    times = f"{milliseconds(row['p20'])}-{milliseconds(row['p80'])}"
    relative = "" if reference is None else f"{ratio(row['rounds'], reference['rounds']):.2f}"
    return [milliseconds(row["ms"]) + " ~" * (row["status"] == "loose"), times, relative]


def block_cost(found: Found, part: str) -> float | None:
    """Time for each visited score with the window over that without; None where one of them has no time."""
    window, causal = (found.get((name, part)) for name in ("window", "causal"))
    if not (window and causal and window.get("visited") and causal.get("visited")):
        return None
    return ratio(window["rounds"], causal["rounds"]) * causal["visited"] / window["visited"]


def _both(found: Found, name: str) -> list[float] | None:
    """Forward + backward of every round."""
    passes = [found.get((name, part)) for part in PASSES]
    return [sum(pair) for pair in zip(*(row["rounds"] for row in passes))] if all(passes) else None


def _findings(figure: str, found: Found) -> list[str]:
    texts = []
    if figure == "window":
        for part, words in PASSES.items():
            if (value := block_cost(found, part)) is not None:
                verdict = "ok" if value <= BLOCK_BAR else "MISSED"
                texts.append(
                    f"{words}: a visited block costs {value:.2f} of full causal's (at most {BLOCK_BAR}: {verdict})"
                )
    if figure == "packed" and (packed := _both(found, "packed")):
        if padded := _both(found, "padded"):
            value = ratio(padded, packed)
            verdict = "ok" if value >= PADDED_BAR else "MISSED"
            texts.append(f"forward + backward: {value:.2f}x the padded batch (at least {PADDED_BAR}: {verdict})")
        rivals = {
            name: times for name in {n for n, _ in found} if not _is_ours(found, name) and (times := _both(found, name))
        }
        if rivals:
            best = min(rivals, key=lambda name: quantile(rivals[name], 0.5))
            label = next(row["label"] for (name, _), row in found.items() if name == best)
            texts.append(f"forward + backward: {speedup(ratio(rivals[best], packed))} against {label}")
    return texts


def _is_ours(found: Found, name: str) -> bool:
    return next(row["ours"] for (provider, _), row in found.items() if provider == name)
