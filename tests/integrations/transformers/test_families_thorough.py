"""`patch_model` on a tiny model for every peculiarity, float32 on the CPU: the unpatched model is the reference."""

from collections import Counter

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import patch_model, unpatch_model
from tests.support.hf_models import THOROUGH, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
every_model = pytest.mark.parametrize("name", THOROUGH)


@every_model
def test_training(name, calls):
    model = make_model(name).train()
    assert_same(model, make_ids(2, LENGTH), grad=True, use_cache=False)
    assert calls == {"rope_attention": 2}


@every_model
def test_padding(name, calls):
    model = make_model(name)
    ids, mask = make_ids(3, LENGTH), torch.ones((3, LENGTH), dtype=torch.int64)
    mask[1, :7] = 0
    mask[2, :20] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert_same(model, ids, mask.bool(), grad=True, attention_mask=mask, position_ids=positions, use_cache=False)
    assert_same(model, ids, mask.bool(), attention_mask=mask)  # positions count padding too, and with a cache
    mask = mask.flip(1)
    assert_same(model, ids, mask.bool(), attention_mask=mask, use_cache=False)
    mask[2, 0] = 0  # both sides
    assert_same(model, ids, mask.bool(), attention_mask=mask.bool(), use_cache=False)
    assert calls == {"rope_attention": 8}


def generate(model, ids, mask, **options):
    options = {
        "max_new_tokens": 14,
        "do_sample": False,
        "output_scores": True,
        "return_dict_in_generate": True,
    } | options
    out = model.generate(ids, attention_mask=mask, **options)
    return out.sequences, torch.stack(out.scores)


@every_model
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(name, cache, calls):
    model = make_model(name)
    ids, mask = make_ids(3, 13), torch.ones((3, 13), dtype=torch.int64)
    mask[1, :5], mask[2, :10] = 0, 0
    ids = ids.masked_fill(mask == 0, 0)
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    for rows, width in ((slice(3), 13), (slice(1), 4)):  # padded on the left; a prompt shorter than the window
        tokens, scores = generate(model, ids[rows, -width:], mask[rows, -width:], **options)
        patched_tokens, patched_scores = generate(
            patch_model(model), ids[rows, -width:], mask[rows, -width:], **options
        )
        assert torch.equal(tokens, patched_tokens)
        assert_close(patched_scores, scores, 1e-5, "scores")
        unpatch_model(model)
    # Two prompts, and the steps after them. transformers 4.57 gives the patched model the unpatched one's static cache,
    # and its layers without a window know only on the device that it was emptied: they take the prompts as steps.
    emptied = 0
    if cache == "static" and transformers.__version__ < "5":
        emptied = 2 * sum(not layer.is_sliding for layer in model._cache.layers)
    steps = 2 * 2 * 13 + emptied
    assert Counter(calls) == Counter({"rope_attention": 2 * 2 - emptied, "rope_attention_with_kvcache": steps})


@every_model
def test_beams(name, calls):
    model = make_model(name)
    ids, mask = make_ids(2, 9), torch.ones((2, 9), dtype=torch.int64)
    mask[1, :4] = 0
    options = {"num_beams": 3, "max_new_tokens": 6, "output_scores": False}
    expected = model.generate(ids, attention_mask=mask, do_sample=False, num_beams=3, max_new_tokens=6)
    patched = patch_model(model).generate(ids, attention_mask=mask, do_sample=False, num_beams=3, max_new_tokens=6)
    assert torch.equal(expected, patched)
    assert calls == {"rope_attention": 2, "rope_attention_with_kvcache": 2 * (options["max_new_tokens"] - 1)}
