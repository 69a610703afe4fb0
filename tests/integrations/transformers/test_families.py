"""`patch_model` on a tiny model of every supported class, float32 on the CPU: the unpatched model is the reference."""

import warnings

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import families, patch_model, unpatch_model
from tests.support import hf_vision_models
from tests.support.hf_models import MODELS, attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same
from tests.support.hf_syntax import exists

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def generate(model, ids, mask, **options):
    options |= {"max_new_tokens": 4, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    out = model.generate(ids, attention_mask=mask, **options)
    return out.sequences, torch.stack(out.scores)


@pytest.mark.parametrize("name", MODELS)
def test_family(name, calls):
    """Logits and all gradients with padding on either side, logits against SDPA's, greedy tokens of both caches."""
    model = make_model(name)
    modules = attentions_of(model)
    latent = families.convention_of(modules[0]).latent != ""
    assert {families.name_of(type(module)).split(".")[0] for module in modules} == {name.split("-")[0]}
    ids, mask = make_ids(3, LENGTH), torch.ones((3, LENGTH), dtype=torch.int64)
    mask[1, :7], mask[2, :5], mask[2, -4:] = 0, 0, 0
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
    ids, mask = make_ids(2, 13), torch.ones((2, 13), dtype=torch.int64)
    mask[1, :5] = 0
    for options in ({}, {"cache_implementation": "static"}):
        tokens, scores = generate(unpatch_model(model), ids, mask, **options)
        if latent:
            model.__dict__.pop("_cache", None)  # transformers 4.57 keeps it for the next call, full of tokens
        patched_tokens, patched_scores = generate(patch_model(model), ids, mask, **options)
        assert torch.equal(tokens, patched_tokens)
        assert_close(patched_scores, scores, 1e-5, "scores")
    # In the steps of latent attention the module's own forward runs, over a cache in its own format.
    if latent:
        assert calls == {"rope_attention_mla": 2 * len(modules)}
        return
    # Onto a cache of a model's own type its own attention runs: MiniMax's, and those of hybrid models before 5. That
    # cache is made after the prompt's description, so that the prompt itself is served where the model makes it.
    if name == "minimax":
        assert calls == {"rope_attention": 2 * len(modules)}
    elif families.hands_padding_on(model) and transformers.__version__.startswith("4."):
        assert "rope_attention_with_kvcache" not in calls
    else:
        assert sum(calls.values()) == 2 * 4 * len(modules)


@pytest.mark.parametrize("name", [name for name in ("seed_oss", "starcoder2") if name in MODELS])
def test_dropout_behind_attention(name, calls):
    model, ids = make_model(name).train(), make_ids(2, LENGTH)
    torch.manual_seed(5)
    expected = model(ids, use_cache=False).logits
    torch.manual_seed(5)
    assert_close(patch_model(model)(ids, use_cache=False).logits, expected, 1e-5)
    assert calls == {"rope_attention": 2}
    with pytest.raises(AssertionError):
        assert_close(model.eval()(ids, use_cache=False).logits, expected, 1e-2)  # there is something to drop


def test_every_supported_class_is_tested():
    """A row of MODELS begins with its class's folder, and `test_family` sees to it that it has no other class. Those of
    multimodal models are tested as text towers."""
    folders = [name.split(".")[0] for name in families.SUPPORTED if exists(name)]
    towers = set()
    for name in hf_vision_models.MODELS:
        decoder = hf_vision_models.language_model(hf_vision_models.make_vision_model(name))
        towers |= {families.name_of(type(module)).split(".")[0] for module in attentions_of(decoder)}
    assert sorted(folders) == sorted(towers | {name.split("-")[0] for name in MODELS})
