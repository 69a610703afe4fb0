"""Calls that the kernels do not serve take the module's own forward, with one warning."""

import warnings
from collections import Counter

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import attention, patch_model
from tests.support.hf_models import SIZES, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
FALLBACKS = {
    "output_attentions": {"output_attentions": True},
    "dropout": {},
    "not next to": {"attention_mask": (torch.arange(LENGTH**2).view(1, 1, LENGTH, -1) % 3 > 0).float().log()},
    "holes": {"attention_mask": (torch.arange(2 * LENGTH).view(2, LENGTH) % 7 != 3).long()},
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_what_the_kernels_do_not_serve(reason, calls):
    model = make_model("llama", **({"attention_dropout": 0.5} if reason == "dropout" else {}))
    model.train(reason == "dropout")
    ids, inputs = make_ids(2, LENGTH), FALLBACKS[reason] | {"use_cache": False}
    torch.manual_seed(5)
    expected = model(ids, **inputs)
    patch_model(model)
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match=reason):
        out = model(ids, **inputs)
    assert torch.equal(out.logits, expected.logits) and not calls
    if reason == "output_attentions":
        assert all(map(torch.equal, out.attentions, expected.attentions)) and len(out.attentions) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, **inputs)  # said once
        model.eval()(ids, use_cache=False)
    assert calls == {"rope_attention": 2}


def test_holes_that_appear_while_decoding(calls):
    """Rows padded on the right, and then continued: the second step's mask is no interval."""
    model, ids = make_model("llama"), make_ids(2, 12)
    mask = torch.ones((2, 12), dtype=torch.int64)
    mask[1, 8:11] = 0

    def steps():
        past = transformers.DynamicCache(config=model.config)
        model(ids[:, :11], attention_mask=mask[:, :11], past_key_values=past)
        return model(ids[:, 11:], attention_mask=mask, past_key_values=past).logits

    expected = steps()
    patch_model(model)
    with pytest.warns(UserWarning, match="holes"):
        assert_close(steps(), expected, 1e-5)


def test_a_layer_without_its_model(monkeypatch, calls):
    monkeypatch.setattr(attention, "_passes_of_layers", Counter())
    model = patch_model(make_model("llama"))
    model.config._attn_implementation = "sdpa"
    layer, x = model.model.layers[0], torch.randn(2, 10, SIZES["hidden_size"])
    tables = model.model.rotary_emb(x, torch.arange(10)[None])
    causal = torch.full((10, 10), float("-inf")).triu(1)[None, None]
    fused = layer(x, position_embeddings=tables)
    assert calls == {"rope_attention": 1}
    with pytest.warns(UserWarning, match="without its model"):
        masked = layer(x, position_embeddings=tables, attention_mask=causal)
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    assert_close(first(fused), first(masked), 1e-5)


def test_a_layer_without_a_mask(monkeypatch, calls):
    """Eager attention that is given no mask hides no key: a layer by itself is bidirectional there, patched or not."""
    monkeypatch.setattr(attention, "_passes_of_layers", Counter())
    model = make_model("llama")
    layer, x = model.model.layers[0], torch.randn(2, 10, SIZES["hidden_size"])
    tables = model.model.rotary_emb(x, torch.arange(10)[None])
    expected = layer(x, position_embeddings=tables)
    patch_model(model)
    with pytest.warns(UserWarning, match="hides no key from eager attention"):
        found = layer(x, position_embeddings=tables)
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    assert torch.equal(first(found), first(expected)) and not calls


def test_a_layer_with_a_window(monkeypatch, calls):
    """SDPA knows a window by its mask: a layer by itself, without one, attends to every key before the query."""
    monkeypatch.setattr(attention, "_passes_of_layers", Counter())
    model = make_model("mistral")
    model.config._attn_implementation = "sdpa"
    layer, x = model.model.layers[0], torch.randn(2, LENGTH, SIZES["hidden_size"])
    tables = model.model.rotary_emb(x, torch.arange(LENGTH)[None])
    expected = layer(x, position_embeddings=tables)
    patch_model(model)
    with pytest.warns(UserWarning, match="a layer with a window or chunks called without a mask"):
        found = layer(x, position_embeddings=tables)
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    assert torch.equal(first(found), first(expected)) and not calls
