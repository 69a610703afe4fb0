"""Uniform registers that SASS reads before anything has written them: the mark of one fault of ptxas.

ptxas of CUDA 12.8, which Triton 3.6 and 3.7 use for sm_90, hoists the descriptor of a wgmma operand out of a loop and
loses the instruction that computes its base. The product then reads shared memory at an address that an earlier kernel
left in the register: wrong results, or an illegal access (docs/experiments, "call 2344").

This reads the disassembly of sm_90 binaries, needs no GPU, and follows every path from the kernel's entry:

    python -m tools.uninitialised KERNEL.cubin ...      exit status 1 if a kernel has such a read
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import triton

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,6})\*/\s+(?:(@!?U?P[\dT]+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_REGISTER = re.compile(r"\bUR(\d+)\b")
# Instructions with a uniform register as their result, and those of the same first letter without one.
_WRITES = re.compile(r"U|R2UR|S2UR|CS2UR|VOTEU|REDUX|ELECT")
_NO_RESULT = re.compile(r"UTMA|UBLK|UCGABAR|USETMAXREG|UISETP|UPLOP3")
_WIDTHS = {"64": 2, "WIDE": 2, "128": 4}


class Instruction(NamedTuple):
    """One line of a disassembly: the registers are the numbers of uniform ones."""

    address: str
    name: str
    reads: frozenset[int]
    writes: frozenset[int]
    target: str | None  # the label that it jumps to
    falls_through: bool


@functools.lru_cache(maxsize=1 << 16)
def _registers(name: str, text: str) -> tuple[frozenset[int], frozenset[int]]:
    """Return the uniform registers that an instruction reads and writes."""
    outside_brackets = r",(?![^\[({]*[\])}])"
    operands = [part.strip() for part in re.split(outside_brackets, text) if part.strip()]
    base, *modifiers = name.split(".")
    result, writes = None, frozenset[int]()
    if _WRITES.match(base) and not _NO_RESULT.match(base):
        # Predicates may precede the result.
        result = next((i for i, x in enumerate(operands) if not re.fullmatch(r"!?U?P(\d|T)", x)), None)
        found = None if result is None else re.fullmatch(r"UR(\d+)", operands[result])
        if found:
            width = max((_WIDTHS.get(modifier, 1) for modifier in modifiers), default=1)
            writes = frozenset(range(int(found[1]), int(found[1]) + width))
    reads: set[int] = set()
    from_registers = len(operands) > 1 and re.match(r"R\d", operands[1]) is not None
    for i, operand in enumerate(operands):
        if i == result:
            continue
        for found in _REGISTER.finditer(operand):
            first = int(found[1])
            if f"gdesc[UR{first}]" in operand:  # two descriptors, or one if the other operand is in registers
                reads |= set(range(first + 2 * from_registers, first + 4))
            elif f"desc[UR{first}]" in operand or f"UR{first}.64" in operand:
                reads |= {first, first + 1}
            else:
                reads.add(first)
    return frozenset(reads), writes


def _parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions in order, and the index of each label."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.match(line):
            address, guard, name, rest = found.groups()
            base = name.split(".")[0]
            target = _TARGET.search(rest) if base in ("BRA", "JMP", "CALL") else None
            is_conditional = bool(guard) or re.match(r"!?U?P\d", rest) is not None
            # The one function that kernels call by address reports a failed assertion, and does not return.
            ends = base in ("BRA", "JMP", "EXIT", "RET", "BRX") or name.startswith("CALL.ABS")
            reads, writes = _registers(name, rest)
            code.append(Instruction(address, name, reads, writes, target and target[1], is_conditional or not ends))
    return code, labels


def reads_of_nothing(sass: str) -> Iterator[tuple[str, str, list[int]]]:
    """Yield (address, instruction, registers) of each read that some path reaches without a write.

    sass: a kernel as ``nvdisasm -c`` prints it. A write under a predicate counts as one.
    """
    code, labels = _parse(sass)
    written: list[frozenset[int] | None] = [None] * len(code)
    pending = [(0, frozenset[int]())] if code else []
    while pending:
        i, reaching = pending.pop()
        while i < len(code):
            known = written[i]
            merged = reaching if known is None else known & reaching
            if merged == known:
                break
            written[i] = merged
            reaching = merged | code[i].writes
            target = labels.get(code[i].target or "")
            if target is not None:
                pending.append((target, reaching))
            if not code[i].falls_through:
                break
            i += 1
    for instruction, known in zip(code, written):
        if known is not None and (missing := instruction.reads - known):
            yield instruction.address, instruction.name, sorted(missing)


def disassemble(cubin: Path) -> str:
    """Return the output of nvdisasm for a binary: of Triton's own, or of that in ``TRITON_NVDISASM_PATH``.

    Raises:
        RuntimeError: if neither is installed.
    """
    return subprocess.run(
        [triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin)], check=True, capture_output=True, text=True
    ).stdout


def main(paths: list[str]) -> int:
    found = 0
    for path in paths:
        for address, name, registers in reads_of_nothing(disassemble(Path(path))):
            found += 1
            names = ", ".join(f"UR{register}" for register in registers)
            print(f"{path}: {name} at {address} reads {names}, which nothing has written")
    print(f"{len(paths)} kernels, {found} reads of registers that nothing has written")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
