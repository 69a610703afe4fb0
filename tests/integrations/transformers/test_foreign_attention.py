"""Attention functions that are not transformers' own are never passed over."""

import functools

import pytest
import torch
import transformers
from transformers import masking_utils
from transformers.integrations import flash_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fused_rope_attn.integrations.transformers import patch_model, patch_report
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, run

FUNCTIONS = transformers.AttentionInterface._global_mapping
MASKS = transformers.AttentionMaskInterface._global_mapping


@pytest.fixture
def registered(monkeypatch):
    """Registers an attention function, and a mask function, until the test ends."""

    def register(name, function, mask=masking_utils.sdpa_mask):
        monkeypatch.setitem(FUNCTIONS, name, function)
        monkeypatch.setitem(MASKS, name, mask)

    return register


def halved(module, query, key, value, attention_mask, **kwargs):
    """An attention of a user's own: another result than any other."""
    o, weights = sdpa_attention_forward(module, query, key, value / 2, attention_mask, **kwargs)
    return o, weights


class Wrapper:
    """Sequence parallelism replaces a known function with such an object with a call."""

    def __init__(self, inner):
        self.inner, self.calls = inner, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("function", [halved, functools.partial(halved)])
def test_a_function_of_the_user(function, registered, calls):
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    registered("mine", function)
    model.config._attn_implementation = "mine"
    expected = run(model, ids)[0]
    patch_model(model)
    with pytest.warns(UserWarning, match=r"test_foreign_attention.halved, registered as 'mine', is not served") as said:
        assert torch.equal(run(model, ids)[0], expected)
        run(model, ids)
    assert len(said) == 1 and not calls
    assert [sum(row.own.values()) for row in patch_report(model)] == [2, 2]
    model.config._attn_implementation = "sdpa"
    assert not torch.allclose(run(model, ids)[0], expected, atol=0.01) and calls == {"rope_attention": 2}


def test_a_known_name_that_somebody_wraps(registered, calls):
    """Ulysses does this: the name in the config stays, and the function of that name is another."""
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    model.config._attn_implementation = "sdpa"
    patch_model(model)
    expected = run(model, ids)[0]
    assert calls == {"rope_attention": 2}
    wrapper = Wrapper(FUNCTIONS["sdpa"])
    registered("sdpa", wrapper)
    with pytest.warns(UserWarning, match=r"Wrapper, registered as 'sdpa'"):
        assert_close(run(model, ids)[0], expected, 1e-5)
    assert wrapper.calls == 2 and calls == {"rope_attention": 2}


def test_a_mask_of_the_user(registered, calls):
    def nothing_hidden(batch_size, *_, kv_length, **__):
        return torch.ones((batch_size, 1, 1, kv_length), dtype=torch.bool)

    model, ids = make_model("llama"), make_ids(2, LENGTH)
    registered("mine", sdpa_attention_forward, nothing_hidden)
    model.config._attn_implementation = "mine"
    with pytest.warns(UserWarning, match="the mask function .*nothing_hidden, registered as 'mine'"):
        patch_model(model)(ids)
    assert not calls


def test_other_names_of_known_functions_are_served(registered, calls):
    """Flash-attention kernels of transformers' hub have names of their own."""
    from transformers.integrations.flash_attention import flash_attention_forward

    model, ids = make_model("llama"), make_ids(2, LENGTH)
    expected = run(model, ids)[0]
    patch_model(model)
    registered("hub/kernel", functools.partial(flash_attention_forward, implementation=None))
    model.config._attn_implementation = "hub/kernel"
    assert_close(run(model, ids)[0], expected, 1e-5)
    assert calls == {"rope_attention": 2}


def test_paged_implementations_without_their_cache(calls):
    """Continuous batching hands over a cache, and calls the implementation paged."""
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    expected = run(model, ids)[0]
    patch_model(model)
    model.config._attn_implementation = "paged|eager"
    with pytest.warns(UserWarning, match="'paged.eager' without the paged cache that it takes"):
        try:
            model(ids)
        except Exception:
            pass
    assert not calls
    model.config._attn_implementation = "eager"
    assert_close(run(model, ids)[0], expected, 1e-5)


def test_block_masks():
    from torch.nn.attention.flex_attention import create_block_mask

    model, ids = patch_model(make_model("llama")), make_ids(1, 16)
    blocks = create_block_mask(lambda b, h, q, k: q >= k, 1, None, 16, 16, device="cpu")
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="attention_mask is a BlockMask.*model's is 'sdpa'.*set_attn_implementation"):
        model(ids, attention_mask=blocks)
    model.config._attn_implementation = "flex_attention"
    with torch.no_grad(), pytest.warns(UserWarning, match="a BlockMask is not served"):
        masked = model.requires_grad_(False)(ids, attention_mask=blocks).logits
    assert_close(masked, model(ids).logits, 1e-4)


def test_a_function_below_flash_attention(monkeypatch, calls):
    """verl exchanges shards of a sequence there; the registered function stays transformers' own."""
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    model.config._attn_implementation = "flash_attention_2"

    def exchanging(query, key, value, *args, **kwargs):
        return torch.zeros_like(query)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", exchanging)
    expected = run(model, ids)[0]
    with pytest.warns(UserWarning, match="_flash_attention_forward of transformers.* was replaced by .*exchanging"):
        assert torch.equal(run(patch_model(model), ids)[0], expected)
    assert not calls
