"""`patch_model(model, unsupported="skip")` on tiny multimodal models: decoders are served, vision towers left alone."""

import copy
import re

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import is_patched, obstacles, patch_model, patch_report, unpatch_model
from fused_rope_attn.integrations.transformers.families import RELEASE
from tests.support.hf_models import attentions_of, make_ids
from tests.support.hf_runs import STATIC, assert_close, assert_same, assert_same_generation, declared, run
from tests.support.hf_vision_models import MODELS, language_model, make_inputs, make_vision_model

pytestmark = pytest.mark.filterwarnings("error:patch_model. ")
every_model = pytest.mark.parametrize("name", MODELS)
LEFT, RIGHT = (3, 0), (0, -3)


@every_model
def test_images(name, calls):
    model = make_vision_model(name).train()
    decoder = language_model(model)
    within = next(path for path, module in model.named_modules() if module is decoder)
    way_out = rf"unsupported='skip'\) leaves these alone and patches the 2 supported modules of {within}$"
    with pytest.raises(NotImplementedError, match=way_out):
        patch_model(model)
    assert not is_patched(model)
    for path, parameter in model.named_parameters():
        # Keys that are not rotated may all be moved by the same vector: the gradient is rounding and no more.
        parameter.requires_grad_(not (path.endswith("k_proj.bias") and not path.startswith(within)))
    for padding in ((), LEFT, RIGHT):
        inputs = make_inputs(name, padding=padding)
        present = inputs["attention_mask"].bool()
        assert_same(model, inputs.pop("input_ids"), present, True, unsupported="skip", use_cache=False, **inputs)
    assert calls == {"rope_attention": 6} and is_patched(model)
    reached = {path for path, parameter in model.named_parameters() if parameter.grad is not None}
    assert all(path in reached for path, _ in model.named_parameters() if path.startswith(within))
    assert any(path.endswith("weight") and ".0." in path for path in reached if not path.startswith(within))
    report = patch_report(model)
    assert {row.path for row in report if row.patched} == {f"{within}.layers.{i}.self_attn" for i in range(2)}
    reasons = [row.reason for row in report if not row.path.startswith(within)]
    assert reasons and all(re.search("no rotary|not in the table|none of", reason) for reason in reasons)


@every_model
@pytest.mark.parametrize("cache", [{}, STATIC], ids=["dynamic", "static"])
def test_generation(name, cache, calls):
    assert_same_generation(make_vision_model(name), 6, "skip", **make_inputs(name, padding=LEFT) | cache)
    assert calls == {"rope_attention": 2, "rope_attention_with_kvcache": 2 * 5}


