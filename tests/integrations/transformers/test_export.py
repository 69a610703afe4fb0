"""Patched models under torch.export in its default mode, saved, loaded, and run at other sizes."""

import pytest
import torch

from fused_rope_attn.integrations.transformers import patch_model
from tests.support.export import dimension, exported
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import assert_close

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"), pytest.mark.unpoisoned]


@pytest.mark.parametrize(
    ("name", "implementation", "is_padded", "kind"),
    [
        ("llama", "eager", False, "named"),
        ("llama", "sdpa", True, "named"),
        ("gpt_oss", "eager", True, "named"),
        ("deepseek_v3", "sdpa", False, "named"),
        ("llama4", "sdpa", True, "named"),
        ("mistral", "sdpa", True, "AUTO"),
        ("gemma3", "sdpa", True, "DYNAMIC"),
    ],
)
def test_export(name, implementation, is_padded, kind):
    """A program gives what the model gives without a patch, for batches and lengths other than those of the export."""
    model, batches = make_model(name), []
    model.config._attn_implementation = implementation
    for batch, length in ((3, 17), (2, 9), (4, 33)):
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[0, :5] = 0
        ids, inputs = make_ids(batch, length), {"use_cache": False, "attention_mask": mask if is_padded else None}
        batches.append((ids, inputs, mask != 0 if is_padded else slice(None), model(ids, **inputs).logits))
    axes = {0: dimension(kind, "b"), 1: dimension(kind, "n")}
    shapes = {"input_ids": axes, "use_cache": None, "attention_mask": axes if is_padded else None}
    ids, inputs, *_ = batches[0]
    program = exported(patch_model(model), (ids,), shapes, **inputs)
    for ids, inputs, present, logits in batches:
        assert_close(program(ids, **inputs).logits[present], logits[present], 1e-5)
