"""Patched models under torch.export in its default mode, saved, loaded, and run at other sizes."""

import itertools

import pytest
import torch

from fused_rope_attn.integrations.transformers import patch_model
from tests.support.export import dimension, exported
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.unpoisoned,
]
LLAMA = [("llama", *row, "named") for row in itertools.product(("eager", "sdpa"), (False, True))]
OTHERS = [
    ("gemma3", "sdpa", True, "named"),
    ("gpt_oss", "eager", True, "named"),
    ("deepseek_v3", "sdpa", False, "named"),
    ("llama4", "sdpa", True, "named"),
    ("mistral", "sdpa", True, "AUTO"),
    ("mistral", "sdpa", True, "DYNAMIC"),
]


@pytest.mark.parametrize(("name", "implementation", "is_padded", "kind"), LLAMA + OTHERS)
def test_export(name, implementation, is_padded, kind):
    """A program gives what the model gives without a patch, for batches and lengths other than those of the export."""

    def make(batch, length):
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[0, :5] = 0
        return make_ids(batch, length), {"use_cache": False, "attention_mask": mask if is_padded else None}

    model = make_model(name)
    model.config._attn_implementation = implementation
    batches = [make(*size) for size in ((3, 17), (2, 9), (4, 33))]
    expected = [model(ids, **inputs).logits for ids, inputs in batches]
    axes = {0: dimension(kind, "b"), 1: dimension(kind, "n")}
    shapes = {"input_ids": axes, "use_cache": None, "attention_mask": axes if is_padded else None}
    ids, inputs = batches[0]
    program = exported(patch_model(model), (ids,), shapes, **inputs)
    for (ids, inputs), logits in zip(batches, expected):
        present = slice(None) if inputs["attention_mask"] is None else inputs["attention_mask"] != 0
        assert_close(program(ids, **inputs).logits[present], logits[present], 1e-5)
