"""State that ``patch_model`` stores on the modules of a model: plain objects, copied and pickled with the model."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from fused_rope_attn.distributed.groups import Group, group_named
from fused_rope_attn.integrations.transformers.families import Convention

# Attributes: the Patch of an attention module, the Decoder of a decoder with such modules, and the MaskMaker of a model
# that makes its decoder's masks itself.
PATCH = "_fused_rope_patch"
DECODER = "_fused_rope_decoder"
MASK_MAKER = "_fused_rope_mask_maker"
# Warn of a reason at its first forward pass, and again at every power of ten from this one on.
_WARN_AGAIN = 100


class Shards(NamedTuple):
    """The ranks that share the sequences of a model. The group is stored by name, to be copied and pickled."""

    group: Group
    sharding: str

    @property
    def options(self) -> dict[str, Any]:
        """The arguments for functions of ``fused_rope_attn.distributed``."""
        return {"group": group_named(self.group.name).processes, "sharding": self.sharding}


@dataclass(eq=False)
class Patch:
    """State of one patched attention module.

    convention: of its class.
    previous: the instance attribute that was its forward before; None if the class's own forward was in use.
    deterministic, batch_invariant, shards: from the arguments of ``patch_model``.
    served: number of calls that fused attention served.
    own: number of calls that the module's own forward served, by reason.
    own_norms: the reason why its own norms of heads ran in the last call that fused attention served, or "". None
        before such a call, and without norms of heads.
    own_forward: the reason why ``previous`` may compute something else than the class's forward, or "".
    hands_positions_on: its own attention function would get the ``position_ids`` of a call.

    Calls within a graph of torch.compile are not counted, because the graph would be compiled again for each of them.
    """

    convention: Convention
    previous: Callable | None
    deterministic: bool
    batch_invariant: bool = False
    shards: Shards | None = None
    served: int = 0
    own: Counter[str] = field(default_factory=Counter)
    own_norms: str | None = None
    own_forward: str = ""
    hands_positions_on: bool = True

    def count(self, reason: str) -> None:
        """Count a call. reason: why the module's own forward takes it; "" if fused attention serves it."""
        if torch.compiler.is_compiling():
            return
        if reason:
            self.own[reason] += 1
        else:
            self.served += 1


@dataclass(eq=False)
class Decoder:
    """State of one decoder.

    names: of its forward's parameters.
    attentions: its patched modules.
    reads_masks: other modules in it also read the mask that it passes to its layers.
    shards: the ranks that share its sequences, or None.
    own_cache: ``caches.own_cache_of`` the decoder.
    passes: number of forward passes that took the modules' own attention, by reason.
    """

    names: list[str]
    attentions: list[nn.Module]
    reads_masks: bool
    shards: Shards | None = None
    own_cache: str = ""
    passes: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class MaskMaker:
    """State of one model that makes the masks of its decoder.

    names: of its forward's parameters.
    decoder: the patched decoder within it.
    """

    names: list[str]
    decoder: nn.Module


class Method:
    """An instance attribute that replaces the method ``name`` of a model.

    An object, because pickle stores a method of an instance as its class's own.

    previous: the instance attribute that was the method before; None if the class's own was in use.
    """

    name: str

    def __init__(self, model: nn.Module, previous: Any):
        self.model = model
        self.previous = previous

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
    """Count a pass that takes the modules' own attention, and warn of it at the first and at some later ones."""
    if torch.compiler.is_compiling():
        return
    passes[reason] += 1
    count = passes[reason]
    if count > 1 and (count < _WARN_AGAIN or str(count).strip("0") != "1"):
        return
    again = "" if count == 1 else f", for the {count}th time"
    warnings.warn(
        f"patch_model: {reason} is not served by the fused kernels; the model's own attention runs instead{again} "
        "(patch_report(model) counts such calls)",
        stacklevel=3,
    )


def state_of(module: nn.Module, kind: str) -> Any:
    """Return a module's PATCH, DECODER or MASK_MAKER, or None."""
    return module.__dict__.get(kind)
