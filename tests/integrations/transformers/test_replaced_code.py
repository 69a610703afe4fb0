"""Replaced functions and methods of transformers run, or the model is refused."""

import functools
from types import MethodType

import pytest
import torch
import transformers
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from tests.support.hf_models import attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LlamaAttention = modeling_llama.LlamaAttention


def turned_back(own):
    """A rotation in the other direction, under the own one's name."""

    @functools.wraps(own)
    def rotate(q, k, cos, sin, *args, **kwargs):
        return own(q, k, cos, -sin, *args, **kwargs)

    return rotate


def negated(own):
    def rotate_half(x):
        return -own(x)

    return rotate_half


def doubled(own):
    @functools.wraps(own)
    def forward(*args, **kwargs):
        o, *more = own(*args, **kwargs)
        return 2 * o, *more

    return forward


REPLACED = {
    "apply_rotary_pos_emb": turned_back,
    "rotate_half": negated,
    "eager_attention_forward": doubled,
    "repeat_kv": lambda own: lambda x, times: 2 * own(x, times),
}


@pytest.mark.parametrize("first", ["function", "patch"])
@pytest.mark.parametrize("name", REPLACED)
def test_functions_of_a_modeling_file(name, first, calls, monkeypatch):
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    plain, own = run(model, ids)[0], getattr(modeling_llama, name)
    if first == "patch":
        patch_model(model)
    monkeypatch.setattr(modeling_llama, name, REPLACED[name](own))
    expected = run(unpatch_model(model), ids)[0]
    assert not torch.allclose(expected, plain, atol=0.01)
    patch_model(model)
    reason = f"{name} of transformers.models.llama.modeling_llama, which was replaced by .*"
    with pytest.warns(UserWarning, match=f"patch_model: {reason}, is not served"):
        assert torch.equal(run(model, ids)[0], expected)
    assert not calls and all(row.own and row.served == 0 for row in patch_report(model))
    monkeypatch.undo()
    assert_close(run(model, ids)[0], plain, 1e-5)
    assert patch_report(model)[0].served == 1


def test_the_rotation_of_another_family(calls, monkeypatch):
    """It is transformers' own too, but of pairs."""
    model, ids = patch_model(make_model("llama")), make_ids(2, LENGTH)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_cohere.apply_rotary_pos_emb)
    with pytest.warns(UserWarning, match="replaced by transformers.models.cohere.*apply_rotary_pos_emb"):
        found = run(model, ids)[0]
    assert torch.equal(found, run(unpatch_model(model), ids)[0]) and not calls


def test_eager_attention_is_asked_for_where_it_would_run(calls, monkeypatch):
    model, ids = patch_model(make_model("llama")), make_ids(2, LENGTH)
    expected = run(model, ids)[0]
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", doubled(modeling_llama.eager_attention_forward))
    model.config._attn_implementation = "sdpa"
    assert_close(run(model, ids)[0], expected, 1e-5)
    assert calls == {"rope_attention": 4}


@pytest.mark.parametrize("library", ["liger", "kernels"])
def test_functions_that_libraries_are_known_for(library, calls, monkeypatch):
    """Liger's rotation is one of halves, and takes a model of pairs to its own forward; kernels wraps functions."""

    def liger_rotary_pos_emb(*args):
        raise AssertionError

    class Func(torch.nn.Module):
        def forward(self, *args):
            raise AssertionError

    Func.__module__, liger_rotary_pos_emb.__module__ = "kernels.layer.func", "liger_kernel.transformers.rope"
    liger_rotary_pos_emb.__qualname__ = "liger_rotary_pos_emb"
    function = liger_rotary_pos_emb if library == "liger" else Func()
    for modeling in (modeling_llama, modeling_cohere):
        monkeypatch.setattr(modeling, "apply_rotary_pos_emb", function)
    run(patch_model(make_model("llama")), make_ids(2, LENGTH))
    assert calls == {"rope_attention": 2}
    if library == "liger":
        with pytest.warns(UserWarning, match="replaced by liger_kernel"), pytest.raises(AssertionError):
            run(patch_model(make_model("cohere")), make_ids(2, LENGTH))


