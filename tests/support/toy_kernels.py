"""A kernel with known needs, compiled for one target by `tools.aot`: prints one JSON line for each case."""

import json
import sys

import torch
import triton
import triton.language as tl

from tools import aot


@triton.jit(do_not_specialize=["N"])
def product_kernel(x_ptr, y_ptr, x_strides, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y = x x^T of (BLOCK, BLOCK) tiles."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK)
    x_offsets = rows[:, None] * x_strides[0] + columns[None, :] * x_strides[1]
    x = tl.load(x_ptr + x_offsets, mask=rows[:, None] < N, other=0.0)
    acc = tl.dot(x, tl.trans(x))
    tl.store(y_ptr + rows[:, None] * BLOCK + columns[None, :], acc.to(y_ptr.dtype.element_ty))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def compile_case(arch: str, name: str, column_stride: int = 1, pdl: bool = False, block: int = 64, **options) -> dict:
    x = torch.empty(4 * block, block * column_stride, dtype=torch.float16, device="meta")[:, ::column_stride]
    y = torch.empty(4 * block, block, dtype=torch.float16, device="meta")
    options |= {"num_warps": 4, "num_stages": 2, **({"launch_pdl": True} if pdl else {})}
    with aot.compiling_for(arch) as compiled:
        kernel = product_kernel[(4,)](x, y, x.stride(), 4 * block, BLOCK=block, PDL=pdl, **options)
    (record,) = compiled
    text = kernel.asm.get("ptx", "") + kernel.asm.get("amdgcn", "")
    return {"case": name, **record, "waits": "griddepcontrol.wait" in text}


if __name__ == "__main__":
    (arch,) = sys.argv[1:]
    print(json.dumps(compile_case(arch, "small", pdl=arch in ("sm_90", "sm_100", "sm_120"))))
    print(json.dumps(compile_case(arch, "odd stride", column_stride=3)))
    if arch.startswith("sm_"):
        print(json.dumps(compile_case(arch, "short of registers", block=128, maxnreg=96)))
