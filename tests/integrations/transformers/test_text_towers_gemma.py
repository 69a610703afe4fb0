"""Gemma 3 makes the masks of its decoder itself, in which the tokens of an image see each other both ways."""

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import obstacles, patch_model, patch_report, unpatch_model
from tests.support.hf_models import make_ids
from tests.support.hf_runs import assert_close, assert_same, run
from tests.support.hf_vision_models import make_inputs, make_vision_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
PADDINGS = (), (3, 0), (0, -3)
implementations = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


def make(implementation="eager", **text):
    model = make_vision_model("gemma3", **text)
    model.model.vision_tower.requires_grad_(False)
    model.set_attn_implementation(implementation)
    return model


def served(model):
    """Return whether all calls of the first patched module were served."""
    row = next(row for row in patch_report(model) if row.patched)
    return row.served > 0 and not row.own


@implementations
def test_images_are_served(implementation):
    model = make(implementation)
    for padding in PADDINGS:
        inputs = make_inputs("gemma3", padding=padding)
        mask, ids = inputs["attention_mask"].bool(), inputs.pop("input_ids")
        expected = run(unpatch_model(model), ids, **inputs)[0]
        causal = run(model, ids, **inputs | {"token_type_ids": torch.zeros_like(ids)})[0]
        assert (causal - expected)[mask].abs().max() > 0.1  # so that causal attention would be seen
        assert_same(model, ids, mask, grad=True, unsupported="skip", use_cache=False, **inputs)
        assert served(model)


def test_images_in_a_graph_take_the_own_forward(calls, monkeypatch):
    model, inputs = make(), make_inputs("gemma3")
    expected = model(**inputs).logits
    patch_model(model, unsupported="skip")
    monkeypatch.setattr(obstacles, "is_blind", lambda x: True)
    with pytest.warns(UserWarning, match="made outside of the patched model"):
        assert_close(model(**inputs).logits, expected, 1e-6)
    assert not calls


@implementations
@pytest.mark.parametrize("types", ["zeros", "none"])
def test_text_is_served(implementation, types, calls):
    model = make(implementation).train(types == "zeros")  # before 5.17 training needs them
    for padding in PADDINGS:
        inputs = make_inputs("gemma3", image=False, padding=padding)
        if types == "none":
            del inputs["token_type_ids"]
        mask, ids = inputs["attention_mask"].bool(), inputs.pop("input_ids")
        assert_same(model, ids, mask, grad=True, unsupported="skip", use_cache=False, **inputs)
    assert calls == {"rope_attention": 6}


@pytest.mark.parametrize("image", [True, False])
@implementations
def test_steps_after_a_prompt_are_served(image, implementation):
    model, inputs = make(implementation), make_inputs("gemma3", image=image, padding=(3, 0))
    more = make_ids(2, 4, seed=5)

    def logits():
        past = transformers.DynamicCache(config=model.config.get_text_config())
        outs = [model(**inputs, past_key_values=past, use_cache=True).logits[:, -1:]]
        mask = inputs["attention_mask"]
        for part in (more[:, :1], more[:, 1:]):  # a token, and several
            mask = torch.cat((mask, torch.ones_like(part)), 1)
            outs.append(model(part, attention_mask=mask, past_key_values=past, use_cache=True).logits)
        return torch.cat(outs, 1)

    expected = logits()
    patch_model(model, unsupported="skip")
    assert_close(logits(), expected, 1e-5)
    assert served(model)


@implementations
def test_modules_that_are_bidirectional_under_causal_masks(implementation):
    """The masks that the model makes do not heed ``use_bidirectional_attention``, but sdpa without a mask does."""
    model = make(implementation, use_bidirectional_attention=True)
    told = pytest.warns(UserWarning, match="made outside of the decoder")
    for padding in PADDINGS[:2]:
        images, inputs = make_inputs("gemma3", padding=padding), make_inputs("gemma3", image=False, padding=padding)
        del inputs["token_type_ids"]
        expected = unpatch_model(model)(**inputs).logits
        with told:
            assert torch.equal(patch_model(model, unsupported="skip")(**inputs).logits, expected)
        mask = images["attention_mask"].bool()
        assert_same(model, images.pop("input_ids"), mask, unsupported="skip", **images)  # an image's masks are read
        for cache in (None, "static"):
            options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
            tokens = unpatch_model(model).generate(**inputs, **options)
            model.__dict__.pop("_cache", None)
            with told:
                assert torch.equal(patch_model(model, unsupported="skip").generate(**inputs, **options), tokens)
            model.__dict__.pop("_cache", None)


def test_attention_weights_that_only_the_config_asks_for():
    model, inputs = make(), make_inputs("gemma3", image=False)
    model.config.output_attentions = True
    expected = model(**inputs)
    with pytest.warns(UserWarning, match="output_attentions=True"):
        out = patch_model(model, unsupported="skip")(**inputs)
    assert torch.equal(out.logits, expected.logits) and len(out.attentions or ()) == len(expected.attentions or ())


def test_unpatching_leaves_no_trace():
    model = make()
    own = {path: set(module.__dict__) for path, module in model.named_modules()}
    patch_model(patch_model(model, unsupported="skip"), unsupported="skip")
    hooked = {path: len(m._forward_pre_hooks) for path, m in model.named_modules() if m._forward_pre_hooks}
    assert hooked == {"model": 1, "model.language_model": 1}
    unpatch_model(model)
    for path, module in model.named_modules():
        assert set(module.__dict__) == own[path], path
        assert not module._forward_pre_hooks and not module._forward_pre_hooks_with_kwargs

    # A subclass that makes its masks in another way is left alone.
    class Other(type(model.model)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model.model.__class__ = Other
    patch_model(model, unsupported="skip")
    assert not model.model._forward_pre_hooks
