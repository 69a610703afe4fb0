"""``patch_report``: for every attention module, whether it is patched, and which forward its calls took."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from torch import nn

from fused_rope_attn.integrations.transformers.families import convention_of, looks_like_attention, refusal
from fused_rope_attn.integrations.transformers.norms import head_norms
from fused_rope_attn.integrations.transformers.state import PATCH, Patch, check_model, state_of

_HEADER = ("module", "class", "patched", "norms", "calls served here", "calls of its own forward")


class ModuleReport(NamedTuple):
    """The report of one attention module.

    Attributes:
        path: within the model; "" if the model is the module.
        name: of its class.
        patched: whether ``rope_attention`` replaces its attention.
        reason: why it is not patched, or "".
        served: number of calls that ``rope_attention`` served since it was patched.
        own: number of calls that took the module's own forward since then, by reason.
        norms: of a patched module that norms each head of q and k before the rotation: ``"fused"`` if the kernels did
            so in the last served call, ``"its own"`` and the reason if the module's norms ran. Before the first call,
            the choice for the norms as they are now. "" without such norms.
    """

    path: str
    name: str
    patched: bool
    reason: str
    served: int
    own: dict[str, int]
    norms: str = ""


class PatchReport(tuple[ModuleReport, ...]):
    """A ModuleReport for every attention module of a model, in the model's order. It prints as a table.

    The table has one line for equal layers, for example ``model.layers.{0-31}.self_attn``, and a column of norms if a
    module has any.
    """

    def __str__(self) -> str:
        if not self:
            return "the model has no attention modules"
        alike: dict[tuple, list[ModuleReport]] = {}
        for row in self:
            # Layers are counted by the last number in a path.
            key = (re.sub(r"\d+(?=\D*$)", "{}", row.path), *row[1:5], row.norms, tuple(sorted(row.own.items())))
            alike.setdefault(key, []).append(row)
        table = [_HEADER, *(_line(rows) for rows in alike.values())]
        if not any(row.norms for row in self):
            table = [(*line[:3], *line[4:]) for line in table]
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines.append("Calls in graphs of torch.compile and replays of CUDA graphs are not counted.")
        return "\n".join(lines)


def patch_report(model: nn.Module) -> PatchReport:
    """Report for every attention module of a model whether it is patched, which forward its calls took, and why.

    Args:
        model: patched or not.

    Returns:
        a tuple of ``ModuleReport``, which prints as a table.

    Raises:
        TypeError: model is not a module.
    """
    check_model(model)
    return PatchReport(_report(path, m) for path, m in model.named_modules() if looks_like_attention(m))


def _report(path: str, module: nn.Module) -> ModuleReport:
    patch: Patch | None = state_of(module, PATCH)
    if patch is not None:
        return ModuleReport(path, type(module).__name__, True, "", patch.served, dict(patch.own), _norms(module, patch))
    reason = "patch_model has not been called since the module came into the model"
    if convention_of(module) is None:
        reason = refusal(type(module))
    return ModuleReport(path, type(module).__name__, False, reason, 0, {})


def _norms(module: nn.Module, patch: Patch) -> str:
    """Return ``ModuleReport.norms``."""
    pair = patch.convention.norms(module)
    if pair is None:
        return ""
    # Prefer the last call's answer, because weights may look different then: FSDP2 gathers them for it.
    reason = patch.own_norms
    if reason is None:
        found = head_norms(*pair)
        reason = found if isinstance(found, str) else ""
    return f"its own: {reason}" if reason else "fused"


def _line(rows: list[ModuleReport]) -> tuple[str, ...]:
    """Return the line for modules that differ only in the last number of their paths."""
    row, path = rows[0], rows[0].path or "(model)"
    if len(rows) > 1:
        numbers = [int(re.findall(r"\d+(?=\D*$)", row.path)[0]) for row in rows]
        path = re.sub(r"\d+(?=\D*$)", "{" + _ranges(numbers) + "}", row.path)
    own = "; ".join(f"{count}: {reason}" for reason, count in row.own.items())
    patched = "yes" if row.patched else f"no: {row.reason}"
    return path, row.name, patched, row.norms or "none", str(row.served), own or "0"


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers as ranges, for example "0-3, 5"."""
    groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
