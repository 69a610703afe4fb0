"""Rows of masks to text: a table for each figure, and what it says about the bars that are set for it."""

from __future__ import annotations

from bench.report import Row, milliseconds, not_timed, speedup, table, timed
from bench.timing import quantile, ratio

# The most that a visited block may cost beside one of full causal attention, and the least that a padded batch must
# take beside a packed one.
BLOCK_BAR, PADDED_BAR = 1.3, 1.5


def summary(rows: list[Row]) -> str:
    """A table for each figure, and what it says about the bars; then whoever was not timed, with the reason."""
    blocks = []
    for figure in dict.fromkeys(row["case"] for row in rows):
        found = {(r["provider"], r["pass"]): r for r in timed(rows) if r["case"] == figure}
        if not found:
            continue
        base = {"window": "window", "packed": "packed", "overhead": "causal"}[figure]
        cells = []
        for name in dict.fromkeys(name for name, _ in found):
            both = [found.get((name, part)) for part in ("fwd", "bwd")]
            label = next(row for row in both if row)["label"]
            kernels = "/".join(dict.fromkeys(row["backend"] for row in both if row and "backend" in row))
            cells.append([label, kernels, *(cell for row in both for cell in _cells(found, base, row))])
        header = [figure, "kernels", "fwd ms", "p20-p80", f"/ {base}", "bwd ms", "p20-p80", f"/ {base}"]
        blocks.append("\n".join([table(header, cells, left=2), *_findings(figure, found)]))
    return "\n\n".join([*blocks, *filter(None, ["\n".join(not_timed(rows, with_case=True))])]) or "nothing was timed"


def _cells(found, base: str, row) -> list[str]:
    if row is None:
        return ["", "", ""]
    reference = found.get((base, row["pass"]))
    times = f"{milliseconds(row['p20'])}-{milliseconds(row['p80'])}"
    relative = "" if reference is None else f"{ratio(row['rounds'], reference['rounds']):.2f}"
    return [milliseconds(row["ms"]) + " ~" * (row["status"] == "loose"), times, relative]


def block_cost(found: dict, part: str) -> float | None:
    """Time for each visited score with the window over that without; None where one of them has no time."""
    window, causal = (found.get((name, part)) for name in ("window", "causal"))
    if not (window and causal and window.get("visited") and causal.get("visited")):
        return None
    return ratio(window["rounds"], causal["rounds"]) * causal["visited"] / window["visited"]


def _both(found: dict, name: str) -> list[float] | None:
    """Forward + backward of every round."""
    passes = [found.get((name, part)) for part in ("fwd", "bwd")]
    return [sum(pair) for pair in zip(*(row["rounds"] for row in passes))] if all(passes) else None


def _findings(figure: str, found: dict) -> list[str]:
    texts = []
    if figure == "window":
        for part, words in (("fwd", "forward"), ("bwd", "backward")):
            if (value := block_cost(found, part)) is not None:
                verdict = "ok" if value <= BLOCK_BAR else "MISSED"
                texts.append(
                    f"  {words}: a visited block costs {value:.2f} of full causal's (at most {BLOCK_BAR}: {verdict})"
                )
    if figure == "packed" and (packed := _both(found, "packed")):
        if padded := _both(found, "padded"):
            value = ratio(padded, packed)
            verdict = "ok" if value >= PADDED_BAR else "MISSED"
            texts.append(f"  forward + backward: {value:.2f}x the padded batch (at least {PADDED_BAR}: {verdict})")
        rivals = {
            name: times for name in {n for n, _ in found} if not _is_ours(found, name) and (times := _both(found, name))
        }
        if rivals:
            best = min(rivals, key=lambda name: quantile(rivals[name], 0.5))
            label = next(row["label"] for (name, _), row in found.items() if name == best)
            texts.append(f"  forward + backward: {speedup(ratio(rivals[best], packed))} against {label}")
    return texts


def _is_ours(found: dict, name: str) -> bool:
    return next(row["ours"] for (provider, _), row in found.items() if provider == name)
