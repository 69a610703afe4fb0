"""Attention with rotary position embedding inside: ``rope_attention(q, k, v, cos, sin, causal)``.

The public names are imported when they are first used: importing the package needs neither a GPU, nor Triton, nor an
extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fused_rope_attn.attention.api import (
        cu_seqlens_from_position_ids,
        plan,
        plan_varlen,
        rope_attention,
        rope_attention_varlen,
    )
    from fused_rope_attn.attention.planning import Plan
    from fused_rope_attn.generation.api import plan_with_kvcache, rope_attention_with_kvcache, write_kvcache
    from fused_rope_attn.rotation.api import apply_rope, apply_rope_qk
    from fused_rope_attn.rotation.embedding import RotaryEmbedding
    from fused_rope_attn.rotation.layouts import permute_rope_layout
    from fused_rope_attn.rotation.tables import rope_tables, rope_tables_2d

__version__ = "0.1.0"
__all__ = [
    "Plan",
    "RotaryEmbedding",
    "apply_rope",
    "apply_rope_qk",
    "cu_seqlens_from_position_ids",
    "permute_rope_layout",
    "plan",
    "plan_varlen",
    "plan_with_kvcache",
    "rope_attention",
    "rope_attention_varlen",
    "rope_attention_with_kvcache",
    "rope_tables",
    "rope_tables_2d",
    "write_kvcache",
]

_MODULES = {
    "Plan": "attention.planning",
    "RotaryEmbedding": "rotation.embedding",
    "apply_rope": "rotation.api",
    "apply_rope_qk": "rotation.api",
    "cu_seqlens_from_position_ids": "attention.api",
    "permute_rope_layout": "rotation.layouts",
    "plan": "attention.api",
    "plan_varlen": "attention.api",
    "plan_with_kvcache": "generation.api",
    "rope_attention": "attention.api",
    "rope_attention_varlen": "attention.api",
    "rope_attention_with_kvcache": "generation.api",
    "rope_tables": "rotation.tables",
    "rope_tables_2d": "rotation.tables",
    "write_kvcache": "generation.api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
