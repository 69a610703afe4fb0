"""Attention with rotary position embedding inside: ``rope_attention(q, k, v, cos, sin, causal)``."""

from fused_rope_attn.api import plan, rope_attention, rope_tables
from fused_rope_attn.planning import Plan

__version__ = "0.1.0"
__all__ = ["Plan", "plan", "rope_attention", "rope_tables"]
