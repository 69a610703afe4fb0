"""``python -m bench fa3`` with PyTorch in the place of JAX and of its library."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench.__main__ import main
from bench.attention import jax_fa3
from bench.attention.jax_fa3 import CALLS, FA3, FA3_SUITE, PROVIDERS
from tests.support.bench import TINY, run
from verification.testing import reference_attention

CASE = replace(TINY, case=replace(TINY.case, dtype=torch.bfloat16, causal=True))


@pytest.fixture
def library(monkeypatch):
    """Compute the targets by the reference, and note their names."""
    called = []

    def call(target, shapes, causal, head_dim, *given):
        called.append(target)
        q, k, v, *saved = (x.transpose(1, 2) for x in (given if target == jax_fa3._FORWARD else given[1:]))
        cos, sin = torch.ones(q.shape[2], head_dim // 2), torch.zeros(q.shape[2], head_dim // 2)
        leaves = [x.float().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            o, lse = reference_attention(*leaves, cos, sin, causal, rotary_dim=head_dim, softmax_scale=head_dim**-0.5)
        results = [o, lse]
        if target == jax_fa3._BACKWARD:
            torch.testing.assert_close(saved[0].float(), o.bfloat16().float(), rtol=0.02, atol=0.02)
            results = list(torch.autograd.grad(o, leaves, given[0].transpose(1, 2).float()))
        found = [x.detach() if x.ndim == 3 else x.detach().to(q.dtype).transpose(1, 2) for x in results]
        assert [tuple(x.shape) for x in found] == [tuple(shape) for shape, _ in shapes[: len(found)]]
        return (*found, *shapes[len(found) :])

    def jit(function):
        def lower(*given):
            return SimpleNamespace(compile=lambda: function)

        function_of = lambda *given: function(*given)  # noqa: E731
        function_of.lower = lower
        return function_of

    monkeypatch.setattr(jax_fa3, "_call", call)
    monkeypatch.setattr(jax_fa3, "_jax", lambda: SimpleNamespace(jit=jit))
    monkeypatch.setattr(jax_fa3, "_to_jax", lambda x: x.detach().transpose(1, 2).contiguous())
    monkeypatch.setattr(jax_fa3, "_to_torch", lambda x: x.transpose(1, 2))
    return called


def test_it_is_judged_and_timed_next_to_ours(library):
    mine = PROVIDERS["fused"], replace(PROVIDERS[FA3], missing=lambda: None)
    rows, _ = run(FA3_SUITE, CASE, providers=mine, modes=FA3_SUITE.modes)
    assert {row["status"] for row in rows} <= {"ok", "loose"}, [row["detail"] for row in rows]
    assert [(row["pass"], row["provider"]) for row in rows] == [
        (part, name) for part in ("fwd", "bwd") for name in ("fused", FA3)
    ]
    assert all(row["mode"] == "load" for row in rows)
    assert "peak_mib" not in rows[1] and rows[1]["role"] == "bare"
    # An execution of the other framework is CALLS calls of one target.
    assert library.count(jax_fa3._BACKWARD) == 2 + 4 * CALLS  # the gate, and two rounds of two executions


def test_a_wrong_gradient_is_not_timed(library, monkeypatch):
    right = jax_fa3._call
    monkeypatch.setattr(jax_fa3, "_call", lambda target, *given: tuple(_halved(right(target, *given), target)))
    rows, _ = run(FA3_SUITE, CASE, providers=[replace(PROVIDERS[FA3], missing=lambda: None)])
    assert [row["status"] for row in rows] == ["failed"] and "dk" in rows[0]["detail"]


def _halved(results, target):
    return [x / 2 if i == 1 and target == jax_fa3._BACKWARD else x for i, x in enumerate(results)]


def test_what_is_missing(monkeypatch, tmp_path, capsys):
    found = {"jax": None, "dew_flash_attn": None}
    monkeypatch.setattr(jax_fa3.importlib.util, "find_spec", found.get)
    assert jax_fa3._missing() == "pip install jax[cuda13]"
    found["jax"] = SimpleNamespace()
    assert "libdew_flash_attn3.so" in jax_fa3._missing()
    found["dew_flash_attn"] = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    assert "libdew_flash_attn3.so" in jax_fa3._missing()
    (tmp_path / "libdew_flash_attn3.so").touch()
    assert jax_fa3._missing() is None
    monkeypatch.undo()
    assert main(["fa3", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "Llama3-8B-16K" in text and "Long-64K" not in text and "bare FA3, from JAX" in text


def test_times_of_blocks(monkeypatch):
    """A sample waits for PyTorch and for the other framework, and divides by all calls."""
    now, events = [0.0], []
    clock = jax_fa3.BackToBackClock.__new__(jax_fa3.BackToBackClock)
    monkeypatch.setattr(jax_fa3.BackToBackClock, "synchronize", lambda self: events.append("torch"))
    monkeypatch.setattr(jax_fa3.time, "perf_counter", lambda: now[0])

    class Last:
        def block_until_ready(self):
            events.append("other")
            now[0] += 0.032

    def fn():
        events.append("call")
        now[0] += 0.016
        return Last()

    assert clock.sample(fn, 2) == [pytest.approx(1.0)]
    assert events == ["torch", "call", "call", "other", "torch"]
    assert clock.calls_for(fn, 200.0) == 4
