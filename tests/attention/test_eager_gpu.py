"""On a GPU: eager calls that are replayed give what they give when every launch is made anew."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention
from fused_rope_attn.attention import ops
from fused_rope_attn.runtime.launch import Launch
from tests.support.attention import assert_equal
from tests.support.gpu import ODD_LENGTHS, assert_alike, is_sm_90
from verification.testing import Case, make_inputs, masks_of, norms_of

pytestmark = pytest.mark.gpu

PLAIN = Case(1, 4, 4, 128, 128, 64)
# (case, backend, strategy): after the calls that are recorded, none of these launches a kernel by itself.
CALLS = {
    "inline": (PLAIN, "triton", "inline"),
    "pre-pass": (ODD_LENGTHS, "triton", "prepass"),
    "sm_90": (ODD_LENGTHS, "hopper", "auto"),
    "sm_90, a narrow window": (replace(ODD_LENGTHS, window=(40, 0)), "hopper", "auto"),
    "sm_90, wide heads": (replace(ODD_LENGTHS, head_dim=192), "hopper", "auto"),
    "lengths": (replace(ODD_LENGTHS, kv_lens=(400, 500)), "triton", "auto"),
    "norms": (replace(PLAIN, norms=0.0), "triton", "auto"),
    "norms, sm_90": (replace(ODD_LENGTHS, norms=1.0), "hopper", "auto"),
    "chosen": (PLAIN, "auto", "auto"),
}


@pytest.fixture(params=CALLS)
def call(request):
    """(makes a step of a seed, compares two of its results)."""
    case, backend, strategy = CALLS[request.param]
    if backend == "hopper" and not is_sm_90():
        pytest.skip("needs an sm_90 GPU")

    def make(seed):
        inputs = make_inputs(replace(case, seed=seed), "cuda")
        options = masks_of(case, "cuda") | norms_of(case, "cuda")

        def step(do=inputs.do):
            def run(*given, **more):
                return rope_attention(
                    *given, inputs.cos, inputs.sin, True, backend=backend, strategy=strategy, **options, **more
                )

            alone = run(*inputs[:3])
            q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
            o, lse = run(q, k, v, return_lse=True)
            return o.detach(), lse, *torch.autograd.grad(o, (q, k, v), do), alone

        return step

    def compare(given, expected):
        (assert_equal if backend == "triton" else assert_alike)(given, expected)

    yield make, compare
    ops.forget()


def moved(x):
    """The same tensor at an address that is no multiple of 16 bytes."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return room[1:].view(x.shape).copy_(x)


def expected_of(make, monkeypatch, seeds):
    with monkeypatch.context() as patched:
        patched.setattr(ops, "find", lambda *arguments: None)
        return [[x.clone() for x in make(seed)()] for seed in seeds]


def test_replays_give_what_launches_give(call, monkeypatch):
    make, compare = call
    expected = expected_of(make, monkeypatch, range(3))
    for _ in range(3):
        make(0)()
    monkeypatch.setattr(Launch, "__call__", None)
    for seed in (1, 2, 0, 1):
        compare(make(seed)(), expected[seed])


def test_a_gradient_that_lies_otherwise_is_another_call(call, monkeypatch):
    make, compare = call
    (expected,) = expected_of(make, monkeypatch, [1])
    step = make(1)
    for _ in range(4):
        compare(step(), expected)
    do = step.__defaults__[0]
    for other in (do.transpose(1, 2).contiguous().transpose(1, 2), do.repeat_interleave(2, -1)[..., ::2], moved(do)):
        for _ in range(4):
            assert_alike(step(other), expected)


def test_what_hooks_have_moved_is_another_call(call, monkeypatch):
    make, _ = call
    (expected,) = expected_of(make, monkeypatch, [1])
    step = make(1)
    for _ in range(4):
        step()
    for unpack in (moved, torch.Tensor.contiguous):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            assert_alike(step(), expected)
