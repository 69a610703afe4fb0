"""The sm_90 backend on its GPU: against float64, against itself, and that nothing hangs. Run with `pytest -m gpu`.

What it is compared with where float64 would take too long are the portable kernels, which test_gpu.py holds.
"""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fused_rope_attn import plan, rope_attention, rope_attention_varlen
from fused_rope_attn.attention import configs, planning
from fused_rope_attn.testing import (
    Case,
    Inputs,
    Results,
    compare,
    make_inputs,
    masks_of,
    run_op,
    run_reference,
)
from tests.attention.test_gpu import (
    BF16,
    F16,
    F32,
    HORSE,
    bytes_of,
    equal,
    gradients,
    gradients_from_another_thread,
    graphed,
    hold,
    peak_bytes,
    run_with_late_inputs,
)

ROOT = Path(__file__).parents[3]
SM_90 = torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not SM_90, reason="needs an sm_90 GPU")]

# Enough tiles that several go through each multiprocessor, in an order that varies.
MANY = Case(4, 16, 4, 1111, 1111, 128, dtype=BF16)
HOPPER = {"backend": "hopper"}


@pytest.fixture
def preferred(monkeypatch):
    """Make "auto" take the sm_90 kernels for a pass at every length, or at none, whatever the tables say."""

    def prefer(forward, backward):
        for name, taken in (("HOPPER_FORWARD", forward), ("HOPPER_BACKWARD", backward)):
            auto = configs.BUCKETS if taken else ()
            rows = tuple(replace(row, auto=auto, much_work=False) for row in getattr(configs, name))
            monkeypatch.setattr(configs, name, rows)
        planning._plan.cache_clear()

    yield prefer
    planning._plan.cache_clear()


def alike(xs, ys, limit=5e-3):
    """Equal up to the order of sums: relative rms distance, tensor by tensor."""
    for x, y in zip(xs, ys, strict=True):
        x, y = x.double(), y.double()
        assert bool(torch.isfinite(x).all()) and (x - y).norm() <= limit * y.norm() + 1e-30, (x - y).norm() / y.norm()


