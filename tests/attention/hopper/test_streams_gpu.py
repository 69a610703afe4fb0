"""The sm_90 kernels among streams, graphs, threads and devices, without ever waiting for the GPU."""

from dataclasses import replace

import pytest
import torch

from tests.support.attention import assert_equal, assert_matches_float64
from tests.support.gpu import (
    MANY_TILES,
    ODD_LENGTHS,
    assert_alike,
    assert_same_but_dq,
    gradients_from_another_thread,
    no_synchronisation,
    replayed,
    run_with_late_inputs,
)
from tests.support.hopper import ON_SM_90, needs_sm_90
from verification.testing import Inputs, Results, make_inputs, run_op

pytestmark = needs_sm_90


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("length", [64, 700])
def test_cuda_graph(length, deterministic):
    """Captured once, replayed with new data."""
    case = replace(ODD_LENGTHS, len_q=length, len_k=length)
    for fresh, (o, *gradients) in replayed(case, seeds=(1, 2, 3), deterministic=deterministic, **ON_SM_90):
        out = run_op(fresh, case, deterministic=deterministic, **ON_SM_90)
        assert_same_but_dq((o, out.lse, *gradients), out)
        assert_matches_float64(case, fresh, Results(o, out.lse, *gradients))


def test_no_synchronisation():
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    for deterministic in (False, True):
        run_op(inputs, ODD_LENGTHS, deterministic=deterministic, **ON_SM_90)
        with no_synchronisation():
            run_op(inputs, ODD_LENGTHS, deterministic=deterministic, **ON_SM_90)


def test_another_stream():
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    expected = run_op(inputs, ODD_LENGTHS, **ON_SM_90)
    assert_same_but_dq(run_with_late_inputs(inputs, ODD_LENGTHS, **ON_SM_90), expected)


def test_two_streams_at_once():
    """Persistent blocks of two calls share the multiprocessors; each call has counters of its own."""
    problems = [make_inputs(replace(MANY_TILES, seed=seed), "cuda") for seed in (1, 2)]
    expected = [run_op(inputs, MANY_TILES, **ON_SM_90) for inputs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for inputs, stream in zip(problems, streams):
            with torch.cuda.stream(stream):
                found.append(run_op(inputs, MANY_TILES, **ON_SM_90))
    torch.cuda.synchronize()
    for i, out in enumerate(found):
        assert_same_but_dq(out, expected[i % 2])


def test_backward_from_another_thread():
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    expected = run_op(inputs, ODD_LENGTHS, **ON_SM_90)
    dq, dk, dv = gradients_from_another_thread(inputs, **ON_SM_90)
    assert_equal((dk, dv), expected[3:])
    assert_alike([dq], [expected.dq])


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_a_second_device():
    inputs = make_inputs(ODD_LENGTHS, "cuda:0")
    expected = run_op(inputs, ODD_LENGTHS, **ON_SM_90)
    there = Inputs(*(x.to("cuda:1") for x in inputs))
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        out = run_op(there, ODD_LENGTHS, **ON_SM_90)
        assert all(x.device == torch.device("cuda:1") for x in out)
        assert_same_but_dq([x.to("cuda:0") for x in out], expected)
