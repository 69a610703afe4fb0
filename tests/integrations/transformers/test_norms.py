"""Norms of heads that the kernels compute with the rotation, and when a module's own norms run instead."""

import importlib

import peft
import pytest
import torch
from torch import nn

from fused_rope_attn import apply_rope_qk
from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from fused_rope_attn.integrations.transformers.rotations import RMS_NORMS, head_norms, unfit_for
from tests.support.hf_models import MODELS, attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same, run


def make_norm(name, head_dim=24, seed=0):
    prefix = "" if name.startswith(("torch.", "liger")) else "transformers.models."
    module, _, cls = (prefix + name).rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as error:
        pytest.skip(str(error))
    norm = cls(head_dim, eps=1e-3)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(seed))
    return norm


def fused_of(model):
    return [row.norms for row in patch_report(model)]


@pytest.mark.parametrize("name", RMS_NORMS)
def test_every_class_computes_what_the_kernels_do(name):
    pair = make_norm(name), make_norm(name, seed=1)
    found = head_norms(*pair)
    if name.startswith("liger"):
        assert (found.norm_eps, found.norm_offset, found.keeps_dtype) == (1e-3, 0.0, True)
        return  # its kernel needs a GPU
    x = 0.1 * torch.randn(2, 3, 4, 24, generator=torch.Generator().manual_seed(2))
    still = torch.ones(4, 1), torch.zeros(4, 1)
    for norm, normed in zip(pair, apply_rope_qk(x, x, *still, **found.options)):
        assert_close(normed, norm(x), 1e-6)
    mixed = pair[0](x.bfloat16())
    # PyTorch's own class keeps it too, but not by its documentation.
    assert (mixed.dtype is torch.bfloat16) is (found.keeps_dtype or name.startswith("torch."))
    assert (unfit_for(found, x.bfloat16(), cached=False) == "") is found.keeps_dtype


def test_families_whose_norms_are_fused():
    """All that norm heads by a root mean square, and no others; OLMo's norms are of whole rows."""
    own = {"cohere-norm": "its own: q_norm is CohereLayerNorm", "phi": "its own: q_norm is LayerNorm"}
    normed = 0
    for name in (name for name in MODELS if name.startswith(("qwen3", "gemma3", "olmo", "phi", "cohere", "lfm2"))):
        model = patch_model(make_model(name))
        for module, said in zip(attentions_of(model), fused_of(model)):
            fused = "fused" if type(module).__name__.startswith(("Qwen3", "Gemma3", "Lfm2")) else ""
            assert said.startswith(own[name]) if name in own else said == fused
            normed += said == "fused"
    assert normed >= 6


@torch.no_grad()
def test_norms_of_another_dtype():
    """Float32 norms of Qwen 3 in a bfloat16 model give float32 heads: where autocast does not undo it, they run."""
    model, ids = make_model("qwen3"), make_ids(1, 9)
    exact = run(model, ids)[0]
    patch_model(model)
    with torch.autocast("cpu", torch.bfloat16):
        fused = model(ids, use_cache=False).logits.float()
        assert fused_of(model) == ["fused"] * 2
        past = model(ids).past_key_values
    assert_close(fused, exact, 0.1)
    reason = "its own: norms that make bfloat16 heads float32"
    assert fused_of(model) == [reason] * 2
    with torch.autocast("cpu", torch.bfloat16):
        expected = unpatch_model(model)(ids).past_key_values
    for layer, other in zip(past.layers, expected.layers):
        assert layer.keys.dtype is other.keys.dtype is torch.float32
        assert_close(layer.keys, other.keys, 0.05)
    half = head_norms(*(nn.RMSNorm(8, eps=1e-6, dtype=torch.float16) for _ in "qk"))
    q = torch.empty(1, 2, 3, 8, dtype=torch.bfloat16)
    assert unfit_for(half, q, False) == "weights in float16 for heads in bfloat16"
    assert unfit_for(half, q.half()[..., :4], False) == "weights of shape (8,) for heads of 4 columns"
    assert unfit_for(half, q.half().to("meta"), False) == "weights on cpu for heads on meta"
    assert unfit_for(half, q.half(), True) == ""
    with torch.autocast("cpu", torch.float16):
        assert unfit_for(half, q.half(), False) == ""
        assert unfit_for(half, q.half(), True) == "norms that make float16 heads float32"


def test_norms_that_peft_wraps(calls):
    """Norms that are trained with an adapter are copies inside a wrapper, which chooses one."""
    model, ids = make_model("qwen3"), make_ids(1, LENGTH)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["q_norm"], init_lora_weights=False)
    model = patch_model(peft.get_peft_model(model, config)).eval()
    assert_same(model, ids, grad=True, use_cache=False)
    assert all("q_norm is ModulesToSaveWrapper" in said for said in fused_of(model))
    assert any("q_norm" in name for name, p in model.named_parameters() if p.grad is not None)
    assert calls == {"rope_attention": 2}
