"""Hugging Face transformers 4.57 and 5 (the ``hf`` extra)."""

from fused_rope_attn.integrations.transformers.patch import patch_model, unpatch_model
from fused_rope_attn.integrations.transformers.tables import rope_tables_from_config

__all__ = ["patch_model", "rope_tables_from_config", "unpatch_model"]