def capture(step):
    """(a CUDA graph of ``step()``, what it returns), after a call that must not synchronise."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


def hold_all(case, inputs, out):
    """``hold``, and the gradient of the sinks, which is one row."""
    hold(case, inputs, out)
    if case.sinks:
        dsinks = (
            x.dsinks[None] for x in (out, run_reference(inputs, case, torch.float64), run_reference(inputs, case))
        )
        result = compare("dsinks", *dsinks, grad=True, dtype=case.dtype)
        assert result.ok, f"{case.name}: {result}"


def against_float64(case, dtype):
    """``hold_all`` in ``dtype``, which tables that are not float32 have too; the inputs stay as they are."""
    case = replace(case, dtype=dtype)
    if case.table_dtype is BF16:
        case = replace(case, table_dtype=dtype)
    inputs = make_inputs(case, "cuda")
    before = [x.clone() for x in inputs]
    out = run_op(inputs, case, **HOPPER)
    equal(before, inputs)
    hold_all(case, inputs, out)


def agree(xs, ys):
    """Two runs of o, lse, dq, dk, dv by the same kernels: all but dq bitwise."""
    o, lse, dq, dk, dv = xs
    equal((o, lse, dk, dv), (ys[0], ys[1], ys[3], ys[4]))
    alike([dq], [ys[2]])


@pytest.mark.parametrize(
    "case",
    [
        HORSE,
        replace(HORSE, len_q=1),
        replace(HORSE, len_q=700, len_k=333),  # rows that see nothing
        replace(HORSE, batch=1, heads_q=6, heads_kv=3, len_q=1000, len_k=1000),
        replace(HORSE, len_q=1024, len_k=1024),
        replace(HORSE, tables="yarn", extra_rows=100, table_batch=True),
        replace(HORSE, softmax_scale=-0.3),
        replace(HORSE, softmax_scale=0.0),
        replace(HORSE, causal=False),
        replace(HORSE, causal=False, len_q=1, len_k=1),
        replace(HORSE, rotary_dim=64, full_width=True, interleaved=True, tables="random"),
        replace(HORSE, table_dtype=BF16, full_width=True),
        MANY,
        Case(2, 4, 4, 1000, 1000, 64, dtype=F16),
        Case(2, 4, 2, 1000, 1000, 64, dtype=F16, causal=False),
        Case(2, 4, 1, 600, 600, 96, dtype=BF16),
    ],
    ids=lambda case: case.name,
)
def test_against_float64(case):
    inputs = make_inputs(case, "cuda")
    before = [x.clone() for x in inputs]
    out = run_op(inputs, case, **HOPPER)
    equal(before, inputs)
    hold(case, inputs, out)


# Key blocks of 128 and query blocks of 64 and 128 that begin, end and are cut in every way.
PADDED = replace(HORSE, len_q=300, len_k=700)
MASKED = (
    replace(HORSE, window=(200, 0)),
    replace(HORSE, window=(128, 0), head_dim=64),
    replace(HORSE, window=(0, 0)),
    replace(HORSE, window=(2**40, -1), causal=False),
    replace(PADDED, window=(100, 50), causal=False),
    replace(PADDED, window=(-1, 5), causal=False, head_dim=64),
    replace(PADDED, window=(33, 0)),
    replace(HORSE, len_q=700, len_k=333, window=(90, 0)),  # rows that see nothing
    replace(HORSE, softcap=20.0),
    replace(HORSE, softcap=2.0, head_dim=64, causal=False),
    replace(HORSE, softcap=0.5, softmax_scale=-2.0),
    replace(HORSE, softcap=5.0, softmax_scale=0.0),
    replace(HORSE, sinks=True),
    replace(HORSE, sinks=True, len_q=700, len_k=333, head_dim=64),
    replace(HORSE, kv_lens=(700, 333), len_q=65, len_k=700),
    replace(PADDED, kv_lens=(0, 900), causal=False),
    replace(PADDED, kv_lens=(129, 640), causal=False, head_dim=64),
    replace(HORSE, kv_starts=(0, 399), len_q=700, len_k=700, table_batch=True),
    replace(PADDED, kv_starts=(5, 600), kv_lens=(0, 650), causal=False),
    replace(PADDED, kv_starts=(-4, 256), kv_lens=(128, 701), rotary_dim=64, interleaved=True),
    replace(HORSE, window=(150, 0), softcap=30.0),
    replace(HORSE, window=(128, 0), sinks=True, head_dim=96),
    replace(PADDED, window=(64, 10), causal=False, softcap=3.0, sinks=True, kv_starts=(20, 0), kv_lens=(470, 650)),
    replace(MANY, window=(300, 0), softcap=50.0, kv_starts=(0, 1, 500, 1111), kv_lens=(1111, 900, 1024, 5)),
    replace(MANY, len_q=900, window=(511, 0), kv_lens=(1000, 1, 600, 128), head_dim=64),
)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
def test_masks_against_float64(case, dtype):
    case = replace(case, dtype=dtype)
    inputs = make_inputs(case, "cuda")
    out = run_op(inputs, case, **HOPPER)
    hold_all(case, inputs, out)


# A quarter of the keys at most, and more key blocks than run at a time: dQ is begun by the last key block that sees it,
# for which the others wait, and finished while key blocks of other heads are still at work.
NARROW = (
    Case(2, 40, 8, 2700, 2700, 128, dtype=BF16, window=(256, 0)),
    Case(1, 64, 64, 3000, 3000, 128, dtype=F16, window=(600, 0)),
    Case(1, 64, 32, 2000, 4096, 64, dtype=BF16, window=(1000, 0)),
    Case(2, 24, 24, 2500, 2500, 96, dtype=BF16, window=(300, 200), causal=False, sinks=True),
)


@pytest.mark.parametrize("case", NARROW, ids=lambda case: case.name)
def test_narrow_windows(case):
    """Right, and the same again and again: what nobody has written is poisoned each time."""
    inputs = make_inputs(case, "cuda")
    first = run_op(inputs, case, **HOPPER)
    hold(case, inputs, first)
    for _ in range(30):
        again = run_op(inputs, case, **HOPPER)
        equal((first.o, first.dk, first.dv), (again.o, again.dk, again.dv))
        torch.testing.assert_close(again.dq, first.dq, rtol=2e-2, atol=2e-3)


def test_narrow_windows_on_two_streams():
    """Two backward passes at once, each of which has blocks that wait for others of its own."""
    cases = NARROW[0], NARROW[1]
    inputs = [make_inputs(case, "cuda") for case in cases]
    expected = [run_op(x, case, **HOPPER) for x, case in zip(inputs, cases)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for stream, x, case in zip(streams, inputs, cases):
            with torch.cuda.stream(stream):
                found.append(run_op(x, case, **HOPPER))
        torch.cuda.synchronize()
        for true, out in zip(expected, found):
            equal((true.o, true.dk, true.dv), (out.o, out.dk, out.dv))
            torch.testing.assert_close(out.dq, true.dq, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    "case",
    [
        replace(PADDED, kv_starts=(10, 470), kv_lens=(500, 505)),
        replace(PADDED, kv_starts=(10, 470), kv_lens=(500, 505), causal=False, head_dim=64),
        replace(HORSE, len_q=10, len_k=340, window=(150, 0)),
        replace(HORSE, len_q=10, len_k=340, window=(150, 0), softcap=9.0, kv_starts=(0, 200)),
    ],
    ids=lambda case: case.name,
)
def test_nan_in_keys_that_nobody_reaches(case):
    """... and in query rows that see nothing, and their dO: the same numbers, and zero gradients there."""
    inputs = make_inputs(case, "cuda")
    expected = run_op(inputs, case, **HOPPER)
    q, k, v, do = (x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    for b in range(case.batch):
        last = case.len_k if case.kv_lens is None else case.kv_lens[b]
        first = max(
            0 if case.kv_starts is None else case.kv_starts[b], last - case.len_q - (case.window or (10**6,))[0]
        )
        k[b, :, :first], v[b, :, :first] = math.nan, math.inf
        k[b, :, last:], v[b, :, last:] = math.inf, math.nan
        dead = max(0, (first if case.causal and case.window is None else 0) - last + case.len_q)
        q[b, :, :dead], do[b, :, :dead] = math.nan, math.nan
    agree(run_op(inputs._replace(q=q, k=k, v=v, do=do), case, **HOPPER), expected)


SQUARE = replace(HORSE, head_dim=256, heads_q=4, len_q=700)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    "case",
    [
        SQUARE,
        replace(SQUARE, causal=False),
        replace(SQUARE, causal=False, len_q=1, len_k=1),
        replace(SQUARE, len_q=700, len_k=333),  # rows that see nothing
        replace(SQUARE, len_q=300, len_k=1111),
        replace(SQUARE, batch=4, heads_q=16, heads_kv=8, len_q=1024, len_k=1024),
        replace(SQUARE, heads_q=8, heads_kv=1, layout="bhnd", softmax_scale=-0.3),
        replace(SQUARE, softmax_scale=0.0),
        replace(SQUARE, head_dim=192),
        replace(SQUARE, head_dim=136, causal=False, len_q=333),
        replace(SQUARE, rotary_dim=64, len_q=90),
        replace(SQUARE, head_dim=192, rotary_dim=160, interleaved=True, full_width=True, tables="random"),
        replace(SQUARE, window=(200, 0), softcap=30.0),
        replace(SQUARE, window=(100, 50), causal=False),
        replace(SQUARE, window=(0, 0), len_q=300),
        replace(SQUARE, softcap=2.0, causal=False),
        replace(SQUARE, sinks=True, len_q=700, len_k=333),
        replace(SQUARE, kv_starts=(0, 399)),
        replace(SQUARE, kv_lens=(700, 333), len_q=65),
        replace(SQUARE, window=(64, 10), causal=False, softcap=3.0, sinks=True, kv_starts=(20, 0), kv_lens=(470, 650)),
    ],
    ids=lambda case: case.name,
)
def test_wide_heads_backward(case, dtype):
    """Against float64, and all but dq the same from run to run."""
    case = replace(case, dtype=dtype)
    inputs = make_inputs(case, "cuda")
    first = run_op(inputs, case, **HOPPER)
    hold_all(case, inputs, first)
    for _ in range(5):
        again = run_op(inputs, case, **HOPPER)
        equal((first.o, first.dk, first.dv), (again.o, again.dk, again.dv))
        alike([again.dq], [first.dq])


def test_wide_heads_take_the_sm_90_backward():
    q, k, v, cos, sin, _ = make_inputs(SQUARE, "cuda")
    assert type(plan(q, k, v, cos, sin, True, **HOPPER).backward) is configs.HopperBackwardConfig
    assert type(plan(q, k, v, cos, sin, True, deterministic=True, **HOPPER).backward) is configs.BackwardConfig


def packed(seqlens, behind=(0, 0), **changes):
    """A packed case; ``behind``: rows of q and k behind the last sequence."""
    pairs = tuple(n if isinstance(n, tuple) else (n, n) for n in seqlens)
    total_q, total_k = (sum(n[i] for n in pairs) + behind[i] for i in range(2))
    return replace(HORSE, batch=1, len_q=total_q, len_k=total_k, seqlens=pairs, **changes)


# Tiles of 128 queries, 64 of a warpgroup, and 128 keys, query blocks of 64: cut by a row, whole, empty, and alone.
UNEVEN = ((10, 700), (400, 7), (0, 20), (20, 0), (1, 333), (129, 129), (65, 191), (128, 256))
EMPTY = (16, 2, 3, 1) * 50 + (0,) * 1000  # mostly tiles without queries; lengths are read in two turns
PACKINGS = (
    packed((700, 1, 333, 64, 128, 129, 63)),
    packed((700, 1, 333, 64, 128, 129, 63), causal=False),
    packed((256, 128, 384)),
    packed((1000,)),
    packed((5,)),
    packed((1000, 40)),  # shorter than the row that it begins at, where limits and rows are easily confused
    packed(((64, 1000), (300, 20), (40, 40)), causal=False),
    packed(UNEVEN),
    packed(UNEVEN, causal=False),
    packed(UNEVEN, head_dim=64),
    packed((0, 0, 200, 0, 333, 0)),
    packed((20, 333), behind=(400, 700)),
    packed((20, 333), behind=(400, 700), causal=False),
    packed((), behind=(5, 9)),
    packed(((0, 20), (0, 300))),
    packed(EMPTY),
    packed(EMPTY, head_dim=64),
    packed((700, 500, 90), window=(200, 0)),
    packed((700, 500), window=(0, 0)),
    packed(UNEVEN, window=(33, 0)),
    packed(UNEVEN, window=(20, 300), causal=False, softcap=3.0, sinks=True),
    packed((700, 500, 90), window=(100, 50), causal=False, softcap=3.0, sinks=True),
    packed(UNEVEN, window=(90, 0), sinks=True, head_dim=96),
    packed(UNEVEN, softcap=20.0, head_dim=64, causal=False, sinks=True),
    packed((300, 401), interleaved=True, rotary_dim=64, full_width=True, tables="random"),
    packed((300, 401), softmax_scale=-0.3, table_dtype=BF16),
    packed((300, 401), softmax_scale=0.0),
    packed((300, 401), layout="bhnd"),
    packed((1500, 40, 2000, 900), heads_q=16, heads_kv=4),
    packed((1500, 40, 0, 2000, 1, 900, 127, 4096), causal=False),
    packed(tuple(1 + 37 * i % 300 for i in range(300)), heads_q=4, heads_kv=4),
)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("number", range(len(PACKINGS)))
def test_packed_sequences_against_float64(number, dtype):
    against_float64(PACKINGS[number], dtype)


# Head dims beyond 128: Q comes rotated from the pre-pass, one buffer for each warpgroup, O leaves in two halves.
GEMMA = replace(HORSE, head_dim=256)
WIDE = (
    GEMMA,
    replace(GEMMA, causal=False),
    replace(GEMMA, head_dim=192),
    replace(GEMMA, head_dim=136, causal=False, heads_q=4, heads_kv=4),
    replace(GEMMA, len_q=1),
    replace(GEMMA, len_q=1, len_k=1, causal=False),
    replace(GEMMA, len_q=700, len_k=333),  # rows that see nothing
    replace(GEMMA, batch=1, len_q=1024, len_k=1024, layout="bhnd"),
    replace(GEMMA, len_q=65, len_k=64),
    replace(GEMMA, rotary_dim=64, full_width=True, interleaved=True, tables="random"),
    replace(GEMMA, rotary_dim=128, tables="yarn", extra_rows=100, table_batch=True),
    replace(GEMMA, softmax_scale=-0.3),
    replace(GEMMA, softmax_scale=0.0, table_dtype=BF16),
    replace(GEMMA, batch=4, heads_q=16, heads_kv=8, len_q=1111, len_k=1111),  # several tiles a multiprocessor
    replace(GEMMA, len_q=1111, len_k=1111, window=(300, 0), softcap=50.0),  # Gemma 2
    replace(GEMMA, window=(0, 0)),
    replace(GEMMA, len_q=300, len_k=700, window=(100, 50), causal=False, softcap=3.0, sinks=True),
    replace(GEMMA, sinks=True, len_q=700, len_k=333, head_dim=192),
    replace(GEMMA, kv_lens=(129, 640), causal=False, len_q=300, len_k=700),
    replace(GEMMA, kv_starts=(5, 600), kv_lens=(0, 650), len_q=300, len_k=700, rotary_dim=128, interleaved=True),
    packed((700, 1, 333, 64, 128, 129, 63), head_dim=256),
    packed(UNEVEN, head_dim=256, causal=False),
    packed(UNEVEN, behind=(90, 150), head_dim=192, window=(90, 0), sinks=True, softcap=20.0),
    packed(EMPTY, head_dim=256),
)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("number", range(len(WIDE)))
def test_wide_heads_against_float64(number, dtype):
    against_float64(WIDE[number], dtype)


def test_wide_heads_again_and_again():
    """The order in which tiles are taken varies, what nobody has written is poisoned: the same bits each time."""
    case = replace(GEMMA, batch=4, heads_q=16, heads_kv=8, len_q=1111, len_k=1111)
    inputs = make_inputs(case, "cuda")
    assert type(plan(*inputs[:5], True, **HOPPER).forward) is configs.HopperForwardConfig
    first = run_op(inputs, case, **HOPPER)
    for _ in range(30):
        again = run_op(inputs, case, **HOPPER)
        equal((first.o, first.lse), (again.o, again.lse))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "case",
    [
        packed((300, 65, 200)),
        packed((300, 65, 200), causal=False, head_dim=64),
        packed(UNEVEN, behind=(90, 150)),
        packed(UNEVEN, behind=(90, 150), causal=False, softcap=20.0),
        packed((300, 65, 200), behind=(0, 30), window=(50, 0), dtype=F16),
    ],
    ids=lambda case: case.name,
)
def test_nan_stays_in_its_sequence(case, bad):
    """Each sequence in turn, and the rows behind the last: the others, whose tiles read those rows, are what they
    were."""
    inputs = make_inputs(case, "cuda")
    expected = run_op(inputs, case, **HOPPER)
    total_q, total_k = (sum(n[i] for n in case.seqlens) for i in range(2))
    first_q = first_k = 0
    for len_q, len_k in (*case.seqlens, (case.len_q - total_q, case.len_k - total_k)):
        rows_q, rows_k = slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        q, k, v, do = (x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
        q[:, :, rows_q], do[:, :, rows_q], k[:, :, rows_k], v[:, :, rows_k] = bad, bad, bad, bad
        out = run_op(inputs._replace(q=q, k=k, v=v, do=do), case, **HOPPER)
        if len_q <= len_k and first_q < total_q:
            assert not bool(torch.isfinite(out.o[:, :, rows_q]).any())
        if first_q >= total_q and first_k >= total_k:
            assert not any(bool(x.any()) for x in (out.o[:, :, rows_q], out.dq[:, :, rows_q], out.dk[:, :, rows_k]))
        for name, x, y in zip(out._fields, out, expected):
            rows = rows_k if name in ("dk", "dv") else rows_q
            x[:, :, rows] = y[:, :, rows]
        agree(out, expected)
        first_q, first_k = first_q + len_q, first_k + len_k


def test_packed_reruns():
    """Tiles are taken in any order, and what nobody has written is poisoned each time."""
    case = packed((1500, 40, 0, 2000, 1, 900, 127), heads_q=16, heads_kv=4)
    inputs = make_inputs(case, "cuda")
    first = run_op(inputs, case, **HOPPER)
    fixed = run_op(inputs, case, **HOPPER, deterministic=True)
    equal(fixed[:2], first[:2])
    for _ in range(50):
        agree(run_op(inputs, case, **HOPPER), first)
        equal(run_op(inputs, case, **HOPPER, deterministic=True), fixed)
    hold(case, inputs, first)
    hold(case, inputs, fixed)


def test_auto_takes_them_for_packed_sequences():
    """The same bits as when they are asked for, which the portable kernels' are not."""
    case = packed((1500, 40, 0, 2000, 1, 900, 127), heads_q=16, heads_kv=4)
    inputs = make_inputs(case, "cuda")
    auto, asked, portable = (run_op(inputs, case, backend=name) for name in ("auto", "hopper", "triton"))
    agree(auto, asked)
    assert not torch.equal(auto.dk, portable.dk) and not torch.equal(auto.o, portable.o)
    alike(auto, portable, 2e-2)


