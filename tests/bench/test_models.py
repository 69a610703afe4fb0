"""`python -m bench models` with a clock that needs no GPU, on a tiny model."""

import inspect
import sys
import types
from dataclasses import replace
from types import MethodType

import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from bench import report
from bench.__main__ import main
from bench.models import providers, serving, shapes, suite
from bench.models.providers import ModelProvider
from bench.report import case_report
from fused_rope_attn.integrations.transformers import patch_report
from tests.support.bench import run as run_suite

TINY = shapes.Model(
    "Tiny",
    "Llama",
    {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "rope_theta": 5000.0,
    },
)


def run(chosen, works, model=TINY, **options):
    suite.ModelTrial._made = None
    cases = [suite.ModelCase(model, work) for work in works]
    return run_suite(suite.MODELS_SUITE, *cases, providers=chosen, **options)


@pytest.fixture(autouse=True)
def eager_rotation(monkeypatch):
    monkeypatch.setattr("fused_rope_attn.rotation.api._has_kernel", lambda x: False)


def broken(model):
    raise RuntimeError("no such thing")


def test_rows(tmp_path):
    chosen = [providers.PROVIDERS["sdpa"], providers.PROVIDERS["fused"]]
    chosen.append(ModelProvider("absent", "Absent", missing=lambda: "not installed", switches=(broken,)))
    chosen.append(ModelProvider("broken", "Broken", switches=(broken,)))
    works = [shapes.Work(kind, 2, 16) for kind in ("train", "step", "prefill", "decode")]
    rows, measurement = run(chosen, works)
    assert len(rows) == 16 and {row["case"] for row in rows} == {"Tiny"} and not measurement.not_run
    for work in works:
        found = {row["provider"]: row for row in rows if row["shape"].startswith(f"{work.name} ")}
        assert found["absent"]["status"] == "missing" and "no such thing" in found["broken"]["detail"]
        ours, sdpa = found["fused"], found["sdpa"]
        assert ours["status"] == sdpa["status"] == "ok"
        assert ours["off_first"] < 1e-5 and sdpa["off_first"] == 0.0  # equal inputs, equal results
        assert ours["tokens_s"] == pytest.approx(work.tokens / ours["ms"] * 1e3)
    file = tmp_path / "rows.jsonl"
    report.write_lines(file, rows)
    text = case_report([row for row in report.read_file(file) if row["shape"] == "train-16 B2 N16"])
    assert "patch_model" in text and "missing" in text and "tokens/s" in text


def test_latent_attention():
    """The shape of DeepSeek-V3 with smaller numbers. Providers that cannot run it are left out."""
    whole = next(model for model in shapes.MODELS if model.name == "DeepSeek-V3")
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16}
    model = replace(whole, config=whole.config | small)
    works = [shapes.Work("train", 1, 16), shapes.Work("prefill", 1, 16)]
    case = suite.ModelCase(model, works[0])
    assert list(suite.MODELS_SUITE.table(case)) == ["sdpa", "liger_norm", "own_norms", "fused"]
    rows, _ = run([providers.PROVIDERS["sdpa"], providers.PROVIDERS["fused"]], works, model)
    assert {row["status"] for row in rows} == {"ok"} and max(row["off_first"] for row in rows) < 1e-5
    assert all(row.served and not row.own for row in patch_report(patched_by_the_suite()))


def patched_by_the_suite():
    from fused_rope_attn.integrations.transformers import patch_model

    model = patch_model(suite.ModelTrial._made[1])
    step = suite.Step(model, shapes.Work("prefill", 1, 16), torch.device("cpu"))
    step.begin()
    return model


def test_a_cache_is_passed_by_the_name_that_the_release_has():
    """transformers keeps the older name by a wrapper of the forward, and its time is not that of the model."""
    model = shapes.make(TINY, torch.device("cpu"))
    given = []
    model.register_forward_pre_hook(lambda module, args, named: given.append(set(named)), with_kwargs=True)
    step = suite.Step(model, shapes.Work("decode", 1, 8), torch.device("cpu"))
    step.begin()
    assert given[1] and given[1] <= set(inspect.signature(model.forward).parameters)
    assert step.past.get_seq_length() == 9


