"""Nothing hangs on sm_90, and run after run gives the same, also where programs wait for one another to add dQ.

Rotated q and k that the forward saves for the backward give what the backward gives that rotates them itself.
"""

import subprocess
from dataclasses import replace

import pytest
import torch

from tests.support import gpu
from tests.support.attention import assert_equal, assert_matches_float64
from tests.support.dtypes import BF16, F16
from tests.support.internals import run_operators
from tests.support.marks import cases
from tests.support.paths import python
from tests.support.places import EMPTY, ON_SM_90, PADDED, UNEVEN, check_reruns, needs_sm_90, packed
from verification.testing import Case, make_inputs, run_op

pytestmark = needs_sm_90
WATCHED = """
import torch
from tests.support.gpu import assert_alike
from verification.testing import Case, make_inputs, run_op

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
    # A single key gives dq and dk that are nothing but rounding.
    names = ("o", "dq", "dk", "dv") if case.len_k > 1 else ("o", "dv")
    assert_alike(*([getattr(of, name) for name in names] for of in (out, expected)), 2e-2)
print("all agree", flush=True)
"""


@pytest.mark.timeout(600)
def test_nothing_hangs():
    """Odd shapes one after another, up to 128K tokens of one head. In a process of its own, which can be ended."""
    try:
        result = python("-c", WATCHED, timeout=400)
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"not finished after {late.timeout} s; the last lines: {(late.stdout or b'')[-500:]!r}")
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    assert "all agree" in result.stdout


@cases(
    gpu.MANY_TILES,
    *gpu.SOME_TILES,
    gpu.FEW_KEY_HEADS,
    gpu.FEW_HEADS,
    replace(gpu.MANY_TILES, heads_q=16, heads_kv=8, head_dim=256),
    replace(gpu.MANY_TILES, heads_q=48, heads_kv=6, norms=1.0),
    packed((1500, 40, 0, 2000, 1, 900, 127), heads_q=16, heads_kv=4, head_dim=256),
    packed(EMPTY),
    Case(2, 16, 4, 2500, 2500, 128, causal=False, dtype=BF16, intervals="random"),
    # The root's tiles have several times the work of a multiprocessor, and are divided among programs.
    Case(2, 8, 2, 3000, 3000, 128, causal=False, dtype=BF16, intervals="tree", norms=1.0),
)
def test_a_hundred_reruns(case):
    """Tiles are taken in any order, and unwritten memory is poisoned each time."""
    check_reruns(case, times=100)


# More programs than multiprocessors, so that key blocks of a head run at the same time and one after another.
LONG = Case(1, 8, 2, 3000, 3000, 128, dtype=BF16)
ORDERED = (
    replace(gpu.MANY_TILES, causal=False, head_dim=64),
    replace(LONG, window=(200, 0)),  # narrow: each query block is stored by the first key block that sees it
    replace(LONG, window=(150, 77), causal=False, softcap=20.0, sinks=True, dtype=F16, head_dim=256),
    replace(LONG, window=(1500, 0), heads_kv=8, norms=1.0, head_dim=96),
    replace(LONG, batch=2, kv_starts=(0, 700), kv_lens=(3000, 2111), softcap=9.0, head_dim=64),
    replace(LONG, causal=False, intervals="blocks", window=(900, -1), kv_lens=(2900,), heads_q=2),
    packed(UNEVEN, heads_q=16, heads_kv=4, head_dim=96),
    packed((2000, 0, 1, 900, 127, 64), causal=False, norms=1.0, sinks=True, head_dim=64),
)


