"""Hugging Face's rotation + `scaled_dot_product_attention`: what most models run today."""

from baselines import attentions, rotations
from baselines.base import Baseline

BASELINE = Baseline("hf_sdpa", rotations.HF, attentions.SDPA)
