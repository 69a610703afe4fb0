"""Patched models on the portable kernels in Triton's interpreter."""

import pytest
import torch

from fused_rope_attn.integrations.transformers import unpatch_model
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import assert_same
from tests.support.marks import ignore_overflow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@ignore_overflow
@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2", "glm4", "gpt_oss", "llama4", "qwen3"])
def test_in_the_interpreter(name, interpreted_attention):
    model, ids = make_model(name), make_ids(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    assert_same(model, ids, mask.bool(), grad=True, attention_mask=mask, use_cache=False)
    options = {"attention_mask": mask, "max_new_tokens": 2, "do_sample": False, "cache_implementation": "static"}
    patched = model.generate(ids, **options)
    assert torch.equal(patched, unpatch_model(model).generate(ids, **options))
