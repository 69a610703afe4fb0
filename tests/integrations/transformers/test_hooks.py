"""Inputs of a step that `generate` takes from a patched model: its own, with the Batch where masks were made."""

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import patch_model
from fused_rope_attn.integrations.transformers.attention import BATCH
from fused_rope_attn.integrations.transformers.patch import Preparation
from tests.support.hf_models import make_ids, make_model

PADDING = torch.ones(2, 5, dtype=torch.int64)
MADE = torch.zeros(2, 1, 5, 8)  # what a mask of four dimensions is made of, it no longer says


@pytest.fixture(scope="module")
def llama():
    return patch_model(make_model("llama"))


def prepared(model, given, mask, past=True, **more):
    """Return whether a step that made ``mask`` from ``given`` has the Batch among its inputs."""
    config = model.config if hasattr(model, "config") else make_model("llama").config
    cache = transformers.StaticCache(config=config, max_cache_len=8) if past else None
    inputs = {"input_ids": make_ids(2, 5), "attention_mask": mask, "past_key_values": cache} | more
    got = Preparation(model, lambda **kwargs: inputs)(attention_mask=given)
    assert all(got[name] is value for name, value in inputs.items())
    return BATCH in got


@pytest.mark.parametrize(
    ("given", "mask", "described"),
    [
        (PADDING, MADE, True),
        (None, MADE, True),
        (PADDING, PADDING, False),
        (None, None, False),
        (MADE, MADE[:1], False),
        ({"full_attention": MADE}, {"full_attention": MADE}, False),
        (PADDING[0, 0], MADE, False),
    ],
    ids=["padding", "nothing", "unmade", "no mask", "a mask of four dimensions", "a mask for each kind", "a number"],
)
def test_masks_that_say_what_they_are_made_of(llama, given, mask, described):
    assert prepared(llama, given, mask) is described
    assert not prepared(llama, given, mask, past=False)


def test_types_of_tokens_are_for_who_makes_the_masks(llama):
    assert not prepared(llama, PADDING, MADE, token_type_ids=torch.zeros_like(PADDING))
    assert prepared(llama, PADDING, MADE, token_type_ids=None)


class Several(torch.nn.ModuleList):
    """A model of models."""

    def prepare_inputs_for_generation(self, **kwargs):
        raise AssertionError


def test_models_without_a_decoder_or_with_two(llama):
    assert prepared(Several([llama]), PADDING, MADE)
    assert not prepared(Several([llama, patch_model(make_model("llama"))]), PADDING, MADE)
    assert not prepared(Several([torch.nn.Linear(2, 2)]), PADDING, MADE)


@torch.no_grad()
def test_arguments_without_names(llama, calls):
    """A decoder may be given them by their places."""
    ids, mask = make_ids(2, 9), (torch.arange(9) >= torch.tensor([[0], [3]])).long()
    expected = llama.model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.equal(llama.model(ids, mask).last_hidden_state, expected)
    assert calls == {"rope_attention": 4}
