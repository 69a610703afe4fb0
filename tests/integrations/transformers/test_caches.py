"""Caches of a patched model: which argument is one, which steps onto it take the generation step and what they leave,
how dynamic ones grow, and those of a user's own."""

import copy
import functools
import gc
import inspect
import weakref

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from fused_rope_attn.integrations.transformers import caches, families, patch_model, patch_report, unpatch_model
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import CAPACITY, ENDS, assert_close, left_padded, make_cache, noted, parts, steps

IS_RENAMED = "cache" in inspect.signature(transformers.LlamaModel.forward).parameters
OWN_NAME = "cache" if IS_RENAMED else "past_key_values"
OLD, NEW, PAGED = transformers.DynamicCache(), transformers.DynamicCache(), object.__new__(PagedAttentionCache)


CACHES = [  # the arguments of a call, and its cache before 5.24 and since
    ({}, None, None),
    ({"past_key_values": OLD}, OLD, OLD),
    ({"layer_past": OLD}, OLD, OLD),
    ({"past_key_value": OLD, "past_key_values": None}, OLD, OLD),
    ({"cache": NEW}, None, NEW),
    ({"cache": NEW, "past_key_values": OLD}, OLD, NEW),
    ({"cache": None, "past_key_values": OLD}, OLD, None),
    ({"cache": PAGED, "past_key_values": None}, PAGED, PAGED),
    ({"layer_past": PAGED}, PAGED, PAGED),
]


@pytest.mark.parametrize("is_renamed", [False, True], ids=["before 5.24", "since 5.24"])
def test_the_cache_of_a_call(is_renamed, monkeypatch):
    assert caches._IS_RENAMED is IS_RENAMED and OWN_NAME in caches.CACHE_NAMES
    monkeypatch.setattr(caches, "_IS_RENAMED", is_renamed)
    for given, before, since in CACHES:
        assert caches.cache_of(given) is (since if is_renamed else before), given
    assert caches.is_paged(PAGED) and not any(map(caches.is_paged, (None, OLD, object())))


def assert_same_layers(past, plain):
    for layer, other in zip(past.layers, plain.layers, strict=True):
        assert layer.get_seq_length() == other.get_seq_length() and layer.keys.shape == other.keys.shape
        assert_close(layer.keys, other.keys, 1e-5)
        assert_close(layer.values, other.values, 1e-5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "smollm3"])
@torch.no_grad()
def test_steps_of_every_length(name, kind, padded, calls):
    model, ids = make_model(name), make_ids(2, ENDS[-1])
    mask = left_padded(ENDS[-1], 0, 3) if padded else None
    plain, patched = (make_cache(model, kind) for _ in range(2))
    expected = parts(model, plain, ids, mask)
    got = parts(patch_model(model), patched, ids, mask)
    present = torch.ones_like(ids).bool() if mask is None else mask.bool()
    assert_close(got[present], expected[present], 1e-5)
    assert calls == {"rope_attention": 2 * 2, "rope_attention_with_kvcache": 2 * (len(ENDS) - 2)}
    if not padded:  # the values of padding tokens in later layers do not matter
        assert_same_layers(patched, plain)
    if kind == "static":  # a reset leaves layers that count on the device initialised: the first part is a step
        patched.reset()
        assert_close(parts(model, patched, ids, mask)[present], got[present], 1e-6)


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
    updates = noted(monkeypatch, StaticLayer, "update")
    for name, expected in (("llama", [9, 9]), ("gemma3", [9])):
        model = patch_model(make_model(name))
        parts(model, make_cache(model, "static"), make_ids(2, 12), ends=(9, 10, 12))
        assert [args[1].shape[2] for args, _ in updates] == expected
        updates.clear()


@pytest.mark.parametrize(("name", "kind"), [("llama", "dynamic"), ("llama", "static"), ("gemma3", "static")])
@torch.no_grad()
def test_tokens_that_are_taken_back(name, kind):
    """Assisted decoding drops refused tokens. Their rows of a static cache stay as they were, and must not be seen."""
    if kind == "static" and not getattr(StaticLayer, "is_croppable", False):
        pytest.skip("another release of transformers")
    model, ids, others = make_model(name), make_ids(2, 7), make_ids(2, 4, seed=2)
    results = []
    for patched in (unpatch_model, patch_model):
        past = make_cache(patched(model), kind, 8)
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
    mask = left_padded(12, 0, 5)
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
    assert_same_layers(past, plain)


@pytest.mark.parametrize("fork", ["copied", "shared", "cropped"])
@torch.no_grad()
def test_two_caches_of_the_same_tokens(fork):
    model, ids = patch_model(make_model("llama")), make_ids(2, 16)
    others = torch.cat((ids[:, :10], make_ids(2, 6, seed=5)), dim=1)
    past = make_cache(model, "dynamic")
    parts(model, past, ids, ends=(9, 10))
    other = copy.deepcopy(past)
    if fork != "copied":  # the very same tensors
        for layer, mine in zip(other.layers, past.layers):
            layer.keys, layer.values = mine.keys, mine.values
    if fork == "cropped":
        model(make_ids(2, 1, seed=9), past_key_values=other)
        other.crop(-1)
    turns = [(past, ids, model(ids).logits), (other, others, model(others).logits)]
    for i in range(10, 16):
        for cache, tokens, expected in turns:
            got = model(tokens[:, i : i + 1], past_key_values=cache).logits
            assert_close(got, expected[:, i : i + 1], 1e-5)


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
    rows = {0: 16, 15: 16, 16: 32, 127: 128, 128: 160, 255: 256, 256: 320, 400: 448, 1000: 1024, 1024: 1280, 5000: 5120}
    for length, expected in rows.items():
        buffer = caches.new_buffer(torch.zeros(2, 3, 1, 4, dtype=torch.float16), length)
        assert buffer.shape == (2, 3, expected, 4) and buffer.dtype is torch.float16 and buffer.is_contiguous()


