"""Packed, shifted and plain positions in every served class: each patched model against the unpatched one."""

import copy
import itertools
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import transformers

from fused_rope_attn.integrations.transformers import patch_model
from tests.support import hf_models, hf_vision_models

LENGTH = 21
TOLERANCE = 2e-4  # of the root mean square
# (rows, LENGTH) position ids by name.
POSITIONS = {
    "restart": torch.cat((torch.arange(9), torch.arange(12)))[None],
    "gap": torch.cat((torch.arange(9), torch.arange(14, 26)))[None],
    "from 3": torch.arange(3, 3 + LENGTH)[None],
    "one token each": torch.zeros(1, LENGTH, dtype=torch.int64),
    "two rows": torch.stack((torch.arange(LENGTH), torch.cat((torch.arange(4), torch.arange(17))))),
}
_VISION = "vision "
# Multimodal models, which get text only, are named after those of text.
CLASSES = (*hf_models.MODELS, *(_VISION + name for name in hf_vision_models.MODELS))


class Setting(NamedTuple):
    """use_cache: None leaves it to the model. mask: a padding mask of ones is given."""

    implementation: str
    training: bool
    positions: str
    use_cache: bool | None
    mask: bool


_VALUES = itertools.product(("eager", "sdpa"), (False, True), POSITIONS, (None, True, False), (False, True))
SETTINGS = tuple(itertools.starmap(Setting, _VALUES))
# A quick choice: all positions with a cache and without one, and all else in turn.
CHOSEN = (
    *(Setting("eager", False, positions, None, False) for positions in POSITIONS),
    *(Setting("sdpa", False, positions, False, False) for positions in POSITIONS),
    Setting("sdpa", False, "restart", True, True),
    Setting("eager", True, "restart", None, False),
    Setting("eager", True, "restart", False, False),
)


class Outcome(NamedTuple):
    """verdict: "same", "refused" if both raise the same error, or what differs.

    told: the patched model's warning that it runs its modules' own attention, or "".
    """

    verdict: str
    told: str


def make_pair(name: str) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedModel]:
    """Return a model of CLASSES, and a patched copy."""
    if name.startswith(_VISION):
        model = hf_vision_models.make_vision_model(name.removeprefix(_VISION))
    else:
        model = hf_models.make_model(name)
    return model, patch_model(copy.deepcopy(model), unsupported="skip" if name.startswith(_VISION) else "raise")


def compare(pair: tuple[Any, Any], settings: Iterable[Setting]) -> dict[Setting, Outcome]:
    """Compare a model with its patched copy in these settings."""
    return {setting: _compared(*pair, setting) for setting in settings}


def _compared(model: Any, patched: Any, setting: Setting) -> Outcome:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got, expected = _run(patched, setting), _run(model, setting)
    told = next((str(x.message) for x in caught if "patch_model" in str(x.message)), "")
    if isinstance(got, str) or isinstance(expected, str):
        verdict = "refused" if got == expected else f"patched: {str(got)[:200]}, unpatched: {str(expected)[:200]}"
        return Outcome(verdict, told)
    # A square root of less than this is rounding: nothing else is left of a gradient of 0.
    errors = [((x - y).abs().max() / y.square().mean().sqrt().clamp(min=1e-6)).item() for x, y in zip(got, expected)]
    return Outcome("same" if max(errors) <= TOLERANCE else f"differs by {max(errors):.1e} of the mean", told)


def _run(model: Any, setting: Setting) -> tuple[torch.Tensor, ...] | str:
    """Return logits, and in training the gradient of the embedding, or the error that the model raised."""
    positions = POSITIONS[setting.positions]
    # Token ids below 82, because the multimodal models use larger ones for images and videos.
    inputs = {"input_ids": hf_models.make_ids(*positions.shape) % 80 + 2, "position_ids": positions}
    if setting.mask:
        inputs["attention_mask"] = torch.ones_like(positions)
    if setting.use_cache is not None:
        inputs["use_cache"] = setting.use_cache
    try:
        if model.config._attn_implementation != setting.implementation:
            model.set_attn_implementation(setting.implementation)
        if not setting.training:
            with torch.no_grad():
                return (model.eval()(**inputs).logits,)
        torch.manual_seed(5)  # of dropout
        logits = model.train()(**inputs).logits
        weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
        return logits.detach(), *torch.autograd.grad((logits * weight).sum(), model.get_input_embeddings().weight)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