def test_packed_passes_of_different_backends_fit_together():
    case = packed(UNEVEN, window=(150, 0), softcap=30.0, sinks=True)
    inputs = make_inputs(case, "cuda")
    q, k, v, cos, sin, do = inputs
    ends = torch.tensor(((0, 0), *case.seqlens)).cumsum(0).int().cuda()
    options = (True, case.scale, case.rotary, False, "auto")
    masks = (
        masks_of(case, "cuda")["sinks"], None, None, ends[:, 0].contiguous(), ends[:, 1].contiguous(), *case.window,
        case.softcap, 700,
    )  # fmt: skip
    operators = torch.ops.fused_rope_attn
    for first, second in (("hopper", "triton"), ("triton", "hopper")):
        o, lse = operators.attention_forward(q, k, v, cos, sin, *options, first, False, *masks)
        dq, dk, dv, _ = operators.attention_backward(do, q, k, v, o, lse, cos, sin, *options, second, False, *masks)
        hold(case, inputs, Results(o, lse, dq, dk, dv))


def test_packed_lengths_change_under_a_graph():
    """cu_seqlens are read on the device: no synchronisation, and a replay sees the new ones."""
    case = packed((300, 0, 401, 99))
    inputs = make_inputs(case, "cuda")
    q, k, v = (x[0].transpose(0, 1).detach().requires_grad_() for x in inputs[:3])
    do = inputs.do[0].transpose(0, 1)
    ends = torch.zeros(5, dtype=torch.int32, device="cuda")

    def fill(lengths):
        ends.copy_(torch.tensor((0, *lengths)).cumsum(0))

    def step():
        o, lse = rope_attention_varlen(
            q, k, v, inputs.cos, inputs.sin, ends, ends, 800, 800, True, return_lse=True, **HOPPER
        )
        return o.detach(), lse, *torch.autograd.grad(o, (q, k, v), do)

    fill((300, 0, 401, 99))
    graph, captured = capture(step)
    for lengths in ((300, 0, 401, 99), (800, 0, 0, 0), (1, 64, 65, 600)):
        fill(lengths)
        graph.replay()
        o, lse, *rest = captured
        whole = [x.transpose(0, 1)[None] for x in (o, *rest)]
        seqlens = tuple((n, n) for n in lengths)
        hold(replace(case, seqlens=seqlens), inputs, Results(whole[0], lse[None], *whole[1:]))


