"""Multi-head latent attention by the portable kernels on a GPU: float64, reruns, memory, streams."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import plan_mla, rope_attention_mla
from tests.support.dtypes import BF16, F16, F32
from tests.support.marks import cases
from verification.testing import LatentCase, compare_latent, make_latent_inputs, run_latent_op

pytestmark = pytest.mark.gpu

# DeepSeek's widths, odd lengths, and heads that no whole number of programs shares.
DEEPSEEK = LatentCase(2, 6, 333, 700, 128, 64, 128, interleaved=True, dtype=BF16)


@cases(
    DEEPSEEK,
    replace(DEEPSEEK, dtype=F16, interleaved=False),
    replace(DEEPSEEK, dtype=F32, batch=1, heads=2, len_q=200, len_k=300),
    replace(DEEPSEEK, causal=False, window=(100, 50), lse_gradient=True),
    replace(DEEPSEEK, kv_starts=(0, 300), kv_lens=(700, 650), lse_gradient=True),
    replace(DEEPSEEK, nope=80, rope=48, value=112, aligned=False, softmax_scale=-0.1),
    replace(DEEPSEEK, batch=1, len_q=630, len_k=680, seqlens=((300, 300), (0, 0), (1, 1), (129, 129), (200, 250))),
    LatentCase(1, 16, 2048, 2048, 128, 64, 128, interleaved=True, bshd=True, dtype=BF16),
)
def test_results_match_float64(case):
    inputs = make_latent_inputs(case, "cuda")
    out = run_latent_op(inputs, case, backend="triton")
    for found in compare_latent(inputs, case, out):
        assert found.ok, f"{case.name}: {found}"


def test_200_reruns_are_bitwise_equal():
    inputs = make_latent_inputs(DEEPSEEK, "cuda")
    first = run_latent_op(inputs, DEEPSEEK, backend="triton")
    for _ in range(200):
        assert all(torch.equal(x, y) for x, y in zip(first, run_latent_op(inputs, DEEPSEEK, backend="triton")))


def test_auto_takes_the_portable_kernels_for_little_work():
    inputs = make_latent_inputs(replace(DEEPSEEK, batch=1, heads=1), "cuda")
    found = plan_mla(*inputs[:7], True, interleaved=True)
    assert found.backend == "triton" and found.backward is not None


def test_no_tensor_of_all_columns_or_all_heads_is_allocated():
    """Forward allocates o, lse and the rotated shared head, and no more than a rounding of the allocator beyond."""
    case = LatentCase(1, 32, 2048, 2048, 128, 64, 128, dtype=BF16)
    inputs = make_latent_inputs(case, "cuda")
    for _ in range(3):  # compile, record, replay
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            o, lse = rope_attention_mla(*inputs[:7], True, return_lse=True, backend="triton")
        taken = torch.cuda.max_memory_allocated() - before
    shared = 2048 * 64 * 2
    assert taken <= o.numel() * 2 + lse.numel() * 4 + shared + (1 << 20)
