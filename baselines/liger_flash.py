"""Liger's one-launch rotation + PyTorch's flash attention."""

from baselines import attentions, rotations
from baselines.base import Baseline

BASELINE = Baseline("liger_flash", rotations.LIGER, attentions.SDPA_FLASH)