def test_masked_passes_of_different_backends_fit_together():
    case = replace(PADDED, window=(150, 0), softcap=30.0, kv_starts=(0, 300), kv_lens=(700, 600), sinks=True)
    inputs = make_inputs(case, "cuda")
    q, k, v, cos, sin, do = inputs
    masks = masks_of(case, "cuda")
    options = (True, case.scale, case.rotary, False, "auto")
    masks = (masks["sinks"], masks["kv_starts"], masks["kv_lens"], None, None, *case.window, case.softcap)
    operators = torch.ops.fused_rope_attn
    for first, second in (("hopper", "triton"), ("triton", "hopper")):
        o, lse = operators.attention_forward(q, k, v, cos, sin, *options, first, False, *masks)
        dq, dk, dv, _ = operators.attention_backward(do, q, k, v, o, lse, cos, sin, *options, second, False, *masks)
        hold(case, inputs, Results(o, lse, dq, dk, dv))


def test_lengths_change_under_a_graph():
    """They are read on the device: no synchronisation, and a replay sees the new ones."""
    case = replace(PADDED, kv_starts=(0, 0), kv_lens=(700, 700))
    inputs = make_inputs(case, "cuda")
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    starts, lens = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (case.kv_starts, case.kv_lens))

    def step():
        o, lse = rope_attention(
            q, k, v, inputs.cos, inputs.sin, True, kv_starts=starts, kv_lens=lens, return_lse=True, **HOPPER
        )
        return o.detach(), lse, *torch.autograd.grad(o, (q, k, v), inputs.do)

    graph, captured = capture(step)
    for new_starts, new_lens in (((0, 0), (700, 333)), ((640, 3), (700, 260)), ((0, 100), (0, 700))):
        starts.copy_(torch.tensor(new_starts))
        lens.copy_(torch.tensor(new_lens))
        graph.replay()
        hold(replace(case, kv_starts=new_starts, kv_lens=new_lens), inputs, Results(*captured))


