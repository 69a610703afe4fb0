"""One call: drawn, run, and what came of it."""

from __future__ import annotations

import time
import traceback
import warnings
from dataclasses import dataclass

import torch

from verification.random.common import Finding, Machine
from verification.random.drawing import draw_call
from verification.random.refusals import IllegalCall

# Memory that PyTorch keeps for a process beyond this is given back after a call, since many share the GPU.
_KEPT_BYTES = 2 << 30


@dataclass(frozen=True)
class Outcome:
    """What came of a call. ``skipped`` is why it says nothing, such as a GPU whose memory is full."""

    index: int
    function: str
    text: str
    is_illegal: bool
    findings: tuple[Finding, ...]
    skipped: str = ""
    seconds: float = 0.0
    fatal: bool = False  # the process cannot go on: the GPU's context is broken

    @property
    def failures(self) -> list[Finding]:
        return [found for found in self.findings if not found.ok]


def run_call(seed: int, index: int, machine: Machine) -> Outcome:
    """Draw and run the call ``index``. Nothing is raised: what a call raises has failed."""
    start = time.perf_counter()
    findings: list[Finding] = []
    function, text, skipped, is_illegal, fatal = "?", "could not be drawn", "", False, False
    try:
        call = draw_call(seed, index, machine)
        function, text, is_illegal = call.function, call.text, isinstance(call, IllegalCall)
        with warnings.catch_warnings():
            # NumPy warns of the rows and columns of a tile that lie outside the tensor, in Triton's interpreter.
            warnings.simplefilter("ignore")
            for found in call.run(machine):
                findings.append(found)
        if machine.has_gpu:
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        skipped = "does not fit the GPU's memory beside the other processes"
    except Exception as error:
        findings.append(_raised(error))
    if machine.has_gpu:
        fatal = not _gpu_is_alive()
        if not fatal and torch.cuda.memory_reserved() > _KEPT_BYTES:
            torch.cuda.empty_cache()
    seconds = time.perf_counter() - start
    return Outcome(index, function, text, is_illegal, tuple(findings), skipped, seconds, fatal)


def _raised(error: Exception) -> Finding:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].name}, line {frames[-1].lineno})" if frames else ""
    lines = str(error).splitlines() or [""]
    return Finding("?", "exception", 0.0, False, f"{type(error).__name__}: {lines[0][:300]}{where}")


def _gpu_is_alive() -> bool:
    """Whether this process can still use its GPU: after an illegal access or a device assertion it cannot."""
    try:
        torch.cuda.synchronize()
        return True
    except Exception:
        return False
