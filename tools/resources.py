"""Registers and spills of a compiled kernel, read from the binary, and ptxas's remarks: no GPU, no driver."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import triton.backends.nvidia
from triton.backends.compiler import GPUTarget

CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Usage:
    """Of one thread (NVIDIA) or lane (AMD): registers, and bytes of stack or scratch, which is where spills go."""

    registers: int
    spill: int


def usage(files: dict[str, str], target: GPUTarget) -> Usage:
    """``files`` maps each artefact's name to its path, as Triton's compilation listener passes it."""
    by_suffix = {name.rsplit(".", 1)[1]: Path(path) for name, path in files.items()}
    if target.backend == "cuda":
        return _nvidia(by_suffix["cubin"])
    return _amd(by_suffix["amdgcn"].read_text())


def _nvidia(cubin: Path) -> Usage:
    command = [str(CUOBJDUMP), "-res-usage", str(cubin)]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kernels = re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", report)
    if not kernels:
        raise RuntimeError(f"cuobjdump reported no kernel for {cubin.name}:\n{report}")
    return Usage(
        registers=max(int(registers) for registers, _, _ in kernels),
        spill=max(int(stack) + int(local) for _, stack, local in kernels),
    )


def _amd(assembly: str) -> Usage:
    def field(name: str) -> int:
        return max(map(int, re.findall(rf"\.{name}:\s+(\d+)", assembly)), default=0)

    return Usage(registers=field("vgpr_count"), spill=field("private_segment_fixed_size"))


def says_serialised(log: str) -> bool:
    """Whether ptxas says "Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."."""
    return "wgmma.mma_async instructions are serialized" in log
