"""Every rival by name, in the order in which reports list them. Importing it imports none of their packages."""

from __future__ import annotations

from baselines import (
    bare_cudnn,
    bare_fa4,
    bare_flash,
    bare_triton_fa2,
    compiled_cudnn,
    compiled_fa4,
    hf_flash_attn,
    hf_sdpa,
    hf_triton_fa2,
    liger_cudnn,
    liger_fa4,
    liger_flash,
)
from baselines.base import Baseline

_MODULES = (
    hf_sdpa,
    hf_flash_attn,
    hf_triton_fa2,
    liger_flash,
    liger_cudnn,
    liger_fa4,
    compiled_cudnn,
    compiled_fa4,
    bare_flash,
    bare_cudnn,
    bare_fa4,
    bare_triton_fa2,
)

BASELINES: dict[str, Baseline] = {module.BASELINE.name: module.BASELINE for module in _MODULES}


def missing() -> dict[str, str]:
    """Rivals that cannot run here, each with the pip names that it lacks. Imports what it asks about."""
    reasons = {name: baseline.missing() for name, baseline in BASELINES.items()}
    return {name: reason for name, reason in reasons.items() if reason}
