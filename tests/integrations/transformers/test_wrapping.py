"""Wrappers around a model that was patched before: adapters, traces, devices without data."""

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, run

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_adapters_around_a_patched_model(calls):
    """PEFT puts its layers into the modules that are patched, and takes them out again when it merges."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model, ids = patch_model(make_model("llama")), make_ids(2, LENGTH)
    plain = run(model, ids)[0]
    calls.clear()
    model = peft.get_peft_model(model, config).eval()
    logits, grads = run(model, ids, grad=True, use_cache=False)
    assert calls == {"rope_attention": 2} and not torch.allclose(logits, plain, atol=0.01)
    unpatch_model(model)
    expected, expected_grads = run(model, ids, grad=True, use_cache=False)
    assert_close(logits, expected, 1e-5)
    assert grads.keys() == expected_grads.keys() and all("lora_" in name for name in grads)
    for name, grad in grads.items():
        assert_close(grad, expected_grads[name], 1e-4, name)
    merged = patch_model(model).merge_and_unload()
    assert_close(run(merged, ids)[0], expected, 1e-4)
    assert calls == {"rope_attention": 4} and len(patch_report(merged)) == 2


class Logits(torch.nn.Module):
    """Return a model's logits alone, because ``torch.jit.trace`` takes no other result."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.skipif(transformers.__version__ < "5", reason="its models cannot be traced, patched or not")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.unpoisoned
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_traced(name, implementation, calls):
    """A trace holds the model's own attention: TorchScript knows none of these kernels."""
    model, ids = make_model(name).requires_grad_(False), make_ids(2, LENGTH)
    model.config._attn_implementation = implementation
    mask = (torch.arange(LENGTH) >= torch.tensor([[0], [3]])).long()
    expected = model(ids, attention_mask=mask).logits
    with pytest.warns(UserWarning, match="patch_model: torch.jit.trace is not served"):
        traced = torch.jit.trace(Logits(patch_model(model)), (ids, mask), check_trace=False)
    assert_close(traced(ids, mask)[mask != 0], expected[mask != 0], 1e-5)
    assert_close(traced(ids[:, :-2], mask[:, :-2])[mask[:, :-2] != 0], expected[:, :-2][mask[:, :-2] != 0], 1e-5)
    calls.clear()
    assert_close(model(ids, attention_mask=mask).logits[mask != 0], expected[mask != 0], 1e-5)
    assert sum(calls.values()) == 2
