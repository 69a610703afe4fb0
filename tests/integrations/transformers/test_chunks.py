"""Attention within chunks (Llama 4): prompts of several chunks, steps across their borders, and what is not served."""

import pytest
import torch
import transformers
from packaging.version import Version

from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from fused_rope_attn.integrations.transformers.obstacles import lasting_obstacle
from tests.support.hf_models import WINDOW, attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
PROMPT, STEPS = WINDOW + 3, 2 * WINDOW + 2


def own_reasons(model):
    return {reason for row in patch_report(model) for reason in row.own}


def test_chunks_hide_keys():
    """The tests of this file compare with a model whose chunks matter."""
    ids = make_ids(2, LENGTH)
    whole = run(make_model("llama4", attention_chunk_size=LENGTH), ids, use_cache=False)[0]
    assert (run(make_model("llama4"), ids, use_cache=False)[0] - whole).abs().max() > 0.1


@pytest.mark.parametrize("length", [WINDOW, WINDOW + 1, LENGTH])
def test_training_with_sdpa(length, calls):
    model, ids = make_model("llama4"), make_ids(3, length)
    model.set_attn_implementation("sdpa")
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, -4:] = 0, 0
    assert_same(model, ids, mask.bool(), grad=True, attention_mask=mask, use_cache=False)
    assert_same(model, ids, grad=True, use_cache=False)
    assert calls == {"rope_attention": 4} and not own_reasons(model)


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("cache", ["layers by type", "equal layers", "static"])
def test_steps_across_borders(cache, padding, calls):
    """The chunks of a row begin at its first token, in the cache too."""
    model, ids = make_model("llama4"), make_ids(2, PROMPT + STEPS)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0

    def logits():
        if cache == "static":
            options = {"max_new_tokens": STEPS, "do_sample": False, "cache_implementation": "static"}
            options |= {"return_dict_in_generate": True, "output_scores": True}
            out = model.generate(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], **options)
            model.__dict__.pop("_cache", None)
            return torch.stack(out.scores)
        past = transformers.DynamicCache(**({"config": model.config} if cache == "layers by type" else {}))
        ends = [PROMPT, *range(PROMPT + 1, PROMPT + STEPS + 1)]
        starts = [0, *ends]
        outs = [
            model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=past, use_cache=True).logits[:, -1]
            for a, b in zip(starts, ends)
        ]
        return torch.stack(outs)

    expected = logits()
    patch_model(model)
    assert_close(logits(), expected, 1e-5)
    assert not own_reasons(model)
    steps = STEPS - 1 if cache == "static" else STEPS
    assert calls == {"rope_attention": 2, "rope_attention_with_kvcache": 2 * steps}


@torch.no_grad()
def test_several_tokens_onto_a_cache(calls):
    model, ids = make_model("llama4"), make_ids(1, LENGTH)

    def logits(first):
        past = transformers.DynamicCache(config=model.config)
        parts = ids[:, :first], ids[:, first:LENGTH]
        return torch.cat([model(part, past_key_values=past, use_cache=True).logits for part in parts], 1)

    expected = logits(PROMPT)
    patch_model(model)
    with pytest.warns(UserWarning, match="several tokens in chunks"):
        assert_close(logits(PROMPT), expected, 1e-5)
    assert own_reasons(model) == {"several tokens in chunks with a cache that holds others"}


def test_packed_documents(calls):
    """The chunks of a document begin at its first token."""
    model = make_model("llama4")
    positions = torch.cat([torch.arange(n) for n in (3, 5)])[None]
    assert_same(model, make_ids(1, 8), position_ids=positions, use_cache=False)
    assert calls == {"rope_attention_varlen": 2}
    calls.clear()
    rows = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((11, 1, 13), (2, 23))])
    ids = make_ids(2, 25)
    if Version(transformers.__version__) >= Version("5.23"):
        assert_same(model, ids, grad=True, position_ids=rows, use_cache=False)
        assert calls == {"rope_attention": 1, "rope_attention_varlen": 1}
    else:
        expected = run(unpatch_model(model), ids, position_ids=rows, use_cache=False)[0]
        with pytest.warns(UserWarning, match="packed sequences in chunks"):
            assert torch.equal(run(patch_model(model), ids, position_ids=rows, use_cache=False)[0], expected)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="chunks are not counted by document")
@pytest.mark.parametrize("use_cache", [None, False])
def test_chunks_of_documents_are_counted_by_positions(use_cache, calls):
    """A document that begins with position 3 has five tokens in its first chunk of 8. A cache hides the documents."""
    model, ids = make_model("llama4"), make_ids(1, LENGTH)
    for first, second in ((0, 3), (5, 3), (0, 14), (0.5, 3.5)):
        position_ids = torch.cat((torch.arange(12) + first, torch.arange(LENGTH - 12) + second))[None]
        assert_same(model, ids, position_ids=position_ids, use_cache=use_cache)
    assert calls == ({"rope_attention": 8} if use_cache is None else {"rope_attention": 4, "rope_attention_varlen": 4})


@torch.no_grad()
def test_static_caches_of_chunks_alone():
    """Such a cache stops counting on the device when a chunk is full."""
    model = make_model("llama4", layer_types=["chunked_attention"] * 2)
    options = {"max_new_tokens": STEPS, "do_sample": False, "cache_implementation": "static"}
    ids = make_ids(2, PROMPT)
    expected = model.generate(ids, **options)
    model.__dict__.pop("_cache", None)
    assert torch.equal(patch_model(model).generate(ids, **options), expected)


def test_a_layer_without_its_model():
    model = make_model("llama4")
    model.set_attn_implementation("sdpa")
    layer = patch_model(model).model.layers[0].self_attn
    x, angles = torch.randn(1, LENGTH, 64), torch.polar(torch.ones(1, LENGTH, 8), torch.rand(1, LENGTH, 8))
    with pytest.warns(UserWarning, match="a window or chunks called without a mask"):
        layer(x, position_embeddings=angles, attention_mask=None)


def test_continuous_batching():
    model = patch_model(make_model("llama4"))
    reason = lasting_obstacle(attentions_of(model), model.config)
    assert reason == "continuous batching of attention in chunks"
    model = patch_model(make_model("llama"))
    assert lasting_obstacle(attentions_of(model), model.config) == ""
