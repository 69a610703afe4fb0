"""Windows that are changed in the config of a loaded model: masks follow the config, flash-attention the modules."""

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from fused_rope_attn.integrations.transformers.obstacles import Pass, obstacle
from tests.support.hf_models import MODELS, attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
NAMES = [
    name
    for name in ("qwen2", "qwen3_moe", "gemma2", "gemma3", "cohere2", "gpt_oss", "olmo3", "exaone4", "smollm3")
    if name in MODELS
]
# Before transformers 5 each decoder layer remembers its type, and all layers of Qwen 3 MoE are alike.
BY_TYPE = [] if transformers.__version__.startswith("4.") else [name for name in NAMES if name != "qwen3_moe"]
CASES = [(name, "sliding_window") for name in NAMES] + [(name, "layer_types") for name in BY_TYPE]


@pytest.mark.parametrize(("name", "attribute"), CASES)
def test_windows_that_are_changed(name, attribute, calls):
    """Before the model is patched and after; what is set back is served again."""
    model, ids = make_model(name), make_ids(2, LENGTH)
    before, plain = getattr(model.config, attribute), run(model, ids, use_cache=False)[0]
    value = 3 if attribute == "sliding_window" else before[::-1]
    setattr(model.config, attribute, value)
    expected = run(model, ids, use_cache=False)[0]
    generated = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert not torch.allclose(expected, plain, atol=0.01)
    setattr(model.config, attribute, before)
    assert_close(run(patch_model(model), ids, use_cache=False)[0], plain, 1e-5)
    assert calls == {"rope_attention": 2}
    setattr(model.config, attribute, value)
    with pytest.warns(UserWarning, match="a layer that was made with the window .* is not served"):
        assert torch.equal(run(model, ids, use_cache=False)[0], expected)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), generated)
    with pytest.warns(UserWarning, match="a layer that was made with the window .* is not served"):
        assert torch.equal(run(patch_model(unpatch_model(model)), ids, use_cache=False)[0], expected)
    assert calls == {"rope_attention": 2} and all(row.own for row in patch_report(model))


@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_windows_of_the_config_are_followed(name, calls):
    """Modules of these models read the window from the config in each call."""
    model, ids = make_model(name), make_ids(2, LENGTH)
    patch_model(model)
    plain = run(model, ids, use_cache=False)[0]
    for window in (3, None):
        model.config.sliding_window = window
        expected = run(make_model(name, sliding_window=window), ids, use_cache=False)[0]
        assert not torch.allclose(expected, plain, atol=0.01)
        assert_close(run(model, ids, use_cache=False)[0], expected, 1e-5)
    assert calls == {"rope_attention": 6}


def test_flash_attention_goes_by_the_modules():
    model = patch_model(make_model("gemma3"))
    modules, config = attentions_of(model), model.config
    config.sliding_window = 3
    for implementation, served in (("eager", False), ("sdpa", False), ("flash_attention_2", True)):
        config._attn_implementation = implementation
        assert (obstacle(Pass(modules, config, {}), True) == "") is served
    config._attn_implementation = "sdpa"
    config.sliding_window = modules[0].sliding_window
    assert obstacle(Pass(modules, config, {}), True) == ""
    config.sliding_window = None
    assert "made with the window 8, for which" in obstacle(Pass(modules, config, {}), True)
