"""Attention with rotary position embedding inside: ``rope_attention(q, k, v, cos, sin, causal)``.

The public names, ``distributed``, ``experimental`` and ``masks`` are imported when they are first used: importing this
package needs neither a GPU, nor Triton, nor an extra.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fused_rope_attn import distributed as distributed, experimental as experimental, masks as masks
    from fused_rope_attn.attention.api import (
        cu_seqlens_from_position_ids,
        plan,
        plan_mla,
        plan_mla_varlen,
        plan_varlen,
        rope_attention,
        rope_attention_mla,
        rope_attention_mla_varlen,
        rope_attention_varlen,
    )
    from fused_rope_attn.attention.planning import Plan
    from fused_rope_attn.generation.api import plan_with_kvcache, rope_attention_with_kvcache, write_kvcache
    from fused_rope_attn.rotation.api import apply_rope, apply_rope_qk
    from fused_rope_attn.rotation.tables import RotaryEmbedding, permute_rope_layout, rope_tables, rope_tables_2d
    from fused_rope_attn.runtime.layouts import Layout, RotationLayout
    from fused_rope_attn.runtime.options import Backend, Strategy

__version__ = "0.1.0"
# fmt: off
__all__ = [
    "Backend", "Layout", "Plan", "RotaryEmbedding", "RotationLayout", "Strategy", "apply_rope", "apply_rope_qk",
    "cu_seqlens_from_position_ids", "permute_rope_layout", "plan", "plan_mla", "plan_mla_varlen", "plan_varlen",
    "plan_with_kvcache", "rope_attention", "rope_attention_mla", "rope_attention_mla_varlen", "rope_attention_varlen",
    "rope_attention_with_kvcache", "rope_tables", "rope_tables_2d", "write_kvcache",
]
# fmt: on
# The modules of names that are not in ``attention.api``.
_MODULES = {
    "attention.planning": ("Plan",),
    "generation.api": ("plan_with_kvcache", "rope_attention_with_kvcache", "write_kvcache"),
    "rotation.api": ("apply_rope", "apply_rope_qk"),
    "rotation.tables": ("RotaryEmbedding", "permute_rope_layout", "rope_tables", "rope_tables_2d"),
    "runtime.layouts": ("Layout", "RotationLayout"),
    "runtime.options": ("Backend", "Strategy"),
}

# Public packages. They are not in __all__, because a star import would load them.
_PACKAGES = ("distributed", "experimental", "masks")


if not TYPE_CHECKING:  # because of ``__getattr__`` a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = next((module for module, names in _MODULES.items() if name in names), "attention.api")
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, "__version__"])
