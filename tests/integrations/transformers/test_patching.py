"""`patch_model` changes a model, `unpatch_model` restores it, and both refuse other models."""

import copy
import functools
import warnings
from types import FunctionType, SimpleNamespace

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from fused_rope_attn.integrations.transformers import is_patched, patch, patch_model, unpatch_model
from tests.support.hf_models import attentions_of, make_ids, make_model
from tests.support.hf_runs import assert_close, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_unpatching_leaves_no_trace():
    model = make_model("llama")
    own = {path: (set(module.__dict__), module.forward) for path, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other = make_model("llama")
    assert patch_model(model) is model and patch_model(model) is model  # twice is once
    changed = [path for path, module in model.named_modules() if module.forward != own[path][1]]
    assert changed == [f"model.layers.{i}.self_attn" for i in range(2)]
    assert all("forward" not in module.__dict__ for module in other.modules())  # two models side by side
    assert model.state_dict().keys() == state.keys()
    run(model, make_ids(1, 5))
    assert unpatch_model(model) is model and unpatch_model(model) is model
    for path, module in model.named_modules():
        assert set(module.__dict__) == own[path][0] and module.forward == own[path][1], path
        assert not module._forward_pre_hooks and not module._forward_pre_hooks_with_kwargs
    assert model.prepare_inputs_for_generation.__func__ is type(model).prepare_inputs_for_generation


def test_whose_preparation_of_inputs_is_replaced():
    """That of models which generate, and no other module's, be it around them or within."""
    patched = patch_model(torch.nn.ModuleDict({"model": make_model("llama")}))
    name = "prepare_inputs_for_generation"
    assert [path for path, module in patched.named_modules() if name in module.__dict__] == ["model"]


def test_a_forward_of_the_instance_comes_back():
    model = make_model("llama")
    module = attentions_of(model)[0]
    own = functools.partial(type(module).forward, module)
    module.forward = own
    patch_model(model)
    assert module.forward is not own
    assert unpatch_model(model) and module.forward is own


@pytest.mark.parametrize("first", ["hook", "patch"])
def test_hooks_of_accelerate(first, calls):
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model, ids, seen = make_model("llama"), make_ids(1, 9), []

    class Hook(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(module)
            return args, kwargs

    def add():
        add_hook_to_module(attentions_of(model)[0], Hook())

    expected = run(model, ids)[0]
    for action in (add, lambda: patch_model(model)) if first == "hook" else (lambda: patch_model(model), add):
        action()
    assert_close(run(model, ids)[0], expected, 1e-5)
    assert len(seen) == 1 and calls == {"rope_attention": 2}
    unpatch_model(model)
    assert torch.equal(run(model, ids)[0], expected)
    assert len(seen) == 2 and calls == {"rope_attention": 2}
    remove_hook_from_module(attentions_of(model)[0])
    assert torch.equal(run(model, ids)[0], expected)


def test_what_is_not_supported_is_named():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, but is str"):
        patch_model("llama")
    with pytest.raises(TypeError, match="model"):
        unpatch_model(None)
    with pytest.raises(NotImplementedError, match="Linear has none"):
        patch_model(torch.nn.Linear(2, 2))
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=9, n_embd=16, n_layer=5, n_head=2))
    with pytest.raises(NotImplementedError, match=r"h.2.attn and 2 more \(GPT2Attention: its model has no rotary"):
        patch_model(gpt2)
    both = torch.nn.ModuleDict({"one": make_model("llama"), "two": torch.nn.MultiheadAttention(8, 2)})
    with pytest.raises(NotImplementedError, match=r"two \(MultiheadAttention: it is none of transformers' own"):
        patch_model(both)
    assert not any("forward" in module.__dict__ for module in both.modules())  # nothing has been changed

    class Subclass(transformers.models.llama.modeling_llama.LlamaAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    both["one"].model.layers[1].self_attn.__class__ = Subclass
    del both["two"]
    with pytest.raises(
        NotImplementedError, match=r"s.1.self_attn \(Subclass: its forward was replaced by .*Subclass.f"
    ):
        patch_model(both)


def test_saved_and_loaded(tmp_path, calls):
    model, ids = patch_model(make_model("qwen3")), make_ids(2, 9)
    expected = run(model, ids)[0]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert_close(run(loaded, ids)[0], expected, 1e-5)
    assert calls == {"rope_attention": 2}  # a loaded model is unpatched
    assert torch.equal(run(patch_model(loaded), ids)[0], expected)


def test_copied(calls):
    model, ids = patch_model(make_model("llama")), make_ids(2, 9)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].self_attn.q_proj.weight.zero_()
    assert not torch.equal(run(twin, ids)[0], run(model, ids)[0])
    assert all(module.forward.args == (module,) for module in attentions_of(twin))
    unpatch_model(twin)
    run(twin, ids)
    assert calls == {"rope_attention": 4}


def test_bare_decoder(calls):
    model, ids = make_model("llama").model, make_ids(2, 9)
    expected = model(ids).last_hidden_state
    assert_close(patch_model(model)(ids).last_hidden_state, expected, 1e-5)
    assert calls == {"rope_attention": 2}


def test_a_release_with_another_name_for_caches_is_refused(monkeypatch):
    """Keys that a module never sees would be missing from its results."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, kv=None, **kwargs):
        raise AssertionError

    model = make_model("llama")
    forward = FunctionType(forward.__code__, vars(modeling_llama), "forward", forward.__defaults__)
    forward.__module__ = modeling_llama.__name__
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(NotImplementedError, match="passes caches by another name than cache, past_key_values"):
        patch_model(model)
    assert not is_patched(model)


@pytest.mark.parametrize("version", ["5.25.0", "5.24.1", "5.23.0", "6.0.0.dev0"])
def test_a_release_that_nobody_has_read(version, monkeypatch):
    monkeypatch.setattr(patch, "transformers", SimpleNamespace(__version__=version))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch_model(make_model("llama"))
    texts = [str(warning.message) for warning in caught if "patch_model knows" in str(warning.message)]
    assert len(texts) == (version[:4] not in ("5.23", "5.24")) and all(f"transformers {version}" in x for x in texts)
    assert not texts or caught[-1].filename == __file__
