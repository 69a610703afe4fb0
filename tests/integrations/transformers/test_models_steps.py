"""Steps of a patched model onto a cache: which of them take the generation step, and what they leave in the cache."""

import copy
import gc
import weakref

import pytest
import torch
import transformers
from transformers.cache_utils import StaticLayer

from fused_rope_attn.generation import launch as decode
from fused_rope_attn.generation import planning
from fused_rope_attn.integrations.transformers import attention, patch_model, rooms, unpatch_model
from tests.integrations.transformers.test_models import assert_close, calls, eager_rotation  # noqa: F401
from tests.support.generation import interpreted_step
from tests.support.hf_models import WINDOW, make_ids, make_model

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
    assert calls == {"rope_attention": 2 * 2, "rope_attention_with_kvcache": 2 * (len(ENDS) - 2)}
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
    assert calls == {"rope_attention": 4 + 3, "rope_attention_with_kvcache": 8 + 9}


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
    assert calls == {"rope_attention": 2, "rope_attention_with_kvcache": 4}


def test_gradients_go_without_the_step(calls):  # noqa: F811
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
    assert calls == {"rope_attention": 6, "rope_attention_with_kvcache": 2}


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
    assert calls == {"rope_attention": 4, "rope_attention_with_kvcache": 8}
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


def steps(model, past, ids, start):
    """Logits of the tokens from ``start`` on, one by one."""
    return torch.cat([model(ids[:, i : i + 1], past_key_values=past).logits for i in range(start, ids.shape[1])], dim=1)


@torch.no_grad()
def test_a_dynamic_cache_grows_in_place():
    """Most steps copy nothing; what was handed out before stays as it was; a layer notes what its own update notes."""
    model, ids = make_model("llama"), make_ids(2, 80)
    plain, past = make_cache(model, "dynamic"), make_cache(model, "dynamic")
    expected = torch.cat((model(ids[:, :9], past_key_values=plain).logits, steps(model, plain, ids, 9)), dim=1)
    patch_model(model)
    logits, seen, places = [model(ids[:, :9], past_key_values=past).logits], [], set()
    for i in range(9, 80):
        logits.append(model(ids[:, i : i + 1], past_key_values=past).logits)
        for layer in past.layers:
            seen += [(x, x.clone()) for x in (layer.keys, layer.values)]
            places.add(layer.keys.untyped_storage().data_ptr())
    assert_close(torch.cat(logits, dim=1), expected, 1e-5)
    assert 2 <= len(places) <= 2 * 5  # rooms of 16 rows more
    assert all(torch.equal(x, kept) for x, kept in seen)
    for layer, other in zip(past.layers, plain.layers):
        assert vars(layer).keys() == vars(other).keys()
        assert layer.keys.shape == other.keys.shape and layer.dtype is other.dtype and layer.device == other.device
        assert_close(layer.keys, other.keys, 1e-5)
        assert_close(layer.values, other.values, 1e-5)


def shared(past, model):
    """Another cache of the very same tensors."""
    other = make_cache(model, "dynamic")
    for layer, mine in zip(other.layers, past.layers):
        layer.update(mine.keys, mine.values)
        layer.keys, layer.values = mine.keys, mine.values
    return other


def cropped(past, model):
    other = shared(past, model)
    model(make_ids(2, 1, seed=9), past_key_values=other)
    other.crop(-1)
    return other


def reordered(past, model):
    other = shared(past, model)
    other.reorder_cache(torch.tensor([0, 1]))
    return other


@pytest.mark.parametrize("fork", [shared, cropped, reordered, lambda past, model: copy.deepcopy(past)])
@torch.no_grad()
def test_two_caches_of_the_same_tokens(fork):
    """Each goes its own way, turn by turn, and finds nothing of the other's."""
    model, ids = patch_model(make_model("llama")), make_ids(2, 16)
    others = torch.cat((ids[:, :10], make_ids(2, 6, seed=5)), dim=1)
    expected, others_expected = model(ids).logits, model(others).logits
    past = make_cache(model, "dynamic")
    model(ids[:, :9], past_key_values=past)
    model(ids[:, 9:10], past_key_values=past)
    other = fork(past, model)
    for i in range(10, 16):
        got = model(ids[:, i : i + 1], past_key_values=past).logits
        others_got = model(others[:, i : i + 1], past_key_values=other).logits
        assert_close(got, expected[:, i : i + 1], 1e-5)
        assert_close(others_got, others_expected[:, i : i + 1], 1e-5)


