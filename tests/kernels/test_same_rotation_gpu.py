"""One rotation has the same bits in every kernel on a GPU, and the backward pass finds the forward pass's weights."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn.attention.hopper import configs as hopper_configs, forward as hopper_forward
from fused_rope_attn.attention.problem import Saving
from tests.support.attention import assert_matches_float64, packed_case
from tests.support.dtypes import BF16, F16, F32
from tests.support.gpu import is_sm_90
from tests.support.internals import described_for_launch
from tests.support.marks import cases
from tests.support.same_rotation import assert_one_rotation, in_memory_order, one_visible_key, rotated_by_every_kernel
from verification.testing import Case, make_inputs

pytestmark = pytest.mark.gpu

BASE = Case(2, 4, 4, 333, 333, 128, dtype=BF16)
CASES = (
    BASE,
    replace(BASE, dtype=F16, interleaved=True),
    replace(BASE, head_dim=64, layout="odd", dtype=F16),
    replace(BASE, head_dim=96, rotary_dim=32, tables="random"),
    replace(BASE, norms=0.0),
    replace(BASE, norms=1.0, dtype=F16, interleaved=True),
    replace(BASE, norms=0.0, head_dim=64, norm_dtype=BF16, layout="bhnd"),
    replace(BASE, norms=0.0, head_dim=80, dtype=F16),
    replace(BASE, norms=0.0, head_dim=256),
)


@cases(*CASES, replace(BASE, dtype=F32, head_dim=64), replace(BASE, norms=0.0, dtype=F32, layout="odd"))
def test_every_kernel_gives_the_same_bits(case, monkeypatch):
    found = rotated_by_every_kernel(case, monkeypatch, "cuda")
    if is_sm_90() and case.dtype != F32 and case.layout != "odd":
        problem, tensors = described_for_launch(make_inputs(case, "cuda"), case)
        config = hopper_configs.forward_row(case.head_dim, True, "long", False, False).config
        saved = hopper_forward.ForwardCall(problem, tensors, config, Saving.ROWS)(tensors)
        found["sm_90 forward and pre-pass"] = tuple(in_memory_order(x, case) for x in (saved.q_rot, saved.k_rot))
    assert_one_rotation(found)


ONE_KEY = Case(1, 4, 4, 600, 600, 64, dtype=F16, causal=False, softmax_scale=1.0, window=(0, 0))


@cases(
    packed_case(ONE_KEY, (589, 573, 7)),
    packed_case(replace(ONE_KEY, dtype=BF16, interleaved=True), (589, 573, 7)),
    ONE_KEY,
    replace(ONE_KEY, head_dim=128, causal=True, softmax_scale=-0.4),
    replace(ONE_KEY, norms=0.0, dtype=BF16, head_dim=128),
)
@pytest.mark.parametrize("options", [("triton", "inline"), ("triton", "prepass"), ("triton", "auto"), ("auto", "auto")])
def test_one_visible_key_has_weight_one(case, options):
    """Then dv is do to the bit. A single bit of a rotation that differs between the passes is 2e-3 of it here."""
    backend, strategy = options
    for seed in range(5):
        out, inputs = one_visible_key(replace(case, seed=seed), "cuda", backend=backend, strategy=strategy)
        rows = slice(None) if case.seqlens is None else slice(sum(pair[0] for pair in case.seqlens))
        assert torch.equal(out.dv[:, :, rows], inputs.do[:, :, rows])
        assert torch.equal(out.o[:, :, rows], inputs.v[:, :, rows])
    assert_matches_float64(replace(case, seed=4), inputs, out)
