"""Hugging Face transformers 4.57 and 5 (the ``hf`` extra)."""

from fused_rope_attn.integrations.transformers.patch import is_patched, patch_model, unpatch_model
from fused_rope_attn.integrations.transformers.state import ModuleReport, PatchReport, patch_report
from fused_rope_attn.integrations.transformers.tables import rope_tables_from_config

__all__ = [
    "ModuleReport",
    "PatchReport",
    "is_patched",
    "patch_model",
    "patch_report",
    "rope_tables_from_config",
    "unpatch_model",
]
