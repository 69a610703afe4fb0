"""Multi-head latent attention by the sm_90 kernels: float64, equal bits, plans, memory."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_rope_attn import plan_mla, rope_attention_mla
from tests.support.dtypes import BF16, F16
from tests.support.gpu import assert_alike
from tests.support.hopper import needs_sm_90
from tests.support.internals import go_through_the_dispatcher
from tests.support.marks import cases
from verification.testing import LatentCase, compare_latent, make_latent_inputs, run_latent_op

pytestmark = needs_sm_90

DEEPSEEK = LatentCase(2, 6, 333, 700, 128, 64, 128, interleaved=True, dtype=BF16)
PACKED = replace(
    DEEPSEEK, batch=1, len_q=650, len_k=710, lse_gradient=True,
    seqlens=((300, 300), (0, 0), (1, 1), (20, 0), (129, 129), (0, 30), (200, 250)),
)  # fmt: skip
PADDED = replace(DEEPSEEK, kv_starts=(0, 300), kv_lens=(700, 650), lse_gradient=True)


@cases(
    LatentCase(1, 1, 128, 128, 128, 64, 128, dtype=BF16),
    LatentCase(1, 3, 1, 65, 128, 64, 128, dtype=BF16),
    DEEPSEEK,
    replace(DEEPSEEK, dtype=F16, interleaved=False),
    replace(DEEPSEEK, causal=False),
    replace(DEEPSEEK, len_q=700, len_k=333),  # queries that see nothing
    replace(DEEPSEEK, causal=False, window=(100, 50), lse_gradient=True),
    replace(DEEPSEEK, window=(33, 0)),
    PADDED,
    replace(PADDED, kv_lens=(0, 650), causal=False, window=(200, 70)),
    PACKED,
    replace(PACKED, causal=False, window=(64, 3), dtype=F16),
    replace(DEEPSEEK, aligned=False, softmax_scale=0.1, bshd=True),
    LatentCase(1, 16, 2048, 2048, 128, 64, 128, interleaved=True, bshd=True, dtype=BF16),
    LatentCase(1, 4, 8192, 8192, 128, 64, 128, interleaved=True, dtype=BF16),
)
def test_results_match_float64(case):
    inputs = make_latent_inputs(case, "cuda")
    out = run_latent_op(inputs, case, backend="hopper")
    for found in compare_latent(inputs, case, out):
        assert found.ok, f"{case.name}: {found}"


@cases(DEEPSEEK, PADDED, PACKED, replace(DEEPSEEK, len_q=2048, len_k=2048, heads=16))
def test_200_reruns_are_bitwise_equal(case):
    inputs, others = make_latent_inputs(case, "cuda"), make_latent_inputs(replace(case, seed=1), "cuda")
    first = run_latent_op(inputs, case, backend="hopper", deterministic=True)
    for _ in range(200):
        # Leave other numbers in the memory that the next run's workspaces get: a kernel may begin before another ends.
        run_latent_op(others, case, backend="hopper")
        assert all(torch.equal(x, y) for x, y in zip(first, run_latent_op(inputs, case, backend="hopper")))


@cases(DEEPSEEK, PADDED, PACKED)
def test_backward_of_saved_and_of_given_queries(case, monkeypatch):
    """An eager forward pass saves q_rope rotated. Traced calls save what the caller gave."""
    inputs = make_latent_inputs(case, "cuda")
    o, _, *gradients = run_latent_op(inputs, case, backend="hopper")
    go_through_the_dispatcher(monkeypatch)
    found_o, _, *found = run_latent_op(inputs, case, backend="hopper")
    assert_alike((found_o, *found), (o, *gradients))


def test_the_operator_of_saved_queries():
    """A mode that watches operators sees one. Its fake results have the layout of the real ones."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append((function, args))
            return function(*args, **(kwargs or {}))

    inputs = make_latent_inputs(DEEPSEEK, "cuda")
    leaves = [x.detach().requires_grad_() for x in inputs[:5]]
    o = rope_attention_mla(*leaves, *inputs[5:7], True, interleaved=True, backend="hopper")
    expected = torch.autograd.grad(o, leaves, inputs.do, retain_graph=True)
    with Watch(), torch.enable_grad():
        found = torch.autograd.grad(o, leaves, inputs.do, create_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    ((function, arguments),) = [x for x in seen if "attention_backward" in str(x[0])]
    torch.library.opcheck(function, arguments, test_utils="test_faketensor")


@cases(PADDED, PACKED)
def test_rows_that_do_not_exist_may_hold_nan(case):
    """Keys outside of a sequence, and other sequences' rows, reach nothing: neither o nor any gradient."""
    inputs = make_latent_inputs(case, "cuda")
    expected = run_latent_op(inputs, case, backend="hopper")
    hidden = inputs._replace(**{name: getattr(inputs, name).clone() for name in ("k_nope", "k_rope", "v")})
    if case.seqlens is None:
        for name in ("k_nope", "k_rope", "v"):
            getattr(hidden, name)[1, :, :300] = float("nan")
            getattr(hidden, name)[1, :, 650:] = float("nan")
        found = run_latent_op(hidden, case, backend="hopper")
        assert all(torch.equal(x, y) for x, y in zip(expected, found))
    else:
        for name in ("k_nope", "k_rope", "v"):
            getattr(hidden, name)[:, :, :300] = float("nan")  # those of the first sequence
        found = run_latent_op(hidden, case, backend="hopper")
        for name, x, y in zip(found._fields, expected, found):
            after = (slice(None), slice(None), slice(300, None))
            assert torch.equal(x[after], y[after]), name


def test_auto_takes_these_kernels_where_there_is_enough_work():
    large, small = (
        make_latent_inputs(replace(DEEPSEEK, batch=1, heads=heads, len_q=512, len_k=512), "cuda") for heads in (2, 1)
    )
    assert plan_mla(*large[:7], True).backend == "hopper"
    found = plan_mla(*small[:7], True)
    assert found.backend == "triton" and "a launch-bound call" in found.reason
    assert "softmax_scale must be positive" in plan_mla(*large[:7], True, softmax_scale=-0.1).reason


def test_a_negative_scale_and_other_widths_are_refused():
    inputs = make_latent_inputs(DEEPSEEK, "cuda")
    with pytest.raises(NotImplementedError, match="softmax_scale must be positive for backend='hopper'"):
        rope_attention_mla(*inputs[:7], True, softmax_scale=-0.1, backend="hopper")
    inputs = make_latent_inputs(replace(DEEPSEEK, value=112), "cuda")
    with pytest.raises(NotImplementedError, match="must have 128, 64, 128 columns .* but have 128, 64, 112"):
        rope_attention_mla(*inputs[:7], True, backend="hopper")


def test_no_tensor_of_all_columns_or_all_heads_is_allocated():
    """Forward allocates o, lse and the rotated k_rope, and no more than a rounding of the allocator beyond."""
    case = LatentCase(1, 32, 2048, 2048, 128, 64, 128, dtype=BF16)
    inputs = make_latent_inputs(case, "cuda")
    for _ in range(3):  # compile, record, replay
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            o, lse = rope_attention_mla(*inputs[:7], True, return_lse=True, backend="hopper")
        taken = torch.cuda.max_memory_allocated() - before
    rotated = 2048 * 64 * 2
    assert taken <= o.numel() * 2 + lse.numel() * 4 + rotated + (1 << 20)
