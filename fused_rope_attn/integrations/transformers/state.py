"""What ``patch_model`` leaves on the modules of a model. Plain objects: they are copied and pickled with the model."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fused_rope_attn.integrations.transformers.conventions import Convention

if TYPE_CHECKING:  # shards asks `obstacles`, which reads what is here
    from fused_rope_attn.integrations.transformers.shards import Shards

# Where a patched attention module has its Patch, a decoder with such modules its Decoder, and a model that makes a
# decoder's masks itself its MaskMaker.
PATCH = "_fused_rope_patch"
DECODER = "_fused_rope_decoder"
MASK_MAKER = "_fused_rope_mask_maker"
# A reason is told at its first forward pass, and again at every power of ten from here on.
_TELL_AGAIN = 100


class Patch:
    """Of one attention module.

    convention: of its class.
    previous: the instance attribute that was its forward before; None where the class's own forward was in use.
    deterministic, shards: as ``patch_model`` was told.
    served: calls that fused attention has served.
    own: calls that the module's own forward has served, by reason.
    own_norms: why its own norms of heads ran in the last call that fused attention has served, "" where they did not;
        None before such a call, and where there are no norms of heads.

    own_forward: why ``previous`` does something else than the class's forward; "" where it does not.

    Calls within a graph of torch.compile are not counted: the graph would be made anew for each of them.
    """

    own_norms: str | None = None
    own_forward = ""

    def __init__(self, convention: Convention, previous: Callable | None, deterministic: bool):
        self.convention = convention
        self.previous = previous
        self.deterministic = deterministic
        self.shards: Shards | None = None
        self.served = 0
        self.own: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        """Count a call that was served, with "" for a reason, or that its own forward takes."""
        if torch.compiler.is_compiling():
            return
        if reason:
            self.own[reason] += 1
        else:
            self.served += 1


class Decoder:
    """Of one decoder.

    names: of its forward's parameters.
    attentions: its patched modules.
    reads_masks: something in it besides them reads the mask that it hands to its layers.
    passes: forward passes that took the modules' own attention, by reason.
    shards: who shares its sequences, or None.
    """

    def __init__(
        self, decoder: nn.Module, attentions: list[nn.Module], reads_masks: bool, shards: Shards | None = None
    ):
        self.names = names_of_parameters(decoder)
        self.attentions = attentions
        self.shards = shards
        self.reads_masks = reads_masks
        self.passes: Counter[str] = Counter()


class MaskMaker:
    """Of one model that makes the masks of its decoder.

    names: of its forward's parameters.
    decoder: the patched decoder within it.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module):
        self.names = names_of_parameters(model)
        self.decoder = decoder


def names_of_parameters(model: nn.Module) -> list[str]:
    """The names of the parameters of a model's forward, in their order."""
    return [name for name in inspect.signature(type(model).forward).parameters if name != "self"]


def tell(passes: Counter[str], reason: str) -> None:
    """Count a pass that takes the modules' own attention, and warn of it: the first time, and now and then."""
    if torch.compiler.is_compiling():
        return
    passes[reason] += 1
    count = passes[reason]
    if count > 1 and (count < _TELL_AGAIN or str(count).strip("0") != "1"):
        return
    again = "" if count == 1 else f", for the {count}th time"
    warnings.warn(
        f"patch_model: {reason} is not served by the fused kernels; the model's own attention runs instead{again} "
        "(patch_report(model) counts such calls)",
        stacklevel=3,
    )


def state_of(module: nn.Module, kind: str) -> Any:
    """A module's PATCH, DECODER or MASK_MAKER; None where it has none."""
    return module.__dict__.get(kind)
