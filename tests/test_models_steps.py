"""Steps of a patched model onto a cache: which of them take the generation step, and what they leave in the cache."""

import functools

import pytest
import torch
import transformers
from hf_models import WINDOW, make_ids, make_model
from test_models import assert_close, calls, eager_rotation  # noqa: F401
from transformers.cache_utils import StaticLayer

from fused_rope_attn import planning
from fused_rope_attn.integrations.transformers import attention, patch_model, unpatch_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
# Ends of the parts of a sequence: one token and several, before, across and after the window's end. The last part is
# longer than the generation step takes.
ENDS = (5, 7, 10, 11, 13, 53)
CAPACITY = 56


def make_cache(model, kind):
    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=CAPACITY)


def parts(model, past, ids, mask=None, ends=ENDS):
    """Logits of a sequence that the model is given in parts."""
    logits = []
    for start, end in zip((0, *ends), ends):
        part = None if mask is None else mask[:, :end]
        logits.append(model(ids[:, start:end], attention_mask=part, past_key_values=past).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "smollm3", "glm4"])
@torch.no_grad()
def test_steps_of_every_length(name, kind, padded, calls):  # noqa: F811
    """Logits are the unpatched model's, and the cache is what it leaves behind."""
    model, ids = make_model(name), make_ids(2, ENDS[-1])
    mask = (torch.arange(ENDS[-1]) >= torch.tensor([[0], [3]])).long() if padded else None
    plain, patched = make_cache(model, kind), make_cache(model, kind)
    expected = parts(model, plain, ids, mask)
    got = parts(patch_model(model), patched, ids, mask)
    present = mask.bool() if padded else slice(None)
    assert_close(got[present], expected[present], 1e-5)
    assert calls == {"rope_attention": 2 * 2, "_with_kvcache": 2 * (len(ENDS) - 2)}
    for layer, other in zip(patched.layers, plain.layers):
        assert layer.get_seq_length() == other.get_seq_length()
        if not padded:  # what padding tokens leave in later layers is nobody's business
            assert_close(layer.keys, other.keys, 1e-5)
            assert_close(layer.values, other.values, 1e-5)


@torch.no_grad()
def test_a_cache_that_is_used_again(calls):  # noqa: F811
    """A reset leaves layers that count on the device as they are; the first one of gemma3 counts on the host."""
    model, ids = patch_model(make_model("gemma3")), make_ids(2, ENDS[-1])
    past = make_cache(model, "static")
    first = parts(model, past, ids)
    past.reset()
    assert_close(parts(model, past, ids), first, 1e-6)  # the first part of it is a step, this time
    assert calls == {"rope_attention": 4 + 3, "_with_kvcache": 8 + 9}


@torch.no_grad()
def test_tokens_that_are_taken_back(calls):  # noqa: F811
    """Assisted generation: steps of several tokens, of which the last are dropped again."""
    model, ids = make_model("llama"), make_ids(2, 20)
    expected = model(ids).logits
    past = make_cache(patch_model(model), "dynamic")
    model(ids[:, :9], past_key_values=past)
    model(make_ids(2, 6, seed=7), past_key_values=past)
    past.crop(-6)
    got = model(ids[:, 9:], past_key_values=past).logits
    assert_close(got, expected[:, 9:], 1e-5)
    assert calls == {"rope_attention": 2, "_with_kvcache": 4}


def test_gradients_go_without_the_step(calls):  # noqa: F811
    model, ids = patch_model(make_model("gpt_oss")), make_ids(1, 7)
    parts(model, make_cache(model, "dynamic"), ids, ends=(6, 7))[:, -1].sum().backward()
    assert all(p.grad is not None for p in model.model.layers[0].self_attn.parameters())
    assert calls == {"rope_attention": 4}
    # Nobody's gradient, though gradients are on; then the sinks' alone.
    model.requires_grad_(False)
    parts(model, make_cache(model, "dynamic"), ids, ends=(6, 7))
    assert calls == {"rope_attention": 6, "_with_kvcache": 2}
    model.model.layers[1].self_attn.sinks.requires_grad_(True)
    parts(model, make_cache(model, "dynamic"), ids, ends=(6, 7))
    assert calls == {"rope_attention": 9, "_with_kvcache": 3}


