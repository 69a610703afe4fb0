"""What stands between a patched model and its attention modules: each forward pass is described for all of them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from fused_rope_attn.integrations.transformers.attention import BATCH
from fused_rope_attn.integrations.transformers.batch import describe
from fused_rope_attn.integrations.transformers.state import DECODER, Decoder, state_of, tell

PREPARE = "prepare_inputs_for_generation"


def describe_batch(decoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Forward pre-hook of a decoder: its Batch as one more keyword, for the attention modules to find."""
    if getattr(decoder, "_is_replica", False):
        raise NotImplementedError(
            "a patched model was called by torch.nn.DataParallel, whose replicas would all compute with the attention "
            "modules of the first: use torch.nn.parallel.DistributedDataParallel"
        )
    state: Decoder = getattr(decoder, DECODER)
    given = dict(zip(state.names, args)) | kwargs
    batch = given.get(BATCH)
    if batch is None:
        batch = describe(state.attentions, decoder.config, given)
    if batch.original:
        tell(state.passes, batch.original)
        return args, kwargs | {BATCH: batch}
    if state.reads_masks:
        return args, kwargs | {BATCH: batch}
    # A mask of four dimensions is handed on as it is: none is built that nobody reads.
    tokens = given.get("input_ids")
    tokens = given["inputs_embeds"] if tokens is None else tokens
    mask = torch.empty((tokens.shape[0], 1, 0, 0), dtype=torch.bool, device=tokens.device)
    return (), given | {BATCH: batch, "attention_mask": mask}


class Preparation:
    """``prepare_inputs_for_generation`` of a patched model: the method's own result, with the Batch of the step.

    An object, not a method, because a method of an instance is pickled as its class's own.

    previous: the instance attribute that was the method before; None where the class's own was in use.
    """

    def __init__(self, model: nn.Module, previous: Any):
        self.model = model
        self.previous = previous

    @property
    def __signature__(self) -> inspect.Signature:
        """The own method's, by which ``generate`` checks its arguments."""
        return inspect.signature(self._own)

    @property
    def _own(self) -> Any:
        own = getattr(type(self.model), PREPARE).__get__(self.model)
        return own if self.previous is None else self.previous

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = self._own(*args, **kwargs)
        given, mask = kwargs.get("attention_mask"), inputs.get("attention_mask")
        past = inputs.get("past_key_values")
        decoder = decoder_in(self.model)
        # With a static cache the mask is replaced by one of four dimensions, which no longer says what it is made of.
        made = mask is not given and (given is None or getattr(given, "ndim", 0) == 2)
        if decoder is None or past is None or not made or inputs.get("token_type_ids") is not None:
            return inputs
        state: Decoder = getattr(decoder, DECODER)
        return inputs | {BATCH: describe(state.attentions, decoder.config, inputs | {"attention_mask": given})}


def decoder_in(model: nn.Module) -> nn.Module | None:
    """The patched decoder that a model consists of; None where there is none or more than one."""
    decoders = [module for module in model.modules() if state_of(module, DECODER) is not None]
    return decoders[0] if len(decoders) == 1 else None
