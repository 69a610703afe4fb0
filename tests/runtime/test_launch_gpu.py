"""On a GPU: launches by the driver are taken, and give what Triton's launcher gives, in graphs, streams and threads."""

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import apply_rope_qk, rope_attention, rope_attention_with_kvcache
from fused_rope_attn.runtime import driver
from fused_rope_attn.runtime.launch import Launch
from tests.support.attention import assert_equal
from tests.support.gpu import ODD_LENGTHS, assert_same_but_dq, capture, is_sm_90
from tests.support.internals import forget_calls
from verification.testing import make_inputs

pytestmark = pytest.mark.gpu


def attention(seed, backend="triton"):
    if backend == "hopper" and not is_sm_90():
        pytest.skip("needs an sm_90 GPU")
    inputs = make_inputs(replace(ODD_LENGTHS, seed=seed), "cuda")
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])

    def step():
        o, lse = rope_attention(q, k, v, inputs.cos, inputs.sin, True, return_lse=True, backend=backend)
        return o.detach(), lse, *torch.autograd.grad(o, (q, k, v), inputs.do)

    return step


def generation(seed):
    q, k, v, cos, sin, _ = make_inputs(replace(ODD_LENGTHS, seed=seed), "cuda")
    # 17 and 600, which no copy from the host brings: that would wait for everything before it on the stream.
    lens = torch.arange(17, 601, 583, dtype=torch.int32, device="cuda")

    def step():
        caches = k.clone(), v.clone()
        o = rope_attention_with_kvcache(q[:, :, :1], *caches, cos, sin, k[:, :, :1], v[:, :, :1], cache_seqlens=lens)
        return o, *caches

    return step


def rotation(seed):
    q, k, _, cos, sin, _ = make_inputs(replace(ODD_LENGTHS, seed=seed), "cuda")
    return lambda: apply_rope_qk(q, k[:, :, :333], cos, sin)


sm_90 = functools.partial(attention, backend="hopper")
CALLS = {"portable": attention, "sm_90": sm_90, "generation": generation, "rotation": rotation}


@pytest.fixture(autouse=True)
def forgotten():
    """Launches prepared under a changed driver must not outlive the test."""
    yield
    forget_calls()


@pytest.fixture(params=CALLS)
def calls(request, monkeypatch):
    """(makes a step of a seed, compares two results, results of three seeds by Triton's launcher)."""
    make = CALLS[request.param]
    with monkeypatch.context() as patched:
        patched.setattr(driver, "cuda_driver", lambda: None)
        forget_calls()
        expected = [[x.clone() for x in make(seed)()] for seed in range(3)]
    forget_calls()
    for _ in range(4):  # Triton compiles, the call is recorded, and that of a known call
        make(0)()
    monkeypatch.setattr(Launch, "__call__", None)
    return make, assert_same_but_dq if request.param == "sm_90" else assert_equal, expected


def test_the_driver_gives_what_triton_gives(calls):
    make, compare, expected = calls
    for seed in range(3):
        compare(make(seed)(), expected[seed])


def test_on_a_stream_whose_inputs_come_late(calls):
    make, compare, expected = calls
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        out = make(1)()
        assert not side.query()
    side.synchronize()
    compare(out, expected[1])


def test_in_a_graph(calls):
    make, compare, expected = calls
    graph, captured = capture(make(2))
    for x in captured:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    compare(captured, expected[2])


def test_from_several_threads_at_once(calls):
    """Every thread has its own stream and tensors, and all of them the same prepared launches."""
    make, compare, expected = calls

    def work(seed):
        step, stream = make(seed), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for _ in range(20):
                out = step()
                stream.synchronize()
                compare(out, expected[seed])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))  # raises what a thread raised
