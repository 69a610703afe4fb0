"""`patch_model` on a tiny model of every supported class, float32 on the CPU: the unpatched model is the reference."""

import warnings

import pytest
import transformers

from fused_rope_attn.integrations.transformers import families, patch_report
from fused_rope_attn.integrations.transformers.families import RELEASE
from tests.support.hf_models import MODELS, attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, STATIC, assert_same, assert_same_generation, left_padded
from tests.support.hf_syntax import exists
from tests.support.hf_vision_models import MODELS as VISION_MODELS, language_model, make_vision_model


def prompts(length, *starts):
    return {"input_ids": make_ids(len(starts), length), "attention_mask": left_padded(length, *starts)}


@pytest.mark.parametrize("name", MODELS)
def test_family(name, calls):
    model = make_model(name)
    modules = attentions_of(model)
    latent = families.convention_of(modules[0]).latent != ""
    assert {families.name_of(type(module)).split(".")[0] for module in modules} == {name.split("-")[0]}
    ids, mask = make_ids(3, LENGTH), left_padded(LENGTH, 0, 7, 5)
    mask[2, -4:] = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="patch_model")
        assert_same(model, ids, mask.bool(), grad=True, attention_mask=mask, use_cache=False)
    assert calls == {"rope_attention_mla" if latent else "rope_attention": len(modules)}
    calls.clear()
    # Prompts longer and shorter than the window, which the tokens that follow outgrow.
    beams = {} if families.hands_padding_on(model) else {"num_beams": 3}
    for inputs in (prompts(13, 0, 5), prompts(13, 0, 5) | STATIC, prompts(4, 0) | beams, prompts(4, 0) | STATIC):
        assert_same_generation(model, 6, **inputs)
    # In the steps of latent attention the module's own forward runs, over a cache in its own format.
    if latent:
        assert calls == {"rope_attention_mla": 4 * len(modules)}
    # Onto a cache of a model's own type its own attention runs: MiniMax's, and those of hybrid models before 5. That
    # cache is made after the prompt's description, so that the prompt itself is served where the model makes it.
    elif name == "minimax":
        assert calls == {"rope_attention": 4 * len(modules)}
    elif families.hands_padding_on(model) and RELEASE < (5,):
        assert "rope_attention_with_kvcache" not in calls
    else:
        assert sum(calls.values()) == 4 * 6 * len(modules)


STEPS, PROMPT = {"rope_attention_with_kvcache": 6}, {"rope_attention": 2}
SWITCH, CHUNKS = {"use_bidirectional_attention": True}, {"layer_types": ["chunked_attention"] * 2}
# From transformers 5 on such a static cache stops counting on the device when a chunk is full.
NOT_COUNTED = "a static cache that does not count the tokens after a chunk" if RELEASE >= (5,) else ""


@pytest.mark.parametrize(
    ("name", "options", "implementation", "cache", "expected", "reason"),
    [
        ("mistral", {}, "eager", {}, PROMPT | STEPS, ""),
        ("mistral", {}, "sdpa", {}, STEPS, "is_causal = False of the attention modu"),
        ("llama4", CHUNKS, "eager", STATIC, PROMPT if NOT_COUNTED else PROMPT | STEPS, NOT_COUNTED),
        # Masks of static caches are causal, whatever the modules say: only eager attention reads them at all times.
        ("gemma3", SWITCH, "eager", STATIC, {}, "masks that are made outside of the decoder"),
    ],
    ids=["bidirectional modules, eager", "bidirectional modules, sdpa", "chunks alone", "switch"],
)
@pytest.mark.filterwarnings("ignore:patch_model")
def test_generation_of_changed_models(name, options, implementation, cache, expected, reason, calls):
    if options is SWITCH and not hasattr(transformers.Gemma3TextConfig(), *SWITCH):
        pytest.skip("this Gemma 3 has no such switch")
    model = make_model(name, **options)
    model.config._attn_implementation = implementation
    for module in attentions_of(model):
        module.is_causal = module.is_causal and name != "mistral"
    assert_same_generation(model, 4, **prompts(12, 0, 3), **cache)
    own = {text for row in patch_report(model) for text in row.own}
    assert calls == expected and all(reason in text for text in own) and len(own) == bool(reason)


def test_every_supported_class_is_tested():
    folders = [name.split(".")[0] for name in families.SUPPORTED if exists(name)]
    towers = set()
    for name in VISION_MODELS:
        modules = attentions_of(language_model(make_vision_model(name)))
        towers |= {families.name_of(type(module)).split(".")[0] for module in modules}
    assert sorted(folders) == sorted(towers | {name.split("-")[0] for name in MODELS})
