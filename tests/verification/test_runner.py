"""One task of the verification: what is compared, and how what raises, does not fit or writes nothing is told."""

from dataclasses import replace

import torch

import fused_rope_attn
from verification import attention
from verification.attention import AttentionCheck
from verification.calls import Machine
from verification.matrix import ATTENTION
from verification.report import rows_of
from verification.workers import run_check

F32 = torch.float32


def rows_for(check, *variants):
    check = replace(check, dtype=F32, variants=variants or (("reference", "auto"),))
    return rows_of(run_check(check, Machine.of("cpu")))


def named(name):
    return next(check for check in ATTENTION if check.name == name)


def test_bounds_of_the_compared_heads(monkeypatch):
    """Compare some batch entries of a large case, each by its own bounds."""
    monkeypatch.setattr(attention, "MOST_SCORES", 4800)
    rows = rows_for(AttentionCheck(3, 2, 1, 30, 40, 16, kv_starts=(9, 0, 3), kv_lens=(40, 17, 30)))
    assert [row.verdict for row in rows] == ["ok"] * 5, rows


def test_a_kernel_that_raises_fails_and_the_others_run(monkeypatch):
    right = fused_rope_attn.rope_attention

    def raises(*args, strategy="auto", **options):
        if strategy == "inline":
            raise RuntimeError("no such tile")
        return right(*args, strategy=strategy, **options)

    monkeypatch.setattr(fused_rope_attn, "rope_attention", raises)
    rows = rows_for(named("one token"), ("triton", "inline"), ("reference", "auto"))
    assert rows[0].verdict == "FAIL" and "no such tile" in rows[0].detail
    assert len(rows) == 6


def test_an_output_that_nothing_wrote_fails(monkeypatch):
    right = fused_rope_attn.rope_attention

    def forgetful(q, *args, **options):
        o, lse = right(q, *args, **options)
        return torch.where(torch.arange(q.shape[2])[:, None] == 0, torch.empty(()), o), lse

    monkeypatch.setattr(fused_rope_attn, "rope_attention", forgetful)
    rows = rows_for(named("causal"))
    assert {row.tensor: row.verdict for row in rows}["o"] == "FAIL"


def test_a_large_case_compares_some_heads_and_sees_a_fault_in_the_last(monkeypatch):
    """A large check in miniature: sampled heads, the first and the last among them, of views of wider tensors."""
    small = named("GQA 6 over 2")
    monkeypatch.setattr(attention, "MOST_SCORES", 2 * 3 * small.len_q * small.len_k)
    check = replace(small, batch=3, memory=("far", "far", "far", "bnhd"))
    assert check.compared_heads() == [(0, 0), (2, 1)]
    assert [row.verdict for row in rows_for(check)] == ["ok"] * 5
    right = fused_rope_attn.rope_attention

    def wrong_in_the_last_head(q, *args, **options):
        assert q.stride(2) == 130 * q.shape[3]
        o, lse = right(q, *args, **options)
        return torch.cat((o[:, :-1], o[:, -1:] * 1.01), dim=1), lse

    monkeypatch.setattr(fused_rope_attn, "rope_attention", wrong_in_the_last_head)
    assert {row.tensor: row.verdict for row in rows_for(check)}["o"] == "FAIL"
