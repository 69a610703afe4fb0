"""``python -m bench models``: providers run what their labels say, on one model, and leave it as it was."""

import inspect
from dataclasses import replace

import pytest
import torch

from bench.models import providers, serving, shapes, suite
from fused_rope_attn.integrations.transformers import patch_report
from tests.support.bench import TINY_MODEL, run as run_suite, status

NORMED = shapes.Model("Qwen", "Qwen3", TINY_MODEL.config | {"head_dim": 16, "num_key_value_heads": 1})
IDS = torch.zeros(1, 4, dtype=torch.int64)


def run(names, work, model=TINY_MODEL):
    suite.ModelTrial._made = None
    people = [replace(providers.PROVIDERS[name], missing=lambda: None) for name in names]
    return run_suite(suite.MODELS_SUITE, suite.ModelCase(model, work), providers=people)[0]


def test_norms_of_heads_are_computed_by_whom_the_label_names():
    """A provider's switches are undone after it. Norms with hooks stay outside of our kernels."""
    model, found = shapes.make(NORMED, torch.device("cpu")), {}

    def state():
        return model.config._attn_implementation, [set(vars(x)) for x in model.modules()]

    before = state()
    for name in ("sdpa", "own_norms", "fused"):
        with providers.PROVIDERS[name].on(model):
            model(IDS)
            (found[name],) = (row.norms for row in patch_report(model))
        assert state() == before and not model.model.layers[0].self_attn.q_norm._forward_hooks, name
    assert found == {"sdpa": "", "own_norms": "its own: q_norm has hooks", "fused": "fused"}


@pytest.mark.parametrize("kind", ["train", "step"])
def test_all_providers_agree(kind):
    names = [name for name, p in providers.PROVIDERS.items() if kind in p.kinds and "liger" not in name]
    rows = run(names, shapes.Work(kind, 1, 16), NORMED)
    assert status(rows) == dict.fromkeys(names, "ok") and all(row["off_first"] < 1e-5 for row in rows)
    _, model, optimizer = suite.ModelTrial._made
    assert kind == "train" or all(state["step"] > 8 and state["exp_avg"].any() for state in optimizer.state.values())
    before = shapes.make(NORMED, torch.device("cpu"))
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), before.parameters()))


@pytest.mark.filterwarnings("ignore:.*paged.*:FutureWarning")
def test_requests_of_mixed_lengths(monkeypatch):
    monkeypatch.setattr(serving, "PAGE", 16)
    monkeypatch.setattr("gc.collect", lambda *given: 0)  # which managers call again and again
    for module in (serving, shapes):
        monkeypatch.setattr(module, "NEW_TOKENS", 5)
    work = shapes.Work("serve", 3, 24)
    rows = run(["sdpa", "sdpa_graphs", "fused"], work)
    assert status(rows) == dict.fromkeys(("sdpa", "sdpa_graphs", "fused"), "ok")
    for row in rows:
        assert row["off_first"] == 0.0 and row["tokens_s"] == pytest.approx(3 * 5 / row["ms"] * 1e3)


def test_a_manager_that_fails_leaves_the_attention_of_the_config(monkeypatch):
    """With transformers 5.17 a manager has renamed it before it finds that its pages do not fit the memory."""

    def refuse(manager):
        model.config._attn_implementation = f"paged|{model.config._attn_implementation}"
        raise MemoryError("more than available memory")

    model = shapes.make(TINY_MODEL, torch.device("cpu"))
    monkeypatch.setattr("transformers.generation.continuous_batching.ContinuousBatchingManager.warmup", refuse)
    with providers.PROVIDERS["fused"].on(model):
        patched = model.config._attn_implementation
        with pytest.raises(MemoryError, match="available memory"):
            serving.Served(model, shapes.Work("serve", 3, 24)).begin()
        assert model.config._attn_implementation == patched
    assert model.config._attn_implementation == "sdpa"


def test_a_cache_is_passed_by_the_name_that_the_release_has():
    """transformers keeps the older name by a wrapper of the forward, and its time is not that of the model."""
    model = shapes.make(TINY_MODEL, torch.device("cpu"))
    given = []
    model.register_forward_pre_hook(lambda module, args, named: given.append(set(named)), with_kwargs=True)
    step = suite.Step(model, shapes.Work("decode", 1, 8), torch.device("cpu"))
    step.begin()
    assert given[1] and given[1] <= set(inspect.signature(model.forward).parameters)
    assert step.past.get_seq_length() == 9
