"""The attention of one patched module: its calls of the kernels, and the values that it leaves for the next modules."""

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicLayer

from fused_rope_attn.integrations.transformers import attention, caches, patch_model, rotations, unpatch_model
from fused_rope_attn.integrations.transformers.batch import describe
from fused_rope_attn.integrations.transformers.obstacles import Pass
from tests.support.hf_models import SIZES, WINDOW, attentions_of, make_ids, make_model
from tests.support.hf_runs import assert_close, assert_same, make_cache, noted, parts
from tests.support.hf_vision_models import make_vision_model
from tests.support.rotation import normal


@pytest.fixture(scope="module")
def llama():
    return patch_model(make_model("llama")).requires_grad_(False)


def batch_of(model, **given):
    return describe(Pass(attentions_of(model), model.config, {"input_ids": torch.zeros(2, 5)} | given))


def states(tokens=5, dtype=torch.float32):
    return normal(2, tokens, SIZES["hidden_size"], dtype=dtype)


def angles(rows, dtype=torch.float32):
    x = normal(1, rows, 8, seed=4).repeat_interleave(2, -1)
    return x.cos().to(dtype), x.sin().to(dtype)


def test_as_many_tables_are_kept_as_a_pass_may_have(llama):
    """Eight, and all of them are given up where something makes new ones for every layer."""
    module, batch, counts = attentions_of(llama)[0], batch_of(llama), []
    for _ in range(10):
        for embeddings in [angles(5)] * 2:
            module(states(), position_embeddings=embeddings, **{attention.BATCH: batch})
        counts.append(len(batch.kept.tables))
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]


def kept_tables(module, batch, hidden, embeddings):
    module(hidden, position_embeddings=embeddings, **{attention.BATCH: batch})
    return next(iter(batch.kept.tables.values()))[0]


@pytest.mark.parametrize(("given", "kept"), [("float16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")])
def test_dtypes_of_tables(given, kept):
    """Attention in bfloat16 takes it and float32; autocast may have given q another dtype than the model's."""
    llama, embeddings = patch_model(make_model("llama")).bfloat16(), angles(5, getattr(torch, given))
    tables = kept_tables(attentions_of(llama)[0], batch_of(llama), states(dtype=torch.bfloat16), embeddings)
    assert [table.dtype for table in tables.arrays] == [getattr(torch, kept)] * 2


def test_tables_of_three_kinds_of_positions(llama):
    """transformers 4.57 has each module of Qwen2-VL choose: 4 columns in time, 2 in height, 2 in width."""
    module = patch_model(make_vision_model("qwen2_vl"), unsupported="skip").model.language_model.layers[0].self_attn
    x = torch.arange(8.0) / 10 + torch.arange(3.0).view(3, 1, 1, 1) + torch.zeros(5, 1)
    x = torch.cat((x, x), -1)
    tables = kept_tables(module, batch_of(llama), states(), (x.cos(), x.sin()))
    chosen = torch.tensor([0.0, 0.1, 0.2, 0.3, 1.4, 1.5, 2.6, 2.7]).expand(1, 5, 8)
    for table, expected in zip(tables.arrays, (chosen.cos(), chosen.sin())):
        assert_close(table, expected, 1e-6)


NO_POSITIONS = ("cohere2", "exaone4", "llama4-plain", "smollm3")  # in the second of two layers


@pytest.mark.parametrize("name", [*NO_POSITIONS, "qwen3"])
def test_attention_without_tables(name, monkeypatch):
    """None, and not tables of angle 0: in a layer without positions in training, in a prompt and in a step of one
    token, and in every layer in a step of several tokens, which are normed and rotated before it."""
    made = [noted(monkeypatch, attention, each) for each in ("rope_attention", "rope_attention_with_kvcache")]
    model, ids, ends = make_model(name), make_ids(2, WINDOW + 4), (WINDOW + 1, WINDOW + 2, WINDOW + 4)
    assert_same(model, ids, grad=True, use_cache=False)
    with torch.no_grad():
        got = parts(model, make_cache(model, "dynamic"), ids, ends=ends)
        assert_close(got, parts(unpatch_model(model), make_cache(model, "dynamic"), ids, ends=ends), 1e-5)
    given = [[x is not None for x in args[3:5]] for calls in made for args, _ in calls]
    by_layer = [[True] * 2, [name not in NO_POSITIONS] * 2]
    assert given[:6] == by_layer * 3 and not any(map(any, given[6:]))
    assert len(given) == (6 if name.startswith("llama4") else 8)  # its own attention takes parts in chunks


