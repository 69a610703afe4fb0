"""The backend of a call: "auto" always runs, and an explicit choice runs or gives the reason why not."""

import os
import subprocess
import sys

import pytest
import torch

from fused_rope_attn import plan, rope_attention, rope_attention_varlen
from tests.support.attention import gradients
from tests.support.internals import with_kvcache
from tests.support.marks import interpreted
from tests.support.operators import MASKS, SMALL, assert_close
from verification.testing import Case, make_inputs, run_reference


def test_what_the_sm_90_kernels_do_not_serve():
    """float32, of packed sequences too, and the generation step, which has a kernel of its own."""
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    cu_q, cu_k = (torch.tensor([0, x.shape[2]], dtype=torch.int32) for x in (q, k))
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    with pytest.raises(NotImplementedError, match="^q must be float16 or bfloat16 for backend='hopper'"):
        rope_attention_varlen(*packed, cos, sin, cu_q, cu_k, 7, 9, True, backend="hopper")
    lengths = torch.tensor([9, 5], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="^cache_seqlens .*hopper.*portable"):
        with_kvcache(q, k, v, cos, sin, cache_seqlens=lengths, backend="hopper")


@pytest.mark.parametrize("names", [*((name,) for name in MASKS), tuple(MASKS)], ids=",".join)
def test_auto_always_runs(names):
    inputs = make_inputs(SMALL)
    extras = {name: MASKS[name] for name in names}
    arguments = (inputs.cos, inputs.sin, True)
    chosen = plan(*inputs[:3], *arguments, **extras)
    assert chosen.backend == "reference" and chosen.reason
    auto = gradients(lambda q, k, v: rope_attention(q, k, v, *arguments, **extras), inputs)
    assert_close(
        auto, gradients(lambda q, k, v: rope_attention(q, k, v, *arguments, backend="reference", **extras), inputs)
    )
    assert not torch.equal(auto[0], rope_attention(*inputs[:3], *arguments))


@pytest.mark.parametrize(
    ("changes", "error", "pattern"),
    [
        ({"head_dim": 20}, NotImplementedError, "^q .*multiple of 8 from 16 to 256.*20"),
        ({"head_dim": 8}, NotImplementedError, "^q .*multiple of 8 from 16 to 256.*8"),
        ({"head_dim": 264}, NotImplementedError, "^q .*multiple of 8 from 16 to 256.*264"),
        ({"dtype": torch.float64}, NotImplementedError, "^q .*float64"),
    ],
    ids=str,
)
@pytest.mark.parametrize("choice", [{"backend": "triton"}, {"strategy": "inline"}], ids=str)
@interpreted
def test_explicit_choices_never_fall_back(changes, error, pattern, choice):
    case = Case(**({"batch": 1, "heads_q": 1, "heads_kv": 1, "len_q": 3, "len_k": 3, "head_dim": 16} | changes))
    q, k, v, cos, sin, _ = make_inputs(case)
    for function in (rope_attention, plan):
        with pytest.raises(error, match=pattern):
            function(q, k, v, cos, sin, True, **choice)
    assert rope_attention(q, k, v, cos, sin, True).shape == q.shape  # "auto" serves it
    assert plan(q, k, v, cos, sin, True).backend == "reference"


def test_backends_that_this_machine_cannot_run():
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    for function in (rope_attention, plan):
        with pytest.raises((NotImplementedError, RuntimeError), match="hopper"):
            function(q, k, v, cos, sin, True, backend="hopper")
        with pytest.raises(ValueError, match="strategy.*reference"):
            function(q, k, v, cos, sin, True, backend="reference", strategy="inline")


def test_triton_on_cpu_needs_the_interpreter():
    program = """
import torch, fused_rope_attn
x, t = torch.zeros(1, 1, 4, 16), torch.zeros(4, 8)
for choice in ({"backend": "triton"}, {"strategy": "prepass"}):
    for function in (fused_rope_attn.rope_attention, fused_rope_attn.plan):
        try:
            function(x, x, x, t, t, True, **choice)
        except RuntimeError as error:
            assert "TRITON_INTERPRET=1" in str(error) and "cpu" in str(error), error
        else:
            raise SystemExit("it ran")
assert fused_rope_attn.plan(x, x, x, t, t).backend == "reference"
fused_rope_attn.rope_attention(x, x, x, t, t)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


@interpreted
def test_the_kernels_agree_with_the_reference_through_the_public_function():
    inputs = make_inputs(SMALL)
    run = {
        backend: gradients(
            lambda q, k, v: rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend=backend),  # noqa: B023
            inputs,
        )
        for backend in ("triton", "reference")
    }
    assert_close(run["triton"], run["reference"], 1e-4)
    eager = run_reference(inputs, SMALL)
    assert_close(run["reference"], [eager.o, eager.dq, eager.dk, eager.dv], 1e-5)
