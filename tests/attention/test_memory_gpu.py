"""The kernels and a GPU's memory: strides, alignment, peaks, and more than 2**31 elements."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention, rope_attention_mla
from tests.support.attention import assert_matches_float64
from tests.support.dtypes import BF16
from tests.support.gpu import ODD_LENGTHS, bytes_of, misaligned, peaks_of_both_passes, skip_below_free_memory
from tests.support.marks import both_strategies
from tests.support.places import INLINE, ON_SM_90, PREPASS, assert_same, both_backends, each_backend, needs_sm_90
from verification.testing import Case, Inputs, LatentCase, Results, make_inputs, make_latent_inputs, run_op

pytestmark = pytest.mark.gpu


@each_backend
def test_the_gradient_of_a_sum(chosen):
    """It is one number, expanded."""
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    ones = torch.ones((), dtype=BF16, device="cuda").expand(inputs.q.shape)
    out = run_op(inputs._replace(do=ones), ODD_LENGTHS, **chosen)
    assert_matches_float64(ODD_LENGTHS, inputs._replace(do=ones), out)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    o, lse = rope_attention(q, k, v, *inputs[3:5], True, return_lse=True, **chosen)
    o.sum().backward()
    assert_same((o.detach(), lse.detach(), q.grad, k.grad, v.grad), out, chosen)


@both_backends
def test_alignment_is_not_remembered(chosen):
    """Equal shapes and strides, another alignment: a launch prepared for aligned pointers must not serve both."""
    case = replace(ODD_LENGTHS, layout="bhnd")
    inputs = make_inputs(case, "cuda")
    expected = run_op(inputs, case, **chosen)
    for name in ("q", "k", "v", "cos", "do"):
        shifted = inputs._replace(**{name: misaligned(getattr(inputs, name))})
        for x, y in zip(run_op(shifted, case, **chosen), expected):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
        assert_same(run_op(inputs, case, **chosen), expected, chosen)


@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    ("chosen", "layout"),
    [(INLINE, "bnhd"), (PREPASS, "bnhd"), (PREPASS, "odd"), pytest.param(ON_SM_90, "bnhd", marks=needs_sm_90)],
)
def test_peaks(layout, chosen):
    """No copy of an aligned input but the rotated q and k, K and V not expanded to the query heads, no score matrix.

    An inline forward pass saves no rotated q and k, so that the backward pass rotates both. The sm_90 kernels divide
    few key heads of one sequence among programs. They add up dk and dv of 128 keys in float32, in up to two slots for
    each multiprocessor.
    """
    case = Case(1, 32, 2, 1000, 1000, 128, dtype=BF16, layout=layout)
    inputs, o, results, forward, backward = peaks_of_both_passes(case, **chosen)
    lse = torch.empty(1, 32, 1000, device="cuda")
    is_inline, is_copied, is_sm_90 = chosen == INLINE, layout == "odd", chosen == ON_SM_90
    rotated, copies = bytes_of(inputs.q, inputs.k), bytes_of(inputs.v, inputs.do)
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    sums = 4 * (32 * 1024 * 128 + 2 * multiprocessors * 2 * 128 * 128)
    slack = (64 << 10) if is_sm_90 else 4096
    most = bytes_of(o, lse) + (not is_inline) * rotated + is_copied * (rotated + bytes_of(inputs.v))
    assert forward <= most + slack
    most = bytes_of(*results, lse, lse) + is_inline * rotated + is_copied * copies + is_sm_90 * sums
    assert backward <= most + slack


@both_backends
def test_latent_attention_allocates_no_tensor_of_all_columns_or_all_heads(chosen):
    """Forward allocates o, lse and the rotated shared head, and no more than a rounding of the allocator beyond."""
    inputs = make_latent_inputs(LatentCase(1, 32, 32, 2048, 2048, 64, nope=128, value=128, dtype=BF16), "cuda")
    for _ in range(3):  # compile, record, replay
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            o, lse = rope_attention_mla(*inputs[:7], True, return_lse=True, backend=chosen["backend"])
        taken = torch.cuda.max_memory_allocated() - before
    assert taken <= o.numel() * 2 + lse.numel() * 4 + 2048 * 64 * 2 + (1 << 20)


@pytest.mark.unpoisoned
@both_strategies
def test_more_than_two_to_the_31_elements(strategy):
    """All of q, k, v and the outputs are larger, and there are more than 65535 heads; both ends against float64."""
    skip_below_free_memory(60 << 30)
    case = Case(66000, 4, 4, 64, 64, 128, dtype=BF16)
    inputs = make_inputs(case, "cuda")
    assert inputs.q.numel() > 2**31 and inputs.k.numel() > 2**31
    out = run_op(inputs, case, backend="triton", strategy=strategy)
    for part in (slice(0, 2), slice(32767, 32769), slice(-2, None)):
        some = replace(case, batch=2)
        some_inputs = Inputs(*(x[part] for x in inputs[:3]), inputs.cos, inputs.sin, inputs.do[part])
        assert_matches_float64(some, some_inputs, Results(*(x[part] for x in out)))
    del inputs, out
    torch.cuda.empty_cache()
