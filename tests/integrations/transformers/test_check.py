"""`python -m fused_rope_attn.integrations.transformers`: its report, and that it plans the calls that a model makes."""

import json
import runpy
import sys

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import __main__ as check, attention, patch_model
from tests.support.hf_models import MODELS, attentions_of, make_ids, make_model
from tests.support.hf_runs import noted

# The poisoned torch.empty would make weights on the CPU instead of the meta device.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.unpoisoned]
LENGTH = 20
# Between them: windows, sinks, softcap, norms in and after the kernels, partial and interleaved rotation, layers and
# models that do not rotate, chunks, multi-head latent attention.
NAMES = (
    *("llama", "gemma2", "gemma3", "gpt_oss", "phi", "qwen3", "glm4", "cohere2", "llama4", "olmo_hybrid-nope"),
    *("hunyuan_v1_dense", "minimax_m2", "deepseek_v3", "longcat_flash", "ministral3"),
)


@pytest.mark.parametrize("name", [name for name in NAMES if name in MODELS])
def test_the_planned_call_is_the_one_that_the_model_makes(name, monkeypatch):
    real = make_model(name)
    calls = {function: noted(monkeypatch, attention, function) for function in ("rope_attention", "rope_attention_mla")}
    patch_model(real)(make_ids(2, LENGTH), use_cache=False)
    (made,) = filter(None, calls.values())
    empty = check.empty_model(real.config, torch.float32)
    assert all(row.patched for row in check.examine(empty))
    sizes, modules = check.Calls(2, LENGTH, torch.float32, torch.device("cpu")), attentions_of(empty)
    assert len(modules) == len(made) > 0
    for module, (rows, options) in zip(modules, made):
        planned_rows, planned = check.call_of(module, sizes)
        for one, other in zip(planned_rows[: len(rows) - 2], rows):
            assert (one.shape, one.dtype, one.stride(-1)) == (other.shape, other.dtype, other.stride(-1))
        of_plan, of_model = (None if x is None else x.shape[-1] for x in (planned_rows[-1], rows[-1]))
        assert of_plan == of_model  # tables, or none in layers without positions
        given, planned = (
            {key: x.shape[-1:] if torch.is_tensor(x) else x for key, x in found.items() if x is not None}
            for found in (options, planned)
        )
        given.pop("deterministic")
        assert planned == given


def test_the_command_reports_a_checkpoint(tmp_path, monkeypatch, capsys):
    """A checkpoint of the size of Llama-3.1-8B is examined without its weights, from a file or a folder."""
    config = transformers.LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "config.json"), "--batch", "2", "--length", "8192"])
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_path(check.__file__, run_name="__main__")
    out = capsys.readouterr().out
    assert "model.layers.{0-31}.self_attn" in out
    assert "Kernels for bfloat16, batch 2, 8192 tokens:" in out
    assert "32 x LlamaAttention, 32/8 heads of 128" in out
    assert "training, a prompt: reference (" in out and "a step of generation: reference (" in out


def test_what_keeps_a_checkpoint_out_is_said(tmp_path, capsys):
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    assert check.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "its model has no rotary embedding" in out and "Kernels" not in out
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    assert check.main([str(tmp_path)]) == 2
    assert "cannot be examined" in capsys.readouterr().err
    assert check.main([str(tmp_path / "missing" / "config.json")]) == 2
    assert "(no file or folder here has this name) cannot be examined" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--batch", "--length"])
def test_an_empty_batch_is_refused(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        check.main(["unread", option, "0"])
    assert f"argument {option}: must be at least 1, but is 0" in capsys.readouterr().err


def test_dropout_in_training_is_said():
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, attention_dropout=0.1)
    model = check.empty_model(config, torch.float32)
    (line,) = check.kernels(model, check.examine(model), check.Calls(1, 16, torch.float32, torch.device("cpu")))
    assert "training: its own forward, because of attention dropout in training" in line
