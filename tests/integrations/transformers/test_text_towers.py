"""`patch_model(model, unsupported="skip")` on tiny multimodal models: decoders are served, vision towers left alone."""

import re
from collections import Counter

import pytest
import torch

from fused_rope_attn.integrations.transformers import is_patched, patch_model, patch_report, unpatch_model
from tests.support.hf_runs import assert_close, assert_same
from tests.support.hf_vision_models import MODELS, language_model, make_inputs, make_vision_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("error:patch_model. "),
]
every_model = pytest.mark.parametrize("name", MODELS)
LEFT, RIGHT = (3, 0), (0, -3)


@every_model
def test_training(name, calls):
    model, inputs = make_vision_model(name).train(), make_inputs(name)
    decoder = language_model(model)
    within = next(path for path, module in model.named_modules() if module is decoder)
    for path, parameter in model.named_parameters():
        # Keys that are not rotated may all be moved by the same vector: the gradient is rounding and no more.
        parameter.requires_grad_(not (path.endswith("k_proj.bias") and not path.startswith(within)))
    assert_same(model, inputs.pop("input_ids"), grad=True, unsupported="skip", use_cache=False, **inputs)
    assert calls == {"rope_attention": 2}
    reached = {path for path, parameter in model.named_parameters() if parameter.grad is not None}
    assert all(path in reached for path, _ in model.named_parameters() if path.startswith(within))
    assert any(path.endswith("weight") and ".0." in path for path in reached if not path.startswith(within))
    report = patch_report(model)
    assert {row.path for row in report if row.patched} == {f"{within}.layers.{i}.self_attn" for i in range(2)}
    towers = [row for row in report if not row.path.startswith(within)]
    assert towers and all(
        not row.patched and re.search("no rotary|not in the table|none of", row.reason) for row in towers
    )


@every_model
@pytest.mark.parametrize("image", [True, False], ids=["image", "text"])
def test_padding(name, image, calls):
    model = make_vision_model(name)
    for padding in (LEFT, RIGHT):
        inputs = make_inputs(name, image=image, padding=padding)
        present = inputs["attention_mask"].bool()
        assert_same(model, inputs.pop("input_ids"), present, unsupported="skip", **inputs)
    assert calls == {"rope_attention": 4}


@every_model
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(name, cache, calls):
    model, inputs = make_vision_model(name), make_inputs(name, padding=LEFT)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    options |= {} if cache == "dynamic" else {"cache_implementation": "static"}
    expected = model.generate(**inputs, **options)
    model.__dict__.pop("_cache", None)  # transformers 4.57 keeps a static cache for the next call
    got = patch_model(model, unsupported="skip").generate(**inputs, **options)
    assert torch.equal(got.sequences, expected.sequences)
    assert_close(torch.stack(got.scores), torch.stack(expected.scores), 1e-5, "scores")
    assert Counter(calls) == Counter({"rope_attention": 2, "rope_attention_with_kvcache": 2 * 5})


@every_model
def test_a_tower_is_refused_with_the_way_out(name):
    model = make_vision_model(name)
    decoder = language_model(model)
    path = next(path for path, module in model.named_modules() if module is decoder)
    way_out = rf"unsupported='skip'\) leaves these alone and patches the 2 supported modules of {path}$"
    with pytest.raises(NotImplementedError, match=way_out):
        patch_model(model)
    assert not is_patched(model)
    # The decoder alone can be patched as it is, and serves the whole model where that hands its masks on.
    inputs = make_inputs(name)
    expected = model(**inputs).logits
    assert patch_model(decoder) is decoder
    assert_close(model(**inputs).logits, expected, 1e-5)
    assert is_patched(model) and not is_patched(unpatch_model(model))
