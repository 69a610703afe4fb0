"""Replaced functions and methods of transformers run, or the model is refused."""

import functools
from types import MethodType

import pytest
import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from tests.support.hf_models import attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LlamaAttention = modeling_llama.LlamaAttention


def turned_back(own):
    """A rotation in the other direction, under the own one's name."""
    return functools.wraps(own)(lambda q, k, cos, sin, *args, **kwargs: own(q, k, cos, -sin, *args, **kwargs))


def doubled(own):
    @functools.wraps(own)
    def forward(*args, **kwargs):
        o, *more = own(*args, **kwargs)
        return 2 * o, *more

    return forward


REPLACED = {
    "apply_rotary_pos_emb": turned_back,
    "rotate_half": lambda own: lambda x: -own(x),
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
    model.config._attn_implementation = "sdpa"  # which calls no function of eager attention
    run(model, ids)
    assert bool(calls) is (name in ("eager_attention_forward", "repeat_kv"))
    model.config._attn_implementation = "eager"
    monkeypatch.undo()
    assert_close(run(model, ids)[0], plain, 1e-5)


def test_the_rotation_of_another_family(calls, monkeypatch):
    """It is transformers' own too, but of pairs."""
    model, ids = patch_model(make_model("llama")), make_ids(2, LENGTH)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_cohere.apply_rotary_pos_emb)
    with pytest.warns(UserWarning, match="replaced by transformers.models.cohere.*apply_rotary_pos_emb"):
        found = run(model, ids)[0]
    assert torch.equal(found, run(unpatch_model(model), ids)[0]) and not calls


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
    for modeling in (modeling_llama, modeling_cohere):
        monkeypatch.setattr(modeling, "apply_rotary_pos_emb", liger_rotary_pos_emb if library == "liger" else Func())
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


def test_a_forward_of_a_class(calls, monkeypatch):
    """Replaced after patching it runs; before, the message says so, rather than that LlamaAttention is not known."""
    model, ids = patch_model(make_model("llama")), make_ids(2, LENGTH)
    plain, own = run(model, ids)[0], LlamaAttention.forward
    monkeypatch.setattr(LlamaAttention, "forward", doubled(own))
    with pytest.warns(UserWarning, match=r"LlamaAttention \(its forward was replaced by .*\) is not served"):
        found = run(model, ids)[0]
    assert calls == {"rope_attention": 2} and not torch.allclose(found, plain, atol=0.01)
    assert all(row.patched and row.own for row in patch_report(model))
    assert torch.equal(found, run(unpatch_model(model), ids)[0])
    for function in (doubled(own), lambda self, *args: None):
        monkeypatch.setattr(LlamaAttention, "forward", function)
        name = f"{function.__module__}.{function.__qualname__}".replace("<", "[<]")
        with pytest.raises(NotImplementedError, match=rf"\(LlamaAttention: its forward was replaced by {name}"):
            patch_model(model)
        assert all("its forward was replaced by" in row.reason for row in patch_report(model))
    monkeypatch.undo()
    assert_close(run(patch_model(model), ids)[0], plain, 1e-5)


@pytest.mark.parametrize(
    ("bind", "change", "foreign"),
    [
        (functools.partial, lambda own: own, False),
        (functools.partial, doubled, True),
        (lambda function, module: MethodType(function, module), lambda own: own, False),
        (lambda function, module: MethodType(function, module), doubled, True),
        (lambda own, module: functools.partial(own, module, output_attentions=False), lambda own: own, True),
    ],
    ids=["partial", "changed partial", "method", "changed method", "keywords"],
)
def test_a_forward_of_an_instance(bind, change, foreign, calls):
    """One that was there before the model was patched runs; that of the class, however it is bound, does not."""
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    module = attentions_of(model)[0]
    module.forward = before = bind(change(LlamaAttention.forward), module)
    expected = run(model, ids)[0]
    patch_model(model)
    if foreign:
        with pytest.warns(UserWarning, match="module whose forward was replaced by .* before it was patched"):
            assert torch.equal(run(model, ids)[0], expected)
        assert not calls
    else:
        assert_close(run(model, ids)[0], expected, 1e-5)
        assert calls == {"rope_attention": 2}
    assert unpatch_model(model) and module.forward is before
