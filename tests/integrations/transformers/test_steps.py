"""Steps of a patched model onto a cache: which of them take the generation step, and what they leave in the cache."""

import pytest
import torch

from fused_rope_attn.integrations.transformers import patch_model
from tests.support.hf_caches import ENDS, make_cache, parts
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "smollm3", "glm4"])
@torch.no_grad()
def test_steps_of_every_length(name, kind, padded, calls):
    """Logits and the cache are the unpatched model's."""
    model, ids = make_model(name), make_ids(2, ENDS[-1])
    mask = (torch.arange(ENDS[-1]) >= torch.tensor([[0], [3]])).long() if padded else None
    plain, patched = make_cache(model, kind), make_cache(model, kind)
    expected = parts(model, plain, ids, mask)
    got = parts(patch_model(model), patched, ids, mask)
    present = mask.bool() if padded else slice(None)
    assert_close(got[present], expected[present], 1e-5)
    assert calls == {"rope_attention": 2 * 2, "rope_attention_with_kvcache": 2 * (len(ENDS) - 2)}
    for layer, other in zip(patched.layers, plain.layers):
        assert layer.get_seq_length() == other.get_seq_length()
        if not padded:  # the values of padding tokens in later layers do not matter
            assert_close(layer.keys, other.keys, 1e-5)
            assert_close(layer.values, other.values, 1e-5)


@torch.no_grad()
def test_a_cache_that_is_used_again(calls):
    """A reset leaves layers that count on the device as they are; the first one of gemma3 counts on the host."""
    model, ids = patch_model(make_model("gemma3")), make_ids(2, ENDS[-1])
    past = make_cache(model, "static")
    first = parts(model, past, ids)
    past.reset()
    assert_close(parts(model, past, ids), first, 1e-6)  # the first part of it is a step, this time
    assert calls == {"rope_attention": 4 + 3, "rope_attention_with_kvcache": 8 + 9}


@torch.no_grad()
def test_tokens_that_are_taken_back(calls):
    """Assisted generation: steps of several tokens, the last of them dropped again."""
    model, ids = make_model("llama"), make_ids(2, 20)
    expected = model(ids).logits
    past = make_cache(patch_model(model), "dynamic")
    model(ids[:, :9], past_key_values=past)
    model(make_ids(2, 6, seed=7), past_key_values=past)
    past.crop(-6)
    got = model(ids[:, 9:], past_key_values=past).logits
    assert_close(got, expected[:, 9:], 1e-5)
    assert calls == {"rope_attention": 2, "rope_attention_with_kvcache": 4}


def test_gradients_go_without_the_step(calls):
    model, ids = patch_model(make_model("gpt_oss")), make_ids(1, 7)
    parts(model, make_cache(model, "dynamic"), ids, ends=(6, 7))[:, -1].sum().backward()
    assert all(p.grad is not None for p in model.model.layers[0].self_attn.parameters())
    assert calls == {"rope_attention": 4}
    # Nobody's gradient, though gradients are on; then the sinks' alone.
    model.requires_grad_(False)
    parts(model, make_cache(model, "dynamic"), ids, ends=(6, 7))
    assert calls == {"rope_attention": 6, "rope_attention_with_kvcache": 2}
    model.model.layers[1].self_attn.sinks.requires_grad_(True)
    parts(model, make_cache(model, "dynamic"), ids, ends=(6, 7))
    assert calls == {"rope_attention": 9, "rope_attention_with_kvcache": 3}


@torch.no_grad()
def test_a_cache_of_another_dtype(calls):
    """Filled in float32 and continued under autocast: the keys become float32 again, q is bfloat16."""
    model, ids = make_model("llama"), make_ids(2, 9)

    def last():
        past = make_cache(model, "dynamic")
        model(ids[:, :8], past_key_values=past)
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids[:, 8:], past_key_values=past).logits.float()

    assert_close(last(), model(ids).logits[:, 8:], 0.05)
    expected = last()
    patch_model(model)
    assert_close(last(), expected, 0.05)
    assert calls == {"rope_attention": 4}
    with torch.autocast("cpu", torch.bfloat16):  # the cache too
        parts(model, make_cache(model, "static"), ids, ends=(8, 9))
    assert calls == {"rope_attention": 6, "rope_attention_with_kvcache": 2}
