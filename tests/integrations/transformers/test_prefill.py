"""Prompts in several chunks, and generation with a static cache in one graph."""

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import patch_model, unpatch_model
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_chunked_prefill_and_crop(calls):
    """Several tokens at a time onto a cache that holds others, padded and not."""
    model, ids = make_model("gemma3"), make_ids(2, 30)
    for mask in (None, (torch.arange(30) >= torch.tensor([[0], [5]])).long()):

        def chunks(mask=mask):
            past, logits = transformers.DynamicCache(config=model.config), []
            for start, end in ((0, 10), (10, 17), (17, 18), (18, 30)):
                part = None if mask is None else mask[:, :end]
                logits.append(model(ids[:, start:end], attention_mask=part, past_key_values=past).logits)
            return torch.cat(logits, dim=1)

        expected = chunks(mask)
        patch_model(model)
        present = slice(None) if mask is None else mask.bool()
        assert_close(chunks(mask)[present], expected[present], 1e-5)
        unpatch_model(model)
    assert calls == {"rope_attention": 16}


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