# Positions of three kinds: in time, height and width. Qwen's models take the text's own in front of them.
LENGTHS = (7, 1, 8)
TOTAL = sum(LENGTHS)
QWEN = pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
PLACES = torch.cat([torch.arange(length) for length in LENGTHS])[None]
# (3, 1, TOTAL), as images have them: no place within a sequence says what a token is rotated by.
ANGLES = torch.stack((PLACES // 2, PLACES % 3, PLACES // 3))
POSITIONS = torch.cat((PLACES[None], ANGLES))


@QWEN
def test_packed_positions_of_images(name, calls):
    """By the text's positions, and as lengths; each sequence is what it is alone. Three kinds without the text's own
    are not packed, and with a cache no sequences are searched for."""
    model, ids = make_vision_model(name), make_ids(1, TOTAL)
    alone = [
        run(model, part, position_ids=own, attention_mask=torch.ones_like(part))[0]
        for part, own in zip(ids.split(LENGTHS, 1), ANGLES.split(LENGTHS, 2))
    ]
    assert_same(model, ids, grad=True, unsupported="skip", position_ids=POSITIONS, use_cache=False)
    for given in ({"position_ids": POSITIONS}, {"position_ids": ANGLES} | declared(*LENGTHS)):
        assert_close(run(model, ids, use_cache=False, **given)[0], torch.cat(alone, 1), 1e-5)
    assert calls == {"rope_attention_varlen": 6}
    rows = torch.cat((POSITIONS, torch.arange(TOTAL).expand(4, 1, -1)), 1)  # a row of three sequences, one of one
    assert_same(model, make_ids(2, TOTAL), unsupported="skip", position_ids=rows, use_cache=False)
    calls.clear()
    assert_same(model, ids, unsupported="skip", position_ids=ANGLES, use_cache=False)
    assert_same(model, ids, unsupported="skip", position_ids=POSITIONS, use_cache=True)
    # Before 5.3 Qwen 3 reads the positions in time as the text's: an image's tokens are alone when unpatched, too.
    old = name.startswith("qwen3") and RELEASE < (5, 3)
    assert calls == ({"rope_attention_varlen": 2, "rope_attention": 2} if old else {"rope_attention": 4})


def test_a_decoder_that_is_patched_alone(calls):
    model, inputs = make_vision_model("llava"), make_inputs("llava")
    expected = model(**inputs).logits
    assert patch_model(language_model(model)) is language_model(model)
    assert_close(model(**inputs).logits, expected, 1e-5)
    assert calls == {"rope_attention": 2} and is_patched(model) and not is_patched(unpatch_model(model))


def test_modules_with_sections_of_their_own(calls):
    model, inputs = make_vision_model("qwen2_vl"), make_inputs("qwen2_vl")
    first = attentions_of(language_model(model))[0]
    # transformers 4.57 reads the module's own parameters, 5 its config's; from 5.17 on no module chooses.
    first.config = copy.copy(first.config)
    owner, name = (first, "rope_scaling") if hasattr(first, "rope_scaling") else (first.config, "rope_parameters")
    setattr(owner, name, getattr(owner, name) | {"mrope_section": [2, 3, 3]})
    assert_same(model, inputs.pop("input_ids"), unsupported="skip", **inputs)
    assert calls == {"rope_attention": 2}


# Gemma 3 makes the masks of its decoder itself, in which the tokens of an image see each other both ways.
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


def gemma(implementation="eager", **text):
    model = make_vision_model("gemma3", **text)
    model.model.vision_tower.requires_grad_(False)
    model.set_attn_implementation(implementation)
    return model


@IMPLEMENTATIONS
@pytest.mark.parametrize("content", ["image", "text", "text without types"])
def test_masks_of_the_model(implementation, content, calls):
    model = gemma(implementation).train(content != "text without types")  # before 5.17 training needs types
    for padding in ((), LEFT, RIGHT):
        inputs = make_inputs("gemma3", image=content == "image", padding=padding)
        mask, ids = inputs["attention_mask"].bool(), inputs.pop("input_ids")
        if content == "image":
            expected = run(unpatch_model(model), ids, **inputs)[0]
            causal = run(model, ids, **inputs | {"token_type_ids": torch.zeros_like(ids)})[0]
            assert (causal - expected)[mask].abs().max() > 0.1  # so that causal attention would be seen
        elif content == "text without types":
            del inputs["token_type_ids"]
        assert_same(model, ids, mask, grad=True, unsupported="skip", use_cache=False, **inputs)
    assert calls == {"rope_attention": 6}


def test_images_in_a_graph_take_the_own_forward(calls, monkeypatch):
    model, inputs = gemma(), make_inputs("gemma3")
    expected = model(**inputs).logits
    patch_model(model, unsupported="skip")
    monkeypatch.setattr(obstacles, "is_blind", lambda x: True)
    with pytest.warns(UserWarning, match="made outside of the patched model"):
        assert_close(model(**inputs).logits, expected, 1e-6)
    assert not calls


@IMPLEMENTATIONS
def test_modules_that_are_bidirectional_under_causal_masks(implementation):
    """The masks that the model makes do not heed ``use_bidirectional_attention``, but sdpa without a mask does."""
    model = gemma(implementation, use_bidirectional_attention=True)
    for padding in ((), LEFT):
        images, inputs = make_inputs("gemma3", padding=padding), make_inputs("gemma3", image=False, padding=padding)
        mask = images["attention_mask"].bool()
        assert_same(model, images.pop("input_ids"), mask, unsupported="skip", **images)  # an image's masks are read
        ids, padded = inputs["input_ids"], {"attention_mask": inputs["attention_mask"]}
        with pytest.warns(UserWarning, match="made outside of the decoder"):
            assert_same(model, ids, unsupported="skip", tolerance=0, **padded)
            for cache in ({}, STATIC):
                assert_same_generation(model, 4, "skip", input_ids=ids, **padded | cache)


def test_hooks_before_the_masks():
    """One in the model and one in its decoder; a subclass that makes its masks in another way is left alone."""
    model, own = gemma(), {"forward": lambda self, *args, **kwargs: super(type(self), self).forward(*args, **kwargs)}
    for cls, hooked in ((type(model.model), 2), (type("Other", (transformers.Gemma3Model,), own), 1)):
        model.model.__class__ = cls
        patch_model(patch_model(model, unsupported="skip"), unsupported="skip")
        assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooked
        unpatch_model(model)
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert not any("fused_rope" in name for module in model.modules() for name in vars(module))