@pytest.mark.timeout(1200)
def test_the_verification_matrix():
    """Every small case that the backend serves, compiled by many processes."""
    jobs = str(min(16, os.cpu_count() or 1))
    command = [sys.executable, "-m", "verification", "--backend", "hopper", "--small", "--json", "", "--jobs", jobs]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]


WATCHED = """
import torch
from fused_rope_attn.testing import Case, make_inputs, run_op

lengths = [(n, n) for n in (1, 63, 127, 129, 1000, 4097)] + [(1, 4097), (129, 1000), (4097, 129), (63, 64)]
cases = [
    Case(1, *heads, *length, head_dim, causal=causal, dtype=torch.bfloat16)
    for head_dim in (128, 64)
    for causal in (True, False)
    for heads in ((1, 1), (6, 2))
    for length in lengths
    if causal or length[0] <= length[1]
]
cases.append(Case(1, 1, 1, 131072, 131072, 128, dtype=torch.bfloat16))
for lengths in ((16, 2, 3, 1) * 50 + (0,) * 1000, (4097, 1, 0, 63, 129, 1000), (20000, 7, 300)):
    total, pairs = sum(lengths), tuple((n, n) for n in lengths)
    cases.append(Case(1, 6, 2, total, total, 128, dtype=torch.bfloat16, seqlens=pairs))
found = []
for case in cases:  # back to back: nothing waits for the GPU
    inputs = make_inputs(case, "cuda")
    found.append((case, inputs, run_op(inputs, case, backend="hopper")))
    print("launched", case.name, flush=True)
torch.cuda.synchronize()
print("all finished", flush=True)
for case, inputs, out in found:
    expected = run_op(inputs, case, backend="triton", strategy="prepass")
    for name, x, y in zip(out._fields, out, expected):
        x, y = x.double(), y.double()
        if name == "lse":
            assert torch.equal(x.isinf(), y.isinf()), case.name
            x, y = x[~x.isinf()], y[~y.isinf()]
        # A single key gives dq and dk that are nothing but rounding.
        floor = 1e-2 * y.numel() ** 0.5 * (inputs.k.shape[2] < 2)
        assert bool(torch.isfinite(x).all()), (case.name, name)
        assert (x - y).norm() <= 2e-2 * y.norm() + floor, (case.name, name, float((x - y).norm() / y.norm()))
print("all agree", flush=True)
"""


