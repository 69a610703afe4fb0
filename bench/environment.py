"""Facts in every result row: card, driver, versions, commit, date."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import torch

from fused_rope_attn.env import driver_version, package_version, run_quietly

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
_PACKAGES = (
    *("transformers", "liger-kernel", "flash-attn", "fa3-fwd", "flash-attn-4", "nvidia-cutlass-dsl"),
    *("quack-kernels", "jax", "dew-flash-attn-cu13"),
)


def environment() -> dict[str, object]:
    """Facts of this machine and this tree, JSON-ready."""
    import triton

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "driver": driver_version() or "none",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": cudnn,
        "triton": triton.__version__,
        "packages": {name: found for name in _PACKAGES if (found := package_version(name))},
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """$FUSED_ROPE_COMMIT where set (a tree copied from elsewhere); else HEAD, ``-dirty`` when files differ."""
    found = os.environ.get("FUSED_ROPE_COMMIT")
    if not found and (ROOT / ".git").exists():
        found = run_quietly("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return found or "unknown"
