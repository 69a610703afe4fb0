"""Rotary position embedding (RoPE) of queries and keys in one launch, with gradients, in every convention."""

from . import layers
from .rotation.api import apply_rope, apply_rope_qk

__all__ = ["apply_rope", "apply_rope_qk", "layers"]
