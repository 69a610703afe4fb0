"""Dynamic caches of a patched model grow in place, and no two of them share what they must not."""

import copy
import gc
import weakref

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import caches, families, patch_model
from tests.support.hf_caches import make_cache, steps
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


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
    assert 2 <= len(places) <= 2 * 5  # buffers of 16 rows more
    assert all(torch.equal(x, kept) for x, kept in seen)
    for layer, other in zip(past.layers, plain.layers):
        assert vars(layer).keys() - vars(other).keys() <= {"dtype"}  # which 5.24 no longer notes
        assert all(
            getattr(layer, name) == getattr(other, name) for name in vars(other) if name not in ("keys", "values")
        )
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
    """A cache set back to earlier tensors of its own: the rows after them are taken."""
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
def test_nothing_outlives_its_pass(monkeypatch):
    """Tables die with their pass, buffers with the tensors in them."""
    model, ids = patch_model(make_model("gemma3")), make_ids(2, 14)
    tables, own = [], families.Convention.half_widths

    def noted(*args):
        made = own(*args)
        tables.append([weakref.ref(x) for x in made])
        return made

    monkeypatch.setattr(families.Convention, "half_widths", noted)
    past = make_cache(model, "dynamic")
    model(ids[:, :9], past_key_values=past)
    steps(model, past, ids, 9)
    assert len(tables) == 6 * 2  # for each pass those of layers with a window, and those of layers without
    gc.collect()
    assert all(x() is None for pair in tables for x in pair)
    layer = past.layers[1]
    # Only the layer has tensors in the buffers, so dropping them frees the memory.
    assert not any(isinstance(x, torch.Tensor) for x in caches._known[layer])
    keys = weakref.ref(layer.keys)
    layer.keys = layer.values = None
    gc.collect()
    assert keys() is None
    known = len(caches._known)
    del past, layer
    gc.collect()
    assert len(caches._known) < known


def test_buffers_grow_by_a_fraction_of_their_rows():
    """By 16 rows at first, by an eighth at most twice over, and never by more than 256."""
    x = torch.zeros(2, 3, 1, 4, dtype=torch.float16)
    lengths = (0, 15, 16, 127, 128, 255, 256, 400, 1000, 1024, 3000, 5000)
    shapes = [caches.new_buffer(x, length).shape for length in lengths]
    assert [shape[2] for shape in shapes] == [16, 16, 32, 128, 160, 256, 320, 448, 1024, 1280, 3072, 5120]
    assert {(*shape[:2], shape[3]) for shape in shapes} == {(2, 3, 4)}
    buffer = caches.new_buffer(x, 20)
    assert buffer.dtype is torch.float16 and buffer.is_contiguous()


def test_a_room_is_used_to_its_last_row():
    layer = transformers.cache_utils.DynamicLayer()
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

    def run():
        past = make_cache(model, "dynamic")
        model(ids[:, :9], past_key_values=past)
        model(ids[:, 9:10], past_key_values=past)
        layer, rows = past.layers[0], 2 if part == "fewer" else 7
        model_ids, buffers = ids[:1] if part == "fewer" else ids, []
        for name in ("keys", "values"):
            x = getattr(layer, name)
            if part == "other":
                buffer = torch.full((2, *x.shape[1:2], 40, x.shape[3]), 3.0)
                buffer[:, :, : x.shape[2]] = x
                x.data = buffer[:, :, : x.shape[2]]
            elif part == "transposed":
                buffer = torch.full((2, 40, x.shape[1], x.shape[3]), 3.0)
                buffer[:, : x.shape[2]] = x.transpose(1, 2)
                x.data = buffer[:, : x.shape[2]].transpose(1, 2)
            else:
                buffer = x.data
                x.data = x.data[:, :, :rows] if part == "shorter" else x.data[:1]
            buffers.append((buffer, buffer.clone()))
        start = layer.keys.shape[2]
        logits = steps(model, past, model_ids[:, : start + 3], start)
        for buffer, before in buffers:
            assert torch.equal(buffer, before)
        return logits

    expected = run()
    patch_model(model)
    assert_close(run(), expected, 1e-5)
