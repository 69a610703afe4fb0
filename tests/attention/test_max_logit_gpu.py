"""``return_max_logit`` on a GPU: random calls against float64, equal bits, replayed, and in a CUDA graph."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention, rope_attention_varlen, rope_tables
from tests.support.attention import assert_equal
from tests.support.dtypes import BF16
from tests.support.gpu import ODD_LENGTHS
from tests.support.marks import cases
from tests.support.places import UNEVEN, check_on_gpu, each_backend, packed
from verification.testing import make_inputs, run_op

pytestmark = pytest.mark.gpu


@each_backend
@pytest.mark.parametrize(("family", "head_dim"), [("attention", 128), ("packed", 64)])
def test_random_calls(family, head_dim, chosen):
    check_on_gpu(chosen, family, "max_logit", return_max_logit=True, head_dim=head_dim)


@each_backend
@cases(replace(ODD_LENGTHS, kv_starts=(0, 399), kv_lens=(0, 650)), packed(UNEVEN, head_dim=256, causal=False))
def test_equal_bits(case, chosen):
    """o and lse have the same bits without it, and max_logit has the same bits in every run."""
    inputs = make_inputs(case, "cuda")
    out = run_op(inputs, case, **chosen, grads=False, max_logit=True)
    assert_equal(out[:2], run_op(inputs, case, **chosen, grads=False)[:2])
    for _ in range(3):
        assert torch.equal(run_op(inputs, case, **chosen, grads=False, max_logit=True).max_logit, out.max_logit)


@each_backend
def test_each_replay_fills_it_again(chosen):
    """Smaller logits after larger ones, as a known call and in a CUDA graph."""
    q, k, v, cos, sin, _ = make_inputs(ODD_LENGTHS, "cuda")

    def run():
        return rope_attention(q, k, v, cos, sin, True, return_max_logit=True, **chosen)[1]

    first = run()
    for _ in range(4):
        assert torch.equal(run(), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for factor in (1.0, 0.25):
        q.mul_(factor)  # a power of two: exact
        assert torch.equal(run(), first * factor)
        graph.replay()
        assert torch.equal(captured, first * factor)


@each_backend
def test_rows_after_the_last_sequence_raise_no_other_memory(chosen):
    """Four times 32 maxima fill a block of the allocator: those of a fifth sequence would be in the next one."""
    q, k, v = (torch.randn(700, heads, 128, device="cuda", dtype=BF16) for heads in (32, 8, 8))
    tables = rope_tables(512, 128, device="cuda")

    def run(sequences):
        ends = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * 128
        return rope_attention_varlen(q, k, v, *tables, ends, ends, 128, 128, True, **chosen, return_max_logit=True)

    for sequences in (4, 0):
        run(sequences)  # compiles
        blocks = [torch.full((128,), -1, device="cuda", dtype=torch.int32) for _ in range(64)]
        del blocks[32]
        o, max_logit = run(sequences)
        assert max_logit.shape == (sequences, 32) and bool(max_logit.isfinite().all())
        assert not bool(o[128 * sequences :].any()) and all(bool((block == -1).all()) for block in blocks)
