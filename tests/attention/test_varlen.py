"""`rope_attention_varlen` and `cu_seqlens_from_position_ids`: what they refuse, and the sequences that are found."""

import pytest
import torch

from fused_rope_attn import cu_seqlens_from_position_ids, rope_attention_varlen
from verification.testing import Case, make_inputs


def test_cu_seqlens_from_position_ids():
    ids = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 1, 2]])
    cu, longest = cu_seqlens_from_position_ids(ids)
    assert cu.tolist() == [0, 3, 5, 6, 8, 9, 12] and longest == 3 and cu.dtype == torch.int32
    assert cu_seqlens_from_position_ids(ids[0])[0].tolist() == [0, 3, 5, 6]
    cu, longest = cu_seqlens_from_position_ids(ids, max_sequences=8)
    assert cu.tolist() == [0, 3, 5, 6, 8, 9, 12, 12, 12] and longest == 6
    assert cu_seqlens_from_position_ids(ids, max_sequences=2)[0].tolist() == [0, 3, 5]  # the rest belongs to none
    assert cu_seqlens_from_position_ids(torch.tensor([5, 6, 7, 3, 4]))[0].tolist() == [0, 3, 5]
    assert cu_seqlens_from_position_ids(torch.zeros(2, 0, dtype=torch.int64))[0].tolist() == [0]
    for wrong, error in (
        (ids.float(), TypeError),
        (ids[None], ValueError),
        (ids[0, 0], ValueError),
        ([0, 1], TypeError),
    ):
        with pytest.raises(error, match="^position_ids "):
            cu_seqlens_from_position_ids(wrong)
    for wrong, error in ((0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error, match="^max_sequences "):
            cu_seqlens_from_position_ids(ids, max_sequences=wrong)


def test_packed_refusals():
    q, k, v, cos, sin, _ = make_inputs(Case(1, 2, 1, 6, 6, 16))
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    good = {
        "q": q,
        "k": k,
        "v": v,
        "cos": cos,
        "sin": sin,
        "cu_seqlens_q": cu,
        "cu_seqlens_k": cu,
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
    }
    assert rope_attention_varlen(**good).shape == q.shape
    for name, value, error, pattern in (
        ("q", q[None], ValueError, "T_q, HQ, D.*4 dimensions"),
        ("k", None, TypeError, "Tensor.*NoneType"),
        ("v", v[:, 0], ValueError, "T_k, HKV, D.*2 dimensions"),
        ("cu_seqlens_q", [0, 6], TypeError, "Tensor.*list"),
        ("cu_seqlens_k", cu.long(), TypeError, "int32.*int64"),
        ("cu_seqlens_k", cu.to("meta"), ValueError, "device cpu.*meta"),
        ("cu_seqlens_q", cu[None], ValueError, r"\(sequences\+1,\).*\(1, 3\)"),
        ("cu_seqlens_q", cu[:0], ValueError, r"\(sequences\+1,\).*\(0,\)"),
        ("cu_seqlens_q", cu.repeat_interleave(2)[::2], ValueError, "contiguous.*2"),
        ("cu_seqlens_q", cu[:2], ValueError, r"\(2,\).*\(3,\)"),
        ("cu_seqlens_k", cu[:2], ValueError, r"\(3,\).*\(2,\)"),
        ("q", 1.0, TypeError, "Tensor.*float 1.0"),
        ("v", None, TypeError, "Tensor.*NoneType"),
        ("k", k[0], ValueError, r"\(T_k, HKV, D\).*2 dimensions"),
        ("cu_seqlens_q", cu.long(), TypeError, "int32.*int64"),
        ("cu_seqlens_q", cu.to("meta"), ValueError, "device cpu.*meta"),
        ("cu_seqlens_k", cu[0], ValueError, r"\(sequences\+1,\).*\(\)"),
        ("max_seqlen_q", 4.0, TypeError, "int.*4.0"),
        ("max_seqlen_q", True, TypeError, "int.*bool True"),
        ("max_seqlen_q", -1, ValueError, "0 or more.*-1"),
        ("max_seqlen_k", None, TypeError, "int.*NoneType"),
        ("max_seqlen_k", -1, ValueError, "0 or more.*-1"),
        ("cos", cos[:3], ValueError, "4 positions.*3 rows"),
    ):
        named = "cu_seqlens_k" if pattern.startswith(r"\(2") else name  # the first of two is what the other must be
        with pytest.raises(error, match=f"^{named} .*{pattern}"):
            rope_attention_varlen(**(good | ({"sin": sin[:3]} if name == "cos" else {}) | {name: value}))
    with pytest.raises(RuntimeError, match="^backend='hopper' needs an sm_90 GPU"):
        rope_attention_varlen(**good, backend="hopper")
