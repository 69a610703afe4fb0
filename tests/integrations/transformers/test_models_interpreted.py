"""Patched models on the portable kernels in Triton's interpreter."""

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import patch_model, unpatch_model
from tests.support.hf_caches import make_cache, parts, steps
from tests.support.hf_models import WINDOW, make_ids, make_model
from tests.support.hf_runs import assert_close, assert_same
from tests.support.hf_vision_models import make_inputs, make_vision_model
from tests.support.internals import count_prepared_steps, forget_calls
from tests.support.marks import ignore_overflow

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), ignore_overflow]


@pytest.mark.parametrize("name", ["cohere", "deepseek_v3", "gemma2", "glm4", "gpt_oss", "llama4", "qwen3", "smollm3"])
def test_in_the_interpreter(name, interpreted_attention):
    """Windows, chunks, caps, pairs, sinks, norms, latent attention, layers that do not rotate; with padding."""
    ends = (WINDOW - 1, WINDOW + 2, WINDOW + 3)  # one token and several
    model, ids = make_model(name), make_ids(2, ends[-1])
    mask = (torch.arange(ends[-1]) >= torch.tensor([[0], [3]])).long()
    assert_same(model, ids, mask.bool(), grad=True, attention_mask=mask, use_cache=False)
    with torch.no_grad():
        for kind in ("dynamic", "static"):
            got = parts(patch_model(model), make_cache(model, kind), ids, mask, ends)
            expected = parts(unpatch_model(model), make_cache(model, kind), ids, mask, ends)
            assert_close(got[mask.bool()], expected[mask.bool()], 1e-5)


def packed_positions():
    places = torch.cat([torch.arange(length) for length in (5, 1, 6)])[None]
    return {"input_ids": make_ids(1, 12), "position_ids": torch.stack((places, places // 2, places % 3, places // 3))}


@pytest.mark.parametrize(
    ("name", "make_them"),
    [
        ("qwen2_vl", lambda: make_inputs("qwen2_vl", padding=(3, 0))),  # positions of three kinds
        ("qwen3_vl", packed_positions),
        ("gemma3", lambda: make_inputs("gemma3", padding=(3, 0))),  # images see both ways; windows are in masks
    ],
)
def test_images(name, make_them, interpreted_attention):
    model, inputs = make_vision_model(name, num_hidden_layers=1 if name != "gemma3" else 2), make_them()
    present = inputs["attention_mask"].bool() if "attention_mask" in inputs else None
    getattr(model.model, "vision_tower", torch.nn.Module()).requires_grad_(False)
    ids = inputs.pop("input_ids")
    assert_same(model, ids, present, name == "gemma3", unsupported="skip", use_cache=False, **inputs)


@torch.no_grad()
def test_steps_are_prepared_once(interpreted_steps):
    """The length of a dynamic cache is no part of the signature of a step's launches."""
    model, ids = patch_model(make_model("llama")), make_ids(1, 15)
    past = make_cache(model, "dynamic")
    model(ids[:, :9], past_key_values=past)
    forget_calls()
    steps(model, past, ids, 9)
    assert count_prepared_steps() == 1


@pytest.mark.unpoisoned
@torch.no_grad()
def test_compiled_by_the_user(interpreted_steps):
    """Without ``generate``: the batch is described, and the cache counted, inside the graph, which has no break."""
    model, ids = make_model("llama"), make_ids(2, 9)
    expected = parts(model, make_cache(model, "static"), ids, ends=(6, 7, 8, 9))
    past = make_cache(patch_model(model), "static")
    first = parts(model, past, ids, ends=(6,))
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = []
    for i in range(6, 9):
        # 4.57 would look for the cache's length in its rows, which no graph can.
        options = {"cache_position": torch.tensor([i])} if transformers.__version__ < "5" else {}
        logits.append(step(ids[:, i : i + 1], past_key_values=past, **options).logits)
    assert_close(torch.cat((first, *logits), dim=1), expected, 1e-5)
    assert [int(layer.get_seq_length()) for layer in past.layers] == [9, 9]
    torch._dynamo.reset()