_NORMED = TINY.config | {"head_dim": 16, "num_key_value_heads": 1}
NORMED = shapes.Model("Qwen", "Qwen3", _NORMED, norms=True)


@pytest.fixture
def liger(monkeypatch):
    """Replace Liger by PyTorch, and count the calls of its norm."""
    calls = []
    source = """
class LigerRMSNorm(torch.nn.Module):
    def forward(self, x):
        calls.append(self.casting_mode)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return y * (self.offset + self.weight)
"""
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    norms, rope = (types.ModuleType(f"liger_kernel.transformers.{name}") for name in ("rms_norm", "rope"))
    vars(norms).update(torch=torch, calls=calls)
    exec(source, vars(norms))
    rope.liger_rotary_pos_emb = modeling_llama.apply_rotary_pos_emb
    for module in (norms, rope):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_models_with_norms_of_heads(liger):
    """A layer has two norms of heads, and Liger's are bound to no others."""
    chosen = [replace(provider, missing=lambda: None) for provider in providers.PROVIDERS.values()]
    chosen = [provider for provider in chosen if "train" in provider.kinds]
    rows, _ = run(chosen, [shapes.Work("train", 1, 16)], NORMED)
    found = {row["provider"]: row for row in rows}
    assert {row["status"] for row in rows} == {"ok"} and len(rows) == 5
    assert all(row["off_first"] < 1e-5 for row in rows)
    assert [name for name, row in found.items() if row["role"] == "ours"] == ["fused"]
    assert set(liger) == {"llama"}
    made = shapes.make(NORMED, torch.device("cpu"))
    counts = {}
    for name in ("liger_norm", "own_norms", "fused"):
        liger.clear()
        with providers.PROVIDERS[name].on(made):
            made(torch.zeros(1, 4, dtype=torch.int64))
            counts[name] = len(liger), patch_report(made)[0].norms
    assert counts == {
        "liger_norm": (2, ""),
        "own_norms": (0, "its own: q_norm has hooks"),
        "fused": (0, "fused"),
    }
    norm = made.model.layers[0].self_attn.q_norm
    assert "forward" not in norm.__dict__ and not norm._forward_hooks and "offset" not in norm.__dict__


def test_models_without_norms_of_heads():
    rows, _ = run([providers.PROVIDERS["own_norms"], providers.PROVIDERS["fused"]], [shapes.Work("train", 1, 16)])
    assert [row["status"] for row in rows] == ["unsupported", "ok"]


@pytest.mark.filterwarnings("ignore:.*paged.*:FutureWarning")
def test_requests_of_mixed_lengths(monkeypatch):
    """Continuous batching: all providers answer alike, and each is timed with a manager of its own."""
    monkeypatch.setattr(serving, "PAGE", 16)
    monkeypatch.setattr("gc.collect", lambda *given: 0)  # which managers call again and again
    for module in (serving, shapes):
        monkeypatch.setattr(module, "NEW_TOKENS", 5)
    names = ("sdpa", "sdpa_graphs", "own_norms", "fused")
    work = shapes.Work("serve", 3, 24)
    rows, _ = run([providers.PROVIDERS[name] for name in names], [work])
    found = {row["provider"]: row for row in rows}
    assert [found[name]["status"] for name in names] == ["ok", "ok", "unsupported", "ok"]
    assert all(found[name]["off_first"] == 0.0 for name in ("sdpa", "sdpa_graphs", "fused"))
    assert work.tokens == 3 * shapes.NEW_TOKENS
    assert found["sdpa"]["tokens_s"] == pytest.approx(work.tokens / found["sdpa"]["ms"] * 1e3)


