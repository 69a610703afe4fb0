"""Hugging Face's rotation + the official flash-attn (PyTorch's build of its kernels where the package is absent)."""

from baselines import attentions, rotations
from baselines.base import Baseline

BASELINE = Baseline("hf_flash_attn", rotations.HF, attentions.FLASH_ATTN)
