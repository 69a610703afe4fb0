"""Liger's one-launch rotation + FlashAttention-4: the strongest pair on Hopper."""

from baselines import attentions, rotations
from baselines.base import Baseline

BASELINE = Baseline("liger_fa4", rotations.LIGER, attentions.FA4)
