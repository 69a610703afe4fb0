"""Patched models with multi-head latent attention: what attention is given, and what the cache holds."""

import math

import pytest
import torch

from fused_rope_attn.integrations.transformers import attention, is_patched, patch_model, patch_report, unpatch_model
from tests.support.hf_models import MODELS, attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, left_padded, noted, run

# Complex tables, pairs sorted by the module or kept, halves, factors of the latent vectors, a gate.
KINDS = [
    name for name in ("deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash", "bailing_hybrid") if name in MODELS
]


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("deepseek")])
def test_attention_gets_views_of_the_projections(name, monkeypatch):
    made, calls = {}, noted(monkeypatch, attention, "rope_attention_mla")
    model = patch_model(make_model(name))
    module = attentions_of(model)[0]
    for part in ("q_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa"):
        if getattr(module, part, None) is not None:
            getattr(module, part).register_forward_hook(lambda _, x, y, part=part: made.__setitem__(part, y))
    run(model, make_ids(2, LENGTH), use_cache=False)
    (q_nope, q_rope, k_nope, k_rope, v, cos, sin), options = calls[0]
    q = made.get("q_b_proj", made.get("q_proj"))
    sources = q, q, made["kv_b_proj"], made["kv_a_proj_with_mqa"], made["kv_b_proj"]
    for x, source in zip((q_nope, q_rope, k_nope, k_rope, v), sources):
        assert x.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    assert k_rope.shape == (2, 1, LENGTH, 16) and cos.shape == sin.shape == (1, LENGTH, 8)
    assert options["softmax_scale"] == module.scaling and options["interleaved"] is (name != "deepseek_v3-halves")
    if name == "deepseek_v3":  # of the config: 48 columns, YaRN by 4 with mscale_all_dim 1
        assert module.scaling == pytest.approx(48**-0.5 * (0.1 * math.log(4) + 1) ** 2)


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_prompt_leaves_the_module_s_own_cache(name, calls):
    model, ids = make_model(name), make_ids(2, 13)
    mask = left_padded(13, 0, 5)
    caches = []
    for each in (unpatch_model, patch_model):
        out = each(model)(ids, attention_mask=mask)
        caches.append(getattr(out, "cache", None) or out.past_key_values)
    modules = attentions_of(model)
    assert calls == {"rope_attention_mla": len(modules)}
    for module in modules:
        expected, found = (cache.layers[module.layer_idx] for cache in caches)
        for one, other in ((expected.keys, found.keys), (expected.values, found.values)):
            assert one.shape == other.shape and one.dtype == other.dtype
            # What a layer writes for padding depends on outputs of padding, which are unspecified.
            assert_close(other[:1], one[:1], 1e-5)
            assert_close(other[1:, :, 5:], one[1:, :, 5:], 1e-5)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_compiled_without_a_break(name):
    model, x = make_model(name), torch.randn(2, LENGTH, 64)
    model.set_attn_implementation("sdpa")  # a layer without its model is causal only then
    module = attentions_of(patch_model(model))[0]
    tables = model.model.rotary_emb(x, torch.arange(LENGTH)[None])
    torch.compiler.reset()  # another model's softmax scale would make this one a symbol
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    one, other = (call(x, position_embeddings=tables, attention_mask=None)[0] for call in (compiled, module))
    assert_close(one, other, 1e-6)
    assert patch_report(model)[0].served == 1  # calls in graphs are not counted


def test_options_that_it_does_not_have():
    model = make_model("deepseek_v3")
    with pytest.raises(NotImplementedError, match="batch_invariant=True is not served for models with multi-head lat"):
        patch_model(model, batch_invariant=True)
    assert not is_patched(model) and is_patched(patch_model(model, deterministic=True))
