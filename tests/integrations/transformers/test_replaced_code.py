"""Changes of a model or of transformers, before a model is patched and after: the patched model computes them too."""

import functools
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from tests.support.hf_models import attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same, run


class Change(NamedTuple):
    """A change of a model's first attention module, or of transformers by a monkeypatch, and what follows from it."""

    make: Callable[[Any, Any], Any]
    own: str = ""  # the reason in the warning, if the modules' own forward runs
    norms: str = ""  # the report's words on the first layer's norms
    model: str = "llama"
    only_before: bool = False  # only a change before patching has this effect


def doubled(own):
    @functools.wraps(own)
    def forward(*args, **kwargs):
        out = own(*args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

    return forward


def turned_back(own):
    return functools.wraps(own)(lambda q, k, cos, sin, *args, **kwargs: own(q, k, cos, -sin, *args, **kwargs))


def function(name, change, by=""):
    reason = f"{name} of transformers.models.llama.modeling_llama, which was replaced by {by}.*, is not served"
    return Change(lambda m, patch: patch.setattr(modeling_llama, name, change(getattr(modeling_llama, name))), reason)


def forward(bind, own=True):
    reason = "module whose forward was replaced by .* before it was patched" if own else ""
    return Change(lambda m, patch: setattr(m, "forward", bind(m)), reason, only_before=True)


class Odd(torch.Tensor):
    """A weight that may be more than its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def odd_weight(norm):
    weight = norm.weight.detach().as_subclass(Odd)
    del norm.weight
    norm.weight = weight


def subclass(norm, **methods):
    norm.__class__ = type("Changed", (type(norm),), methods)


def rms_norm(self, x):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return y * (self.offset + self.weight)


# The function that Liger binds to the norms of a model, from a module of its package's name.
IN_LIGER = {"torch": torch, "__name__": "liger_kernel.transformers.rms_norm"}
liger_forward = types.FunctionType(rms_norm.__code__, IN_LIGER)
liger_forward.__qualname__ = "LigerRMSNorm.forward"


def liger(norms="fused", casting_mode="gemma", change=None):
    """Liger has patched the norms of the first module, and a user has changed them again."""

    def make(module, _):
        for norm in (module.q_norm, module.k_norm):
            norm.offset, norm.casting_mode, norm.variance_epsilon = 1.0, casting_mode, norm.eps
            norm.forward = types.MethodType(liger_forward, norm)
        if change is not None:
            change(module)

    return Change(make, norms=norms, model="gemma3")


def norm(words, change, of="q_norm", model="qwen3"):
    words = words if words == "fused" else f"{of} {words}"
    return Change(lambda m, _: change(getattr(m, of)), norms=words, model=model)


def become(norm, other):
    norm.__class__, norm.__dict__ = type(other), vars(other)


def method(norm, function):
    norm.forward = types.MethodType(function, norm)


HOOKS, GLOBAL, FOREIGN = "has hooks", nn.modules.module._global_forward_hooks, "k_norm has a forward of its own"
COHERE = (lambda own: modeling_cohere.apply_rotary_pos_emb), "transformers.models.cohere"
CHANGES = {
    "rotation": function("apply_rotary_pos_emb", turned_back),
    "rotation of pairs": function("apply_rotary_pos_emb", *COHERE),
    "rotate_half": function("rotate_half", lambda own: lambda x: -own(x)),
    "eager attention": function("eager_attention_forward", doubled),
    "repeat_kv": function("repeat_kv", lambda own: lambda x, times: 2 * own(x, times)),
    "forward, partial": forward(lambda m: functools.partial(LlamaAttention.forward, m), own=False),
    "forward, method": forward(lambda m: types.MethodType(LlamaAttention.forward, m), own=False),
    "forward, with keywords": forward(lambda m: functools.partial(LlamaAttention.forward, m, output_attentions=False)),
    "forward, other partial": forward(lambda m: functools.partial(doubled(LlamaAttention.forward), m)),
    "forward, other method": forward(lambda m: types.MethodType(doubled(LlamaAttention.forward), m)),
    "norm, hook": norm(HOOKS, lambda n: n.register_forward_hook(lambda n, x, y: 2 * y)),
    "norm, pre-hook": norm(HOOKS, lambda n: n.register_forward_pre_hook(lambda n, x: (x[0] + 1,))),
    "norm, backward": norm(HOOKS, lambda n: n.register_full_backward_hook(lambda n, dx, dy: (dx[0] * 0.5,))),
    "norm, backward pre": norm(HOOKS, lambda n: n.register_full_backward_pre_hook(lambda n, dy: (dy[0] * 0.5,))),
    "norm, forward": norm("has a forward of its own", lambda n: setattr(n, "forward", lambda x: 2 * x)),
    "norm, wrapper": norm("has a forward of its own", lambda n: method(n, doubled(type(n).forward))),
    "norm, eps": norm("and k_norm differ in more than their weights", lambda n: setattr(n, "variance_epsilon", 0.5)),
    "norm, eps of the dtype": norm("has an eps of None", lambda n: become(n, nn.RMSNorm(24))),
    "norm, other": norm("is LayerNorm", lambda n: become(n, nn.LayerNorm(24))),
    "norm, odd weight": norm("has a weight of type Odd", odd_weight),
    "norm, new weight": norm("fused", lambda n: setattr(n, "weight", nn.Parameter(torch.linspace(-1, 2, 24)))),
    "norm, trained": norm("fused", lambda n: n.weight.data.mul_(-1.5)),
    "norm, call": norm("is Changed", lambda n: subclass(n, __call__=lambda self, x: self.forward(x) + 1)),
    "norm, subclass": norm("is Changed", lambda n: subclass(n, forward=lambda self, x: 2 * x)),
    "norm, method": norm("is Changed", lambda n: subclass(n, _norm=lambda self, x: x), "k_norm", "gemma3"),
    "norms, hook": Change(
        lambda m, patch: patch.setitem(GLOBAL, 0, lambda *_: None), "", "hooks on all modules", "qwen3"
    ),
    "norms, class": Change(
        lambda m, patch: patch.setattr(Gemma3RMSNorm, "forward", lambda n, x: 2 * x), "", "q_norm is Gemma3", "gemma3"
    ),
    "Liger": liger(),
    "Liger, casting": liger("q_norm has the casting mode none", "none"),
    "Liger, another's": liger(FOREIGN, change=lambda m: setattr(m.k_norm, "forward", m.q_norm.forward)),
    "Liger, wrapped": liger(FOREIGN, change=lambda m: method(m.k_norm, doubled(liger_forward))),
    "Liger, call": liger(FOREIGN, change=lambda m: subclass(m.k_norm, __call__=lambda n, x: 2 * n.forward(x))),
}


@pytest.mark.parametrize(
    ("name", "first"),
    [(name, first) for name, row in CHANGES.items() for first in ("change", "patch")[: 1 if row.only_before else 2]],
)
def test_changes(name, first, calls, monkeypatch):
    row = CHANGES[name]
    model, ids = make_model(row.model), make_ids(2, LENGTH)
    plain, module = run(model, ids, use_cache=False)[0], attentions_of(model)[0]
    if first == "patch":
        run(patch_model(model), ids, use_cache=False)
    row.make(module, monkeypatch)
    before = module.__dict__.get("forward")
    if first == "change":
        patch_model(model)
    calls.clear()
    with pytest.warns(UserWarning, match=row.own) if row.own else nullcontext():
        logits, grads = run(model, ids, grad=True, use_cache=False)
    assert calls == ({} if row.own else {"rope_attention": 2})
    report = patch_report(model)[0]
    assert report.norms.removeprefix("its own: ").startswith(row.norms) if row.norms else report.norms == ""
    assert bool(report.own) is bool(row.own)
    expected, expected_grads = run(unpatch_model(model), ids, grad=True, use_cache=False)
    assert_close(logits, expected, 1e-5)
    for parameter, gradient in expected_grads.items():
        assert_close(grads[parameter], gradient, 1e-4, parameter)
    assert not row.only_before or module.forward is before
    if row.own and not row.only_before:
        monkeypatch.undo()
        assert_close(run(patch_model(model), ids, use_cache=False)[0], plain, 1e-5)
        assert patch_report(model)[0].served == 1


def test_a_forward_of_a_class(calls, monkeypatch):
    """Replaced after patching it runs; before, the message says so, rather than that LlamaAttention is not known."""
    model, ids = patch_model(make_model("llama")), make_ids(2, LENGTH)
    plain, own = run(model, ids)[0], LlamaAttention.forward
    monkeypatch.setattr(LlamaAttention, "forward", doubled(own))
    with pytest.warns(UserWarning, match=r"LlamaAttention \(its forward was replaced by .*\) is not served"):
        found = run(model, ids)[0]
    assert calls == {"rope_attention": 2}
    assert torch.equal(found, run(unpatch_model(model), ids)[0])
    for replaced in (doubled(own), lambda self, *args: None):
        monkeypatch.setattr(LlamaAttention, "forward", replaced)
        name = f"{replaced.__module__}.{replaced.__qualname__}".replace("<", "[<]")
        with pytest.raises(NotImplementedError, match=rf"\(LlamaAttention: its forward was replaced by {name}"):
            patch_model(model)
        assert all("its forward was replaced by" in row.reason for row in patch_report(model))
    monkeypatch.undo()
    assert_close(run(patch_model(model), ids)[0], plain, 1e-5)


@pytest.mark.parametrize("name", ["eager_attention_forward", "repeat_kv"])
def test_eager_attention_is_asked_for_where_it_would_run(name, calls, monkeypatch):
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    monkeypatch.setattr(modeling_llama, name, None)
    model.config._attn_implementation = "sdpa"
    assert_same(model, ids)
    assert calls == {"rope_attention": 2}


@pytest.mark.parametrize("library", ["liger_kernel.transformers.rope", "kernels.layer.func"])
def test_functions_that_libraries_are_known_for(library, calls, monkeypatch):
    """Liger's rotation is one of halves, and takes a model of pairs to its own forward; kernels wraps functions."""

    def liger_rotary_pos_emb(*args):
        raise AssertionError

    liger_rotary_pos_emb.__module__, liger_rotary_pos_emb.__qualname__ = library, "liger_rotary_pos_emb"
    wrapped = type("Func", (nn.Module,), {"__module__": library, "forward": liger_rotary_pos_emb})()
    for modeling in (modeling_llama, modeling_cohere):
        replaced = liger_rotary_pos_emb if library.startswith("liger") else wrapped
        monkeypatch.setattr(modeling, "apply_rotary_pos_emb", replaced)
    run(patch_model(make_model("llama")), make_ids(2, LENGTH))
    assert calls == {"rope_attention": 2}
    if library.startswith("liger"):
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
