"""Context parallelism: attention with rotary position embedding over sequences that several processes share."""

from fused_rope_attn.distributed.api import (
    cp_positions,
    cp_shard,
    cp_shift_labels,
    cp_unshard,
    plan_cp,
    rope_attention_cp,
    rope_attention_varlen_cp,
)
from fused_rope_attn.distributed.documents import DocumentPlan, plan_varlen_cp
from fused_rope_attn.distributed.layout import CpPlan
from fused_rope_attn.runtime.options import CpMethod

__all__ = [
    "CpMethod",
    "CpPlan",
    "DocumentPlan",
    "cp_positions",
    "cp_shard",
    "cp_shift_labels",
    "cp_unshard",
    "plan_cp",
    "plan_varlen_cp",
    "rope_attention_cp",
    "rope_attention_varlen_cp",
]
