"""The rotation of a module's heads: tables of a pass's tokens, and the launches that turn queries and keys by them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_rope_attn import apply_rope_qk
from fused_rope_attn.integrations.transformers.batch import Batch, Kept
from fused_rope_attn.integrations.transformers.conventions import AttentionModule, Convention, by_section
from fused_rope_attn.integrations.transformers.norms import HeadNorms
from fused_rope_attn.rotation.api import rotate_checked
from fused_rope_attn.rotation.problem import RotationOptions, RotationTensors

# Tables of a pass that are kept at a time: two kinds of layers, on a few devices.
_MOST_TABLES = 8


class Tables:
    """cos and sin (1|B, N, R/2) of a batch's tokens, and the options that say how they turn a module's heads."""

    def __init__(self, cos: Tensor, sin: Tensor, interleaved: bool):
        self.arrays = cos, sin
        self.options: dict[str, Any] = {"rotary_dim": 2 * cos.shape[-1], "interleaved": interleaved}
        self._long: tuple[Tensor, Tensor] | None = None
        self._by_token: Tables | None = None
        self.joined: tuple[Tensor, Tensor] | None = None  # of the rows of all ranks that share the sequence

    def long(self, rows: int) -> tuple[Tensor, Tensor]:
        """Tables of one row as tables of many rows (1|B, rows, R/2), all the same."""
        if self._long is None or self._long[0].shape[1] != rows:
            cos, sin = self.arrays
            self._long = cos.expand(-1, rows, -1), sin.expand(-1, rows, -1)
        return self._long

    def by_token(self) -> Tables:
        """(N, 1, R/2) of a batch of one row: a sequence of its own for each of its tokens."""
        if self._by_token is None:
            cos, sin = (table.transpose(0, 1) for table in self.arrays)
            self._by_token = Tables(cos, sin, self.options["interleaved"])
        return self._by_token


def tables_for(
    module: AttentionModule, convention: Convention, embeddings: Any, q: Tensor, kept: Kept | None
) -> Tables:
    """Tables for q (B, HQ, N, D) of (cos, sin) as the model's rotary embedding gives them.

    A layer that does not rotate leaves them unread; they may then be None.
    """
    if not convention.rotates(module, embeddings):
        return identity(q.shape[2], q.device)
    if kept is None:
        return _tables_of(convention, embeddings, q.dtype, convention.sections(module))
    # One pair serves all layers, or, as in Gemma 3, all of one kind.
    cos, sin = embeddings
    sections = convention.sections(module)
    key = (id(cos), id(sin), q.dtype, convention.half_width, convention.interleaved, sections)
    entry = kept.tables.get(key)
    if entry is None:
        if len(kept.tables) >= _MOST_TABLES:  # something between the layers makes new ones for each
            kept.tables.clear()
        entry = kept.tables[key] = (_tables_of(convention, embeddings, q.dtype, sections), embeddings)
    return entry[0]


def _tables_of(
    convention: Convention, embeddings: tuple[Tensor, Tensor], dtype: torch.dtype, sections: tuple[int, ...] | None
) -> Tables:
    cos, sin = (convention.half_width(table) for table in embeddings)
    # transformers 5 has the rotary embedding choose among the tables of a token's three positions, 4.57 each module.
    if sections is not None and cos.ndim == 4:
        cos, sin = by_section(cos, sections), by_section(sin, sections)
    if cos.dtype not in (torch.float32, dtype):  # autocast may have given q another dtype than the model's
        cos, sin = cos.float(), sin.float()
    return Tables(cos, sin, convention.interleaved)


def identity(rows: int, device: torch.device) -> Tables:
    """Tables that turn nothing: one pair by the angle 0, exact in every dtype."""
    cos, sin = torch.ones((1, 1, 1), device=device), torch.zeros((1, 1, 1), device=device)
    return Tables(cos.expand(1, rows, 1), sin.expand(1, rows, 1), False)


def kept_of(batch: Batch) -> Kept | None:
    # A graph that looked at what eager passes keep would be made anew for each of them.
    return None if torch.compiler.is_compiling() else batch.kept


def unturned(device: torch.device, batch: Batch) -> Tables:
    """One row that turns nothing, the same for all layers of a pass."""
    kept = kept_of(batch)
    if kept is None:
        return identity(1, device)
    if device not in kept.unturned:
        kept.unturned[device] = identity(1, device)
    return kept.unturned[device]


def options_of(norms: HeadNorms | None) -> dict[str, Any]:
    """Norms as keywords of the operators."""
    return {} if norms is None else norms.options


def weights_of(norms: HeadNorms | None) -> tuple[Tensor, ...]:
    return () if norms is None else (norms.q_norm, norms.k_norm)


def rotated(q: Tensor, k: Tensor, tables: Tables, norms: HeadNorms | None) -> tuple[Tensor, ...]:
    """Normed and rotated q, k (B, H, N, D), by a launch."""
    options = tables.options | options_of(norms)
    return apply_rope_qk(q, k, *tables.arrays, **options)


def rotated_keys(k: Tensor, tables: Tables, norms: HeadNorms | None, out: Tensor | None = None) -> Tensor:
    """Normed and rotated k (B, HKV, N, D), of arguments that attention has checked."""
    options = RotationOptions(tables.options["rotary_dim"], tables.options["interleaved"], inverse=False, layout="bhsd")
    outs = None if out is None else [out]
    tensors = RotationTensors([k], outs, *tables.arrays, position_ids=None, cu_seqlens=None)
    if norms is not None:
        options = options._replace(norm_eps=norms.norm_eps, norm_offset=norms.norm_offset)
        tensors = tensors._replace(weights=[norms.k_norm])
    return rotate_checked(options, tensors)[0]
