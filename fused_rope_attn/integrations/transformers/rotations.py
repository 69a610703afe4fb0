"""Rotation of a module's heads: the tables of a pass's tokens, and launches that norm and rotate queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_rope_attn import apply_rope_qk
from fused_rope_attn.integrations.transformers.batch import Batch, Kept, kept_of
from fused_rope_attn.integrations.transformers.conventions import AttentionModule, Convention, Latent, by_section
from fused_rope_attn.integrations.transformers.norms import HeadNorms
from fused_rope_attn.rotation.api import rotate_checked
from fused_rope_attn.rotation.problem import RotationOptions, RotationTensors

# Tables of a pass that are kept at a time: two kinds of layers, on a few devices.
_MOST_TABLES = 8


class Tables:
    """cos and sin (1|B, N, R/2) of a batch's tokens, and the operators' options for these tables.

    joined: cos and sin of all ranks that share the sequence, once they are gathered.
    """

    def __init__(self, cos: Tensor, sin: Tensor, interleaved: bool):
        self.arrays = cos, sin
        self.options: dict[str, Any] = {"rotary_dim": 2 * cos.shape[-1], "interleaved": interleaved}
        self._long: tuple[Tensor, Tensor] | None = None
        self._by_token: Tables | None = None
        self.joined: tuple[Tensor, Tensor] | None = None

    def long(self, rows: int) -> tuple[Tensor, Tensor]:
        """Expand tables of one row to (1|B, rows, R/2), all rows the same."""
        if self._long is None or self._long[0].shape[1] != rows:
            cos, sin = self.arrays
            self._long = cos.expand(-1, rows, -1), sin.expand(-1, rows, -1)
        return self._long

    def wide(self, columns: int) -> Tables:
        """Expand identity tables of one column to (1, rows, columns)."""
        cos, sin = self.arrays
        return Tables(cos.expand(-1, -1, columns), sin.expand(-1, -1, columns), False)

    def by_token(self) -> Tables:
        """Return tables (N, 1, R/2) of a batch of one row: each token becomes a sequence of its own."""
        if self._by_token is None:
            cos, sin = (table.transpose(0, 1) for table in self.arrays)
            self._by_token = Tables(cos, sin, self.options["interleaved"])
        return self._by_token


class Tokens(NamedTuple):
    """The new tokens of one layer: q (B, HQ, N, D), k and v (B, HKV, N, D).

    tables: of the rotation that q and k still need. norms: those that the kernels compute before it, or None.
    latent: of multi-head latent attention, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    tables: Tables
    norms: HeadNorms | None = None
    latent: Latent | None = None

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The tensors that attention takes before the tables."""
        if self.latent is None:
            return self.q, self.k, self.v
        return self.latent.q_nope, self.q, self.latent.k_nope, self.k, self.v

    @property
    def options(self) -> dict[str, Any]:
        """The operators' options for the tables and the norms."""
        if self.latent is not None:  # all columns of q and k are rotated
            return {"interleaved": self.tables.options["interleaved"]}
        return self.tables.options if self.norms is None else self.tables.options | self.norms.options

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return () if self.norms is None else (self.norms.q_norm, self.norms.k_norm)

    def rotated(self, identity: Tables) -> Tokens:
        """Norm and rotate q and k, by one launch. identity: the result's tables, which rotate by the angle 0."""
        q, k = apply_rope_qk(self.q, self.k, *self.tables.arrays, **self.options)
        if self.latent is not None:
            identity = identity.wide(q.shape[-1] // 2)
        return Tokens(q, k, self.v, identity, latent=self.latent)

    def rotated_keys(self, out: Tensor | None = None) -> Tensor:
        """Return normed and rotated k. Call this only after attention has checked the tokens."""
        options = RotationOptions(**self.tables.options, inverse=False, layout="bhsd")
        outs = None if out is None else [out]
        tensors = RotationTensors([self.k], outs, *self.tables.arrays, position_ids=None, cu_seqlens=None)
        if self.norms is not None:
            options = options._replace(norm_eps=self.norms.norm_eps, norm_offset=self.norms.norm_offset)
            tensors = tensors._replace(weights=[self.norms.k_norm])
        return rotate_checked(options, tensors)[0]


def tables_for(
    module: AttentionModule, convention: Convention, embeddings: Any, q: Tensor, kept: Kept | None
) -> Tables:
    """Return the tables for q (B, HQ, N, D). embeddings: (cos, sin) of the model's rotary embedding, or cos + i sin.

    A layer that does not rotate ignores them; they may then be None.
    """
    if not convention.rotates(module, embeddings):
        return identity_tables(q.shape[2], q.device)
    sections, interleaved = convention.sections(module), bool(convention.interleaved(module))
    if kept is None:
        return _tables_of(convention, embeddings, q.dtype, interleaved, sections)
    # One pair serves all layers, or, as in Gemma 3, all of one kind.
    sources = (embeddings,) if isinstance(embeddings, Tensor) else embeddings
    key = (*map(id, sources), q.dtype, convention.half_width, interleaved, sections)
    entry = kept.tables.get(key)
    if entry is None:
        if len(kept.tables) >= _MOST_TABLES:  # something between the layers makes new ones for each
            kept.tables.clear()
        entry = kept.tables[key] = (_tables_of(convention, embeddings, q.dtype, interleaved, sections), embeddings)
    return entry[0]


def _tables_of(
    convention: Convention,
    embeddings: Tensor | tuple[Tensor, Tensor],
    dtype: torch.dtype,
    interleaved: bool,
    sections: tuple[int, ...] | None,
) -> Tables:
    if isinstance(embeddings, Tensor):  # complex numbers, cos + i sin
        embeddings = embeddings.real, embeddings.imag
    cos, sin = (convention.half_width(table) for table in embeddings)
    # A token has three positions, each with a table. The rotary embedding combines them in transformers 5, and each
    # attention module in 4.57.
    if sections is not None and cos.ndim == 4:
        cos, sin = by_section(cos, sections), by_section(sin, sections)
    if cos.dtype not in (torch.float32, dtype):  # autocast may have given q another dtype than the model's
        cos, sin = cos.float(), sin.float()
    return Tables(cos, sin, interleaved)


def identity_tables(rows: int, device: torch.device) -> Tables:
    """Return tables that rotate one pair by the angle 0, which is exact in every dtype."""
    cos, sin = torch.ones((1, 1, 1), device=device), torch.zeros((1, 1, 1), device=device)
    return Tables(cos.expand(1, rows, 1), sin.expand(1, rows, 1), False)


def identity_row(device: torch.device, batch: Batch) -> Tables:
    """Return identity tables of one row, the same for all layers of a pass."""
    kept = kept_of(batch)
    if kept is None:
        return identity_tables(1, device)
    if device not in kept.identities:
        kept.identities[device] = identity_tables(1, device)
    return kept.identities[device]
