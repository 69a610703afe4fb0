"""``python -m bench fa3`` with PyTorch in the place of JAX and of its library."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench.attention import jax_fa3
from bench.attention.jax_fa3 import CALLS, FA3, PROVIDERS
from tests.support.bench import TINY, status
from verification.testing import reference_attention

CASE = replace(TINY, case=replace(TINY.case, dtype=torch.bfloat16, causal=True))


@pytest.fixture
def library(monkeypatch):
    """Compute the targets by the reference, and return a list of the names that are called. "wrong" spoils dk."""
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
            results[1] = results[1] / 2 if called[0] == "wrong" else results[1]
        found = [x.detach() if x.ndim == 3 else x.detach().to(q.dtype).transpose(1, 2) for x in results]
        assert [tuple(x.shape) for x in found] == [tuple(shape) for shape, _ in shapes[: len(found)]]
        return (*found, *shapes[len(found) :])

    def jit(function):
        def jitted(*given):
            return function(*given)

        jitted.lower = lambda *given: SimpleNamespace(compile=lambda: function)
        return jitted

    monkeypatch.setattr(jax_fa3, "_call", call)
    monkeypatch.setattr(jax_fa3, "_jax", lambda: SimpleNamespace(jit=jit))
    monkeypatch.setattr(jax_fa3, "_to_jax", lambda x: x.detach().transpose(1, 2).contiguous())
    monkeypatch.setattr(jax_fa3, "_to_torch", lambda x: x.transpose(1, 2))
    return called


PEOPLE = PROVIDERS["fused"], replace(PROVIDERS[FA3], missing=lambda: None)


def test_it_is_judged_and_timed_next_to_ours(library, measure):
    exit_status, rows = measure("fa3", [CASE], PEOPLE)
    assert exit_status == 0 and {row["status"] for row in rows} <= {"ok", "loose"}, rows
    found = [(row["pass"], row["provider"], row["mode"]) for row in rows]
    assert found == [(part, name, "load") for part in ("fwd", "bwd") for name in ("fused", FA3)]
    assert "peak_mib" not in rows[1] and rows[1]["role"] == "bare"
    # An execution of the other framework is CALLS calls of one target.
    assert library.count(jax_fa3._BACKWARD) == 2 + 4 * CALLS  # the gate, and two rounds of two executions


def test_a_wrong_gradient_is_not_timed(library, measure):
    library.append("wrong")
    _, rows = measure("fa3", [CASE], PEOPLE[1:])
    assert status(rows) == {FA3: "failed"} and rows[0]["pass"] is None and "dk" in rows[0]["detail"]
