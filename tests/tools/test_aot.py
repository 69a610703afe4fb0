"""`tools.aot` compiles what a launch would: specialisation, options and resources of a kernel that is known.

In processes of their own, because this one may be the interpreter's: run as a program, this file compiles the kernel.
"""

import json
import sys

import pytest
import torch
import triton
import triton.language as tl

from tests.support.paths import python
from tools import aot, compile_kernels

ARCHS = ("sm_80", "sm_90", "gfx942")  # the other cards are compiled for in test_compile_kernels.py
SHARED_KB = {"sm_80": 163, "sm_90": 227, "gfx942": 64}

pytestmark = pytest.mark.aot


@triton.jit(do_not_specialize=["N"])
def product_kernel(x_ptr, y_ptr, x_strides, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
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


@pytest.fixture(scope="module", params=ARCHS)
def toy(request, tmp_path_factory) -> dict[str, dict]:
    result = python("-m", "tests.tools.test_aot", request.param, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("cache")))
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert all(row["arch"] == request.param for row in rows)
    return {row["case"]: row for row in rows}


def test_what_a_row_says(toy):
    """Specialisation is the launch's: a stride of 1 is a constant of the kernel, another stride is not; N never is."""
    small, arch = toy["small"], toy["small"]["arch"]
    assert small["kernel"] == "product_kernel" and small["warps"] == 4 and small["stages"] == 2
    assert 16 <= small["registers"] <= 255 and small["spill"] == 0 and 0 < small["shared"] < small["limit"]
    assert small["constants"]["x_strides.1"] == 1 and "x_strides.1" not in toy["odd stride"]["constants"]
    assert small["waits"] == (arch == "sm_90"), "programmatic dependent launch"
    assert not small["serialised"]
    for row in toy.values():
        assert row["limit"] == SHARED_KB[arch] * 1024
        assert "N" not in row["constants"] and "x_strides.0" not in row["constants"]


def test_spills_and_serialised_products_show(toy):
    """ptxas gives up overlapping the products of sm_90 where registers are short, and says so. Triton has no cap on
    registers for AMD, so there is no such case."""
    if row := toy.get("short of registers"):
        assert row["registers"] <= 96 and row["spill"] > 0
        assert row["serialised"] == (row["arch"] == "sm_90")


USAGE_ERRORS = [
    ("1", "--arch sm_90", "TRITON_INTERPRET"),
    *(("0", words, "error: ") for words in ("--filter nothing-is-called-so", "--tile 128", "--arch sm_75")),
]


@pytest.mark.parametrize(("interpret", "arguments", "message"), USAGE_ERRORS, ids=[row[1] for row in USAGE_ERRORS])
def test_usage_errors(interpret, arguments, message, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with pytest.raises(SystemExit) as stopped:
        compile_kernels.main(arguments.split())
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="ahead-of-time compilation needs the compiler"):
        with aot.compiling_for("sm_90"):
            pass


def test_a_tile_that_is_too_large_fails_the_command(tmp_path):
    """The exit status is what `make test` goes by."""
    arguments = ("-m", "tools.compile_kernels", "--arch", "sm_86", "--filter", "forward inline bfloat16 D64")
    result = python(*arguments, "--tile", "32x64w4s8", "--jobs", "1", TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 1, result.stdout + result.stderr
    assert "FAIL shared memory" in result.stdout


def test_a_run_empties_what_it_has_read(tmp_path):
    """Artefacts are empty after a run. The metadata stay, and other processes look them up."""
    program = (
        "from tools.compile_kernels import find_jobs, run\n"
        "rows = run([job for job in find_jobs(['sm_86']) if job.label.startswith('write')][:1], 1)\n"
        "assert rows and not any('files' in row or 'FAIL' in row['verdict'] for row in rows), rows"
    )
    result = python("-c", program, TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    for suffix, is_empty in (("ptx", True), ("cubin", True), ("json", False)):
        found = [path for path in tmp_path.rglob(f"*.{suffix}") if not path.name.startswith("__grp__")]
        assert found and all((path.stat().st_size == 0) == is_empty for path in found), suffix


if __name__ == "__main__":
    print(json.dumps(compile_case(sys.argv[1], "small", pdl=sys.argv[1] == "sm_90")))
    print(json.dumps(compile_case(sys.argv[1], "odd stride", column_stride=3)))
    if sys.argv[1].startswith("sm_"):
        print(json.dumps(compile_case(sys.argv[1], "short of registers", block=128, maxnreg=96)))
