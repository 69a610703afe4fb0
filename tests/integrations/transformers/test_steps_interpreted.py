"""Steps of a patched model with the generation step's kernel in Triton's interpreter."""

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import patch_model, unpatch_model
from tests.support.hf_caches import make_cache, parts, steps
from tests.support.hf_models import WINDOW, make_ids, make_model
from tests.support.hf_runs import assert_close
from tests.support.internals import count_prepared_steps, forget_prepared_steps
from tests.support.marks import ignore_overflow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@ignore_overflow
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gemma2", "cohere", "gpt_oss", "smollm3"])
@torch.no_grad()
def test_in_the_interpreter(name, kind, interpreted_steps):
    """Windows, cap, pairs, sinks and layers that do not rotate; padding; one token and several."""
    model, ends = make_model(name), (WINDOW - 1, WINDOW + 2, WINDOW + 3)
    ids = make_ids(2, ends[-1])
    mask = (torch.arange(ends[-1]) >= torch.tensor([[0], [3]])).long()
    expected = parts(model, make_cache(model, kind), ids, mask, ends)
    got = parts(patch_model(model), make_cache(model, kind), ids, mask, ends)
    assert_close(got[mask.bool()], expected[mask.bool()], 1e-5)


@ignore_overflow
@torch.no_grad()
def test_steps_are_prepared_once(interpreted_steps):
    """The length of a dynamic cache is no part of the signature of a step's launches."""
    model, ids = patch_model(make_model("llama")), make_ids(1, 15)
    past = make_cache(model, "dynamic")
    model(ids[:, :9], past_key_values=past)
    forget_prepared_steps()
    steps(model, past, ids, 9)
    assert count_prepared_steps() == 1


@pytest.mark.unpoisoned
@ignore_overflow
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
    unpatch_model(model)
