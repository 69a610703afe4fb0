"""Caches of a patched model: which argument of a call is one, how dynamic ones grow, and those of a user's own."""

import copy
import functools
import gc
import inspect
import weakref
from contextlib import nullcontext

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from fused_rope_attn.integrations.transformers import caches, families, patch_model, patch_report
from tests.support.hf_caches import CAPACITY, make_cache, parts, steps
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import assert_close

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
    assert caches._IS_RENAMED is IS_RENAMED and OWN_NAME in caches.CACHE_NAMES
    monkeypatch.setattr(caches, "_IS_RENAMED", is_renamed)
    assert caches.cache_of(given) is (since if is_renamed else before)
    assert caches.is_paged(PAGED) and not any(map(caches.is_paged, (None, OLD, object())))


def outputs(decoder, ids, kind, names):
    """Hidden states of a prompt, of a step of one token and of a part that is longer than a step, and the cache."""
    past, states = make_cache(decoder, kind), []
    for start, end in ((0, 9), (9, 10), (10, 53)):
        given = {name: past if wanted else None for name, wanted in names.items()}
        with pytest.warns(FutureWarning) if IS_RENAMED and "past_key_values" in names else nullcontext():
            states.append(decoder(ids[:, start:end], use_cache=True, **given).last_hidden_state)
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
    expected, plain = outputs(decoder, ids, kind, names)
    got, past = outputs(patch_model(decoder), ids, kind, names)
    assert_close(got, expected, 1e-5)
    assert int(past.get_seq_length()) == int(plain.get_seq_length()) == (53 if used else 0)
    assert ("rope_attention_with_kvcache" in calls) is used


# Dynamic caches grow in place, and no two of them share what they must not.
@torch.no_grad()
def test_a_dynamic_cache_grows_in_place():
    """Most steps copy nothing; what was handed out before stays as it was; a layer notes what its own update notes."""
    model, ids = make_model("llama"), make_ids(2, 80)
    plain, past = make_cache(model, "dynamic"), make_cache(model, "dynamic")
    expected = parts(model, plain, ids, ends=range(9, 81))
    patch_model(model)
    logits, seen, places = [model(ids[:, :9], past_key_values=past).logits], [], set()
    for i in range(9, 80):
        logits.append(model(ids[:, i : i + 1], past_key_values=past).logits)
        for layer in past.layers:
            seen += [(x, x.clone()) for x in (layer.keys, layer.values)]
            places.add(layer.keys.untyped_storage().data_ptr())
    assert_close(torch.cat(logits, dim=1), expected, 1e-5)
    assert 2 <= len(places) <= 2 * 5  # buffers of 16 rows more
    assert all(torch.equal(x, kept) for x, kept in seen)
    for layer, other in zip(past.layers, plain.layers):
        assert vars(layer).keys() - vars(other).keys() <= {"dtype"}  # which 5.24 no longer notes
        notes = vars(other).keys() - {"keys", "values"}
        assert all(getattr(layer, name) == getattr(other, name) for name in notes)
        assert layer.keys.shape == other.keys.shape
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


@pytest.mark.parametrize("fork", [shared, cropped, lambda past, model: copy.deepcopy(past)])
@torch.no_grad()
def test_two_caches_of_the_same_tokens(fork):
    """Each goes its own way, turn by turn, and finds nothing of the other's."""
    model, ids = patch_model(make_model("llama")), make_ids(2, 16)
    others = torch.cat((ids[:, :10], make_ids(2, 6, seed=5)), dim=1)
    past = make_cache(model, "dynamic")
    parts(model, past, ids, ends=(9, 10))
    turns = [(past, ids, model(ids).logits), (fork(past, model), others, model(others).logits)]
    for i in range(10, 16):
        for cache, tokens, expected in turns:
            got = model(tokens[:, i : i + 1], past_key_values=cache).logits
            assert_close(got, expected[:, i : i + 1], 1e-5)


@torch.no_grad()
def test_tokens_that_somebody_keeps():
    """A cache set back to earlier tensors of its own: the rows after them are taken."""
    model, ids = patch_model(make_model("llama")), make_ids(2, 14)
    past = make_cache(model, "dynamic")
    model(ids[:, :9], past_key_values=past)
    before = [(layer.keys, layer.values) for layer in past.layers]
    first = steps(model, past, ids, 9)
    after = [(x, x.clone()) for layer in past.layers for x in (layer.keys, layer.values)]
    for layer, (keys, values) in zip(past.layers, before):
        layer.keys, layer.values = keys, values
    assert not torch.allclose(steps(model, past, make_ids(2, 14, seed=5), 9), first)
    assert all(torch.equal(x, then) for x, then in after)


