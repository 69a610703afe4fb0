"""One call of one launcher, compiled for one card: what all jobs of ``compile_kernels`` have in common."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from fused_rope_attn.attention.configs import Tile

# Words of labels. Other features have their fields' names where they are True, and values as they are.
_WITHOUT = {"causal": "full", "append": "read-only", "of_rotated": "raw"}
_NUMBERS = {"rotary_dim": "R{}", "len_q": "NQ{}", "page_size": "pages-of-{}", "group_size": "G{}", "norm": "norm {}"}


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """A call for ``arch`` of tensors in ``dtype`` with ``head_dim`` columns; subclasses add features and ``title``, the
    name of the kernels."""

    arch: str
    dtype: torch.dtype
    head_dim: int
    title: ClassVar[str]

    @property
    def label(self) -> str:
        words = [self.title, str(self.dtype).removeprefix("torch."), f"D{self.head_dim}"]
        features = changed(self, "arch", "dtype", "head_dim", "config", "direction")
        words += [_word(name, value) for name, value in features.items()]
        if hasattr(self, "config"):
            config = changed(self.config, "strategy", "section_bytes").items()
            words += [_tile_word(x) if isinstance(x, Tile) else f"{name}={x}" for name, x in config] or ["defaults"]
        return " ".join(words)

    def launch(self) -> None:
        """Call the launcher on tensors without memory."""
        raise NotImplementedError

    def heads(self, batch: int, length: int, heads: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return (batch, heads, length, head_dim), stored with the heads of a token next to each other."""
        return meta(batch, length, heads, self.head_dim, dtype=dtype or self.dtype).transpose(1, 2)


def changed(record: Any, *but: str) -> dict[str, Any]:
    """Return the fields of a dataclass that are not at their defaults, apart from those named."""
    held = {field.name: (getattr(record, field.name), field.default) for field in fields(record)}
    return {name: value for name, (value, default) in held.items() if value != default and name not in but}


def _tile_word(tile: Tile) -> str:
    return f"{tile.block_m}x{tile.block_n}w{tile.num_warps}s{tile.num_stages}"


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
