"""Hugging Face's rotation + FlashAttention-2 written in Triton: the like-for-like rival of portable kernels."""

from baselines import attentions, rotations
from baselines.base import Baseline

BASELINE = Baseline("hf_triton_fa2", rotations.HF, attentions.TRITON_FA2)
