"""Rivals for multi-head latent attention: a build of queries and keys in memory, and an attention over them.

A rival gets ``rows``, five views as a model's projections give them: q_nope ``(B, H, N, DN)``, q_rope ``(B, H, N, R)``,
k_nope ``(B, H, N, DN)``, k_rope ``(B, 1, N, R)`` and v ``(B, H, N, DV)``. Pairs are interleaved, attention is causal.
A build rotates q_rope and k_rope, concatenates them with the other columns, and expands k_rope to all heads. It may
sort the columns of the pairs, because equal orders in q and k give equal scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baselines import attentions, rotations
from baselines.base import Attention, Package, nothing_missing

HF_INTERLEAVED = Package(
    "transformers", "transformers.models.deepseek_v3.modeling_deepseek_v3", "apply_rotary_pos_emb_interleave"
)
Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Build:
    """``build(rows, tables) -> q, k``, both (B, H, N, DN + R), differentiable.

    half_tables: tables are rounded to q's dtype. sorted_columns: it is given q_rope and k_rope with the first columns
    of all pairs before the second ones, as a model with sorted weights projects them.
    """

    label: str
    build: Callable[[list[Tensor], Tables], tuple[Tensor, Tensor]]
    half_tables: bool = False
    sorted_columns: bool = False
    missing: Callable[[], str | None] = nothing_missing

    def prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tables:
        """Return (1, N, R) tables from (N, R/2) float32, as transformers makes them."""
        dtype = dtype if self.half_tables else torch.float32
        cos, sin = (torch.cat((x, x), dim=-1).to(dtype)[None] for x in (cos, sin))
        return cos, sin


def joined(rows: list[Tensor], q_rot: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate the columns, and expand the shared key head."""
    q_nope, _, k_nope = rows[:3]
    return torch.cat((q_nope, q_rot), -1), torch.cat((k_nope, k_rot.expand(*k_nope.shape[:-1], -1)), -1)


def _hf(rows: list[Tensor], tables: Tables) -> tuple[Tensor, Tensor]:
    return joined(rows, *HF_INTERLEAVED.load()(rows[1], rows[3], *tables))


def _liger(rows: list[Tensor], tables: Tables) -> tuple[Tensor, Tensor]:
    return joined(rows, *rotations.LIGER.rotate(rows[1], rows[3], tables))


@functools.cache
def _whole() -> Callable[..., tuple[Tensor, Tensor]]:
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def build(rows: list[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # (B, N, H, columns), the order in memory: results have it too, and FlashAttention takes it.
        rows = [x.transpose(1, 2) for x in rows[:4]]
        cos, sin = (x[:, :, None, : x.shape[-1] // 2] for x in (cos, sin))
        return joined(rows, *(turned(x, cos, sin) for x in (rows[1], rows[3])))

    return rotations.specialised(build)


def _compiled(rows: list[Tensor], tables: Tables) -> tuple[Tensor, Tensor]:
    q, k = _whole()(list(rows), *tables)
    return q.transpose(1, 2), k.transpose(1, 2)


# transformers' own lines: rotation, concatenation and expansion are separate launches, every step rounded.
HF = Build("HF build", _hf, half_tables=True, missing=HF_INTERLEAVED.missing)
# One kernel each way.
COMPILED = Build("compiled build", _compiled)
# Liger's kernel rotates halves in place; views of wider rows are copied before.
LIGER = Build("Liger rope, concatenated", _liger, sorted_columns=True, missing=rotations.LIGER_ROTATION.missing)


@dataclass(frozen=True)
class LatentBaseline:
    """One rival. Without a build attention gets queries and keys that are built but not rotated."""

    name: str
    build: Build | None
    attention: Attention

    @property
    def label(self) -> str:
        """Return the label in tables."""
        attention = self.attention.label if isinstance(self.attention.label, str) else self.attention.label()
        return f"{self.build.label} + {attention}" if self.build else f"bare {attention}"

    @property
    def role(self) -> str:
        """Return the role of ``bench.suite.Provider``."""
        return "rival" if self.build else "bare"

    @property
    def backward(self) -> bool:
        """Return whether it has gradients. Liger's kernel is measured forward only, with an attention that is."""
        return self.attention.backward

    def missing(self) -> str | None:
        """Return every package that it lacks, with the import error; None if it can run."""
        reasons = [part.missing() for part in (self.build, self.attention) if part]
        return "; ".join(dict.fromkeys(filter(None, reasons))) or None

    def prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tables | None:
        """Bring (N, R/2) float32 tables into the form of the build; this is not timed."""
        return self.build.prepare(cos, sin, dtype) if self.build else None

    def leaves(self, rows: list[Tensor]) -> list[Tensor]:
        """Return the tensors that ``run`` takes: ``rows``, or what a model would project or build for it."""
        q_nope, q_rope, k_nope, k_rope, v = rows
        if self.build is None:
            return [*joined(rows, q_rope, k_rope), v]
        if self.build.sorted_columns:  # as before, views of wider rows in the order (B, N, H, columns)
            q_rope, k_rope = (torch.cat((x[..., ::2], x[..., 1::2]), -1) for x in (q_rope, k_rope))
            q = torch.cat((q_nope, q_rope), -1).transpose(1, 2).contiguous().transpose(1, 2)
            q_nope, q_rope = q.split([q_nope.shape[-1], q_rope.shape[-1]], dim=-1)
            k_rope = torch.cat((k_rope, k_rope), -1)[..., k_rope.shape[-1] :]
        return [q_nope, q_rope, k_nope, k_rope, v]

    def run(self, leaves: list[Tensor], tables: Tables | None) -> Tensor:
        """Return o (B, H, N, DV)."""
        q, k = self.build.build(leaves, tables) if self.build and tables else leaves[:2]
        return self.attention.attend(q, k, leaves[-1], True)

    def gradients(self, found: list[Tensor], nope: int) -> list[Tensor]:
        """Return those of the five ``rows`` from those of the leaves. nope: DN."""
        if self.build is not None or not found:
            return found
        (dq_nope, dq_rope), (dk_nope, dk_rope) = (x.split([nope, x.shape[-1] - nope], -1) for x in found[:2])
        return [dq_nope, dq_rope, dk_nope, dk_rope.float().sum(1, keepdim=True), found[2]]


# In the order in which reports list them.
LATENT: dict[str, LatentBaseline] = {
    baseline.name: baseline
    for baseline in (
        # Models run these today.
        LatentBaseline("hf_sdpa", HF, attentions.SDPA),
        LatentBaseline("hf_cudnn", HF, attentions.CUDNN),
        LatentBaseline("hf_fa4", HF, attentions.FA4),
        LatentBaseline("compiled_cudnn", COMPILED, attentions.CUDNN),
        # The strongest that a user can write.
        LatentBaseline("compiled_fa4", COMPILED, attentions.FA4),
        # Forward only.
        LatentBaseline("liger_fa3", LIGER, attentions.FA3),
        LatentBaseline("bare_cudnn", None, attentions.CUDNN),
        LatentBaseline("bare_fa3", None, attentions.FA3),
        LatentBaseline("bare_fa4", None, attentions.FA4),
    )
}
