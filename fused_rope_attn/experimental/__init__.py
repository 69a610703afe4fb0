"""Research operators: interfaces may change, and nothing else in the package imports them."""

from fused_rope_attn.experimental.corope import corope_attention

__all__ = ["corope_attention"]