@pytest.mark.parametrize("gradients", [True, False])  # they are switched on, but no tensor wants one
@pytest.mark.parametrize("cache", ["described", "bare"])
def test_a_prompt_leaves_free_rows_after_it(llama, cache, gradients, monkeypatch):
    """So that the first step writes its token only. A cache that has no layers yet makes them itself."""
    updates, ids = noted(monkeypatch, DynamicLayer, "update"), make_ids(1, 302)
    past = transformers.DynamicCache(**({"config": llama.config} if cache == "described" else {}))
    with torch.set_grad_enabled(gradients):
        logits = parts(llama, past, ids, ends=(300, 301, 302))
    assert_close(logits, llama(ids).logits, 1e-5)
    assert len(updates) == (0 if cache == "described" else 2)


@pytest.mark.parametrize(("name", "weight"), [("llama", "k_proj"), ("llama", "v_proj"), ("qwen3", "q_norm")])
def test_gradients_of_one_parameter_through_a_cache(name, weight, calls, monkeypatch):
    """The kernel that writes in place has no gradient, so a gradient of the keys or of the values alone avoids it."""
    updates = noted(monkeypatch, DynamicLayer, "update")
    model, ids = make_model(name, use_sliding_window=False).requires_grad_(False), make_ids(1, 8)
    parameter = getattr(attentions_of(model)[1], weight).weight.requires_grad_(True)

    def gradient():
        past = make_cache(model, "dynamic")
        updates.clear()
        parts(model, past, ids, ends=(7, 8))[:, 7:].square().sum().backward()
        found, parameter.grad = parameter.grad, None
        return found, [args[0] for args, _ in updates], past.layers[1]

    expected, *_ = gradient()
    patch_model(model)
    found, updated, layer = gradient()
    assert_close(found, expected, 1e-4)
    # q and k are normed together.
    assert (layer.keys.requires_grad, layer.values.requires_grad) == (weight != "v_proj", weight == "v_proj")
    assert set(updated) == {layer}
    assert calls == {"rope_attention": 3, "rope_attention_with_kvcache": 1}


def test_where_to_write_is_told_to_caches_that_ask_for_it(llama, monkeypatch):
    """Static caches of transformers 4.57 do; no place is named where the decoder was told none."""
    told = noted(monkeypatch, transformers.Cache, "update")
    monkeypatch.setattr(caches, "may_be_written", lambda past: False)  # as of a cache that is offloaded
    module, past = attentions_of(llama)[0], transformers.DynamicCache(config=llama.config)
    for tokens in (5, 1):
        for place in (None, torch.arange(tokens)):
            described = batch_of(llama, input_ids=torch.zeros(2, tokens), past_key_values=past)
            given = {"position_embeddings": angles(tokens), "past_key_values": past, "cache_position": place}
            module(states(tokens), **given, **{attention.BATCH: described})
            assert told.pop()[0][4:] == (() if place is None else ({"cache_position": place},)) and not told


@torch.no_grad()
@pytest.mark.parametrize(("heads_kv", "most"), [(1, 16), (2, 32), (4, 64)])
def test_as_many_tokens_as_a_step_takes(heads_kv, most, calls, monkeypatch):
    """64 rows of a cache's head: its query heads times the new tokens. One token is rotated by the step; several are
    rotated before, by a kernel of their own, once in each layer."""
    model = patch_model(make_model("llama", num_key_value_heads=heads_kv, num_hidden_layers=1))
    launches = noted(monkeypatch, rotations, "apply_rope_qk")
    for tokens, before in ((1, 0), (most, 1), (most + 1, 2)):
        parts(model, make_cache(model, "dynamic"), make_ids(3, 4 + tokens), ends=(4, 4 + tokens))
        assert len(launches) == before
    assert calls == {"rope_attention": 4, "rope_attention_with_kvcache": 2}


class Stubborn(torch.nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@torch.no_grad()
def test_autocast_beside_a_cache_and_projections_in_float32(calls):
    """The step's operator would cast q, and the cache stays what it is."""
    model, ids = make_model("llama"), make_ids(2, 9)
    for module in attentions_of(model):
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(module, name).__class__ = Stubborn
    expected = model(ids).logits
    past = make_cache(patch_model(model), "dynamic")
    model(ids[:, :8], past_key_values=past)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(model(ids[:, 8:], past_key_values=past).logits.float(), expected[:, 8:], 0.05)
    assert calls == {"rope_attention": 4}


@torch.no_grad()
@pytest.mark.parametrize("held", [3, 7])
def test_a_layer_that_holds_another_number_of_tokens(llama, held):
    """Than the first one does, which counts for the pass: nothing that it holds is written over."""
    past = make_cache(llama, "dynamic")
    for i, tokens in enumerate((5, held)):
        x = torch.randn(2, 2, tokens, 16, generator=torch.Generator().manual_seed(i))
        past.update(x, -x, i)
    before = past.layers[1].keys.clone()
    llama(make_ids(2, 1), past_key_values=past)
    after = past.layers[1].keys
    assert past.layers[0].keys.shape[2] == 6 and after.shape[2] == held + 1
    assert torch.equal(after[:, :, :held], before) and torch.equal(past.layers[1].values[:, :, :held], -before)
