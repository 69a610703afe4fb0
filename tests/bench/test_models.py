"""`python -m bench models` with a clock that needs no GPU, on a tiny model."""

import pytest
import torch

from bench import report
from bench.__main__ import main
from bench.suites import models
from tests.support.bench import run as run_suite

TINY = models.Model(
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
    left_out=3,
)


def run(providers, works, **options):
    return run_suite(
        models.Models(providers), *(models.Case(TINY, work) for work in works), modes=("eager",), **options
    )


@pytest.fixture(autouse=True)
def eager_rotation(monkeypatch):
    monkeypatch.setattr("fused_rope_attn.rotation.api._has_kernel", lambda x: False)


def broken(model):
    raise RuntimeError("no such thing")


def test_rows(tmp_path):
    providers = [models.PROVIDERS["sdpa"], models.PROVIDERS["fused"]]
    providers.append(models.Provider("absent", "Absent", broken, lambda: "not installed"))
    providers.append(models.Provider("broken", "Broken", broken))
    works = [models.Work("train", 2, 16), models.Work("prefill", 1, 16), models.Work("decode", 2, 16)]
    rows, measurement = run(providers, works)
    assert len(rows) == 12 and {row["case"] for row in rows} == {"Tiny"} and not measurement.not_run
    for work in works:
        found = {row["provider"]: row for row in rows if row["pass"] == work.name}
        assert found["absent"]["status"] == "missing" and "no such thing" in found["broken"]["detail"]
        ours, sdpa = found["fused"], found["sdpa"]
        assert ours["status"] == sdpa["status"] == "ok" and ours["ours_faster"] == 1.0
        assert ours["off_first"] < 1e-5 and sdpa["off_first"] == 0.0  # equal inputs, equal results
        assert ours["tokens_s"] == pytest.approx(work.tokens / ours["ms"] * 1e3)
        assert ("loss" in ours) == (work.kind == "train")
    file = tmp_path / "rows.jsonl"
    report.write_lines(file, rows)
    text = models.summary(report.read_lines([file]))
    assert "patch_model" in text and "missing" in text and "Tiny" in text


def test_what_a_deadline_leaves():
    rows, measurement = run([models.PROVIDERS["sdpa"]], [models.Work("train", 1, 2048)], deadline=0.0)
    assert rows == [] and measurement.not_run == ["Tiny train-2K B1 N2048"]


def test_losses_are_printed():
    row = {"case": "M", "pass": "w", "label": "sdpa", "provider": "sdpa", "status": "ok", "ms": 1.0, "tokens_s": 1.0}
    assert "slower than sdpa: M w 0.80" in models.summary([row | {"peak_mib": 1.0, "ours_faster": 0.8, "loss": 2.0}])


def test_switching_leaves_the_model_as_it_was():
    model = models.make(TINY, torch.device("cpu"))
    before = {path: set(module.__dict__) for path, module in model.named_modules()}
    for provider in (models.PROVIDERS["sdpa"], models.PROVIDERS["fused"]):
        with provider.on(model):
            model(torch.zeros(1, 4, dtype=torch.int64))
    assert before == {path: set(module.__dict__) for path, module in model.named_modules()}
    assert model.config._attn_implementation == "sdpa"


def test_command_line(capsys):
    assert main(["models", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("Llama-3.2-1B", "24 layers left out", "Qwen3-0.6B", "prefill-16K", "liger"))
    assert main(["models", "--dry-run", "--models", "no"]) == 2
    if not torch.cuda.is_available():
        assert main(["models"]) == 2 and "no GPU" in capsys.readouterr().err