def test_a_manager_that_fails_leaves_the_attention_of_the_config(monkeypatch):
    """With transformers 5.17 a manager has renamed it before it finds that its pages do not fit the memory."""

    def refuse(manager):
        model.config._attn_implementation = f"paged|{model.config._attn_implementation}"
        raise MemoryError("more than available memory")

    model = shapes.make(TINY, torch.device("cpu"))
    before = model.config._attn_implementation
    monkeypatch.setattr("transformers.generation.continuous_batching.ContinuousBatchingManager.warmup", refuse)
    served = serving.Served(model, shapes.Work("serve", 3, 24))
    with providers.PROVIDERS["fused"].on(model):
        patched = model.config._attn_implementation
        with pytest.raises(MemoryError, match="available memory"):
            served.begin()
        assert model.config._attn_implementation == patched
    assert model.config._attn_implementation == before


def test_switching_leaves_the_model_as_it_was():
    model = shapes.make(TINY, torch.device("cpu"))
    before = {path: set(module.__dict__) for path, module in model.named_modules()}
    for provider in (providers.PROVIDERS["sdpa"], providers.PROVIDERS["fused"]):
        with provider.on(model):
            model(torch.zeros(1, 4, dtype=torch.int64))
    assert before == {path: set(module.__dict__) for path, module in model.named_modules()}
    assert model.config._attn_implementation == "sdpa"


def test_command_line(capsys):
    assert main(["models", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("Llama-3.2-1B", "Qwen3-0.6B", "prefill-16K", "liger"))
    assert main(["models", "--dry-run", "--cases", "no such"]) == 2
    assert main(["models", "--dry-run", "--cases", "Gemma3+decode"]) == 2
    if not torch.cuda.is_available():
        assert main(["models"]) == 2 and "no GPU" in capsys.readouterr().err


def test_training_steps(monkeypatch, liger):
    """Steps leave the weights as they are. Liger's patch is undone, and our kernels compute its norms of heads."""
    from liger_kernel.transformers.rms_norm import LigerRMSNorm

    def liger_rotary_pos_emb(*given):
        return modeling_llama.apply_rotary_pos_emb(*given)

    liger_rotary_pos_emb.__module__ = "liger_kernel.transformers.rope"
    liger_rotary_pos_emb.__qualname__ = "liger_rotary_pos_emb"
    plain = modeling_qwen3.apply_rotary_pos_emb

    def apply(model):
        attention = model.model.layers[0].self_attn
        sys.modules[type(model).__module__].apply_rotary_pos_emb = liger_rotary_pos_emb
        for norm in (model.model.norm, attention.q_norm, attention.k_norm):
            norm.__dict__ |= {"offset": 0.0, "casting_mode": "llama", "forward": MethodType(LigerRMSNorm.forward, norm)}

    monkeypatch.setattr(providers.Package, "load", lambda package: apply)
    chosen = [replace(p, missing=lambda: None) for n, p in providers.PROVIDERS.items() if "step" in p.kinds]
    chosen = [provider for provider in chosen if provider.name not in ("liger_all_fa4",)]
    rows, _ = run(chosen, [shapes.Work("step", 1, 16)], NORMED)
    assert [row["provider"] for row in rows] == ["sdpa", "liger_all", "fused", "fused_liger"]
    assert {row["status"] for row in rows} == {"ok"} and all(row["off_first"] < 1e-5 for row in rows)
    _, model, optimizer = suite.ModelTrial._made
    states = list(optimizer.state.values())
    assert len(states) == len(list(model.parameters())) and all(state["exp_avg"].any() for state in states)
    assert all(state["step"] > 8 for state in states)
    before = shapes.make(NORMED, torch.device("cpu"))
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), before.parameters()))
    # Liger's norms of heads go to our kernels, its other norms stay, and nothing of it is left afterwards.
    liger.clear()
    with providers.PROVIDERS["fused_liger"].on(model):
        model(torch.zeros(1, 4, dtype=torch.int64))
        assert len(liger) == 1 and patch_report(model)[0].norms == "fused"
    assert sys.modules[type(model).__module__].apply_rotary_pos_emb is plain
    assert "forward" not in model.model.norm.__dict__ and "offset" not in model.model.norm.__dict__
