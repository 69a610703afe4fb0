"""The portable kernels among streams, graphs, threads and devices, without ever waiting for the GPU."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import plan, rope_attention
from tests.support.attention import assert_equal, assert_matches_float64
from tests.support.dtypes import F32
from tests.support.gpu import (
    ODD_LENGTHS,
    gradients_from_another_thread,
    no_synchronisation,
    replayed,
    run_with_late_inputs,
)
from tests.support.marks import both_strategies
from verification.testing import Inputs, Results, make_inputs, run_op

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strategy", ["auto", "inline", "prepass"])
@pytest.mark.parametrize("length", [64, 700])
def test_cuda_graph(length, strategy):
    """Captured once, replayed with new data. At 64 `auto` takes what it takes for launch-bound calls."""
    case = replace(ODD_LENGTHS, len_q=length, len_k=length)
    for fresh, (o, *gradients) in replayed(case, seeds=(1, 2), strategy=strategy):
        lse = run_op(fresh, case, backend="triton", strategy=strategy).lse
        assert_matches_float64(case, fresh, Results(o, lse, *gradients))


def test_no_synchronisation_and_no_hidden_copies():
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    for strategy in ("inline", "prepass"):
        run_op(inputs, ODD_LENGTHS, backend="triton", strategy=strategy)
        with no_synchronisation():
            run_op(inputs, ODD_LENGTHS, backend="triton", strategy=strategy)


@both_strategies
def test_other_streams(strategy):
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    expected = run_op(inputs, ODD_LENGTHS, backend="triton", strategy=strategy)
    assert_equal(run_with_late_inputs(inputs, ODD_LENGTHS, backend="triton", strategy=strategy), expected)


@both_strategies
def test_backward_from_another_thread(strategy):
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    expected = run_op(inputs, ODD_LENGTHS, backend="triton", strategy=strategy)
    assert_equal(gradients_from_another_thread(inputs, backend="triton", strategy=strategy), expected[2:])


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
@both_strategies
def test_a_second_device(strategy):
    """Tensors on cuda:1 while cuda:0 is current, forward, backward and from another thread."""
    inputs = make_inputs(ODD_LENGTHS, "cuda:0")
    expected = run_op(inputs, ODD_LENGTHS, backend="triton", strategy=strategy)
    there = Inputs(*(x.to("cuda:1") for x in inputs))
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        out = run_op(there, ODD_LENGTHS, backend="triton", strategy=strategy)
        assert all(x.device == torch.device("cuda:1") for x in out)
        assert_equal([x.to("cuda:0") for x in out], expected)
    q, k, v, cos, sin, _ = there
    with pytest.raises(ValueError, match="^k must be on q's device cuda:1, but is on cuda:0"):
        rope_attention(q, inputs.k, v, cos, sin, True)
    with pytest.raises(ValueError, match="^cos must be on q's device cuda:1, but is on cpu"):
        rope_attention(q, k, v, cos.cpu(), sin, True)


def test_devices_must_agree():
    q, k, v, cos, sin, _ = make_inputs(ODD_LENGTHS, "cuda")
    with pytest.raises(ValueError, match="^cos must be on q's device cuda:0, but is on cpu"):
        rope_attention(q, k, v, cos.cpu(), sin, True)
    with pytest.raises(ValueError, match="^v must be on q's device cuda:0, but is on cpu"):
        rope_attention(q, k, v.cpu(), cos, sin, True)


def test_every_mask_at_once_without_a_sync():
    q, k, v, cos, sin, do = make_inputs(replace(ODD_LENGTHS, dtype=F32), "cuda")
    sinks = torch.randn(8, device="cuda")
    lens = torch.tensor([700, 450], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 60], dtype=torch.int32, device="cuda")
    options = {"window": (128, 0), "softcap": 20.0}
    chosen = plan(q, k, v, cos, sin, True, sinks=sinks, kv_lens=lens, kv_starts=starts, **options)
    assert chosen.backend == "triton", chosen.reason
    q = q.detach().requires_grad_()
    with no_synchronisation():
        o, lse = rope_attention(
            q, k, v, cos, sin, True, sinks=sinks, kv_lens=lens, kv_starts=starts, return_lse=True, **options
        )
        o.backward(do)
    here, here_lse = rope_attention(
        *(x.detach().cpu() for x in (q, k, v, cos, sin)),
        True,
        sinks=sinks.cpu(),
        kv_lens=lens.cpu(),
        kv_starts=starts.cpu(),
        return_lse=True,
        **options,
    )
    torch.testing.assert_close(o.detach().cpu(), here, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.cpu(), here_lse, rtol=1e-4, atol=1e-5)
