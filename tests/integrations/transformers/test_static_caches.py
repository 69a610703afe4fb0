"""Static caches of a patched model: the kernels that write them, and calls with a full one."""

import functools

import pytest
import torch
import transformers
from transformers.cache_utils import StaticLayer

from fused_rope_attn.integrations.transformers import caches, patch_model, unpatch_model
from tests.support.hf_caches import CAPACITY, make_cache, parts
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class CountingCache(transformers.StaticCache):
    """Wants to know of every token."""

    tokens = 0

    def update(self, key_states, *args, **kwargs):
        self.tokens += key_states.shape[2]
        return super().update(key_states, *args, **kwargs)


@torch.no_grad()
def test_who_writes_a_static_cache(calls, monkeypatch):
    """Attention itself, and the modules' own where a cache writes in a way of its own."""
    own, written = StaticLayer.update, []

    @functools.wraps(own)  # under its own name, by which it is known
    def update(self, key_states, *args, **kwargs):
        written.append(key_states.shape[2])
        return own(self, key_states, *args, **kwargs)

    monkeypatch.setattr(StaticLayer, "update", update)
    model, ids = patch_model(make_model("llama")), make_ids(2, 12)
    results = [parts(model, make_cache(model, "static"), ids, ends=(9, 10, 12))]
    assert written == [9, 9]
    past = CountingCache(config=model.config, max_cache_len=CAPACITY)
    with pytest.warns(UserWarning, match="a cache of type CountingCache is not served"):
        results.append(parts(model, past, ids, ends=(9, 10, 12)))
    assert written[2:] == [9, 9, 1, 1, 2, 2] and past.tokens == 2 * 12
    assert calls == {"rope_attention": 2, "rope_attention_with_kvcache": 4}
    assert_close(*results, 1e-5)
    # Windows: a layer that is full moves what it holds.
    written.clear()
    model = patch_model(make_model("gemma3"))
    count = caches.count_written
    monkeypatch.setattr(
        caches,
        "count_written",
        lambda layer, tokens: (written.append(type(layer).__name__), count(layer, tokens)),
    )
    parts(model, make_cache(model, "static"), ids, ends=(9, 10, 12))
    assert written == [9, "StaticLayer", "StaticLayer"]


@torch.no_grad()
def test_a_static_cache_that_is_full():
    """StaticLayer.update refuses tokens that find no row; what writes in its place must not lose them in silence."""
    model, ids = make_model("llama"), make_ids(2, CAPACITY + 1)
    for refusal, message in ((IndexError, "out of bounds|out of range"), (RuntimeError, "of 56 tokens is full")):
        past = make_cache(model, "static")
        parts(model, past, ids[:, :CAPACITY], ends=(CAPACITY - 1, CAPACITY))
        with pytest.raises(refusal, match=message):
            model(ids[:, CAPACITY:], past_key_values=past)
        patch_model(model)


@pytest.mark.skipif(not getattr(StaticLayer, "is_croppable", False), reason="static caches are cropped from 5.24 on")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_a_static_cache_that_was_cropped(name):
    """Assisted decoding takes refused tokens back. Their rows stay as they were, and must not be seen."""
    model, ids, others = make_model(name), make_ids(2, 7), make_ids(2, 4, seed=2)
    results = []
    for patched in (unpatch_model, patch_model):
        past = transformers.StaticCache(config=patched(model).config, max_cache_len=8)  # as long as the window
        logits = [model(part, cache=past).logits for part in (ids[:, :4], others)]
        past.crop(-4)
        logits += [model(part, cache=past).logits for part in (ids[:, 4:6], ids[:, 6:])]
        results.append(torch.cat(logits, 1))
        assert int(past.get_seq_length()) == 7
    assert_close(results[1], results[0], 1e-5)
    assert_close(results[1][:, 8:], model(ids, use_cache=False).logits[:, 4:], 1e-5)