@pytest.mark.timeout(600)
def test_nothing_hangs():
    """Odd shapes one after another, up to 128K tokens of one head. In a process of its own, which can be ended."""
    try:
        result = subprocess.run([sys.executable, "-c", WATCHED], cwd=ROOT, capture_output=True, text=True, timeout=400)
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"not finished after {late.timeout} s; the last lines: {(late.stdout or b'')[-500:]!r}")
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    assert "all agree" in result.stdout


@pytest.mark.parametrize("case", [MANY, replace(MANY, head_dim=64, causal=False)], ids=lambda case: case.name)
def test_two_hundred_reruns(case):
    inputs = make_inputs(case, "cuda")
    first = run_op(inputs, case, **HOPPER)
    fixed = run_op(inputs, case, **HOPPER, deterministic=True)
    equal(fixed[:2], first[:2])
    for _ in range(200):
        agree(run_op(inputs, case, **HOPPER), first)
        equal(run_op(inputs, case, **HOPPER, deterministic=True), fixed)
    hold(case, inputs, first)
    hold(case, inputs, fixed)


@pytest.mark.parametrize("logit", [-1e4, -2.45e5, 1e4])
def test_extreme_logits(logit):
    case = replace(HORSE, len_q=300, len_k=300, softmax_scale=logit)
    inputs = make_inputs(case, "cuda")
    q, k = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k)
    q[..., 0], k[..., 0] = 1.0, 1.0
    inputs = inputs._replace(q=q, k=k, cos=torch.ones_like(inputs.cos), sin=torch.zeros_like(inputs.sin))
    out = run_op(inputs, case, **HOPPER)
    count = torch.arange(1, 301, device="cuda")
    torch.testing.assert_close(out.lse, logit + count.log().expand(2, 8, 300))
    mean = inputs.v.double().cumsum(2) / count[:, None]
    torch.testing.assert_close(out.o.double(), mean.repeat_interleave(4, 1), rtol=4e-2, atol=4e-2)
    assert all(bool(torch.isfinite(x).all()) for x in out)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_see_nothing_stay_zero_beside_bad_values(bad):
    case = replace(HORSE, len_q=700, len_k=333)
    inputs = make_inputs(case, "cuda")
    inputs.v[:, :, 0] = bad
    out = run_op(inputs, case, **HOPPER, grads=False)
    hidden = 700 - 333
    assert bool((out.o[:, :, :hidden] == 0).all()) and bool((out.lse[:, :, :hidden] == -math.inf).all())
    assert bool(torch.isfinite(out.lse[:, :, hidden:]).all())
    assert not bool(torch.isfinite(out.o[:, :, hidden:]).any()), "a visible NaN or infinity must not be hidden"


