"""`torch.compile`d rotation + FlashAttention-4."""

from baselines import attentions, rotations
from baselines.base import Baseline

BASELINE = Baseline("compiled_fa4", rotations.COMPILED, attentions.FA4)
