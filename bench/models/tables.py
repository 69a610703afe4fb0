"""The generated tables of the documents about models."""

from __future__ import annotations

from bench.models.providers import OURS, OURS_WITH_LIGER
from bench.report import Group, Row, faster, groups, markdown, provenance, strongest

# The rivals of a model's work without an optimizer: the labels of their tokens per second and of ours over them.
_RIVALS = {"sdpa": ("sdpa", "over sdpa"), "liger": ("Liger's rotation + sdpa", "over Liger")}
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
# In the order of columns: the rivals, then ours.
_TRAINED = {
    "sdpa": "sdpa",
    "flash_2": "flash_attention_2",
    "liger_all": "Liger + sdpa",
    "liger_all_fa4": "Liger + flash_attention_4",
    OURS: "`patch_model`",
    OURS_WITH_LIGER: "`patch_model` + Liger",
}


def training(rows: list[Row]) -> str:
    """Show whole training steps: tokens per second, and the best of the others over ours with Liger's other kernels."""
    found = {key: group for key, group in _groups(rows, "step").items() if OURS_WITH_LIGER in group}
    names = [name for name in _TRAINED if any(name in group for group in found.values())]
    lines = []
    for (model, work), group in found.items():
        mine, best = group[OURS_WITH_LIGER], strongest(group.values())
        speeds = [_speed(group, name) for name in names]
        memory = [f"{row['peak_mib']:.0f}" if row else "-" for row in (best, mine)]
        lines.append([_named(model, mine), work, *speeds, f"{faster(best, mine):.2f}×" if best else "-", *memory])
    header = ["model", "work", *(_TRAINED[name] for name in names), "over the best", "MiB of the best", "MiB"]
    return (
        f"{markdown(header, lines)}\n\n"
        "Tokens per second of whole training steps: forward, loss, backward and AdamW, in eager mode, with random "
        "bfloat16 weights, one after the other in one process. Liger: all of its kernels; with `patch_model` those of "
        "the norms, the MLP and the loss. The last columns compare `patch_model` + Liger with the fastest without "
        "`patch_model`: time over ours, below 1 ours is slower, and peak memory beyond weights and optimizer state. "
    ) + provenance([group[OURS] for group in found.values()], "transformers", "liger-kernel", "flash-attn-4")


def results(rows: list[Row]) -> str:
    """Show tokens per second at each work except ``step`` and ``serve``."""
    found = _groups(rows, "train", "prefill", "decode")
    rivals = [name for name in _RIVALS if any(name in group for group in found.values())]
    lines, normed = [], []
    for (model, work), group in found.items():
        mine = group[OURS]
        speeds = [_speed(group, name) for name in (*rivals, OURS)]
        gains = [_gain(group, name) for name in rivals]
        lines.append([_named(model, mine), work, *speeds, *gains, f"{mine['peak_mib']:.0f}"])
        if outside := group.get("own_norms"):
            gains = [_gain(group, name) for name in ("liger_norm", "own_norms")]
            normed.append([model, work, *gains, f"{outside['peak_mib']:.0f}", f"{mine['peak_mib']:.0f}"])
    speeds, gains = ([_RIVALS[name][i] for name in rivals] for i in (0, 1))
    tables = [markdown(["model", "work", *speeds, "`patch_model`", *gains, "MiB"], lines)]
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
    found = _groups(rows, "serve")
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


def _groups(rows: list[Row], *kinds: str) -> dict[tuple[str, str], Group]:
    """Return (model, work) -> provider -> its timed row, for kinds of work, where there are ours."""
    return {
        (case, shape.replace(" ", ", ", 1)): group
        for (case, shape, part, _), group in groups(rows).items()
        if OURS in group and part.startswith(kinds)
    }


def _named(model: str, row: Row) -> str:
    return model + (f" ({row['layers_left_out']} layers left out)" if row["layers_left_out"] else "")


def _speed(group: Group, name: str) -> str:
    return f"{group[name]['tokens_s']:.0f}" if name in group else "-"


def _gain(group: Group, name: str) -> str:
    """Return a provider's time over ours."""
    return f"{faster(group[name], group[OURS]):.2f}×" if name in group else "-"