@pytest.mark.unpoisoned
def test_a_graph_of_a_model_with_a_replaced_rotation(monkeypatch):
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", turned_back(modeling_llama.apply_rotary_pos_emb))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(patch_model(model), backend="eager", fullgraph=True)
        assert_close(compiled(ids, use_cache=False).logits, expected, 1e-5)


def test_a_forward_of_a_class_that_is_replaced_later(calls, monkeypatch):
    model, ids = patch_model(make_model("llama")), make_ids(2, LENGTH)
    plain = run(model, ids)[0]
    monkeypatch.setattr(LlamaAttention, "forward", doubled(LlamaAttention.forward))
    with pytest.warns(UserWarning, match=r"LlamaAttention \(its forward was replaced by .*\) is not served"):
        found = run(model, ids)[0]
    assert calls == {"rope_attention": 2} and not torch.allclose(found, plain, atol=0.01)
    assert all(row.patched and row.own for row in patch_report(model))
    assert torch.equal(found, run(unpatch_model(model), ids)[0])
    monkeypatch.undo()
    assert_close(run(patch_model(model), ids)[0], plain, 1e-5)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_forward_of_a_class_that_is_replaced_before(wrapped, monkeypatch):
    """The message says so, rather than that LlamaAttention is not supported."""
    model = make_model("llama")

    def forward(self, *args, **kwargs):
        raise AssertionError

    function = functools.wraps(LlamaAttention.forward)(forward) if wrapped else forward
    monkeypatch.setattr(LlamaAttention, "forward", function)
    name = "LlamaAttention.forward" if wrapped else r"test_replaced_code.*\.forward"
    with pytest.raises(NotImplementedError, match=rf"\(LlamaAttention: its forward was replaced by .*{name}"):
        patch_model(model)
    assert all("its forward was replaced by" in row.reason for row in patch_report(model))


@pytest.mark.parametrize("kind", ["function", "method", "partial"])
def test_a_forward_of_an_instance(kind, calls):
    """One that was there before the model was patched runs; that of the class, however it is bound, does not."""
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    module, plain = attentions_of(model)[0], run(model, ids)[0]
    own, changed = type(module).forward, doubled(type(module).forward)
    bind = {"function": lambda f: functools.partial(f, module), "method": lambda f: MethodType(f, module)}
    if kind == "partial":
        module.forward = functools.partial(own, module, output_attentions=False)
    else:
        module.forward = bind[kind](own)
        assert_close(run(patch_model(model), ids)[0], plain, 1e-5)
        assert calls == {"rope_attention": 2}
        unpatch_model(model)
        module.forward = bind[kind](changed)
    expected = run(model, ids)[0]
    calls.clear()
    with pytest.warns(UserWarning, match="an attention module whose forward was replaced by .* before it was patched"):
        assert torch.equal(run(patch_model(model), ids)[0], expected)
    assert not calls


def test_refusals_that_users_understand():
    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    models = {
        "GPT2Attention: its model has no rotary embedding": transformers.GPT2Model(
            transformers.GPT2Config(vocab_size=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
        ),
        "BertSelfAttention: its model has no rotary embedding": transformers.BertModel(
            transformers.BertConfig(**sizes, num_attention_heads=2, attn_implementation="eager")
        ),
        "StableLmAttention: its decoder layer passes no additional keyword": transformers.StableLmModel(
            transformers.StableLmConfig(**sizes, **heads, attn_implementation="eager")
        ),
        "NemotronAttention: its decoder layer passes no additional keyword": transformers.NemotronModel(
            transformers.NemotronConfig(**sizes, **heads, attn_implementation="eager")
        ),
        "EsmSelfAttention: it is not in the table of supported classes": transformers.EsmModel(
            transformers.EsmConfig(**sizes, num_attention_heads=2, position_embedding_type="rotary", pad_token_id=0)
        ),
    }
    for reason, model in models.items():
        expected = rf"^model must have an attention module that patch_model can replace, but has only \S+ \({reason}"
        for unsupported in ("raise", "skip"):
            with pytest.raises(NotImplementedError, match=expected):
                patch_model(model, unsupported=unsupported)
        assert reason.split(": ")[1] in str(patch_report(model))
    remote = type("LlamaAttention", (torch.nn.Module,), {"__module__": "transformers_modules.llama"})
    with pytest.raises(NotImplementedError, match="LlamaAttention: it is none of transformers' own classes"):
        patch_model(torch.nn.Sequential(remote()))
