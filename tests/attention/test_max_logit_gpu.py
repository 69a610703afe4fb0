"""``return_max_logit`` on a GPU against float64, replayed, and in a CUDA graph."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention, rope_attention_varlen, rope_tables
from tests.support.attention import assert_equal, assert_matches_float64, packed_case
from tests.support.dtypes import BF16, F16
from tests.support.gpu import is_sm_90
from verification.testing import Case, make_inputs, run_op

pytestmark = pytest.mark.gpu
BASE = Case(2, 8, 2, 700, 700, 128, dtype=BF16)
LENGTHS = [(16, 16), (333, 400), (0, 20), (20, 0), (1, 333), (129, 129)]
CASES = (
    BASE,
    replace(BASE, len_q=1024, len_k=1024, head_dim=64),
    replace(BASE, head_dim=256, len_q=300),
    replace(BASE, head_dim=96, causal=False, dtype=F16, softmax_scale=-0.3),
    replace(BASE, window=(100, 50), causal=False, len_q=300, head_dim=64),
    replace(BASE, softcap=20.0, sinks=True, dtype=F16),
    replace(BASE, window=(200, 0), softcap=50.0, sinks=True, kv_starts=(5, 600), kv_lens=(700, 650), head_dim=64),
    replace(BASE, kv_starts=(0, 399), kv_lens=(0, 650)),
    replace(BASE, intervals="random", causal=False),
    replace(BASE, norms=1.0, interleaved=True, tables="random"),
    packed_case(BASE, LENGTHS, (5, 70)),
    packed_case(BASE, LENGTHS, window=(90, 0), softcap=30.0, sinks=True),
    packed_case(BASE, LENGTHS, causal=False, head_dim=256),
    packed_case(BASE, [(1000, 1000), (300, 300)], head_dim=64, norms=0.0),
)
BACKENDS = [
    ("triton", "inline"),
    ("triton", "prepass"),
    pytest.param(("hopper", "auto"), marks=pytest.mark.skipif(not is_sm_90(), reason="needs an sm_90 GPU")),
]


@pytest.mark.parametrize("backend", BACKENDS, ids=" ".join)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_max_logit(case, backend):
    inputs = make_inputs(case, "cuda")
    chosen = {"backend": backend[0], "strategy": backend[1]}
    out = run_op(inputs, case, **chosen, max_logit=True)
    assert_matches_float64(case, inputs, out)
    # o and lse have the same bits without it, and max_logit has the same bits in every run.
    assert_equal(out[:2], run_op(inputs, case, **chosen)[:2])
    for grads in (True, False, False, False):
        assert torch.equal(run_op(inputs, case, **chosen, grads=grads, max_logit=True).max_logit, out.max_logit)


@pytest.mark.parametrize("backend", BACKENDS, ids=" ".join)
def test_each_replay_fills_it_again(backend):
    """Smaller logits after larger ones, as a known call and in a CUDA graph."""
    q, k, v, cos, sin, _ = make_inputs(BASE, "cuda")

    def run():
        return rope_attention(q, k, v, cos, sin, True, return_max_logit=True, backend=backend[0], strategy=backend[1])[
            1
        ]

    first = run()
    for _ in range(4):
        torch.testing.assert_close(run(), first, rtol=0.0, atol=0.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for factor in (1.0, 0.25):
        q.mul_(factor)  # a power of two: exact
        assert torch.equal(run(), first * factor)
        graph.replay()
        assert torch.equal(captured, first * factor)


@pytest.mark.parametrize("backend", BACKENDS, ids=" ".join)
@pytest.mark.parametrize("sequences", [4, 0])
def test_rows_after_the_last_sequence_raise_no_other_memory(sequences, backend):
    """Four times 32 maxima fill a block of the allocator: those of a fifth sequence would be in the next one."""
    q, k, v = (torch.randn(700, heads, 128, device="cuda", dtype=BF16) for heads in (32, 8, 8))
    cos, sin = rope_tables(512, 128, device="cuda")
    ends = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * 128
    options = {"backend": backend[0], "strategy": backend[1], "return_max_logit": True}
    rope_attention_varlen(q, k, v, cos, sin, ends, ends, 128, 128, True, **options)  # compiles
    blocks = [torch.full((128,), -1, device="cuda", dtype=torch.int32) for _ in range(64)]
    del blocks[32]
    o, max_logit = rope_attention_varlen(q, k, v, cos, sin, ends, ends, 128, 128, True, **options)
    assert max_logit.shape == (sequences, 32) and bool(max_logit.isfinite().all())
    assert not bool(o[128 * sequences :].any())
    assert all(bool((block == -1).all()) for block in blocks)
