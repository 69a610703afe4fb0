"""The portable kernels and a GPU's memory: strides, alignment, peaks, and more than 2**31 elements."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention
from tests.support.attention import assert_equal, assert_matches_float64
from tests.support.dtypes import BF16
from tests.support.gpu import ODD_LENGTHS, bytes_of, misaligned, peaks_of_both_passes, skip_below_free_memory
from tests.support.marks import both_strategies
from verification.testing import Case, Inputs, Results, make_inputs, run_op

pytestmark = pytest.mark.gpu


@both_strategies
def test_expanded_and_strided_gradients(strategy):
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    ones = torch.ones((), dtype=BF16, device="cuda").expand(inputs.q.shape)
    turned = inputs.do.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    for do in (ones, turned):
        case_inputs = inputs._replace(do=do)
        assert_matches_float64(
            ODD_LENGTHS, case_inputs, run_op(case_inputs, ODD_LENGTHS, backend="triton", strategy=strategy)
        )
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend="triton", strategy=strategy).sum().backward()
    expected = run_op(inputs._replace(do=ones), ODD_LENGTHS, backend="triton", strategy=strategy)
    assert_equal((q.grad, k.grad, v.grad), expected[2:])


def test_alignment_is_not_remembered():
    """Equal shapes and strides, another alignment: a launch prepared for aligned pointers must not serve both."""
    strategy, case = "prepass", replace(ODD_LENGTHS, layout="bhnd")
    inputs = make_inputs(case, "cuda")
    expected = run_op(inputs, case, backend="triton", strategy=strategy)

    for name in ("k", "v", "cos"):
        shifted = inputs._replace(**{name: misaligned(getattr(inputs, name))})
        for x, y in zip(run_op(shifted, case, backend="triton", strategy=strategy), expected):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
        assert_equal(run_op(inputs, case, backend="triton", strategy=strategy), expected)


@pytest.mark.unpoisoned
@pytest.mark.parametrize(("layout", "strategy"), [("bnhd", "inline"), ("bnhd", "prepass"), ("odd", "prepass")])
def test_memory(layout, strategy):
    """No copy of an aligned input but the rotated q and k, K and V not expanded to the query heads, no score matrix.

    An inline forward pass saves no rotated q and k, so that the backward pass rotates both.
    """
    case = Case(1, 32, 2, 1000, 1000, 128, dtype=BF16, layout=layout)
    inputs, o, results, forward, backward = peaks_of_both_passes(case, backend="triton", strategy=strategy)
    lse = torch.empty(1, 32, 1000, device="cuda")
    inline, copied = strategy == "inline", layout == "odd"
    rotated, copies = bytes_of(inputs.q, inputs.k), bytes_of(inputs.v, inputs.do)
    assert forward <= bytes_of(o, lse) + (not inline) * rotated + copied * (rotated + bytes_of(inputs.v)) + 4096
    assert backward <= bytes_of(*results, lse, lse) + inline * rotated + copied * copies + 4096


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


@pytest.mark.unpoisoned
@both_strategies
def test_strides_beyond_two_to_the_31(strategy):
    """Rows of one tile, heads, and batches: strides that fit 32 bits, offsets that do not."""
    skip_below_free_memory(20 << 30)
    storage = torch.empty(2**32 + 2**20, dtype=BF16, device="cuda")
    for shape, strides in (
        ((1, 5, 5, 128), (2**20, 2**30, 128, 1)),
        ((5, 1, 5, 128), (2**30, 2**20, 128, 1)),
        ((1, 1, 5, 128), (2**20, 2**20, 2**30, 1)),
    ):
        case = Case(shape[0], shape[1], shape[1], 5, 5, 128, dtype=BF16, layout="bhnd")
        inputs = make_inputs(case, "cuda")
        expected = run_op(inputs, case, backend="triton", strategy=strategy)
        for name in ("q", "k", "v", "do"):
            far = storage.as_strided(shape, strides)
            far.copy_(getattr(inputs, name))
            out = run_op(inputs._replace(**{name: far}), case, backend="triton", strategy=strategy)
            for x, y in zip(out, expected):
                torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    del storage, far
    torch.cuda.empty_cache()
