"""The argument of a call that is its cache: by the name of the installed release, and by those of other releases."""

import inspect
from contextlib import nullcontext

import pytest
import torch
import transformers
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from fused_rope_attn.integrations.transformers import caches, patch_model, unpatch_model
from tests.support.hf_caches import make_cache
from tests.support.hf_models import make_ids, make_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*past_key_values:FutureWarning")

IS_RENAMED = "cache" in inspect.signature(transformers.LlamaModel.forward).parameters
OWN_NAME = "cache" if IS_RENAMED else "past_key_values"
OLD, NEW, PAGED = transformers.DynamicCache(), transformers.DynamicCache(), object.__new__(PagedAttentionCache)


@pytest.mark.parametrize(
    ("given", "before", "since"),
    [
        ({}, None, None),
        ({"past_key_values": OLD}, OLD, OLD),
        ({"layer_past": OLD}, OLD, OLD),
        ({"past_key_value": OLD, "past_key_values": None}, OLD, OLD),
        ({"cache": NEW}, None, NEW),
        ({"cache": NEW, "past_key_values": OLD}, OLD, NEW),
        ({"cache": None, "past_key_values": OLD}, OLD, None),
        ({"cache": PAGED}, PAGED, PAGED),
        ({"cache": PAGED, "past_key_values": None}, PAGED, PAGED),
        ({"layer_past": PAGED}, PAGED, PAGED),
    ],
)
@pytest.mark.parametrize("is_renamed", [False, True], ids=["before 5.24", "since 5.24"])
def test_the_cache_of_a_call(given, before, since, is_renamed, monkeypatch):
    monkeypatch.setattr(caches, "_IS_RENAMED", is_renamed)
    assert caches.cache_of(given) is (since if is_renamed else before)


def test_which_caches_are_paged():
    assert caches.is_paged(PAGED) and not any(map(caches.is_paged, (None, OLD, object())))
    assert caches._IS_RENAMED is IS_RENAMED and OWN_NAME in caches.CACHE_NAMES


def outputs(decoder, ids, *places, **names):
    """Hidden states of a prompt, of a step of one token and of a part that is longer than a step, and the cache."""
    past, states = make_cache(decoder, names.pop("kind")), []
    for start, end in ((0, 9), (9, 10), (10, 53)):
        given = {name: past if wanted else None for name, wanted in names.items()}
        with pytest.warns(FutureWarning) if IS_RENAMED and "past_key_values" in names else nullcontext():
            states.append(decoder(ids[:, start:end], *places, use_cache=True, **given).last_hidden_state)
    return torch.cat(states, 1), past


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("names", "used"),
    [
        ({OWN_NAME: True}, True),
        ({"past_key_values": True}, True),
        ({"cache": True}, IS_RENAMED),
        ({"cache": False, "past_key_values": True}, not IS_RENAMED),
    ],
    ids=["own", "old", "new", "old beside new"],
)
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mistral"])
@torch.no_grad()
def test_names_mean_what_they_mean_unpatched(name, names, used, kind, calls):
    """5.24 still takes the old name, but not next to the new one, which older releases ignore."""
    decoder, ids = make_model(name).base_model, make_ids(2, 53)
    expected, plain = outputs(decoder, ids, kind=kind, **names)
    got, past = outputs(patch_model(decoder), ids, kind=kind, **names)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert int(past.get_seq_length()) == int(plain.get_seq_length()) == (53 if used else 0)
    assert ("rope_attention_with_kvcache" in calls) is used
    assert torch.equal(outputs(unpatch_model(decoder), ids, kind=kind, **names)[0], expected)


@torch.no_grad()
def test_generation_onto_a_cache_of_the_callers():
    """`generate` continues from it by either name."""
    model, ids = make_model("llama"), make_ids(2, 14)
    greedy = {"max_new_tokens": 6, "do_sample": False}
    tokens = []
    for patched in (unpatch_model, patch_model):
        for name in {OWN_NAME, "past_key_values"}:
            past = make_cache(patched(model), "dynamic")
            model(ids[:, :9], **{name: past})
            tokens.append(model.generate(ids, **{name: past}, **greedy))
            assert past.get_seq_length() == 14 + 5
    assert all(torch.equal(some, tokens[0]) for some in tokens)
