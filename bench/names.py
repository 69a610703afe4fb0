"""Names of lengths and dtypes in results."""

from __future__ import annotations

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def length_name(length: int) -> str:
    """``4K`` for 4096, ``640`` for 640."""
    return f"{length // 1024}K" if length and length % 1024 == 0 else str(length)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16``: what result rows carry."""
    return str(dtype).removeprefix("torch.")


def short_dtype(dtype: torch.dtype) -> str:
    """``bf16``: what shapes and command lines carry."""
    return next(name for name, known in DTYPES.items() if known is dtype)


def words(text: str) -> list[str]:
    """The words of a comma-separated option."""
    return [word.strip() for word in text.split(",") if word.strip()]
