"""The generated tables of the documents about models."""

from __future__ import annotations

from bench.models.providers import OURS
from bench.report import Group, Row, faster, groups, markdown, provenance

_HEADER = ["model", "work", "sdpa", "Liger's rotation + sdpa", "`patch_model`", "over sdpa", "over Liger", "MiB"]
_NORMED = (
    "Models that norm the heads of q and k, which `patch_model` leaves to the kernels: over Liger's RMSNorm of the "
    "heads and its rotation with sdpa, and over `patch_model` with the norms outside."
)
_NORMED_HEADER = ["model", "work", "over Liger", "over norms outside", "MiB, norms outside", "MiB"]
_SERVED = (
    "New tokens per second of requests that come all at once, with prompts from a sixteenth of the work's length to "
    "all of it, to a manager of transformers that runs and is warm. With its own defaults a manager captures CUDA "
    "graphs and prepares passes while others run for flash-attention, and for `patch_model`; `eager` and `sdpa` have "
    "graphs where they are asked for."
)
_UNPATCHED = {
    "eager": "eager",
    "eager_graphs": "eager, graphs",
    "sdpa": "sdpa",
    "sdpa_graphs": "sdpa, graphs",
    "flash_2": "flash_attention_2",
}


def results(rows: list[Row]) -> str:
    """Show tokens per second at each work except ``serve``."""
    found = _groups(rows, served=False)
    lines, normed = [], []
    for (model, work), group in found.items():
        mine = group[OURS]
        speeds = [_speed(group, name) for name in ("sdpa", "liger", OURS)]
        gains = [_gain(group, name) for name in ("sdpa", "liger")]
        lines.append([_named(model, mine), work, *speeds, *gains, f"{mine['peak_mib']:.0f}"])
        if outside := group.get("own_norms"):
            gains = [_gain(group, name) for name in ("liger_norm", "own_norms")]
            normed.append([model, work, *gains, f"{outside['peak_mib']:.0f}", f"{mine['peak_mib']:.0f}"])
    tables = [markdown(_HEADER, lines)]
    if normed:
        tables.append(f"{_NORMED}\n\n{markdown(_NORMED_HEADER, normed)}")
    ours = [group[OURS] for group in found.values()]
    return "\n\n".join(tables) + (
        "\n\nTokens per second in eager mode, random bfloat16 weights, one after the other in one process; ×: their "
        "time over ours, below 1 a loss; MiB: peak memory beyond the weights. train: forward, loss and backward; "
        "prefill: into an empty dynamic cache; decode: one token onto one. With few tokens the host is the limit, and "
        f"most of its time is the model's own. {provenance(ours, 'transformers', 'liger-kernel')}"
    )


def serving(rows: list[Row]) -> str:
    """Show continuous batching, with those of the unpatched ones that were measured anywhere."""
    found = _groups(rows, served=True)
    names = [name for name in _UNPATCHED if any(name in group for group in found.values())]
    lines = []
    for (model, work), group in found.items():
        rivals = [name for name in names if name in group]
        best = max(rivals, key=lambda name: group[name]["tokens_s"], default="")
        speeds = [_speed(group, name) for name in (*names, OURS)]
        lines.append([_named(model, group[OURS]), work, *speeds, _gain(group, best)])
    header = ["model", "work", *(_UNPATCHED[name] for name in names), "`patch_model`", "over the best"]
    ours = [group[OURS] for group in found.values()]
    return f"{markdown(header, lines)}\n\n{_SERVED} {provenance(ours, 'transformers')}"


def _groups(rows: list[Row], served: bool) -> dict[tuple[str, str], Group]:
    """Return (model, work) -> provider -> its timed row, where there are ours."""
    return {
        (case, shape.replace(" ", ", ", 1)): group
        for (case, shape, part, _), group in groups(rows).items()
        if OURS in group and part.startswith("serve") is served
    }


def _named(model: str, row: Row) -> str:
    return model + (f" ({row['layers_left_out']} layers left out)" if row["layers_left_out"] else "")


def _speed(group: Group, name: str) -> str:
    return f"{group[name]['tokens_s']:.0f}" if name in group else "-"


def _gain(group: Group, name: str) -> str:
    """Return a provider's time over ours."""
    return f"{faster(group[name], group[OURS]):.2f}×" if name in group else "-"