@torch.no_grad()
def test_tokens_that_somebody_keeps():
    """A cache set back to tensors that were its own before: the rows behind them are taken."""
    model, ids = patch_model(make_model("llama")), make_ids(2, 14)
    past = make_cache(model, "dynamic")
    model(ids[:, :9], past_key_values=past)
    before = [(layer.keys, layer.values) for layer in past.layers]
    first = steps(model, past, ids, 9)
    after = [(layer.keys, layer.values, layer.keys.clone(), layer.values.clone()) for layer in past.layers]
    for layer, (keys, values) in zip(past.layers, before):
        layer.keys, layer.values = keys, values
    assert not torch.allclose(steps(model, past, make_ids(2, 14, seed=5), 9), first)
    for keys, values, keys_then, values_then in after:
        assert torch.equal(keys, keys_then) and torch.equal(values, values_then)


def test_inference_mode_and_back():
    """Tensors of inference mode are read-only outside it."""
    model, ids = patch_model(make_model("llama")), make_ids(2, 14)
    with torch.inference_mode():
        past = make_cache(model, "dynamic")
        model(ids[:, :9], past_key_values=past)
        steps(model, past, ids[:, :11], 9)
    with torch.no_grad():
        steps(model, past, ids[:, :13], 11)
        expected = model(ids).logits[:, 13:]
    with torch.inference_mode():
        got = steps(model, past, ids, 13)
    assert_close(got.clone(), expected, 1e-5)


@torch.no_grad()
def test_a_dynamic_cache_with_an_update_of_its_own():
    class Counting(transformers.DynamicCache):
        tokens = 0

        def update(self, key_states, *args, **kwargs):
            self.tokens += key_states.shape[2]
            return super().update(key_states, *args, **kwargs)

    model, ids = patch_model(make_model("llama")), make_ids(2, 12)
    past = Counting(config=model.config)
    got = parts(model, past, ids, ends=(9, 10, 12))
    assert past.tokens == 2 * 12
    assert_close(got, model(ids).logits, 1e-5)


@torch.no_grad()
def test_nothing_outlives_its_pass(monkeypatch):
    """Tables die with their pass, rooms with the tensors in them."""
    model, ids = patch_model(make_model("gemma3")), make_ids(2, 14)
    tables, own = [], attention._tables_of

    def noted(*args):
        made = own(*args)
        tables.append([weakref.ref(x) for x in made.arrays])
        return made

    monkeypatch.setattr(attention, "_tables_of", noted)
    past = make_cache(model, "dynamic")
    model(ids[:, :9], past_key_values=past)
    steps(model, past, ids, 9)
    assert len(tables) == 6 * 2  # for each pass those of layers with a window, and those of layers without
    gc.collect()
    assert all(x() is None for pair in tables for x in pair)
    layer = past.layers[1]
    # Nobody but the layer has tensors in the room, so that it gives the memory back when it lets go of them.
    assert not any(isinstance(x, torch.Tensor) for x in rooms._rooms[layer])
    keys = weakref.ref(layer.keys)
    layer.keys = layer.values = None
    gc.collect()
    assert keys() is None
    known = len(rooms._rooms)
    del past, layer
    gc.collect()
    assert len(rooms._rooms) < known


@pytest.fixture
def interpreted(monkeypatch):
    """The generation step in Triton's interpreter, all else as a CPU has it."""
    monkeypatch.setattr("fused_rope_attn.rotation.api._has_kernel", lambda x: False)
    monkeypatch.setattr(attention, "rope_attention_with_kvcache", interpreted_step)


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


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@torch.no_grad()
def test_steps_are_prepared_once(interpreted):
    """The length of a dynamic cache is no part of what a step's launches are made for."""
    model, ids = patch_model(make_model("llama")), make_ids(1, 15)
    past = make_cache(model, "dynamic")
    model(ids[:, :9], past_key_values=past)
    decode._prepared._calls.clear()
    steps(model, past, ids, 9)
    assert len(decode._prepared._calls) == 1


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
