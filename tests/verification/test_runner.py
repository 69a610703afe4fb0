"""One task of the verification: what is compared, and how what raises, does not fit or writes nothing is told."""

import torch

import fused_rope_attn
from fused_rope_attn.testing import Case
from verification.matrix import CHECKS, Check
from verification.runner import Task, run_task


def test_bounds_of_the_compared_heads():
    """Of a large case some batch entries are compared: each by its own bounds."""
    case = Case(2, 2, 1, 30, 40, 16, dtype=torch.float32, kv_starts=(9, 0), kv_lens=(40, 17))
    rows = run_task(Task(Check("bounds", case, scale="large"), torch.float32, (("reference", "auto"),), "cpu"))
    assert [row.verdict for row in rows] == ["ok"] * 5, rows


def test_a_kernel_that_raises_fails_and_the_others_run(monkeypatch):
    right = fused_rope_attn.rope_attention

    def raises(*args, strategy="auto", **options):
        if strategy == "inline":
            raise RuntimeError("no such tile")
        return right(*args, strategy=strategy, **options)

    monkeypatch.setattr(fused_rope_attn, "rope_attention", raises)
    check = next(check for check in CHECKS if check.name == "one token")
    rows = run_task(Task(check, torch.float32, (("triton", "inline"), ("reference", "auto")), "cpu"))
    assert rows[0].verdict == "FAIL" and "no such tile" in rows[0].detail
    assert len(rows) == 6


def test_an_output_that_nothing_wrote_fails(monkeypatch):
    right = fused_rope_attn.rope_attention

    def forgetful(q, *args, **options):
        o, lse = right(q, *args, **options)
        return torch.where(torch.arange(q.shape[2])[:, None] == 0, torch.empty(()), o), lse

    monkeypatch.setattr(fused_rope_attn, "rope_attention", forgetful)
    check = next(check for check in CHECKS if check.name == "causal")
    rows = run_task(Task(check, torch.float32, (("reference", "auto"),), "cpu"))
    assert {row.tensor: row.verdict for row in rows}["o"] == "FAIL"


def test_a_large_case_compares_some_heads_and_sees_a_fault_in_the_last(monkeypatch):
    """A large check in miniature: sampled heads, the first and the last among them, of views of a packed tensor."""
    small = next(check for check in CHECKS if check.name == "GQA 6 over 2").case
    check = Check("miniature", small, scale="large", packed_heads=24)
    task = Task(check, torch.float32, (("reference", "auto"),), "cpu")
    assert [row.verdict for row in run_task(task)] == ["ok"] * 5
    right = fused_rope_attn.rope_attention

    def wrong_in_the_last_head(q, *args, **options):
        assert q.stride(2) == 24 * q.shape[3]
        o, lse = right(q, *args, **options)
        return torch.cat((o[:, :-1], o[:, -1:] * 1.01), dim=1), lse

    monkeypatch.setattr(fused_rope_attn, "rope_attention", wrong_in_the_last_head)
    assert {row.tensor: row.verdict for row in run_task(task)}["o"] == "FAIL"