def test_inference_mode_and_back():
    """Tensors of inference mode are read-only outside it."""
    model, ids = patch_model(make_model("llama")), make_ids(2, 14)
    past = make_cache(model, "dynamic")
    with torch.inference_mode():
        parts(model, past, ids, ends=(9, 10, 11))
    with torch.no_grad():
        steps(model, past, ids[:, :13], 11)
        expected = model(ids).logits[:, 13:]
    with torch.inference_mode():
        assert_close(steps(model, past, ids, 13).clone(), expected, 1e-5)


@torch.no_grad()
def test_nothing_outlives_its_pass(monkeypatch):
    """Tables die with their pass, buffers with the tensors in them."""
    model, tables, own = patch_model(make_model("gemma3")), [], families.Convention.half_widths

    def half_widths(*args):
        made = own(*args)
        tables.extend(map(weakref.ref, made))
        return made

    monkeypatch.setattr(families.Convention, "half_widths", half_widths)
    past = make_cache(model, "dynamic")
    parts(model, past, make_ids(2, 14), ends=range(9, 15))
    assert len(tables) == 6 * 2 * 2  # for each pass those of layers with a window, and those of layers without
    keys, known = weakref.ref(past.layers[1].keys), len(caches._known)
    # Only the layer has tensors in the buffers, so dropping them frees the memory.
    assert not any(isinstance(x, torch.Tensor) for x in caches._known[past.layers[1]])
    del past
    gc.collect()
    assert not any(x() is not None for x in (*tables, keys)) and len(caches._known) < known


def test_buffers_grow_by_a_fraction_of_their_rows():
    """By 16 rows at first, by an eighth at most twice over, and never by more than 256."""
    x = torch.zeros(2, 3, 1, 4, dtype=torch.float16)
    lengths = (0, 15, 16, 127, 128, 255, 256, 400, 1000, 1024, 3000, 5000)
    buffers = [caches.new_buffer(x, length) for length in lengths]
    assert [b.shape[2] for b in buffers] == [16, 16, 32, 128, 160, 256, 320, 448, 1024, 1280, 3072, 5120]
    for buffer in buffers:
        assert (*buffer.shape[:2], buffer.shape[3]) == (2, 3, 4)
        assert buffer.dtype is torch.float16 and buffer.is_contiguous()


def test_a_buffer_is_used_to_its_last_row():
    layer = DynamicLayer()
    buffer, values = (torch.zeros(1, 1, 16, 2) for _ in range(2))
    caches.store(layer, buffer[:, :, :12], values[:, :, :12], buffer)
    assert layer.is_initialized and layer.dtype is torch.float32 and layer.device == buffer.device
    for tokens, kept in ((1, True), (4, True), (5, False)):
        keys, others = caches.buffers_of(layer, tokens)
        assert (keys.data_ptr() == buffer.data_ptr()) is (others.data_ptr() == values.data_ptr()) is kept
        assert keys.shape == others.shape == ((1, 1, 16, 2) if kept else (1, 1, 32, 2))
    layer.values = layer.values.clone()  # one of the two is another's
    keys, others = caches.buffers_of(layer, 1)
    assert keys.data_ptr() != buffer.data_ptr() and torch.equal(others[:, :, :12], layer.values)


@pytest.mark.parametrize("part", ["other", "shorter", "fewer", "transposed"])
@torch.no_grad()
def test_other_memory_under_the_same_tensor(part):
    """After `keys.data = view` the tensor is still the layer's, but the rows after it belong to another buffer."""
    model, ids = make_model("llama", num_hidden_layers=1), make_ids(2, 14)

    def other_view(x):
        """(the buffer, a view of it in place of keys or values)."""
        if part in ("shorter", "fewer"):
            return x.data, x.data[:, :, :7] if part == "shorter" else x.data[:1]
        buffer = torch.full((2, 2, 40, 16) if part == "other" else (2, 40, 2, 16), 3.0)
        view = (buffer if part == "other" else buffer.transpose(1, 2))[:, :, :10]
        return buffer, view.copy_(x)

    def run():
        past, before = make_cache(model, "dynamic"), []
        parts(model, past, ids, ends=(9, 10))
        layer = past.layers[0]
        for x in (layer.keys, layer.values):
            buffer, x.data = other_view(x)
            before.append((buffer, buffer.clone()))
        rows, _, start, _ = layer.keys.shape
        logits = steps(model, past, ids[:rows, : start + 3], start)
        assert all(torch.equal(buffer, then) for buffer, then in before)
        return logits

    expected = run()
    patch_model(model)
    assert_close(run(), expected, 1e-5)


