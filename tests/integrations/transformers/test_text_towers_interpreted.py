"""Images in the kernels, by Triton's interpreter: positions of three kinds, packed ones, tokens that see both ways."""

import pytest
import torch

from tests.support.hf_models import make_ids
from tests.support.hf_runs import assert_same
from tests.support.hf_vision_models import make_inputs, make_vision_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_positions_of_images(interpreted_attention):
    model, inputs = make_vision_model("qwen2_vl", num_hidden_layers=1), make_inputs("qwen2_vl", padding=(3, 0))
    present = inputs["attention_mask"].bool()
    ids = inputs.pop("input_ids")
    assert_same(model, ids, present, unsupported="skip", use_cache=False, **inputs)


def test_images_that_see_both_ways(interpreted_attention):
    """The window of a layer is in its mask, not in the kernel's options."""
    model, inputs = make_vision_model("gemma3"), make_inputs("gemma3", padding=(3, 0))
    model.model.vision_tower.requires_grad_(False)
    present, ids = inputs["attention_mask"].bool(), inputs.pop("input_ids")
    assert_same(model, ids, present, grad=True, unsupported="skip", use_cache=False, **inputs)


def test_packed_positions_of_images(interpreted_attention):
    places = torch.cat([torch.arange(length) for length in (5, 1, 6)])[None]
    positions = torch.stack((places, places // 2, places % 3, places // 3))
    model = make_vision_model("qwen3_vl", num_hidden_layers=1)
    assert_same(model, make_ids(1, 12), unsupported="skip", position_ids=positions, use_cache=False)
