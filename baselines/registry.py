"""Every rival by name: a rotation (or none) and an attention. Importing this module imports none of their packages."""

from __future__ import annotations

from baselines import attentions, rotations
from baselines.base import Baseline

# In the order in which reports list them.
BASELINES: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        # The pair that most models run today.
        Baseline("hf_sdpa", rotations.HF, attentions.SDPA),
        # The official flash-attn; where that package is absent, PyTorch's build of the same kernels.
        Baseline("hf_flash_attn", rotations.HF, attentions.FLASH_ATTN),
        Baseline("liger_flash", rotations.LIGER, attentions.SDPA_FLASH),
        # The strongest pair that installs without a compiler.
        Baseline("liger_cudnn", rotations.LIGER, attentions.CUDNN),
        # Forward only.
        Baseline("liger_fa3", rotations.LIGER, attentions.FA3),
        # The strongest pair on Hopper.
        Baseline("liger_fa4", rotations.LIGER, attentions.FA4),
        # No package beyond PyTorch and the formula of Hugging Face.
        Baseline("compiled_cudnn", rotations.COMPILED, attentions.CUDNN),
        Baseline("compiled_fa4", rotations.COMPILED, attentions.FA4),
        # No rotation at all. The target is that a rotation costs nothing beyond the fastest of these.
        Baseline("bare_flash", None, attentions.FLASH_ATTN),
        Baseline("bare_cudnn", None, attentions.CUDNN),
        Baseline("bare_fa3", None, attentions.FA3),
        Baseline("bare_fa4", None, attentions.FA4),
    )
}
