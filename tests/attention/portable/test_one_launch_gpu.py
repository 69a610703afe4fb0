"""The backward pass in one launch on a GPU: against float64, with each mask, in equal bits from run to run."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn.attention import configs
from fused_rope_attn.attention.portable import configs as portable_configs
from fused_rope_attn.runtime import device
from tests.support.attention import assert_equal, assert_matches_float64, packed_case
from tests.support.dtypes import BF16, F16
from tests.support.marks import both_strategies, cases
from verification.testing import Case, make_inputs, run_op

pytestmark = pytest.mark.gpu
BASE = Case(2, 8, 2, 333, 333, 64, dtype=BF16)


@pytest.fixture(autouse=True)
def has_rows():
    """Skip cards with rows that launch short problems otherwise."""
    arch = configs.family(device.arch(torch.device("cuda")))
    if not portable_configs.backward(arch, 2, 64, "prepass", "tiny").one_launch:
        pytest.skip(f"{arch} has no rows of one launch")


@both_strategies
@cases(
    BASE,
    replace(BASE, heads_kv=8, dtype=F16),
    replace(BASE, len_q=100, len_k=450, causal=False),
    replace(BASE, window=(100, 0)),
    replace(BASE, kv_lens=(333, 100)),
    replace(BASE, kv_starts=(0, 200), table_batch=True),
    replace(BASE, sinks=True, softcap=20.0),
    replace(BASE, head_dim=48, rotary_dim=32, interleaved=True),
    replace(BASE, head_dim=32, heads_kv=8, window=(60, 30), causal=False),
    packed_case(BASE, (16, 133, 0, 1, 300, 64, 129)),
    replace(BASE, norms=0.0),
    replace(BASE, len_q=400, len_k=300),
    replace(BASE, layout="odd"),
    replace(BASE, len_q=512, len_k=512, batch=4),
)
def test_gradients(case, strategy):
    """Inline takes q and k as they came, and the pre-pass saves them rotated."""
    inputs = make_inputs(case, "cuda")
    out = run_op(inputs, case, backend="triton", strategy=strategy)
    assert_matches_float64(case, inputs, out)
    for _ in range(3):
        assert_equal(out, run_op(inputs, case, backend="triton", strategy=strategy))


def test_equal_bits_in_many_runs():
    """No program reads what another one of the launch writes."""
    case = replace(BASE, batch=4, heads_kv=8, len_q=512, len_k=512)
    inputs = make_inputs(case, "cuda")
    first = run_op(inputs, case, backend="auto")
    for _ in range(200):
        assert_equal(first, run_op(inputs, case, backend="auto"))