def stored():
    """A layer with 12 rows in buffers of 16, and these: (B, HKV, rows, D) = (2, 2, 16, 4)."""
    layer, buffers = DynamicLayer(), torch.randn(2, 2, 2, 16, 4).unbind()
    caches.store(layer, *(x[:, :, :12] for x in buffers), buffers[0])
    return layer, buffers


def test_a_buffer_is_used_to_its_last_row():
    layer, (buffer, values) = stored()
    assert layer.is_initialized and layer.dtype is torch.float32 and layer.device == buffer.device
    for tokens, kept in ((1, True), (4, True), (5, False)):
        keys, others = caches.buffers_of(layer, tokens)
        assert (keys.data_ptr() == buffer.data_ptr()) is (others.data_ptr() == values.data_ptr()) is kept
        assert keys.shape == others.shape == (2, 2, 16 if kept else 32, 4)
    for name in ("keys", "values"):  # one of the two is another's
        layer, (buffer, _) = stored()
        setattr(layer, name, getattr(layer, name)[:])
        keys, others = caches.buffers_of(layer, 1)
        assert keys.data_ptr() != buffer.data_ptr() and torch.equal(others[:, :, :12], layer.values)


VIEWS = {
    "other memory": lambda x: torch.randn(2, 2, 16, 4)[:, :, :12],
    "rows apart": lambda x: x.data.as_strided(x.shape, (128, 64, 5, 1)),
    "shorter": lambda x: x.data[:, :, :7],
    "fewer": lambda x: x.data[:1],
}
PLACES = [(name, view) for name in ("keys", "values") for view in ("other memory", "rows apart")]
PLACES += [("keys values", "shorter"), ("keys values", "fewer")]


@pytest.mark.parametrize(("names", "view"), PLACES)
def test_other_memory_under_the_same_tensor(names, view):
    """After `keys.data = view` the tensor is still the layer's, but the rows after it belong to another buffer."""
    layer, _ = stored()
    for name in names.split():
        x = getattr(layer, name)
        x.data = VIEWS[view](x)
    for buffer, x in zip(caches.buffers_of(layer, 1), (layer.keys, layer.values)):
        assert buffer.data_ptr() != x.data_ptr() and torch.equal(buffer[:, :, : x.shape[2]], x)


# Caches of a user's own: attention reads the keys and values that they return.
def halved(update, *args, **kwargs):
    """Half of the values, of those of the prompt too."""
    keys, values = update(*args, **kwargs)
    return keys, values / 2


def halving(cls):
    own = {"update": lambda self, *args, **kwargs: halved(cls.update, self, *args, **kwargs)}
    return type(f"Halving{cls.__name__}", (cls,), own)


def dynamic(model, *layers):
    past = make_cache(model, "dynamic")
    past.layers[len(past.layers) - len(layers) :] = layers
    return past


def with_update(past):
    past.update = functools.partial(halved, past.update)
    return past


Halving, HalvingStatic, Renamed = halving(DynamicLayer), halving(StaticLayer), type("Renamed", (DynamicLayer,), {})
FOREIGN = {  # by the reason of the module's own forward
    "of type HalvingStaticCache": lambda model: make_cache(model, halving(transformers.StaticCache)),
    "with layers of type HalvingDynamicLayer": lambda model: dynamic(model, Halving(), Halving()),
    "with layers of type HalvingStaticLayer": lambda model: dynamic(model, *(HalvingStatic(CAPACITY) for _ in "12")),
    "of type DynamicCache": lambda model: with_update(dynamic(model)),
    "with all layers of type HalvingDynamicLayer": lambda _: transformers.Cache(layer_class_to_replicate=Halving),
    "whose last layer is of type HalvingDynamicLayer": lambda model: dynamic(model, Halving()),
    "with layers of type Renamed": lambda model: dynamic(model, Renamed(), Renamed()),  # only exact types are served
    "of type RenamedCache": lambda _: type("RenamedCache", (transformers.DynamicCache,), {})(),
}


@pytest.mark.parametrize("kind", FOREIGN)
@torch.no_grad()
def test_a_cache_with_an_update_of_its_own(kind, calls):
    """In the prompt, in a step of one token, in one of several, and in a part that is longer than a step."""
    model, ids = make_model("llama"), make_ids(2, 53)
    expected = parts(model, FOREIGN[kind](model), ids)
    patch_model(model)
    with pytest.warns(UserWarning, match="a cache (of|with layers of) type .* is not served"):
        assert torch.equal(parts(model, FOREIGN[kind](model), ids), expected)
    assert not calls and all(kind.split()[-1] in str(row.own) for row in patch_report(model))


@pytest.mark.parametrize("of", [transformers.Cache, DynamicLayer], ids=["Cache", "DynamicLayer"])
@torch.no_grad()
def test_an_update_that_somebody_replaces_for_all(of, calls, monkeypatch):
    """Libraries that compress keys and values do this. The model may make the cache itself."""
    model, ids, own = make_model("llama"), make_ids(2, 9), of.update
    monkeypatch.setattr(of, "update", lambda *args, **kwargs: halved(own, *args, **kwargs))
    for make in (lambda: None, lambda: make_cache(model, "dynamic")):
        expected = unpatch_model(model)(ids, past_key_values=make()).logits
        with pytest.warns(UserWarning, match=r"\.update was replaced by .* is not served"):
            assert torch.equal(patch_model(model)(ids, past_key_values=make()).logits, expected)
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