@cases(*ORDERED)
def test_a_fixed_order_next_to_other_work(case):
    """Products on another stream make programs start later and in another place."""
    inputs = make_inputs(case, "cuda")

    def all_of(results):
        return [x for x in (*results, results.dsinks, results.dq_norm, results.dk_norm) if x is not None]

    first = run_op(inputs, case, **ON_SM_90, deterministic=True)
    assert_matches_float64(case, inputs, first)
    stream, x = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda", dtype=BF16)
    for _ in range(30):
        with torch.cuda.stream(stream):
            for _ in range(int(torch.randint(1, 8, ()))):
                x @ x
        assert_equal(all_of(first), all_of(run_op(inputs, case, **ON_SM_90, deterministic=True)))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_head_may_have_more_key_blocks_than_there_are_multiprocessors(head_dim):
    """Then fewer than half of them alternate with those of the next head."""
    case = Case(1, 6, 3, 19_001, 19_001, head_dim, dtype=BF16)
    inputs = make_inputs(case, "cuda")
    first = run_op(inputs, case, **ON_SM_90, deterministic=True)
    gpu.assert_alike(first, run_op(inputs, case, **ON_SM_90))
    for _ in range(5):
        assert_equal(first, run_op(inputs, case, **ON_SM_90, deterministic=True))


@cases(
    gpu.MANY_TILES,  # persistent blocks share the multiprocessors, not their counters
    # A quarter of the keys at most, and more key blocks than run at a time.
    Case(2, 40, 8, 2700, 2700, 128, dtype=BF16, window=(256, 0)),
    Case(1, 64, 64, 3000, 3000, 128, dtype=F16, window=(600, 0)),
)
def test_two_streams_at_once(case):
    inputs = [make_inputs(replace(case, seed=seed), "cuda") for seed in range(2)]
    expected = [run_op(x, case, **ON_SM_90) for x in inputs]
    assert_matches_float64(case, inputs[0], expected[0])
    streams, found = [torch.cuda.Stream() for _ in inputs], []
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, x in zip(streams, inputs):
            with torch.cuda.stream(stream):
                found.append(run_op(x, case, **ON_SM_90))
    torch.cuda.synchronize()
    for i, out in enumerate(found):
        gpu.assert_same_but_dq(out, expected[i % 2])


# A block's first tile, and its others, are rotated by different warps.
SAVED = (
    replace(gpu.ODD_LENGTHS, causal=False, dtype=F16, interleaved=True, rotary_dim=64),
    replace(gpu.ODD_LENGTHS, head_dim=64, softmax_scale=-0.2, tables="random"),
    replace(PADDED, kv_starts=(40, 690), kv_lens=(650, 700), sinks=True, norms=0.0),
    packed(UNEVEN),
    packed((20, 333), behind=(400, 700), window=(33, 0), head_dim=192),
    gpu.MANY_TILES,
    packed((300, 129, 1000, 63) * 12),
)


@cases(*SAVED)
def test_the_saved_are_what_the_backward_would_rotate(case):
    """All the same bits but dq, which is added in any order, because a rotation has the same bits in every kernel.
    Both match float64."""
    inputs = make_inputs(case, "cuda")
    rotated_by_forward = run_op(inputs, case, **ON_SM_90)
    rotated_by_backward = run_operators(inputs, case, forward="hopper", backward="hopper")
    if case.norms is None:
        gpu.assert_same_but_dq(rotated_by_forward, rotated_by_backward)
    assert_equal(rotated_by_forward[:2], rotated_by_backward[:2])
    assert_matches_float64(case, inputs, rotated_by_forward)
    assert_matches_float64(case, inputs, rotated_by_backward)
    with torch.no_grad():
        assert_equal(run_op(inputs, case, **ON_SM_90, grads=False)[:2], rotated_by_forward[:2])


@pytest.mark.parametrize(("forward", "backward"), [("hopper", "triton"), ("triton", "hopper")])
@cases(
    replace(PADDED, window=(150, 0), softcap=30.0, kv_starts=(0, 300), kv_lens=(700, 600), sinks=True),
    replace(gpu.ODD_LENGTHS, causal=False, intervals="random", norms=0.0, kv_starts=(0, 300), kv_lens=(700, 600)),
    packed(UNEVEN, window=(150, 0), softcap=30.0, sinks=True, head_dim=256),
)
def test_passes_of_different_backends_fit_together(case, forward, backward):
    """o and lse mean the same to both."""
    inputs = make_inputs(case, "cuda")
    assert_matches_float64(case, inputs, run_operators(inputs, case, forward=forward, backward=backward))
