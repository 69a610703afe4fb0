"""``python -m fused_rope_attn.env``: facts about the machine for a bug report, as JSON.

Importing this module asks nothing. The report starts CUDA if there is a GPU, compiles nothing, and works without a GPU,
Triton or an extra.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fused_rope_attn
from fused_rope_attn.runtime import device

# The library that the integration patches, and libraries with rival kernels.
PACKAGES = ("transformers", "liger-kernel", "flash-attn", "flash-attn-4", "nvidia-cutlass-dsl", "numpy")
# Switches that change which kernels run or what they compute. None of them holds a path or a name.
SWITCHES = (
    "TRITON_INTERPRET TRITON_DEFAULT_FP_FUSION TRITON_F32_DEFAULT CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING "
    "HIP_VISIBLE_DEVICES TORCHDYNAMO_DISABLE"
).split()


def environment() -> dict[str, Any]:
    """Return facts about this machine, ready for JSON."""
    return {
        "fused_rope_attn": fused_rope_attn.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "driver": driver_version(),
        "triton": package_version("triton"),
        "interpreter": device.is_interpreted(),
        "packages": {name: found for name in PACKAGES if (found := package_version(name))},
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
        "gpus": _attempt(device.cards),
        "plan": _attempt(typical_plan),
    }


def package_version(name: str) -> str | None:
    """Return the version of an installed distribution, without importing it; None if it is absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver from ``nvidia-smi``, or of the amdgpu module; None without either."""
    answer = run_quietly("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    files = map(Path, ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"))
    answer = answer or next((file.read_text() for file in files if file.exists()), "")
    return answer.splitlines()[0].strip() if answer else None


def run_quietly(*command: str) -> str:
    """Return the output of a command; "" if it is absent, fails or takes more than 20 seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def typical_plan() -> dict[str, Any]:
    """Return the choice of ``plan`` in a training step of a model of 8B parameters, on the GPU if there is one."""
    where = torch.device("cuda" if device.cards() else "cpu")
    q, k, v = (torch.empty(1, heads, 4096, 128, dtype=torch.bfloat16, device=where) for heads in (32, 8, 8))
    cos = torch.empty(4096, 64, device=where)
    chosen = vars(fused_rope_attn.plan(q, k, v, cos, cos, causal=True))
    call = f"rope_attention, bfloat16, causal, B 1, HQ 32, HKV 8, N 4096, D 128, on {where}"
    return {"call": call, **{name: value if value is None else str(value) for name, value in chosen.items()}}


def _attempt(question: Callable[[], Any]) -> Any:
    """Return the answer or the error, because a broken machine needs a report most of all."""
    try:
        return question()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    print(json.dumps(environment(), indent=2))
