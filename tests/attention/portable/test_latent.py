"""Multi-head latent attention by the portable kernels in the interpreter, each result against float64."""

import pytest
import torch

from fused_rope_attn import plan_mla, rope_attention_mla
from tests.support.dtypes import F16, F32
from tests.support.internals import forget_warnings
from tests.support.marks import cases, ignore_overflow, interpreted
from verification.testing import LatentCase, compare_latent, make_latent_inputs, run_latent_op

pytestmark = [interpreted, ignore_overflow]


@cases(
    LatentCase(2, 3, 37, 70, dtype=F32, interleaved=True),
    LatentCase(2, 3, 70, 70, dtype=F16, bshd=True),
    # The widths of DeepSeek, with more than one program for the heads of a tile of keys.
    LatentCase(1, 6, 33, 66, 128, 64, 128, interleaved=True, dtype=F16),
    # Widths that are no powers of two, rows at odd addresses, and a negative scale: q_nope in memory lacks its sign.
    LatentCase(1, 2, 35, 35, 48, 48, 80, aligned=False, softmax_scale=-0.2, dtype=F32),
    LatentCase(1, 2, 35, 35, causal=False, softmax_scale=0.0, dtype=F32),
    LatentCase(2, 2, 40, 75, causal=False, window=(20, 9), lse_gradient=True, dtype=F32),
    LatentCase(3, 2, 40, 75, kv_starts=(0, 33, 70), kv_lens=(75, 66, 71), lse_gradient=True, dtype=F32),
    # Rows without a key, and a batch entry without any.
    LatentCase(2, 2, 40, 33, kv_lens=(33, 0), causal=False, dtype=F16),
    LatentCase(1, 5, 80, 90, seqlens=((5, 5), (0, 0), (37, 40), (30, 40)), lse_gradient=True, dtype=F32),
    LatentCase(1, 2, 20, 70, seqlens=((3, 3), (9, 50)), causal=False, interleaved=True, window=(7, 4), dtype=F16),
)
def test_results_match_float64(case):
    inputs = make_latent_inputs(case)
    before = [x.clone() for x in inputs if x is not None]
    out = run_latent_op(inputs, case, backend="triton")
    assert all(torch.equal(x, y) for x, y in zip(before, (x for x in inputs if x is not None)))
    assert [x.dtype for x in out] == [case.dtype, F32, *[case.dtype] * 5]
    for found in compare_latent(inputs, case, out):
        assert found.ok, f"{case.name}: {found}"


def test_padding_and_unseen_rows_may_hold_nan():
    case = LatentCase(2, 2, 9, 40, kv_starts=(0, 5), kv_lens=(40, 12), dtype=F32)
    inputs = make_latent_inputs(case)
    clean = run_latent_op(inputs, case, backend="triton")
    for name in ("k_nope", "k_rope", "v"):
        x = getattr(inputs, name)
        x[1, :, :5], x[1, :, 12:] = float("nan"), float("inf")
    assert all(torch.equal(x, y) for x, y in zip(clean, run_latent_op(inputs, case, backend="triton")))


def test_reruns_are_bitwise_equal():
    case = LatentCase(2, 8, 33, 40)
    inputs = make_latent_inputs(case)
    first = run_latent_op(inputs, case, backend="triton")
    for deterministic in (False, True):
        again = run_latent_op(inputs, case, backend="triton", deterministic=deterministic)
        assert all(torch.equal(x, y) for x, y in zip(first, again))


def test_empty_calls():
    for sizes in ((0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0)):
        case = LatentCase(*sizes, dtype=F32, causal=True)
        forget_warnings()  # there is one in a process
        with pytest.warns(UserWarning) if sizes[3] == 0 else _nothing():
            out = run_latent_op(make_latent_inputs(case), case, backend="triton")
        assert out.o.shape == (*[sizes[0], sizes[1], sizes[2]], 48) and not any(x.any() for x in (out.o, *out[2:]))


def test_views_run_without_a_copy():
    """A query's and a key's parts are read where the projections wrote them."""
    case = LatentCase(1, 2, 9, 12, dtype=F32)
    inputs = make_latent_inputs(case)
    assert not inputs.q_rope.is_contiguous() and not inputs.v.is_contiguous()
    copies = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            copies.append(getattr(function, "__name__", "") in ("copy_", "contiguous", "clone", "cat", "expand"))
            return function(*args, **(kwargs or {}))

    with Watch(), torch.no_grad():
        rope_attention_mla(*inputs[:7], True, backend="triton")
    assert copies and not any(copies)


@pytest.mark.parametrize("wanted", ["q_nope", "q_rope", "k_nope", "k_rope", "v"])
def test_only_some_inputs_require_a_gradient(wanted):
    case = LatentCase(1, 2, 9, 12, dtype=F32)
    inputs = make_latent_inputs(case)
    everything = run_latent_op(inputs, case, backend="triton")
    tensors = {name: getattr(inputs, name).detach() for name in inputs._fields[:5]}
    tensors[wanted].requires_grad_()
    rope_attention_mla(*tensors.values(), inputs.cos, inputs.sin, True, backend="triton").backward(inputs.do)
    assert torch.equal(tensors[wanted].grad, getattr(everything, f"d{wanted}"))


def test_plan_says_that_the_shared_head_is_rotated_once():
    inputs = make_latent_inputs(LatentCase(1, 2, 9, 12))
    found = plan_mla(*inputs[:7], True, backend="triton")
    assert found.backend == "triton" and found.strategy == "prepass" and "shared key head" in found.reason


def _nothing():
    import contextlib

    return contextlib.nullcontext()
