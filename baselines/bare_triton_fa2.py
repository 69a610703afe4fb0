"""FlashAttention-2 written in Triton alone, no rotation: what a portable kernel without RoPE costs."""

from baselines import attentions
from baselines.base import Baseline

BASELINE = Baseline("bare_triton_fa2", None, attentions.TRITON_FA2)
