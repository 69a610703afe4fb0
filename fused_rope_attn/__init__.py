"""Attention with rotary position embedding inside: ``rope_attention(q, k, v, cos, sin, causal)``."""

from fused_rope_attn.api import (
    cu_seqlens_from_position_ids,
    plan,
    rope_attention,
    rope_attention_varlen,
    rope_attention_with_kvcache,
)
from fused_rope_attn.planning import Plan
from fused_rope_attn.rotation import (
    RotaryEmbedding,
    apply_rope,
    apply_rope_qk,
    permute_rope_layout,
    rope_tables,
    rope_tables_2d,
)

__version__ = "0.1.0"
__all__ = [
    "Plan",
    "RotaryEmbedding",
    "apply_rope",
    "apply_rope_qk",
    "cu_seqlens_from_position_ids",
    "permute_rope_layout",
    "plan",
    "rope_attention",
    "rope_attention_varlen",
    "rope_attention_with_kvcache",
    "rope_tables",
    "rope_tables_2d",
]
