"""One rotation has the same bits in every kernel.

Triton's interpreter rounds a fused multiplication once (from 3.9 on), so that a kernel that fuses another product
differs here too. It cannot show products that the compiler fuses: tests/tools/test_compile_kernels.py looks for those.
"""

from dataclasses import replace

import pytest

from fused_rope_attn.attention.hopper import configs as hopper_configs, forward as hopper_forward
from fused_rope_attn.attention.problem import Saving
from tests.support.dtypes import BF16, F16, F32
from tests.support.gpu import is_sm_90
from tests.support.internals import described_for_launch
from tests.support.marks import cases, interpreted
from tests.support.same_rotation import assert_one_rotation, in_memory_order, rotated_by_every_kernel
from verification.testing import Case, make_inputs

SMALL = Case(2, 2, 2, 21, 21, 32, dtype=F16)
BASE = Case(2, 4, 4, 333, 333, 128, dtype=BF16)


@interpreted
@cases(
    replace(SMALL, interleaved=True, dtype=F32),
    replace(SMALL, rotary_dim=12, tables="random"),
    replace(SMALL, norms=1.0, dtype=F32),
    replace(SMALL, norms=0.0, interleaved=True, norm_dtype=F16),
    replace(SMALL, norms=0.0, head_dim=24, dtype=F32, interleaved=True),
)
def test_every_kernel_gives_the_same_bits(case, monkeypatch):
    assert_one_rotation(rotated_by_every_kernel(case, monkeypatch))


@pytest.mark.gpu
@cases(
    BASE,
    replace(BASE, head_dim=64, layout="odd", dtype=F16, interleaved=True),
    replace(BASE, head_dim=96, rotary_dim=32, tables="random"),
    replace(BASE, norms=1.0, dtype=F16, interleaved=True),
    replace(BASE, norms=0.0, head_dim=64, norm_dtype=BF16, layout="bhnd"),
    replace(BASE, norms=0.0, head_dim=80, dtype=F16),
    replace(BASE, norms=0.0, head_dim=256),
    replace(BASE, norms=0.0, dtype=F32, layout="odd"),
)
def test_every_kernel_gives_the_same_bits_on_a_gpu(case, monkeypatch):
    found = rotated_by_every_kernel(case, monkeypatch, "cuda")
    if is_sm_90() and case.dtype != F32 and case.layout != "odd":
        problem, tensors = described_for_launch(make_inputs(case, "cuda"), case)
        config = hopper_configs.forward_row(case.head_dim, True, "long", False, False).config
        saved = hopper_forward.ForwardCall(problem, tensors, config, Saving.ROWS)(tensors)
        found["sm_90 forward and pre-pass"] = tuple(in_memory_order(x, case) for x in (saved.q_rot, saved.k_rot))
    assert_one_rotation(found)
