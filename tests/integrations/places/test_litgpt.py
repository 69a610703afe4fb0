"""`patch_model` for LitGPT: training, prompts, steps and text of small models with LitGPT's own forward as reference.

Run by `make test-places`, in an environment that has LitGPT.
"""

import copy
import runpy
from collections import Counter
from functools import partial

import pytest
import torch

pytest.importorskip("litgpt", reason="litgpt is not installed: make test-places")

import litgpt.__main__
from litgpt.adapter import GPT as AdapterGPT, Config as AdapterConfig
from litgpt.config import Config
from litgpt.generate.base import generate
from litgpt.lora import GPT as LoraGPT, Config as LoraConfig
from litgpt.model import GPT, CausalSelfAttention

from fused_rope_attn.integrations import litgpt as integration

pytestmark = pytest.mark.unpoisoned
assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
ATTENTION, STEP, OWN = "rope_attention", "rope_attention_with_kvcache", "_own_forward"
SIZES = {"n_layer": 2, "n_embd": 64, "padded_vocab_size": 96, "block_size": 64}
GROUPED = {"n_head": 4, "n_query_groups": 2, "head_size": 16, "intermediate_size": 96}
# LitGPT's own configurations, cut to a few small layers.
CONFIGS = {
    "pythia-14m": {},
    "Llama-3.2-1B": GROUPED,
    "Qwen3-0.6B": GROUPED,
    "Gemma-2-2b": GROUPED | {"sliding_window_size": 7, "attention_scores_scalar": 20},
    "Gemma-3-1b-it": GROUPED | {"sliding_window_size": 7, "attention_scores_scalar": 20},
    "OLMo-2-1124-7B": GROUPED | {"n_query_groups": 4},
}


def make(name, seed=0, kind=(GPT, Config), **options):
    model, config = kind
    torch.manual_seed(seed)
    made = model(config.from_name(name, **SIZES, **CONFIGS[name], **options))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def ids(rows=3, length=29):
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def patched(monkeypatch):
    def patch(model):
        fused, counts = integration.patch_model(copy.deepcopy(model)), Counter()
        functions = {name: getattr(integration, name) for name in (ATTENTION, STEP, OWN)}
        for name, function in functions.items():

            def counted(*args, name=name, function=function, **kwargs):
                counts[name] += 1
                return function(*args, **kwargs)

            monkeypatch.setattr(integration, name, counted)
        return fused, counts

    return patch


@pytest.mark.parametrize("name", CONFIGS)
def test_training(name, patched):
    own = make(name)
    fused, counts = patched(own)
    logits, expected = fused(ids()), own(ids())
    assert_close(logits, expected)
    do = torch.randn_like(logits)
    logits.backward(do), expected.backward(do)
    for parameter, reference in zip(fused.parameters(), own.parameters()):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-3, atol=1e-3 * reference.grad.abs().max())
    assert counts == {ATTENTION: 2}


@pytest.mark.parametrize("name", CONFIGS)
def test_generation(name, patched):
    """Greedy text of LitGPT's own loop: a prompt, then steps onto its cache, or its forward on rings of windows, and of
    capped scores."""
    own, texts = make(name).eval(), []
    fused, counts = patched(own)
    windows = sum(block.attn.apply_sliding_window_attention for block in own.transformer.h)
    for model in (own, fused):
        model.set_kv_cache(batch_size=1)
        texts.append(generate(model, ids(1, 6)[0], max_returned_tokens=20, temperature=0.0, top_k=1))
    assert torch.equal(*texts)
    capped = own.config.attention_logit_softcapping is not None
    expected = {OWN: 14 * 2} if capped else {ATTENTION: 2, STEP: 13 * (2 - windows), OWN: 13 * windows}
    assert counts == {function: count for function, count in expected.items() if count}


def test_a_batch_with_positions_of_its_own(patched):
    """Steps at another position in each row, and a chunk, which takes the own forward on the same cache."""
    own = make("Llama-3.2-1B").eval()
    (fused, counts), tokens, results = patched(own), ids(2, 12), []
    for model in (own, fused):
        model.set_kv_cache(batch_size=2)
        with torch.no_grad():
            model(tokens[:, :5], torch.arange(5), input_pos_maxp1=5)
            chunk = model(tokens[:, 5:8], torch.arange(5, 8), input_pos_maxp1=8)
            results.append(torch.cat((chunk, model(tokens[:, 8:9], torch.tensor([[8], [4]]))), 1))
    assert_close(*results)
    assert counts == {ATTENTION: 2, OWN: 2, STEP: 2}


def test_lora_is_served_and_unpatching_is_exact(patched):
    lora = {"lora_r": 4, "lora_alpha": 8, "lora_query": True, "lora_value": True}
    own = make("Llama-3.2-1B", kind=(LoraGPT, LoraConfig), **lora).eval()
    (model, counts), expected = patched(own), own(ids())
    assert_close(model(ids()), expected)
    assert counts == {ATTENTION: 2} and all("forward" in block.attn.__dict__ for block in model.transformer.h)
    integration.unpatch_model(model)
    assert [module.__dict__.keys() for module in model.modules()] == [x.__dict__.keys() for x in own.modules()]
    assert torch.equal(model(ids()), expected)


def test_attention_of_adapters_is_refused():
    model = make("Llama-3.2-1B", kind=(AdapterGPT, AdapterConfig))
    with pytest.raises(NotImplementedError, match="litgpt.adapter.*has a scaled_dot_product_attention of its own"):
        integration.patch_model(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    with pytest.raises(NotImplementedError, match="no attention module of LitGPT"):
        integration.patch_model(torch.nn.Linear(2, 2))


def test_compilation_in_one_graph():
    model = integration.patch_model(make("Llama-3.2-1B"))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(ids()), model(ids()), rtol=1e-5, atol=1e-5)


def test_the_command_runs_that_of_litgpt(monkeypatch):
    model, seen = make("Llama-3.2-1B"), []
    expected = model(ids())

    def main():
        seen.append(model(ids()))
        with pytest.raises(NotImplementedError, match="scaled_dot_product_attention of its own"):
            make("Llama-3.2-1B", kind=(AdapterGPT, AdapterConfig))(ids())

    monkeypatch.setattr(litgpt.__main__, "main", main)
    monkeypatch.setattr(CausalSelfAttention, "forward", CausalSelfAttention.forward)  # put back after the test
    runpy.run_module("fused_rope_attn.integrations.litgpt", run_name="__main__")
    assert CausalSelfAttention.forward.__name__ == "_forward_or_refuse"
    assert_close(seen[0], expected)
