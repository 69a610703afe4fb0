"""Rows of models to text: for the terminal, and the generated block of the documents."""

from __future__ import annotations

from bench.report import Row, milliseconds, speedup, table
from bench.suites.models.providers import OURS, OURS_BESIDE_LIGER
from bench.tables import markdown, provenance
from bench.timing import ratio


def summary(rows: list[Row]) -> str:
    """A table of all rows: tokens/s, peak memory, and ours against each; a ratio below 1 is a loss."""
    lines = []
    for row in rows:
        if row["status"] == "unsupported":
            continue
        if "ms" not in row:
            lines.append([row["case"], row["pass"], row["label"], row["status"], "", "", "", row["detail"][:40]])
            continue
        faster = row["ours_faster"]
        lines.append(
            [
                row["case"], row["pass"], row["label"], f"{row['tokens_s']:.0f}", milliseconds(row["ms"]),
                f"{row['peak_mib']:.0f}", "" if faster is None else speedup(faster),
                f"{row['loss']:.4f}" if "loss" in row else f"off {row['off_first']:.1e}",
            ]
        )  # fmt: skip
    header = ["model", "work", "provider", "tokens/s", "ms", "peak MiB", "ours", "loss"]
    rivals = [row for row in rows if row["provider"] not in (OURS, OURS_BESIDE_LIGER)]
    lost = [row for row in rivals if row.get("ours_faster") is not None and row["ours_faster"] < 1]
    slower = [f"slower than {row['label']}: {row['case']} {row['pass']} {row['ours_faster']:.2f}" for row in lost]
    return "\n".join([table(header, lines, left=3), *slower])


_HEADER = ["model", "work", "sdpa", "Liger's rotation + sdpa", "`patch_model`", "over sdpa", "over Liger", "MiB"]
_NORMED = (
    "Models that norm the heads of q and k, which `patch_model` leaves to the kernels: over Liger's RMSNorm of the "
    "heads and its rotation with sdpa, over `patch_model` with the norms outside, and, with Liger's RMSNorm in all "
    "other norms of both, over Liger's RMSNorm and rotation with sdpa."
)
_NORMED_HEADER = [
    "model", "work", "over Liger, heads", "over norms outside", "over Liger, all norms", "MiB, norms outside", "MiB"
]  # fmt: skip

_SERVED = (
    "New tokens per second of requests that come all at once, with prompts from a sixteenth of the work's length to "
    "all of it, to a manager of transformers that runs and is warm. With its own defaults a manager captures CUDA "
    "graphs and prepares passes while others run for flash-attention, and for `patch_model`; `eager` and `sdpa` have "
    "graphs where they are asked for."
)
_UNPATCHED = {
    "eager": "eager", "eager_graphs": "eager, graphs", "sdpa": "sdpa", "sdpa_graphs": "sdpa, graphs",
    "flash_2": "flash_attention_2",
}  # fmt: skip


def results(rows: list[Row]) -> str:
    """The generated tables of the documents: tokens per second at each work but ``serve``. ValueError without rows."""
    groups = _groups(rows, served=False)
    lines, normed = [], []
    for (model, work), group in groups.items():
        mine, rivals = group[OURS], [group.get("sdpa"), group.get("liger")]
        speeds = [f"{row['tokens_s']:.0f}" if row else "-" for row in (*rivals, mine)]
        gains = [_gain(group, name, OURS) for name in ("sdpa", "liger")]
        lines.append([_named(model, mine), work, *speeds, *gains, f"{mine['peak_mib']:.0f}"])
        if outside := group.get("own_norms"):
            gains = [_gain(group, name, OURS) for name in ("liger_norm", "own_norms")]
            gains.append(_gain(group, "liger_all", OURS_BESIDE_LIGER))
            normed.append([model, work, *gains, f"{outside['peak_mib']:.0f}", f"{mine['peak_mib']:.0f}"])
    ours = [group[OURS] for group in groups.values()]
    tables = [markdown(_HEADER, lines)]
    if normed:
        tables.append(f"{_NORMED}\n\n{markdown(_NORMED_HEADER, normed)}")
    return "\n\n".join(tables) + (
        "\n\nTokens per second in eager mode, random bfloat16 weights, one after the other in one process; ×: their "
        "time over ours, below 1 a loss; MiB: peak memory beyond the weights. train: forward, loss and backward; "
        "prefill: into an empty dynamic cache; decode: one token onto one. With few tokens the host is the limit, and "
        f"most of its time is the model's own. {provenance(ours, 'transformers', 'liger-kernel')}"
    )


def serving(rows: list[Row]) -> str:
    """The generated table of continuous batching; of the unpatched ones those that were measured anywhere. ValueError
    without rows."""
    groups = _groups(rows, served=True)
    names = [name for name in _UNPATCHED if any(name in group for group in groups.values())]
    lines = []
    for (model, work), group in groups.items():
        mine, rivals = group[OURS], [name for name in names if name in group]
        speeds = [f"{group[name]['tokens_s']:.0f}" if name in group else "-" for name in (*names, OURS)]
        best = max(rivals, key=lambda name: group[name]["tokens_s"], default="")
        lines.append([_named(model, mine), work, *speeds, _gain(group, best, OURS)])
    header = ["model", "work", *(_UNPATCHED[name] for name in names), "`patch_model`", "over the best"]
    ours = [group[OURS] for group in groups.values()]
    return f"{markdown(header, lines)}\n\n{_SERVED} {provenance(ours, 'transformers')}"


def _groups(rows: list[Row], served: bool) -> dict[tuple[str, str], dict[str, Row]]:
    """Rows with times by (model, work) and by provider, where there are ours."""
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row.get("bench") == "models" and "ms" in row and row["pass"].startswith("serve") is served:
            groups.setdefault((row["case"], f"{row['pass']}, {row['shape']}"), {})[row["provider"]] = row
    groups = {key: group for key, group in groups.items() if OURS in group}
    if not groups:
        raise ValueError("no rows of bench models with our own times")
    return groups


def _named(model: str, row: Row) -> str:
    return model + (f" ({row['layers_left_out']} layers left out)" if row["layers_left_out"] else "")


def _gain(group: dict[str, Row], name: str, ours: str) -> str:
    """A provider's time over one of ours."""
    if name not in group or ours not in group:
        return "-"
    return f"{ratio(group[name]['rounds'], group[ours]['rounds']):.2f}×"
