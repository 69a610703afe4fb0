"""Steps of a patched model onto a cache: which of them take the generation step, and what they leave in the cache."""

import functools

import pytest
import torch
import transformers
from transformers.cache_utils import StaticLayer

from fused_rope_attn.integrations.transformers import caches, patch_model, unpatch_model
from tests.support.hf_caches import ENDS, make_cache, parts
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
# Models with static caches that can be cropped: transformers 5.24 and later.
CROPPED = ("llama", "gemma3") if getattr(StaticLayer, "is_croppable", False) else ()


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


def test_gradients_go_without_the_step(calls):
    model, ids = patch_model(make_model("gpt_oss")), make_ids(1, 7)
    parts(model, make_cache(model, "dynamic"), ids, ends=(6, 7))[:, -1].sum().backward()
    assert all(p.grad is not None for p in model.model.layers[0].self_attn.parameters())
    assert calls == {"rope_attention": 4}
    # No parameter wants a gradient, though gradients are on; then the sinks alone do.
    model.requires_grad_(False)
    parts(model, make_cache(model, "dynamic"), ids, ends=(6, 7))
    assert calls == {"rope_attention": 6, "rope_attention_with_kvcache": 2}
    model.model.layers[1].self_attn.sinks.requires_grad_(True)
    parts(model, make_cache(model, "dynamic"), ids, ends=(6, 7))
    assert calls == {"rope_attention": 9, "rope_attention_with_kvcache": 3}


@torch.no_grad()
def test_who_writes_a_static_cache(monkeypatch):
    """Prompts are written by the cache, steps by attention. With windows a layer that is full moves what it holds."""
    own, written, count = StaticLayer.update, [], caches.count_written

    @functools.wraps(own)  # under its own name, by which it is known
    def update(self, key_states, *args, **kwargs):
        written.append(key_states.shape[2])
        return own(self, key_states, *args, **kwargs)

    monkeypatch.setattr(StaticLayer, "update", update)
    monkeypatch.setattr(caches, "count_written", lambda layer, n: (written.append(type(layer)), count(layer, n)))
    for name, expected in (("llama", [9, 9, *[StaticLayer] * 4]), ("gemma3", [9, StaticLayer, StaticLayer])):
        model = patch_model(make_model(name))
        parts(model, make_cache(model, "static"), make_ids(2, 12), ends=(9, 10, 12))
        assert written == expected
        written.clear()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("llama", transformers.DynamicCache),
        # The cache is as long as the window.
        *((name, functools.partial(transformers.StaticCache, max_cache_len=8)) for name in CROPPED),
    ],
)
@torch.no_grad()
def test_tokens_that_are_taken_back(name, make):
    """Assisted decoding drops refused tokens. Their rows of a static cache stay as they were, and must not be seen."""
    model, ids, others = make_model(name), make_ids(2, 7), make_ids(2, 4, seed=2)
    results = []
    for patched in (unpatch_model, patch_model):
        past = make(config=patched(model).config)
        logits = [model(part, past_key_values=past).logits for part in (ids[:, :4], others)]
        past.crop(-4)
        logits += [model(part, past_key_values=past).logits for part in (ids[:, 4:6], ids[:, 6:])]
        results.append(torch.cat(logits, 1))
        assert int(past.get_seq_length()) == 7
    assert_close(results[1], results[0], 1e-5)
    assert_close(results[1][:, 8:], model(ids, use_cache=False).logits[:, 4:], 1e-5)


@pytest.mark.unpoisoned
def test_compiled_generation():
    """A step with a static cache is one graph without a break, made as often as the unpatched model's: twice."""
    model, ids = make_model("gemma3"), make_ids(2, 12)
    mask = (torch.arange(12) >= torch.tensor([[0], [5]])).long()
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **options)
    compilation = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
    compilation._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options |= {"cache_implementation": "static", "compile_config": compilation}
    assert torch.equal(patch_model(model).generate(ids, **options), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()
