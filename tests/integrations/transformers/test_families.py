"""`patch_model` on a tiny model of every supported class, float32 on the CPU: the unpatched model is the reference."""

import warnings
from collections import Counter

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import families, patch_model, patch_report, unpatch_model
from fused_rope_attn.integrations.transformers.families import RELEASE
from tests.support import hf_sweep, hf_vision_models
from tests.support.hf_models import MODELS, THOROUGH, attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same
from tests.support.hf_syntax import exists

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
STATIC = {"cache_implementation": "static"}


def generate(model, ids, mask, new, **options):
    options |= {"max_new_tokens": new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    model.__dict__.pop("_cache", None)  # transformers 4.57 keeps it for the next call, full of tokens
    out = model.generate(ids, attention_mask=mask, **options)
    return out.sequences, torch.stack(out.logits)


def assert_same_generation(model, ids, mask, new, **options):
    tokens, logits = generate(unpatch_model(model), ids, mask, new, **options)
    patched_tokens, patched_logits = generate(patch_model(model), ids, mask, new, **options)
    assert torch.equal(tokens, patched_tokens)
    assert_close(patched_logits, logits, 1e-5)


def padded(rows, length, *starts):
    return (torch.arange(length) >= torch.tensor([[start] for start in (*[0] * (rows - len(starts)), *starts)])).long()


@pytest.mark.parametrize("name", MODELS)
def test_family(name, calls):
    """Logits and all gradients with padding on either side, logits against SDPA's, greedy tokens of both caches."""
    model = make_model(name)
    modules = attentions_of(model)
    latent = families.convention_of(modules[0]).latent != ""
    assert {families.name_of(type(module)).split(".")[0] for module in modules} == {name.split("-")[0]}
    ids, mask = make_ids(3, LENGTH), padded(3, LENGTH, 7, 5)
    mask[2, -4:] = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="patch_model")
        assert_same(model, ids, mask.bool(), grad=True, attention_mask=mask, use_cache=False)
        passes = 1
        # SDPA has no softcap, which transformers before 5.23 did not mind.
        if model._supports_sdpa and not any(families.convention_of(module).softcap for module in modules):
            unpatch_model(model).set_attn_implementation("sdpa")
            assert_same(model, ids, use_cache=False)
            unpatch_model(model).set_attn_implementation("eager")
            passes += 1
    assert calls == {"rope_attention_mla" if latent else "rope_attention": passes * len(modules)}
    calls.clear()
    for options in ({}, STATIC):
        assert_same_generation(model, make_ids(2, 13), padded(2, 13, 5), 4, **options)
    # In the steps of latent attention the module's own forward runs, over a cache in its own format.
    if latent:
        assert calls == {"rope_attention_mla": 2 * len(modules)}
    # Onto a cache of a model's own type its own attention runs: MiniMax's, and those of hybrid models before 5. That
    # cache is made after the prompt's description, so that the prompt itself is served where the model makes it.
    elif name == "minimax":
        assert calls == {"rope_attention": 2 * len(modules)}
    elif families.hands_padding_on(model) and RELEASE < (5,):
        assert "rope_attention_with_kvcache" not in calls
    else:
        assert sum(calls.values()) == 2 * 4 * len(modules)


@pytest.mark.parametrize("how", ["dynamic", "static", "beams"])
@pytest.mark.parametrize("name", THOROUGH)
def test_long_generation(name, how, calls):
    """Prompts longer and shorter than the window, which the tokens that follow outgrow."""
    model, options = make_model(name), {"dynamic": {}, "static": STATIC, "beams": {"num_beams": 3}}[how]
    assert_same_generation(model, make_ids(3, 13), padded(3, 13, 5, 10), 14, **options)
    assert_same_generation(model, make_ids(1, 4), padded(1, 4), 14, **options)
    assert calls == {"rope_attention": 2 * 2, "rope_attention_with_kvcache": 2 * 2 * 13}


def alone(model):
    for module in attentions_of(model):
        module.is_causal = False


