"""The portable kernels on a GPU against float64: bfloat16, realistic shapes, extreme logits, reruns.

Every new combination of dtype, head dimension and flags compiles four kernels, so that the cases share a few. The
*_gpu.py files run with `pytest -m gpu`.
"""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import plan
from tests.support.attention import assert_equal, assert_matches_float64
from tests.support.dtypes import BF16, F16, F32
from tests.support.gpu import ODD_LENGTHS, check_extreme_logits
from tests.support.marks import both_strategies
from verification.testing import Case, make_inputs, run_op

pytestmark = pytest.mark.gpu
INLINE, PREPASS = ("inline",), ("prepass",)
BOTH = ("inline", "prepass")


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        pytest.param(case, strategy, id=f"{case.name} {strategy}")
        for case, strategies in (
            (ODD_LENGTHS, BOTH),
            (replace(ODD_LENGTHS, len_q=1), BOTH),
            (replace(ODD_LENGTHS, len_q=700, len_k=333), BOTH),
            (replace(ODD_LENGTHS, batch=1, heads_q=6, heads_kv=3, len_q=1000, len_k=1000), BOTH),
            (replace(ODD_LENGTHS, len_q=1024, len_k=1024), BOTH),
            (replace(ODD_LENGTHS, tables="yarn", extra_rows=100, table_batch=True), BOTH),
            (replace(ODD_LENGTHS, causal=False), BOTH),
            (replace(ODD_LENGTHS, rotary_dim=64, full_width=True, interleaved=True, tables="random"), BOTH),
            (replace(ODD_LENGTHS, table_dtype=BF16, full_width=True), PREPASS),
            (Case(2, 4, 4, 1000, 1000, 64, dtype=F16), BOTH),
            (Case(2, 4, 1, 600, 600, 96, dtype=BF16, layout="odd"), INLINE),
            (Case(1, 4, 2, 500, 600, 256, dtype=BF16), PREPASS),
            (Case(2, 3, 1, 100, 200, 40, dtype=F16, rotary_dim=10, causal=False, layout="expanded"), INLINE),
            (Case(2, 4, 2, 300, 400, 64, dtype=F32, tables="random"), BOTH),
            (Case(1, 2, 1, 200, 200, 128, dtype=F32, causal=False), PREPASS),
        )
        for strategy in strategies
    ],
)
def test_against_float64(case, strategy):
    inputs = make_inputs(case, "cuda")
    before = [x.clone() for x in inputs]
    out = run_op(inputs, case, backend="triton", strategy=strategy)
    assert_equal(before, inputs)
    assert_matches_float64(case, inputs, out)


@both_strategies
@pytest.mark.parametrize(("batch", "len_q", "len_k"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_empty(batch, len_q, len_k, strategy):
    case = replace(ODD_LENGTHS, batch=batch, len_q=len_q, len_k=len_k)
    inputs = make_inputs(case, "cuda")
    assert_matches_float64(case, inputs, run_op(inputs, case, backend="triton", strategy=strategy))


def test_auto_takes_the_kernels():
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    chosen = plan(*inputs[:5], True)
    assert chosen.backend != "reference" and chosen.reason and chosen.forward is not None
    same = {"backend": chosen.backend, "strategy": chosen.strategy}
    assert torch.equal(
        run_op(inputs, ODD_LENGTHS, backend="auto", grads=False).o, run_op(inputs, ODD_LENGTHS, grads=False, **same).o
    )


@both_strategies
def test_a_hundred_reruns_are_bitwise_equal(strategy):
    inputs = make_inputs(ODD_LENGTHS, "cuda")
    first = run_op(inputs, ODD_LENGTHS, backend="triton", strategy=strategy)
    for _ in range(100):
        assert_equal(run_op(inputs, ODD_LENGTHS, backend="triton", strategy=strategy), first)
    assert_equal(run_op(inputs, ODD_LENGTHS, backend="triton", strategy=strategy, deterministic=True), first)


def test_true_float32_unless_tf32_is_allowed():
    strategy, case = "prepass", Case(2, 4, 2, 300, 400, 64, dtype=F32, tables="random")
    inputs = make_inputs(case, "cuda")
    exact = run_op(inputs, case, backend="triton", strategy=strategy)
    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        rounded = run_op(inputs, case, backend="triton", strategy=strategy)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    for x, y in zip(exact, rounded):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    assert not torch.equal(exact.o, rounded.o)
    assert_equal(run_op(inputs, case, backend="triton", strategy=strategy), exact)


@both_strategies
@pytest.mark.parametrize("logit", [-1e4, -2.45e5, 1e4])
def test_extreme_logits(logit, strategy):
    check_extreme_logits(logit, backend="triton", strategy=strategy)


def test_poisoned_memory_is_poisoned_here_too():
    assert bool(torch.empty(1000, device="cuda").isnan().all())
