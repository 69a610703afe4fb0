"""One rotation has the same bits in every kernel: results in Triton's interpreter, and the code for sm_90.

Triton's interpreter rounds a fused multiplication once (from 3.9 on), so that a kernel that fuses another product
differs here too. The interpreter cannot show products that the compiler fuses, so the compiled code is searched.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.support.dtypes import F16, F32
from tests.support.marks import cases, interpreted
from tests.support.paths import ROOT
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


_COMPILE = """
import torch
from fused_rope_attn.attention.hopper import configs as hopper_configs
from fused_rope_attn.attention.portable import configs as portable_configs
from tools.compile_kernels import Job, compile_job
from tools.decode_jobs import write_jobs
from tools.rotation_jobs import rotation_jobs
inline, prepass = (portable_configs.forward_config("sm_90", 2, 64, strategy, "short")
                   for strategy in ("inline", "prepass"))
hopper = hopper_configs.forward_row(128, True, "long", False, False).config
call = {"arch": "sm_90", "direction": "forward", "dtype": torch.float16}
jobs = [Job(**call, head_dim=64, config=config, norms=norms) for config in (inline, prepass) for norms in (False, True)]
jobs += [Job(**call, head_dim=128, config=hopper, rotated=True, norms=norms) for norms in (False, True)]
jobs += [job for job in rotation_jobs("sm_90") if job.norm != "backward"][:7] + write_jobs("sm_90")[:2]
for job in jobs:
    assert all(row["verdict"] in ("ok", "spills") for row in compile_job(job)), job.label
"""


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_no_product_is_left_for_the_compiler_to_fuse(tmp_path):
    """LLVM may fuse either product of a sum, and picks one by the order that other passes leave. The loops of the
    inline forward fused another product than the code before them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", _COMPILE], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found, kernels = [], list(tmp_path.glob("*/*.llir"))
    assert len(kernels) >= 10
    for file in kernels:
        code = file.read_text()
        products = set(re.findall(r"(%[\w.]+) = fmul ", code))
        sums = re.findall(r"= (?:fadd|fsub) [\w<> ]*(?:float|double)[>]? (%[\w.]+), (%[\w.]+)", code)
        number = sum(left in products and right in products for left, right in sums)
        if number:
            found.append(f"{file.stem}: {number} of {len(sums)} sums")
        assert "@llvm.fma." in code, file.stem
    assert not found, found
