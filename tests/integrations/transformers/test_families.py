"""`patch_model` on a tiny model of every supported class, float32 on the CPU: the unpatched model is the reference."""

import copy
import itertools
import warnings
from typing import NamedTuple

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import families, patch_model, patch_report, unpatch_model
from fused_rope_attn.integrations.transformers.families import RELEASE
from tests.support.hf_models import MODELS, THOROUGH, attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same, left_padded
from tests.support.hf_syntax import exists
from tests.support.hf_vision_models import MODELS as VISION_MODELS, language_model, make_vision_model

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


@pytest.mark.parametrize("name", MODELS)
def test_family(name, calls):
    """Logits and all gradients with padding on either side, logits against SDPA's, greedy tokens of both caches."""
    model = make_model(name)
    modules = attentions_of(model)
    latent = families.convention_of(modules[0]).latent != ""
    assert {families.name_of(type(module)).split(".")[0] for module in modules} == {name.split("-")[0]}
    ids, mask = make_ids(3, LENGTH), left_padded(LENGTH, 0, 7, 5)
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
        assert_same_generation(model, make_ids(2, 13), left_padded(13, 0, 5), 4, **options)
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
    assert_same_generation(model, make_ids(3, 13), left_padded(13, 0, 5, 10), 14, **options)
    assert_same_generation(model, make_ids(1, 4), left_padded(4, 0), 14, **options)
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
    # From transformers 5 on such a static cache stops counting on the device when a chunk is full.
    "chunks alone": (
        *("llama4", {"layer_types": ["chunked_attention"] * 2}, patch_model, "eager", STATIC),
        *(
            (PROMPT, "a static cache that does not count the tokens after a chunk")
            if RELEASE >= (5,)
            else (PROMPT | STEPS, "")
        ),
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
    assert_same_generation(model, make_ids(2, 12), left_padded(12, 0, 3), 4, **cache)
    own = {text for row in patch_report(model) for text in row.own}
    assert calls == expected and all(reason in text for text in own) and len(own) == bool(reason)


def test_every_supported_class_is_tested():
    """A row of MODELS begins with its class's folder, and `test_family` sees to it that it has no other class. Those of
    multimodal models are tested as text towers."""
    folders = [name.split(".")[0] for name in families.SUPPORTED if exists(name)]
    towers = set()
    for name in VISION_MODELS:
        modules = attentions_of(language_model(make_vision_model(name)))
        towers |= {families.name_of(type(module)).split(".")[0] for module in modules}
    assert sorted(folders) == sorted(towers | {name.split("-")[0] for name in MODELS})


# (rows, N) position ids that restart, jump, begin late or stay 0.
POSITIONS = {
    "restart": torch.cat((torch.arange(9), torch.arange(12)))[None],
    "gap": torch.cat((torch.arange(9), torch.arange(14, 26)))[None],
    "from 3": torch.arange(3, 24)[None],
    "one token each": torch.zeros(1, 21, dtype=torch.int64),
    "two rows": torch.stack((torch.arange(21), torch.cat((torch.arange(4), torch.arange(17))))),
}


class Setting(NamedTuple):
    """use_cache: None leaves it to the model. mask: a padding mask of ones is given."""

    implementation: str
    positions: str
    use_cache: bool | None = None
    training: bool = False
    mask: bool = False


SETTINGS = itertools.product(("eager", "sdpa"), POSITIONS, (None, True, False), (False, True), (False, True))
# A quick choice: all positions with a cache and without one, and all else in turn.
CHOSEN = [Setting("sdpa", "restart", True, mask=True), Setting("eager", "restart", training=True)]
CHOSEN += [Setting("eager", positions) for positions in POSITIONS]
CHOSEN += [Setting("sdpa", positions, False) for positions in POSITIONS]
CHOSEN += [Setting("eager", "restart", False, training=True)]
# Those that run their modules' own attention, and why.
OWN_ATTENTION = {
    "vision paligemma": "is_causal = False of the attention modules, which SDPA reads only without a mask,",
}
if RELEASE < (5,):  # their chunks begin anew with each document from transformers 5 on
    names = "llama4", "llama4-plain", "vision llama4"
    OWN_ATTENTION |= dict.fromkeys(names, "packed sequences in chunks that are counted through all of them")


def outcome(model, setting):
    """Return logits, and in training the gradient of the embedding, or the error that the model raised."""
    positions = POSITIONS[setting.positions]
    # Token ids below 82, because the multimodal models use larger ones for images and videos.
    inputs = {"input_ids": make_ids(*positions.shape) % 80 + 2, "position_ids": positions}
    inputs |= {"attention_mask": torch.ones_like(positions)} if setting.mask else {}
    inputs |= {} if setting.use_cache is None else {"use_cache": setting.use_cache}
    torch.manual_seed(5)  # of dropout, also of that after attention
    try:
        if model.config._attn_implementation != setting.implementation:
            model.set_attn_implementation(setting.implementation)
        with torch.set_grad_enabled(setting.training):
            logits = model.train(setting.training)(**inputs).logits
        if not setting.training:
            return [logits]
        weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
        return [logits.detach(), *torch.autograd.grad((logits * weight).sum(), model.get_input_embeddings().weight)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(CHOSEN, id="chosen"),
        pytest.param([Setting(*x) for x in SETTINGS], id="every setting", marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize("name", [*MODELS, *(f"vision {name}" for name in VISION_MODELS)])
def test_documents(name, settings):
    """A model decides by its positions, its mask and its cache which tokens are documents of their own."""
    _, is_vision, vision = name.rpartition("vision ")
    model = make_vision_model(vision) if is_vision else make_model(name)
    patched = patch_model(copy.deepcopy(model), unsupported="skip" if is_vision else "raise")
    capped = any(families.convention_of(module).softcap for module in attentions_of(model))
    for setting in settings:
        # Releases before 5.23 run SDPA without the softcap that the config asks for.
        if setting.implementation == "sdpa" and capped and RELEASE < (5, 23):
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got, expected = outcome(patched, setting), outcome(model, setting)
        for warning in caught:
            reason = OWN_ATTENTION.get(name, "no fallback is expected")
            assert "patch_model" not in str(warning.message) or reason in str(warning.message), setting
        if setting.implementation == "sdpa" and not model._supports_sdpa:
            assert isinstance(got, str) and got == expected, setting
            continue
        for x, y in zip(got, expected, strict=True):
            assert not isinstance(x, str) and not isinstance(y, str), (setting, got, expected)
            # A square root of less than this is rounding: nothing else is left of a gradient of 0.
            error = ((x - y).abs().max() / y.square().mean().sqrt().clamp(min=1e-6)).item()
            assert error <= 2e-4, (setting, error)
