"""Masks and packing in the portable kernels on a GPU: against float64, against FlexAttention, without a host sync."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import apply_rope_qk, cu_seqlens_from_position_ids, rope_attention, rope_attention_varlen
from tests.support.attention import assert_matches_float64
from tests.support.dtypes import BF16, F16, F32
from tests.support.gpu import no_synchronisation
from verification.testing import Case, make_inputs, run_op

pytestmark = pytest.mark.gpu
BASE = Case(2, 8, 2, 700, 700, 128, dtype=BF16)
LENGTHS = (16, 333, 0, 1, 700, 64, 129)
EACH_ORDER = {"rtol": 2e-2, "atol": 2e-3}  # bfloat16 sums
CASES = (
    replace(BASE, window=(200, 0)),
    replace(BASE, window=(100, 50), causal=False, len_q=300),
    replace(BASE, softcap=20.0, head_dim=64),
    replace(BASE, sinks=True, window=(128, 0), head_dim=64),
    replace(BASE, window=(200, 0), softcap=50.0, head_dim=256),
    replace(BASE, kv_lens=(700, 333), len_q=65),
    replace(BASE, kv_starts=(0, 399), table_batch=True),
    replace(BASE, kv_starts=(5, 600), kv_lens=(0, 650), causal=False),
    replace(BASE, batch=1, len_q=sum(LENGTHS), len_k=sum(LENGTHS), seqlens=tuple((n, n) for n in LENGTHS)),
    replace(BASE, batch=1, len_q=700, len_k=900, seqlens=((600, 300), (100, 600)), causal=False, head_dim=64),
    replace(BASE, batch=1, seqlens=((300, 300), (400, 400)), window=(90, 0), softcap=30.0, sinks=True),
)


@pytest.mark.parametrize("strategy", ["inline", "prepass"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_masks(case, dtype, strategy):
    case = replace(case, dtype=dtype)
    inputs = make_inputs(case, "cuda")
    out = run_op(inputs, case, backend="triton", strategy=strategy)
    assert not case.sinks or out.dsinks is not None
    assert_matches_float64(case, inputs, out)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("kind", ["window", "softcap", "window + softcap", "documents"])
def test_flex_attention_says_the_same(kind):
    """Another author's masks and scores, on queries and keys that were rotated before, in float32. The sm_90 kernels,
    which have no float32, are held to the same reference as these in tests/attention/hopper."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case = Case(1, 8, 2, 1000, 1000, 64, dtype=torch.float32)
    q, k, v, cos, sin, do = make_inputs(case, "cuda")
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    cu = torch.tensor([0, 100, 101, 640, 1000], dtype=torch.int32, device="cuda")
    document = torch.searchsorted(cu, torch.arange(1000, device="cuda"), right=True)
    window, cap = 150 if "window" in kind else 10**6, 3.0 if "softcap" in kind else 0.0

    def mask(b, h, i, j):
        seen = (j <= i) & (i - j <= window)
        return seen & (document[i] == document[j]) if kind == "documents" else seen

    def score(s, b, h, i, j):
        return cap * torch.tanh(s / cap) if cap else s

    if kind == "documents":
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        o = rope_attention_varlen(*packed, cos, sin, cu, cu, 539, 539, True, backend="triton").transpose(0, 1)[None]
        position = torch.arange(1000, device="cuda") - cu[document - 1]
        cos, sin = cos[position], sin[position]
    else:
        o = rope_attention(q, k, v, cos, sin, True, window=(window, 0), softcap=cap, backend="triton")
    gradients = torch.autograd.grad(o, (q, k, v), do)
    block_mask = create_block_mask(mask, None, None, 1000, 1000, device="cuda")
    q_rot, k_rot = apply_rope_qk(q, k, cos, sin)
    torch._dynamo.reset()  # it traces itself: another value of ``cap`` would become a symbol, which it refuses
    other = flex_attention(q_rot, k_rot, v, score_mod=score, block_mask=block_mask, enable_gqa=True)
    expected = torch.autograd.grad(other, (q, k, v), do)
    for x, y in zip((o, *gradients), (other, *expected)):
        torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_sequences_need_no_sync(deterministic):
    """... and give the same again; by the sm_90 backward, which is not deterministic, dq in another order of sums."""
    case = CASES[8]
    inputs = make_inputs(case, "cuda")
    q, k, v = (x[0].transpose(0, 1).detach().requires_grad_() for x in inputs[:3])
    cu = torch.nn.functional.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).int().cuda()

    def run():
        o = rope_attention_varlen(q, k, v, inputs.cos, inputs.sin, cu, cu, 700, 700, True, deterministic=deterministic)
        dq, dk, dv = torch.autograd.grad(o, (q, k, v), inputs.do[0].transpose(0, 1))
        return o, dk, dv, dq

    first = run()
    position_ids = torch.cat([torch.arange(n) for n in LENGTHS]).cuda()
    with no_synchronisation():
        again = run()
        ends, longest = cu_seqlens_from_position_ids(position_ids, max_sequences=len(LENGTHS))
    assert all(torch.equal(x, y) for x, y in zip(first[:3], again[:3]))
    torch.testing.assert_close(first[3], again[3], **({"rtol": 0, "atol": 0} if deterministic else EACH_ORDER))
    seen = [0, *torch.tensor([n for n in LENGTHS if n]).cumsum(0).tolist()]
    assert ends.tolist() == [*seen, seen[-1]] and longest == len(position_ids)
