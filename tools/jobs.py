"""One call of one launcher, compiled for one card: what all jobs of ``compile_kernels`` have in common."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

# Words of labels. Other features have their fields' names where they are True, and values as they are.
_WITHOUT = {"causal": "full", "append": "read-only", "of_rotated": "raw"}
_NUMBERS = {"rotary_dim": "R{}", "len_q": "NQ{}", "page_size": "pages-of-{}", "group_size": "G{}", "norm": "norm {}"}


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """A call for ``arch`` of tensors in ``dtype`` with ``head_dim`` columns; subclasses add features."""

    arch: str
    dtype: torch.dtype
    head_dim: int

    @property
    def title(self) -> str:
        """Name the kernels."""
        raise NotImplementedError

    @property
    def tiles(self) -> list[str]:
        """Name the configuration."""
        return []

    @property
    def label(self) -> str:
        words = [self.title, str(self.dtype).removeprefix("torch."), f"D{self.head_dim}"]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("arch", "dtype", "head_dim", "config", "direction") or value == field.default:
                continue
            words.append(_word(field.name, value))
        return " ".join([*words, *self.tiles])

    def launch(self) -> None:
        """Call the launcher on tensors without memory."""
        raise NotImplementedError

    def heads(self, batch: int, length: int, heads: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return (batch, heads, length, head_dim), stored with the heads of a token next to each other."""
        return meta(batch, length, heads, self.head_dim, dtype=dtype or self.dtype).transpose(1, 2)


def _word(name: str, value: Any) -> str:
    if name in _NUMBERS:
        return _NUMBERS[name].format(value)
    if isinstance(value, bool):
        return name if value else _WITHOUT[name]
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def feature_options(window: bool, softcap: bool, norms: bool) -> dict[str, Any]:
    """Return the options of a call of attention that has these features."""
    return {
        "softmax_scale": 0.1,
        "window": (100, -1) if window else None,
        "softcap": 30.0 if softcap else 0.0,
        "norm_eps": 1e-6 if norms else None,
        "norm_offset": 0.0 if norms else None,
    }


def int32(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)
