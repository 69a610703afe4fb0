"""FlashAttention-4 alone, no rotation: part of the target that rotation must not cost anything beyond."""

from baselines import attentions
from baselines.base import Baseline

BASELINE = Baseline("bare_fa4", None, attentions.FA4)