@torch.no_grad()
def test_a_cache_of_another_dtype(calls):  # noqa: F811
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
    assert calls == {"rope_attention": 6, "_with_kvcache": 2}


def test_few_queries():
    assert planning.reads_cache_once(1, 128) and planning.reads_cache_once(16, 4) and planning.reads_cache_once(64, 1)
    assert not planning.reads_cache_once(17, 4) and not planning.reads_cache_once(2, 33)


class CountingCache(transformers.StaticCache):
    """Wants to know of every token."""

    tokens = 0

    def update(self, key_states, *args, **kwargs):
        self.tokens += key_states.shape[2]
        return super().update(key_states, *args, **kwargs)


@torch.no_grad()
def test_who_writes_a_static_cache(calls, monkeypatch):  # noqa: F811
    """Attention itself, unless there is more to it than the layer's own writing."""
    own, written = StaticLayer.update, []

    def update(self, key_states, *args, **kwargs):
        written.append(key_states.shape[2])
        return own(self, key_states, *args, **kwargs)

    monkeypatch.setattr(StaticLayer, "update", update)
    model, ids = patch_model(make_model("llama")), make_ids(2, 12)
    results = [parts(model, make_cache(model, "static"), ids, ends=(9, 10, 12))]
    assert written == [9, 9]
    past = CountingCache(config=model.config, max_cache_len=CAPACITY)
    results.append(parts(model, past, ids, ends=(9, 10, 12)))
    assert written[2:] == [9, 9, 1, 1, 2, 2] and past.tokens == 2 * 12
    assert calls == {"rope_attention": 4, "_with_kvcache": 8}
    assert_close(*results, 1e-6)
    # Windows: a layer that is full moves what it holds.
    written.clear()
    model = patch_model(make_model("gemma3"))
    monkeypatch.setattr(
        attention, "count_written", lambda layer, tokens, count=attention.count_written: (
            written.append(type(layer).__name__), count(layer, tokens)
        ),
    )  # fmt: skip
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


@pytest.fixture
def interpreted(monkeypatch):
    """The generation step in Triton's interpreter, all else as a CPU has it."""
    monkeypatch.setattr("fused_rope_attn.rotation._has_kernel", lambda x: False)
    operator = functools.partial(attention._with_kvcache, backend="triton")
    monkeypatch.setattr(attention, "_with_kvcache", operator)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gemma2", "cohere", "gpt_oss", "smollm3"])
@torch.no_grad()
def test_in_the_interpreter(name, kind, interpreted):
    """Windows, cap, pairs, sinks and layers that do not rotate; padding; one token and several."""
    model, ends = make_model(name), (WINDOW - 1, WINDOW + 2, WINDOW + 3)
    ids = make_ids(2, ends[-1])
    mask = (torch.arange(ends[-1]) >= torch.tensor([[0], [3]])).long()
    expected = parts(model, make_cache(model, kind), ids, mask, ends)
    got = parts(patch_model(model), make_cache(model, kind), ids, mask, ends)
    assert_close(got[mask.bool()], expected[mask.bool()], 1e-5)


@pytest.mark.unpoisoned
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@torch.no_grad()
def test_compiled_by_the_user(interpreted):
    """Without ``generate``: the batch is described, and the cache counted, inside the graph, which has no break."""
    model, ids = make_model("llama"), make_ids(2, 9)
    expected = parts(model, make_cache(model, "static"), ids, ends=(6, 7, 8, 9))
    past = make_cache(patch_model(model), "static")
    first = parts(model, past, ids, ends=(6,))
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = []
    for i in range(6, 9):
        # 4.57 would look for the cache's length in its rows, which no graph can.
        options = {"cache_position": torch.tensor([i])} if transformers.__version__ < "5" else {}
        logits.append(step(ids[:, i : i + 1], past_key_values=past, **options).logits)
    assert_close(torch.cat((first, *logits), dim=1), expected, 1e-5)
    assert [int(layer.get_seq_length()) for layer in past.layers] == [9, 9]
    torch._dynamo.reset()
    unpatch_model(model)
