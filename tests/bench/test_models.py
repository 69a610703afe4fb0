"""``python -m bench models``: providers run what their labels say, on one model, and leave it as it was."""

import inspect
import sys
import types
from dataclasses import replace
from types import MethodType

import pytest
import torch
from transformers.models.llama import modeling_llama

from bench.models import providers, serving, shapes, suite
from fused_rope_attn.integrations.transformers import patch_report
from tests.support.bench import run as run_suite, status

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "rope_theta": 5000.0}
TINY = shapes.Model("Tiny", "Llama", SIZES)
NORMED = shapes.Model("Qwen", "Qwen3", SIZES | {"head_dim": 16, "num_key_value_heads": 1}, norms=True)
IDS = torch.zeros(1, 4, dtype=torch.int64)


def run(names, work, model=TINY):
    suite.ModelTrial._made = None
    people = [replace(providers.PROVIDERS[name], missing=lambda: None) for name in names]
    return run_suite(suite.MODELS_SUITE, suite.ModelCase(model, work), providers=people)[0]


@pytest.fixture(autouse=True)
def eager_rotation(monkeypatch):
    monkeypatch.setattr("fused_rope_attn.rotation.api._has_kernel", lambda x: False)


# Liger in PyTorch, in modules of its names: our integration knows its functions by these and by their globals.
LIGER = {
    "liger_kernel": "",
    "liger_kernel.transformers": "",
    "liger_kernel.transformers.rms_norm": """
class LigerRMSNorm(torch.nn.Module):
    def forward(self, x):
        calls.append(self.casting_mode)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return y * (self.offset + self.weight)
""",
    "liger_kernel.transformers.rope": """
def liger_rotary_pos_emb(*given):
    return apply_rotary_pos_emb(*given)
""",
}


@pytest.fixture
def liger(monkeypatch):
    """Replace Liger by PyTorch, and return a list that counts the calls of its norm."""
    calls = []
    for name, source in LIGER.items():
        module = types.ModuleType(name)
        vars(module).update(torch=torch, calls=calls, apply_rotary_pos_emb=modeling_llama.apply_rotary_pos_emb)
        exec(source, vars(module))
        monkeypatch.setitem(sys.modules, name, module)
    norm_forward = sys.modules["liger_kernel.transformers.rms_norm"].LigerRMSNorm.forward

    def apply(model):
        """Patch a model in place, as Liger does."""
        attention = model.model.layers[0].self_attn
        sys.modules[type(model).__module__].apply_rotary_pos_emb = module.liger_rotary_pos_emb
        for norm in (model.model.norm, attention.q_norm, attention.k_norm):
            norm.__dict__ |= {"offset": 0.0, "casting_mode": "llama", "forward": MethodType(norm_forward, norm)}

    monkeypatch.setattr(providers.Package, "load", lambda package: apply)
    return calls


def test_norms_of_heads_are_computed_by_whom_the_label_names(liger):
    """A layer has two norms of heads. A provider's switches are undone after it."""
    model = shapes.make(NORMED, torch.device("cpu"))
    rotation = sys.modules[type(model).__module__].apply_rotary_pos_emb
    before = {path: set(module.__dict__) for path, module in model.named_modules()}
    counts = {}
    for name in ("sdpa", "liger_norm", "own_norms", "fused", "fused_liger"):
        liger.clear()
        with providers.PROVIDERS[name].on(model):
            model(IDS)
            counts[name] = len(liger), next((row.norms for row in patch_report(model)), "")
        assert {path: set(module.__dict__) for path, module in model.named_modules()} == before, name
        assert sys.modules[type(model).__module__].apply_rotary_pos_emb is rotation
        assert model.config._attn_implementation == "sdpa" and not model.model.layers[0].self_attn.q_norm._forward_hooks
    # Liger's last norm stays Liger's, and its norms of heads go to our kernels.
    own = "its own: q_norm has hooks"
    assert counts == {"sdpa": (0, ""), "liger_norm": (2, ""), "own_norms": (0, own)} | {
        "fused": (0, "fused"),
        "fused_liger": (1, "fused"),
    }


@pytest.mark.parametrize("kind", ["train", "step"])
def test_all_providers_agree(kind, liger):
    """Steps of the optimizer leave the weights as they are."""
    names = [name for name, p in providers.PROVIDERS.items() if kind in p.kinds and name != "liger_all_fa4"]
    rows = run(names, shapes.Work(kind, 1, 16), NORMED)
    assert status(rows) == dict.fromkeys(names, "ok") and all(row["off_first"] < 1e-5 for row in rows)
    _, model, optimizer = suite.ModelTrial._made
    assert kind == "train" or all(state["step"] > 8 and state["exp_avg"].any() for state in optimizer.state.values())
    before = shapes.make(NORMED, torch.device("cpu"))
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), before.parameters()))


@pytest.mark.filterwarnings("ignore:.*paged.*:FutureWarning")
def test_requests_of_mixed_lengths(monkeypatch):
    """Continuous batching: all providers answer alike, and each is timed with a manager of its own."""
    monkeypatch.setattr(serving, "PAGE", 16)
    monkeypatch.setattr("gc.collect", lambda *given: 0)  # which managers call again and again
    for module in (serving, shapes):
        monkeypatch.setattr(module, "NEW_TOKENS", 5)
    work = shapes.Work("serve", 3, 24)
    rows = run(["sdpa", "sdpa_graphs", "own_norms", "fused"], work)
    assert status(rows) == dict.fromkeys(("sdpa", "sdpa_graphs", "fused"), "ok") | {"own_norms": "unsupported"}
    for row in (row for row in rows if row["status"] == "ok"):
        assert row["off_first"] == 0.0 and row["tokens_s"] == pytest.approx(3 * 5 / row["ms"] * 1e3)


def test_a_manager_that_fails_leaves_the_attention_of_the_config(monkeypatch):
    """With transformers 5.17 a manager has renamed it before it finds that its pages do not fit the memory."""

    def refuse(manager):
        model.config._attn_implementation = f"paged|{model.config._attn_implementation}"
        raise MemoryError("more than available memory")

    model = shapes.make(TINY, torch.device("cpu"))
    monkeypatch.setattr("transformers.generation.continuous_batching.ContinuousBatchingManager.warmup", refuse)
    with providers.PROVIDERS["fused"].on(model):
        patched = model.config._attn_implementation
        with pytest.raises(MemoryError, match="available memory"):
            serving.Served(model, shapes.Work("serve", 3, 24)).begin()
        assert model.config._attn_implementation == patched
    assert model.config._attn_implementation == "sdpa"


def test_a_cache_is_passed_by_the_name_that_the_release_has():
    """transformers keeps the older name by a wrapper of the forward, and its time is not that of the model."""
    model = shapes.make(TINY, torch.device("cpu"))
    given = []
    model.register_forward_pre_hook(lambda module, args, named: given.append(set(named)), with_kwargs=True)
    step = suite.Step(model, shapes.Work("decode", 1, 8), torch.device("cpu"))
    step.begin()
    assert given[1] and given[1] <= set(inspect.signature(model.forward).parameters)
    assert step.past.get_seq_length() == 9