@pytest.mark.parametrize(("batch", "len_q", "len_k"), [(0, 5, 5), (2, 0, 5)])
def test_empty(batch, len_q, len_k):
    case = replace(HORSE, batch=batch, len_q=len_q, len_k=len_k)
    inputs = make_inputs(case, "cuda")
    hold(case, inputs, run_op(inputs, case, **HOPPER))


def test_no_keys_are_refused():
    case = replace(HORSE, len_q=5, len_k=0)
    inputs = make_inputs(case, "cuda")
    with pytest.raises(NotImplementedError, match="^k must have at least one position"):
        run_op(inputs, case, **HOPPER)
    hold(case, inputs, run_op(inputs, case, backend="auto"))


def misaligned(x):
    return torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)


def test_v_that_the_tma_cannot_address(preferred):
    """Refused by the explicit backend, served by "auto", and forgotten for the next call."""
    preferred(True, True)
    case = replace(MANY, layout="bhnd")
    inputs = make_inputs(case, "cuda")
    assert plan(*inputs[:5], True).backend == "hopper"
    expected = run_op(inputs, case, **HOPPER)
    bad = inputs._replace(v=misaligned(inputs.v))
    with pytest.raises(NotImplementedError, match=r"^v must have .* address 16 n \+ 2"):
        run_op(bad, case, **HOPPER)
    chosen = plan(*bad[:5], True)
    assert chosen.backend == "triton" and "v must have" in chosen.reason
    equal(run_op(bad, case, backend="auto"), run_op(bad, case, backend="triton"))
    agree(run_op(inputs, case, backend="auto"), expected)


def test_q_k_and_the_gradient_may_lie_anyhow():
    inputs, odd = make_inputs(HORSE, "cuda"), make_inputs(replace(HORSE, layout="odd"), "cuda")
    ones = torch.ones((), dtype=BF16, device="cuda").expand(inputs.q.shape)
    turned = inputs.do.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    for changes in (
        {"q": odd.q},
        {"k": odd.k},
        {"do": odd.do},
        {"do": ones},
        {"do": turned},
        {"do": misaligned(inputs.do.contiguous())},
        {"cos": misaligned(inputs.cos)},
        {"q": odd.q, "k": odd.k, "do": odd.do},
    ):
        some = inputs._replace(**changes)
        hold(HORSE, some, run_op(some, HORSE, **HOPPER))
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    rope_attention(q, k, v, inputs.cos, inputs.sin, True, **HOPPER).sum().backward()
    alike((q.grad, k.grad, v.grad), run_op(inputs._replace(do=ones), HORSE, **HOPPER)[2:])


def test_passes_of_different_backends_fit_together():
    """o and lse mean the same to both; directly, and through a plan that mixes them."""
    inputs = make_inputs(HORSE, "cuda")
    q, k, v, cos, sin, do = inputs
    operators = torch.ops.fused_rope_attn
    options = True, HORSE.scale, HORSE.rotary, False, "auto"
    for first, second in (("hopper", "triton"), ("triton", "hopper")):
        o, lse = operators.attention_forward(q, k, v, cos, sin, *options, first, False)
        *rest, _ = operators.attention_backward(do, q, k, v, o, lse, cos, sin, *options, second, False)
        hold(HORSE, inputs, Results(o, lse, *rest))


@pytest.mark.parametrize("forward", [True, False])
def test_auto_runs_mixed_plans(preferred, forward):
    preferred(forward, not forward)
    inputs = make_inputs(MANY, "cuda")
    chosen = plan(*inputs[:5], True)
    assert isinstance(chosen.forward, configs.HopperForwardConfig) == forward
    assert isinstance(chosen.backward, configs.HopperBackwardConfig) != forward
    hold(MANY, inputs, run_op(inputs, MANY, backend="auto"))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("length", [64, 700])
def test_cuda_graph(length, deterministic):
    """Captured once, replayed with new data."""
    case = replace(HORSE, len_q=length, len_k=length)
    static, graph, captured = graphed(make_inputs(case, "cuda"), deterministic=deterministic, **HOPPER)
    for seed in (1, 2, 3):
        fresh = make_inputs(replace(case, seed=seed), "cuda")
        with torch.no_grad():
            for old, new in zip(static, fresh):
                old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        out = run_op(fresh, case, deterministic=deterministic, **HOPPER)
        agree((captured[0].detach(), out.lse, *captured[1:]), out)
        hold(case, fresh, Results(captured[0].detach(), out.lse, *captured[1:]))


def test_no_synchronisation():
    inputs = make_inputs(HORSE, "cuda")
    for deterministic in (False, True):
        run_op(inputs, HORSE, deterministic=deterministic, **HOPPER)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_op(inputs, HORSE, deterministic=deterministic, **HOPPER)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_another_stream():
    inputs = make_inputs(HORSE, "cuda")
    expected = run_op(inputs, HORSE, **HOPPER)
    agree(run_with_late_inputs(inputs, HORSE, **HOPPER), expected)


