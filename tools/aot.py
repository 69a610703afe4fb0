"""Ahead-of-time compilation without a GPU, through the launchers that users run.

Triton asks its *driver* for the target, the device and the stream, and hands it the binary to load and launch. The
driver here answers with any target and launches nothing, so that a real launcher, called with tensors on the ``meta``
device, compiles exactly the specialisation that a GPU would get. No signature is retyped, and no memory is allocated.
Not for use under ``TRITON_INTERPRET=1``: the interpreter replaces the compiler at import.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget

from fused_rope_attn.runtime import device, driver
from tools import uninitialised

KB = 1024
# arch -> (what Triton compiles for, shared memory that one block may use: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability", and AMD CDNA3 ISA, 64 KB of LDS a workgroup).
TARGETS: dict[str, tuple[GPUTarget, int]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * KB),
    "sm_86": (GPUTarget("cuda", 86, 32), 99 * KB),
    "sm_89": (GPUTarget("cuda", 89, 32), 99 * KB),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * KB),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * KB),
    "sm_120": (GPUTarget("cuda", 120, 32), 99 * KB),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * KB),
}
# Compiled for with every feature by default: the card that everything is measured on, and one of small memory. For the
# others the default is each row of each table once; the rest is `--full`'s.
THOROUGH = ("sm_90", "sm_86")
# Cards that have at least the shared memory of another, and for Triton the same tensor cores: a row of both is compiled
# for the latter. Tiles of few rows use the tensor cores of sm_80 on sm_90 and sm_100 too.
REPEATS = {"sm_80": "sm_86", "sm_89": "sm_86", "sm_120": "sm_89"}
REPEATS_SMALL = REPEATS | {"sm_90": "sm_86", "sm_100": "sm_90"}


def compile_only_driver(arch: str) -> SimpleNamespace:
    """Return the part of Triton's driver (3.6 to 3.9) that compiling and launching touch; launches do nothing.

    Each arch is a device of its own, because a JITFunction keeps its compiled kernels and its target by device index.
    """
    # No limit here: too large a kernel shall be reported with its size, not end the run.
    properties = {"max_shared_mem": 1 << 31, "multiprocessor_count": 128}
    loaded = None, None, 0, 0, 1 << 10  # module, function, registers, spills, threads of a block
    return SimpleNamespace(
        get_current_target=lambda: TARGETS[arch][0],
        get_current_device=lambda: list(TARGETS).index(arch),
        get_current_stream=lambda device: 0,
        utils=SimpleNamespace(
            get_device_properties=lambda device: properties, load_binary=lambda name, binary, shared, device: loaded
        ),
        launcher_cls=lambda src, metadata: lambda *args, **kwargs: None,
    )


def usage_of(files: dict[str, Path], remarks: str) -> tuple[int, int]:
    """Return (registers, spill) as the records of ``compiling_for`` have them.

    files: each artefact's path by its suffix. remarks: the output of ptxas.
    """
    if "amdgcn" in files:
        text, patterns = (
            files["amdgcn"].read_text(),
            (r"\.vgpr_count:\s+(\d+)", r"\.private_segment_fixed_size:\s+(\d+)"),
        )
    else:
        text, patterns = remarks, (r"Used (\d+) registers", r"(\d+) bytes stack frame")
    registers, spill = (max(map(int, re.findall(pattern, text))) for pattern in patterns)
    return registers, spill


def _unwritten(files: dict[str, Path]) -> str:
    # The fault is known of wgmma products alone. Other kernels are spared nvdisasm, which takes 0.3 s to start.
    if "wgmma" not in files["ptx"].read_text():
        return ""
    found = next(uninitialised.reads_of_nothing(uninitialised.disassemble(files["cubin"])), None)
    return "" if found is None else f"{found[1]} at {found[0]}"


def fusable_products(llir: str) -> int:
    """Count the sums of two products in LLVM's IR.

    LLVM may fuse either product of such a sum, and picks one by the order that other passes leave, so that two kernels
    would round the same rotation differently.
    """
    products = set(re.findall(r"(%[\w.]+) = fmul ", llir))
    sums = re.findall(r"= (?:fadd|fsub) [\w<> ]*(?:float|double)[>]? (%[\w.]+), (%[\w.]+)", llir)
    return sum(left in products and right in products for left, right in sums)


def _refusal(src, metadata: dict, ptx: str) -> str:
    """Say why ``runtime.driver`` would leave a kernel to Triton's launcher: the sizes of its parameters, or scratch."""
    entry = re.search(rf"\.entry\s+{re.escape(metadata['name'])}\(([^)]*)\)", ptx)
    declared = re.findall(
        r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)[^,\[]*(?:\[(\d+)\])?", entry[1] if entry else ""
    )
    sizes = [int(bits) // 8 * int(count or 1) for bits, count in declared]
    expected = [*_parameter_sizes(tuple(src.signature.values())), 8, 8]
    if sizes != expected:
        return f"the PTX declares parameters of {sizes} bytes, and not of {expected}"
    scratch = metadata["global_scratch_size"] or metadata["profile_scratch_size"]
    return "the kernel needs scratch memory" if scratch else ""


def _parameter_sizes(kind: Any) -> Iterator[int]:
    """Yield the bytes of a kernel's parameters from Triton's signature, by the rule of ``driver.Kernel``."""
    if isinstance(kind, tuple):
        for each in kind:
            yield from _parameter_sizes(each)
    elif kind.startswith("tensordesc"):
        rank = kind.partition("[")[2].partition("]")[0].count(",") + 1
        yield from (128, *[4] * rank, *[8] * rank)
    elif kind != "constexpr":
        yield 8 if kind.startswith("*") else struct.calcsize(driver.LETTERS[kind])


@contextlib.contextmanager
def compiling_for(arch: str) -> Iterator[list[dict[str, Any]]]:
    """Within the context every Triton launch compiles for ``arch`` and runs nothing; yields the list it fills, with a
    record of each kernel:

    registers, spill: of one thread (NVIDIA) or lane (AMD), the spill in bytes of stack or scratch. shared, limit: bytes
    of shared memory, and how many the card gives a block. serialised: ptxas says that it made wgmma products wait for
    one another. unwritten: the first read of a register that nothing has written, or "". refusal: why the package
    leaves the kernel's launches to Triton, or "". fusable: as in ``fusable_products``. fused: whether LLVM's IR has
    multiply-adds. constants: values of constexpr parameters and specialised arguments. files: the paths of its
    artefacts in Triton's cache, by suffix.

    The package's own question ``device.arch`` gets the same answer. Output printed within does not appear. A kernel
    that is in Triton's cache already does not appear again. Raises RuntimeError under Triton's interpreter.
    """
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RuntimeError("ahead-of-time compilation needs the compiler: unset TRITON_INTERPRET")
    target, limit = TARGETS[arch]
    compiled: list[dict[str, Any]] = []
    log = io.StringIO()

    def record(*, src, metadata, metadata_group, times, cache_hit):
        remarks = log.getvalue()
        log.seek(0)
        log.truncate()
        if cache_hit:  # another launcher, or another process, has compiled and reported it
            return
        files = {name.rpartition(".")[2]: Path(path) for name, path in metadata_group.items()}
        llir = files["llir"].read_text()
        registers, spill = usage_of(files, remarks)
        names = src.fn.arg_names
        constants = {
            ".".join([names[path[0]], *map(str, path[1:])]): x
            if isinstance(x, (int, float, str, type(None)))
            else str(x)
            for path, x in src.constants.items()
        }
        compiled.append(
            {
                "kernel": metadata["name"],
                "arch": arch,
                "warps": metadata["num_warps"],
                "stages": metadata["num_stages"],
                "registers": registers,
                "spill": spill,
                "serialised": "wgmma.mma_async instructions are serialized" in remarks,
                "unwritten": _unwritten(files) if arch == "sm_90" else "",
                "fusable": fusable_products(llir),
                "fused": "@llvm.fma." in llir,
                "refusal": _refusal(src, metadata, files["ptx"].read_text()) if target.backend == "cuda" else "",
                "shared": metadata["shared"],
                "limit": limit,
                "seconds": times.total / 1e6,
                "constants": constants,
                "files": {suffix: str(path) for suffix, path in files.items()},
            }
        )

    knobs = triton.knobs
    with (
        mock.patch.multiple(device, arch=lambda _: arch, num_sms=lambda _: 128),
        mock.patch.object(triton.runtime.driver, "_active", compile_only_driver(arch)),
        knobs.compilation.scope(),
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(log),
    ):
        knobs.compilation.listener = record
        knobs.nvidia.dump_ptxas_log = True  # printed, so that what is printed meanwhile is read and not shown
        yield compiled
