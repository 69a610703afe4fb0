"""`tools.aot` compiles what a launch would: specialisation, options and resources of a kernel that is known.

In processes of their own, because this one may be the interpreter's.
"""

import json

import pytest

from tests.support.paths import python
from tools import aot, compile_kernels

ARCHS = ("sm_80", "sm_90", "gfx942")  # the other cards are compiled for in test_compile_kernels.py
SHARED_KB = {"sm_80": 163, "sm_90": 227, "gfx942": 64}

pytestmark = pytest.mark.aot


@pytest.fixture(scope="module", params=ARCHS)
def toy(request, tmp_path_factory) -> dict[str, dict]:
    result = python(
        "-m", "tests.support.toy_kernels", request.param, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("cache"))
    )
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
    assert small["waits"] == (arch in ("sm_90", "sm_100", "sm_120")), "programmatic dependent launch"
    assert not small["serialised"]
    for row in toy.values():
        assert row["limit"] == SHARED_KB[arch] * 1024
        assert "N" not in row["constants"] and "x_strides.0" not in row["constants"]


def test_spills_and_serialised_products_show(toy):
    """ptxas gives up overlapping the products of sm_90 where registers are short, and says so.

    Triton has no cap on registers for AMD, so there is no such case.
    """
    if row := toy.get("short of registers"):
        assert row["registers"] <= 96 and row["spill"] > 0
        assert row["serialised"] == (row["arch"] == "sm_90")


def usage_error(arguments: list[str], capsys) -> str:
    """Return the command's output when it ends before it compiles anything."""
    with pytest.raises(SystemExit) as stopped:
        compile_kernels.main(arguments)
    assert stopped.value.code == 2, arguments
    return capsys.readouterr().err


def test_the_interpreter_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" in usage_error(["--arch", "sm_90"], capsys)
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


def test_usage_errors(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for arguments in (["--filter", "no such job"], ["--tile", "128"], ["--arch", "sm_75"]):
        assert "error: " in usage_error(arguments, capsys)
