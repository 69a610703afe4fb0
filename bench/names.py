"""Names of lengths and dtypes in results."""

from __future__ import annotations

import torch

# In shapes and on command lines.
SHORT_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def length_name(length: int) -> str:
    """``4K`` for 4096, ``640`` for 640."""
    return f"{length // 1024}K" if length and length % 1024 == 0 else str(length)


def words(text: str) -> list[str]:
    """The words of a comma-separated option."""
    return [word.strip() for word in text.split(",") if word.strip()]
