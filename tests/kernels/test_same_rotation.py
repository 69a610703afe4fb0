"""One rotation has the same bits in every kernel: results in Triton's interpreter.

Triton's interpreter rounds a fused multiplication once (from 3.9 on), so that a kernel that fuses another product
differs here too. It cannot show products that the compiler fuses: tests/tools/test_compile_kernels.py looks for those.
"""

from dataclasses import replace

from tests.support.dtypes import F16, F32
from tests.support.marks import cases, interpreted
from tests.support.same_rotation import assert_one_rotation, rotated_by_every_kernel
from verification.testing import Case

BASE = Case(2, 2, 2, 21, 21, 32, dtype=F16)


@interpreted
@cases(
    replace(BASE, interleaved=True, dtype=F32),
    replace(BASE, rotary_dim=12, tables="random"),
    replace(BASE, norms=1.0, dtype=F32),
    replace(BASE, norms=0.0, interleaved=True, norm_dtype=F16),
    replace(BASE, norms=0.0, head_dim=24, dtype=F32, interleaved=True),
)
def test_every_kernel_gives_the_same_bits(case, monkeypatch):
    assert_one_rotation(rotated_by_every_kernel(case, monkeypatch))
