"""Co-RoPE: rotary attention with distances measured by content."""

from fused_rope_attn.experimental.corope.api import corope_attention

__all__ = ["corope_attention"]
