"""State that ``patch_model`` stores on the modules of a model, copied and pickled with it, and the report of it."""

import inspect
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from fused_rope_attn.distributed import groups, layout
from fused_rope_attn.integrations.transformers import families, rotations
from fused_rope_attn.runtime.checks import refuse_choice

# Attributes: the Patch of an attention module, the Decoder of a decoder with such modules, and, of a model that makes
# its decoder's masks itself, that Decoder with the names of the model's parameters.
PATCH = "_fused_rope_patch"
DECODER = "_fused_rope_decoder"
MASK_MAKER = "_fused_rope_mask_maker"


def state_of(module: nn.Module, kind: str) -> Any:
    """Return a module's PATCH, DECODER or MASK_MAKER, or None."""
    return module.__dict__.get(kind)


class Shards(NamedTuple):
    """The ranks that share the sequences of a model. The group is stored by name, to be copied and pickled."""

    group: groups.Group
    sharding: str

    @property
    def options(self) -> dict[str, Any]:
        """The arguments for functions of ``fused_rope_attn.distributed``."""
        return {"group": groups.group_named(self.group.name).processes, "sharding": self.sharding}


def shards_of(cp_group: Any, cp_sharding: Any) -> Shards | None:
    """Return the ``Shards`` of ``patch_model``'s arguments. Raise TypeError or ValueError naming them."""
    if cp_group is None:
        if cp_sharding in layout.SHARDINGS:
            return None
        refuse_choice("cp_sharding", cp_sharding, layout.SHARDINGS)
    try:
        group = groups.group_of(cp_group)
    except (TypeError, ValueError) as error:
        raise type(error)(f"cp_{error}") from None
    layout.check_sharding("cp_sharding", cp_sharding, group.size)
    return Shards(group, cp_sharding)


@dataclass(eq=False)
class Patch:
    """State of one patched attention module. Graphs of torch.compile count no calls: each would compile them again."""

    convention: families.Convention
    previous: Callable | None  # the instance attribute that was its forward; None if the class's own was in use
    deterministic: bool = False
    batch_invariant: bool = False
    shards: Shards | None = None
    # Number of calls by the reason why the module's own forward served them; "" for fused attention.
    calls: Counter[str] = field(default_factory=Counter)
    # The reason why its own norms ran in the last served call, or "". None before such a call, and without norms.
    own_norms: str | None = None
    own_forward: str = ""  # why ``previous`` may compute something else than the class's forward, or ""
    hands_positions_on: bool = True  # its own attention function would get the ``position_ids`` of a call


@dataclass(eq=False)
class Decoder:
    """State of one decoder."""

    module: nn.Module
    names: list[str]  # of its forward's parameters
    attentions: list[nn.Module]  # its patched modules
    reads_masks: bool  # other modules in it also read the mask that it passes to its layers
    shards: Shards | None = None
    own_cache: str = ""  # ``caches.own_cache_of`` the decoder
    passes: Counter[str] = field(default_factory=Counter)  # that took the modules' own attention, by reason


class Method:
    """An instance attribute that replaces the method ``name`` of a model. previous: as in ``Patch``. It is an object,
    because pickle stores a method of an instance as its class's own."""

    name: str

    def __init__(self, model: nn.Module, previous: Any):
        self.model, self.previous = model, previous

    @property
    def own(self) -> Any:
        """The method that this one replaces."""
        return getattr(type(self.model), self.name).__get__(self.model) if self.previous is None else self.previous

    @classmethod
    def install(cls, model: nn.Module) -> None:
        """Replace the method of a model, unless it is replaced already or the model lacks it."""
        previous = model.__dict__.get(cls.name)
        if hasattr(type(model), cls.name) and not isinstance(previous, cls):
            setattr(model, cls.name, cls(model, previous))


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but is {type(model).__name__}")


def names_of_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters of a model's forward, in their order."""
    return [name for name in inspect.signature(type(model).forward).parameters if name != "self"]


def warn_of(passes: Counter[str], reason: str) -> None:
    """Count a pass that takes the modules' own attention. Warn of the first, and of every power of ten from 100 on."""
    if torch.compiler.is_compiling():
        return
    count = passes[reason] = passes[reason] + 1
    if count > 1 and (count < 100 or str(count).strip("0") != "1"):
        return
    again = "" if count == 1 else f", for the {count}th time"
    warnings.warn(
        f"patch_model: {reason} is not served by the fused kernels; the model's own attention runs instead{again} "
        "(patch_report(model) counts such calls)",
        stacklevel=3,
    )


def check_labels(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise if the loss would shift labels within the shard. A forward pre-hook of models with a loss."""
    given = dict(zip(names_of_parameters(model), args)) | kwargs
    if given.get("labels") is not None and given.get("shift_labels") is None:
        raise ValueError(
            "shift_labels must be given with labels to a model that has a cp_group: the token after a chunk's last "
            "one is another rank's; pass shift_labels=cp_shift_labels(labels of the whole sequence, group=, sharding=)"
        )


# Layers are counted by the last number in a path.
_LAYER = r"\d+(?=\D*$)"
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
            key = (re.sub(_LAYER, "{}", row.path), *row[1:5], row.norms, tuple(sorted(row.own.items())))
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
    return PatchReport(_report(path, m) for path, m in model.named_modules() if families.looks_like_attention(m))


def _report(path: str, module: nn.Module) -> ModuleReport:
    name, patch = type(module).__name__, state_of(module, PATCH)
    if patch is None:
        reason = "patch_model has not been called since the module came into the model"
        if families.convention_of(module) is None:
            reason = families.refusal(type(module))
        return ModuleReport(path, name, False, reason, 0, {})
    pair, norms = patch.convention.norms_of(module), ""
    if pair is not None:
        # Prefer the last call's answer, because weights may look different then: FSDP2 gathers them for it.
        found = rotations.head_norms(*pair) if patch.own_norms is None else patch.own_norms
        norms = f"its own: {found}" if isinstance(found, str) and found else "fused"
    own = dict(patch.calls)
    return ModuleReport(path, name, True, "", own.pop("", 0), own, norms)


def _line(rows: list[ModuleReport]) -> tuple[str, ...]:
    """Return the line for modules that differ only in the last number of their paths."""
    row, path = rows[0], rows[0].path or "(model)"
    if len(rows) > 1:
        numbers = enumerate(int(re.findall(_LAYER, row.path)[0]) for row in rows)
        runs = [[x for _, x in run] for _, run in itertools.groupby(numbers, lambda pair: pair[1] - pair[0])]
        ranges = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
        path = re.sub(_LAYER, "{" + ranges + "}", row.path)
    own = "; ".join(f"{count}: {reason}" for reason, count in row.own.items())
    patched = "yes" if row.patched else f"no: {row.reason}"
    return path, row.name, patched, row.norms or "none", str(row.served), own or "0"