# Caches of a user's own: attention reads the keys and values that they return.
def halved(update, *args, **kwargs):
    """Half of the values, of those of the prompt too."""
    keys, values = update(*args, **kwargs)
    return keys, values / 2


def halving(cls):
    def update(self, *args, **kwargs):
        return halved(functools.partial(cls.update, self), *args, **kwargs)

    return type(f"Halving{cls.__name__}", (cls,), {"update": update})


def with_layers(past, *layers):
    past.layers[-len(layers) :] = layers
    return past


def with_update(past):
    past.update = functools.partial(halved, past.update)
    return past


def dynamic(config):
    return transformers.DynamicCache(config=config)


HalvingLayer, StaticCache = (
    halving(DynamicLayer),
    functools.partial(halving(transformers.StaticCache), max_cache_len=56),
)
FOREIGN = {  # by the reason of the module's own forward
    "of type HalvingStaticCache": lambda config: StaticCache(config=config),
    "with layers of type HalvingDynamicLayer": lambda config: with_layers(
        dynamic(config), HalvingLayer(), HalvingLayer()
    ),
    "with layers of type HalvingStaticLayer": lambda config: with_layers(
        dynamic(config), *[halving(StaticLayer)(CAPACITY) for _ in range(2)]
    ),
    "of type DynamicCache": lambda config: with_update(dynamic(config)),
    "with all layers of type HalvingDynamicLayer": lambda config: transformers.Cache(
        layer_class_to_replicate=HalvingLayer
    ),
    "whose last layer is of type HalvingDynamicLayer": lambda config: with_layers(dynamic(config), HalvingLayer()),
    # Overrides nothing. It is not served either, because only exact types are.
    "of type Renamed": lambda config: type("Renamed", (transformers.DynamicCache,), {})(config=config),
}


@pytest.mark.parametrize("kind", FOREIGN)
@torch.no_grad()
def test_a_cache_with_an_update_of_its_own(kind, calls):
    """In the prompt, in a step of one token, in one of several, and in a part that is longer than a step."""
    model, ids = make_model("llama"), make_ids(2, 53)
    expected = parts(model, FOREIGN[kind](model.config), ids)
    patch_model(model)
    with pytest.warns(UserWarning, match="a cache (of|with layers of) type .* is not served"):
        assert torch.equal(parts(model, FOREIGN[kind](model.config), ids), expected)
    assert not calls and all(kind.split()[-1] in str(row.own) for row in patch_report(model))


@pytest.mark.parametrize("of", [transformers.Cache, DynamicLayer], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("given", [True, False], ids=["given", "made"])
@torch.no_grad()
def test_an_update_that_somebody_replaces_for_all(of, given, calls, monkeypatch):
    """Libraries that compress keys and values do this. The model may make the cache itself."""
    model, ids, own = make_model("llama"), make_ids(2, 9), of.update
    monkeypatch.setattr(of, "update", lambda *args, **kwargs: halved(own, *args, **kwargs))

    def run():
        return model(ids, past_key_values=make_cache(model, "dynamic") if given else None).logits

    expected = run()
    patch_model(model)
    with pytest.warns(UserWarning, match=r"\.update was replaced by .* is not served"):
        assert torch.equal(run(), expected)
    assert not calls


class HybridCache:
    """Hybrid models of older releases make such a cache. It does not inherit from ``Cache``."""


class Making(transformers.LlamaModel):
    def forward(self, *args, **kwargs):
        self.made = HybridCache()
        return super().forward(*args, **kwargs)


def test_a_cache_that_only_the_decoder_makes():
    """The hook that describes the batch does not see this cache, and the kernels cannot read its layers."""
    model, ids = make_model("llama"), make_ids(2, 12)
    expected = model(ids, use_cache=True).logits
    model.model.__class__ = Making
    patch_model(model)
    reason = "a cache of type HybridCache, which the decoder makes,"
    with pytest.warns(UserWarning, match=f"{reason} is not served"):
        assert torch.equal(model(ids, use_cache=True).logits, expected)
    for given in ({"use_cache": False}, {"past_key_values": make_cache(model, "dynamic")}):
        assert_close(model(ids, **given).logits, expected, 1e-5)
    assert all(row.own == {reason: 1} for row in patch_report(model))