def test_two_streams_at_once():
    """Persistent blocks of two calls share the multiprocessors; each call has counters of its own."""
    problems = [make_inputs(replace(MANY, seed=seed), "cuda") for seed in (1, 2)]
    expected = [run_op(inputs, MANY, **HOPPER) for inputs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for inputs, stream in zip(problems, streams):
            with torch.cuda.stream(stream):
                found.append(run_op(inputs, MANY, **HOPPER))
    torch.cuda.synchronize()
    for i, out in enumerate(found):
        agree(out, expected[i % 2])


def test_backward_from_another_thread():
    inputs = make_inputs(HORSE, "cuda")
    expected = run_op(inputs, HORSE, **HOPPER)
    dq, dk, dv = gradients_from_another_thread(inputs, **HOPPER)
    equal((dk, dv), expected[3:])
    alike([dq], [expected.dq])


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_a_second_device():
    inputs = make_inputs(HORSE, "cuda:0")
    expected = run_op(inputs, HORSE, **HOPPER)
    there = Inputs(*(x.to("cuda:1") for x in inputs))
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        out = run_op(there, HORSE, **HOPPER)
        assert all(x.device == torch.device("cuda:1") for x in out)
        agree([x.to("cuda:0") for x in out], expected)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("backend", ["hopper", "auto"])
def test_compile(backend):
    """Inductor, full graph, one compilation for all lengths, on both sides of where "auto" changes its mind."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")

    def block(q, k, v, cos, sin):
        return 0.5 * rope_attention(2.0 * q, k, v, cos, sin, True, backend=backend)

    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=True)
    count = None
    for len_q, len_k in ((333, 700), (200, 400), (64, 2000)):
        inputs = make_inputs(replace(HORSE, len_q=len_q, len_k=len_k), "cuda")
        tables = inputs.cos, inputs.sin
        eager = gradients(lambda q, k, v: block(q, k, v, *tables), inputs)  # noqa: B023
        alike(gradients(lambda q, k, v: compiled(q, k, v, *tables), inputs), eager)  # noqa: B023
        count = count or counter.frame_count
    assert counter.frame_count == count


@pytest.mark.unpoisoned
def test_compile_with_cuda_graphs():
    torch._dynamo.reset()
    q, k, v, cos, sin, _ = make_inputs(HORSE, "cuda")

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def compiled(q, k, v, cos, sin):
        return rope_attention(q, k, v, cos, sin, True, **HOPPER)

    expected = rope_attention(q, k, v, cos, sin, True, **HOPPER)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(q, k, v, cos, sin), expected)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_autocast(dtype):
    inputs = make_inputs(replace(HORSE, dtype=F32), "cuda")
    low = inputs._replace(q=inputs.q.to(dtype), k=inputs.k.to(dtype), v=inputs.v.to(dtype))

    def run(q, k, v):
        return rope_attention(q, k, v, inputs.cos, inputs.sin, True, **HOPPER)

    with torch.autocast("cuda", dtype):
        assert plan(*inputs[:5], True, **HOPPER).backend == "hopper"
        q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
        o = run(q, k, v)
    o.backward(inputs.do.to(dtype))
    assert o.dtype == dtype and q.grad.dtype == k.grad.dtype == v.grad.dtype == F32
    alike((o.detach(), q.grad, k.grad, v.grad), gradients(run, low))


def test_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    inputs = make_inputs(HORSE, "cuda")

    def run(q, k, v):
        return rope_attention(q, k, v, inputs.cos, inputs.sin, True, **HOPPER)

    for use_reentrant in (False, True):
        saved = gradients(lambda q, k, v: checkpoint(run, q, k, v, use_reentrant=use_reentrant), inputs)  # noqa: B023
        alike(saved, gradients(run, inputs))


def test_double_backward_raises():
    inputs = make_inputs(HORSE, "cuda")
    q = inputs.q.detach().requires_grad_()
    o = rope_attention(q, inputs.k, inputs.v, inputs.cos, inputs.sin, True, **HOPPER)
    (dq,) = torch.autograd.grad(o, q, inputs.do, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match="double backward"):
        dq.sum().backward()


@pytest.mark.unpoisoned
@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
def test_memory(layout):
    """No copy of a strided input, K and V not expanded to the query heads, no score matrix."""
    case = Case(1, 32, 2, 1000, 1000, 128, dtype=BF16, layout=layout)
    inputs = make_inputs(case, "cuda")
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    for _ in range(2):  # the second time nothing is compiled, and no stand-in for a descriptor is made
        with peak_bytes() as forward:
            o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, **HOPPER)
        with peak_bytes() as backward:
            results = torch.autograd.grad(o, (q, k, v), inputs.do)
    lse = torch.empty(1, 32, 1000, device="cuda")
    accumulator = torch.empty(1, 32, 1024, 128, device="cuda")
    slack = 64 << 10
    assert forward[0] <= bytes_of(o, lse, k) + slack
    assert backward[0] <= bytes_of(*results, lse, lse, q, k, accumulator) + slack