STEPS, PROMPT = {"rope_attention_with_kvcache": 6}, {"rope_attention": 2}
SWITCH = {"use_bidirectional_attention": True}
# Models that are changed: what runs, and the reason why the rest runs their modules' own attention, or "".
CHANGED = {
    "bidirectional modules, eager": ("mistral", {}, alone, "eager", {}, PROMPT | STEPS, ""),
    "bidirectional modules, sdpa": ("mistral", {}, alone, "sdpa", {}, STEPS, "is_causal = False of the attention modu"),
    # Such a static cache stops counting on the device when a chunk is full.
    "chunks alone": (
        *("llama4", {"layer_types": ["chunked_attention"] * 2}, patch_model, "eager", STATIC, PROMPT),
        "a static cache that does not count the tokens after a chunk",
    ),
    # Masks of static caches are causal, whatever the modules say: only eager attention reads them at all times.
    "switch": ("gemma3", SWITCH, patch_model, "eager", STATIC, {}, "masks that are made outside of the decoder"),
}


@pytest.mark.parametrize("what", CHANGED)
@pytest.mark.filterwarnings("ignore:patch_model")
def test_generation_of_changed_models(what, calls):
    name, options, change, implementation, cache, expected, reason = CHANGED[what]
    if options is SWITCH and not hasattr(transformers.Gemma3TextConfig(), *SWITCH):
        pytest.skip("this Gemma 3 has no such switch")
    model = make_model(name, **options)
    model.config._attn_implementation = implementation
    change(model)
    assert_same_generation(model, make_ids(2, 12), padded(2, 12, 3), 4, **cache)
    own = {text for row in patch_report(model) for text in row.own}
    assert calls == expected and all(reason in text for text in own) and len(own) == bool(reason)


@pytest.mark.parametrize("name", [name for name in ("seed_oss", "starcoder2") if name in MODELS])
def test_dropout_behind_attention(name, calls):
    model, ids, logits = make_model(name).train(), make_ids(2, LENGTH), []
    for change in (unpatch_model, patch_model):
        torch.manual_seed(5)
        logits.append(change(model)(ids, use_cache=False).logits)
    assert_close(*logits, 1e-5)
    assert calls == {"rope_attention": 2}
    with pytest.raises(AssertionError):
        assert_close(model.eval()(ids, use_cache=False).logits, logits[0], 1e-2)  # there is something to drop


def test_every_supported_class_is_tested():
    """A row of MODELS begins with its class's folder, and `test_family` sees to it that it has no other class. Those of
    multimodal models are tested as text towers."""
    folders = [name.split(".")[0] for name in families.SUPPORTED if exists(name)]
    towers = set()
    for name in hf_vision_models.MODELS:
        decoder = hf_vision_models.language_model(hf_vision_models.make_vision_model(name))
        towers |= {families.name_of(type(module)).split(".")[0] for module in attentions_of(decoder)}
    assert sorted(folders) == sorted(towers | {name.split("-")[0] for name in MODELS})


# Position ids that restart, jump, begin late or stay 0. Those that run their modules' own attention there, and why.
OWN_ATTENTION = {
    "vision paligemma": "is_causal = False of the attention modules, which SDPA reads only without a mask,",
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(hf_sweep.CHOSEN, id="chosen"),
        pytest.param(hf_sweep.SETTINGS, id="every setting", marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize("name", hf_sweep.CLASSES)
def test_documents(name, settings):
    """A model decides by its positions, its mask and its cache which tokens are documents of their own."""
    pair = hf_sweep.make_pair(name)
    # Releases before 5.23 run SDPA without the softcap that the config asks for.
    if any(families.convention_of(module).softcap for module in attentions_of(pair[0])) and RELEASE < (5, 23):
        settings = [setting for setting in settings if setting.implementation == "eager"]
    outcomes = hf_sweep.compare(pair, settings)
    for setting, outcome in outcomes.items():
        refused = setting.implementation == "sdpa" and not pair[0]._supports_sdpa
        assert outcome.verdict == ("refused" if refused else "same"), setting
        assert not outcome.told or OWN_ATTENTION.get(name, "no fallback is expected") in outcome.told
    print(f"{name}: {dict(Counter(outcome.verdict for outcome in outcomes.values()))}")
