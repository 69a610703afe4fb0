"""The reference's gradients, dtypes and traces, and what NaN and infinity may reach."""

import math

import pytest
import torch

from tests.support.loop_attention import normal, qkv, tables
from verification.testing import reference_attention


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"softcap": 1.5},
        {"window": (2, 1), "causal": False},
        {"kv_starts": [1, 0], "kv_lens": [5, 2]},
        {"sinks": True},
    ],
    ids=str,
)
def test_gradcheck(options, interleaved):
    options = dict(options)
    q, k, v = (x.requires_grad_() for x in qkv(2, 2, 1, 3, 5, 6))
    cos, sin = tables(5, 4, unit=False)
    causal = options.pop("causal", True)
    sinks = normal(2, seed=9).requires_grad_() if options.pop("sinks", False) else None
    for name in ("kv_starts", "kv_lens"):
        if name in options:
            options[name] = torch.tensor(options[name], dtype=torch.int32)

    def run(q, k, v, sinks):
        o, lse = reference_attention(
            q, k, v, cos, sin, causal, softmax_scale=0.6, rotary_dim=4, interleaved=interleaved, sinks=sinks, **options
        )
        return o, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(run, (q, k, v, sinks))
    assert torch.autograd.gradgradcheck(run, (q, k, v, sinks), fast_mode=True)  # along one random direction


def test_what_overflows_where_nothing_is_visible_stays_there():
    """float16: do v^T is infinite for the last key, which the first query does not see; its gradients are finite."""
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 1, 3, 3, dtype=torch.float16))
    with torch.no_grad():
        v[:, :, 2] = 300.0
    do = torch.zeros_like(q)
    do[:, :, 0] = 300.0
    o, _ = reference_attention(q, k, v, *tables(3, 8), True, softmax_scale=1.0, rotary_dim=8)
    assert all(bool(torch.isfinite(x).all()) for x in (o, *torch.autograd.grad(o, (q, k, v), do)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sinks", [False, True])
def test_nan_outside_the_bounds_never_leaks(dtype, sinks):
    """Left- and right-padded batches: NaN in absent keys and in dead queries, and in the gradient of dead rows."""
    q, k, v = qkv(2, 4, 2, 7, 7, dtype=dtype)
    starts, lens = torch.tensor([3, 0], dtype=torch.int32), torch.tensor([7, 4], dtype=torch.int32)
    cos, sin = tables(7, 8, dtype=torch.float32)
    sink = torch.ones(4, dtype=torch.float32) if sinks else None

    def run(q, k, v, do):
        q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
        o, lse = reference_attention(
            q, k, v, cos, sin, True, softmax_scale=0.4, rotary_dim=8, sinks=sink, kv_starts=starts, kv_lens=lens
        )
        return o, lse, *torch.autograd.grad(o, (q, k, v), do)

    do = normal(*q.shape, seed=5, dtype=dtype)
    clean = run(q, k, v, do)
    q, k, v, do = q.clone(), k.clone(), v.clone(), do.clone()
    for x in (k, v):
        x[0, :, :3] = math.nan
        x[1, :, 4:] = math.inf
    for x in (q, do):
        x[0, :, :3] = math.nan  # positions 0..2 are before the first key
        x[1, :, :3] = math.nan  # positions -3..-1
    poisoned = run(q, k, v, do)
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), clean, poisoned):
        assert torch.equal(a, b), name
    assert bool((poisoned[0][0, :, :3] == 0).all()) and bool((poisoned[1][0, :, :3] == -math.inf).all())
    assert bool((poisoned[3][0, :, :3] == 0).all()) and bool((poisoned[4][1, :, 4:] == 0).all())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 3e-3), (torch.bfloat16, 3e-2), (torch.float32, 2e-6)])
@pytest.mark.parametrize("table_dtype", [torch.float32, "input"])
def test_low_precision(dtype, tolerance, table_dtype):
    q, k, v = qkv(2, 4, 2, 33, 40, 16, dtype=dtype)
    cos, sin = tables(40, 16, dtype=dtype if table_dtype == "input" else table_dtype)
    o, lse = reference_attention(q, k, v, cos, sin, True, softmax_scale=0.25, rotary_dim=16)
    wide = (x.double() for x in (q, k, v, cos, sin))
    o64, lse64 = reference_attention(*wide, True, softmax_scale=0.25, rotary_dim=16)
    assert o.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(o.double(), o64, rtol=0, atol=2 * tolerance)
    torch.testing.assert_close(lse.double(), lse64, rtol=0, atol=2 * tolerance)


def test_autocast_does_not_cast_a_second_time():
    q, k, v = qkv(dtype=torch.float32)
    cos, sin = tables(7, 8, dtype=torch.float32)
    plain, _ = reference_attention(q, k, v, cos, sin, softmax_scale=1.0, rotary_dim=8)
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = reference_attention(q, k, v, cos, sin, softmax_scale=1.0, rotary_dim=8)
    assert inside.dtype == torch.float32 and torch.equal(plain, inside)


@pytest.mark.unpoisoned
def test_traces_with_dynamic_lengths():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def run(q, k, v, cos, sin, lens):
        return reference_attention(
            q, k, v, cos, sin, True, softmax_scale=0.3, rotary_dim=6, interleaved=True, window=(3, 0), kv_lens=lens
        )

    for len_q, len_k in ((5, 7), (6, 9), (11, 13)):
        q, k, v = qkv(len_q=len_q, len_k=len_k)
        cos, sin = tables(len_k, 6)
        lens = torch.tensor([len_k, len_k - 2], dtype=torch.int32)
        o, lse = run(q, k, v, cos, sin, lens)
        expected = reference_attention(
            q, k, v, cos, sin, True, softmax_scale=0.3, rotary_dim=6, interleaved=True, window=(3, 0), kv_lens=lens
        )
        torch.testing.assert_close((o, lse), expected)
    assert counter.frame_count == 1
