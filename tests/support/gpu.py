"""Helpers of the tests on a GPU: streams, graphs, synchronisation, memory, and results that depend on an order."""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention
from tests.support.attention import assert_equal
from tests.support.dtypes import BF16
from verification.testing import Case, Inputs, make_inputs, run_op

# The case of the tests that are not about shapes: odd lengths, GQA, one compilation for all of them.
ODD_LENGTHS = Case(2, 8, 2, 333, 700, 128, dtype=BF16)
# Enough tiles that several go through each multiprocessor, in an order that varies.
MANY_TILES = Case(4, 16, 4, 1111, 1111, 128, dtype=BF16)
# 162 and 279 tiles of 128 queries, so that multiprocessors have one, two or three, and the second one is fixed.
SOME_TILES = Case(1, 9, 3, 2300, 2300, 128, dtype=BF16), Case(1, 9, 3, 3900, 3900, 64, dtype=BF16)
# The sm_90 backward divides the group, and the query blocks of each head, among programs, which add up dk and dv, ...
FEW_KEY_HEADS = Case(1, 8, 1, 1030, 1030, 128, dtype=BF16)
# ... and here the query blocks alone.
FEW_HEADS = Case(1, 2, 2, 2100, 2100, 128, dtype=BF16)


def is_sm_90():
    return torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability() == (9, 0)


def assert_alike(xs, ys, limit=5e-3):
    """Equal up to the order of sums: relative rms distance, tensor by tensor."""
    for x, y in zip(xs, ys, strict=True):
        x, y = x.double(), y.double()
        assert bool(torch.isfinite(x).all()) and (x - y).norm() <= limit * y.norm() + 1e-30, (x - y).norm() / y.norm()


def assert_same_but_dq(xs, ys):
    """Two runs of o, lse, dq, dk, dv by the same kernels have the same bits; dq's order of sums varies."""
    o, lse, dq, dk, dv = xs
    assert_equal((o, lse, dk, dv), (ys[0], ys[1], ys[3], ys[4]))
    assert_alike([dq], [ys[2]])


@contextmanager
def no_synchronisation():
    """Whatever waits for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(step):
    """(a CUDA graph of ``step()``, what it returns), after a call that must not synchronise."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        with no_synchronisation():
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


def replayed(case, seeds, **options):
    """A causal call with its gradients, captured once in a CUDA graph and replayed with the inputs of every seed:
    (inputs, (o, dq, dk, dv)) for each."""
    static = Inputs(*(x.detach().clone() for x in make_inputs(case, "cuda")))
    q, k, v = (x.requires_grad_() for x in static[:3])

    def step():
        o = rope_attention(q, k, v, static.cos, static.sin, True, **options)
        return o, *torch.autograd.grad(o, (q, k, v), static.do)

    graph, captured = capture(step)
    for seed in seeds:
        fresh = make_inputs(replace(case, seed=seed), "cuda")
        with torch.no_grad():
            for old, new in zip(static, fresh):
                old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        yield fresh, tuple(x.detach() for x in captured)


def run_with_late_inputs(inputs, case, **options):
    """`run_op` on a side stream on which q, k and v appear late: a launch on the default stream sees NaN before."""
    late = Inputs(*(torch.full_like(x, math.nan) for x in inputs[:3]), inputs.cos, inputs.sin, inputs.do)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for x, y in zip(late[:3], inputs[:3]):
            x.copy_(y)
        out = run_op(late, case, **options)
    side.synchronize()
    return out


def gradients_from_another_thread(inputs, **options):
    """Return dq, dk and dv of a causal call; the backward pass runs in a thread of its own."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, **options)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(o.backward, inputs.do).result()
    return q.grad, k.grad, v.grad


def bytes_of(*tensors):
    """Rounded up to the allocator's blocks."""
    return sum(-(-x.numel() * x.element_size() // 512) * 512 for x in tensors)


@contextmanager
def peak_bytes():
    """A list that receives the most bytes asked for at one time, above what was there before. Bytes asked for, not
    handed out: a block of the cache that is up to 1 MiB too large is handed out whole."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base, peak = torch.cuda.memory_stats()["requested_bytes.all.current"], []
    yield peak
    peak.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] - base)


def peaks_of_both_passes(case, **options):
    """(inputs, o, [dq, dk, dv], peak of the forward pass in bytes, peak of the backward pass), when all is compiled."""
    inputs = make_inputs(case, "cuda")
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    for _ in range(2):  # the second time nothing is compiled, and no descriptor is made
        with peak_bytes() as forward:
            o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, **options)
        with peak_bytes() as backward:
            results = torch.autograd.grad(o, (q, k, v), inputs.do)
    return inputs, o, results, forward[0], backward[0]


def skip_below_free_memory(size):
    """Skip the test where less than so many bytes of the GPU's memory are free."""
    free, _ = torch.cuda.mem_get_info()
    if free < size:
        pytest.skip(f"needs {size >> 30} GiB of free device memory, has {free >> 30}")


def misaligned(x):
    """Return a copy of x that begins one element past an aligned address."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
