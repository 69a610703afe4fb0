"""Providers of the rotation: ours, packages that a user can install, and a copy as the ceiling.

A provider gets q and k, ``(B, H, N, D)`` views of ``(B, N, H, D)``, and half-width float32 tables. Other forms
(full-width tables, tables in its dtype) are prepared before any clock runs. Some also norm q and k before they rotate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fused_rope_attn
from baselines.base import load
from baselines.norms import hf_norm, liger_norm
from baselines.rotations import HF, HF_ROTATION, LIGER, LIGER_ROTATION, specialised
from bench.suite import Provider, by_name

NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class RopeProvider(Provider):
    """One rotation.

    run: ``run([q, k], tables, interleaved, weights)`` returns both rotated, differentiable. It norms them first where
    there are ``weights``. styles: the values of ``interleaved`` that it serves. in_place: it overwrites its inputs, and
    its gradients. full_tables: each angle twice. rounded_tables: in the dtype of q.
    """

    run: Callable[[list[Tensor], Any, bool, list[Tensor]], list[Tensor]]
    styles: tuple[bool, ...] = (False, True)
    in_place: bool = False
    full_tables: bool = False
    rounded_tables: bool = False

    def unsupported(self, interleaved: bool) -> str | None:
        """Return why it does not serve a style, or None."""
        if interleaved in self.styles:
            return None
        return f"rotates {'halves' if interleaved else 'interleaved pairs'} only"

    def prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype, interleaved: bool) -> tuple[Tensor, Tensor]:
        """Bring (N, D/2) float32 tables into the form that ``run`` takes."""
        if self.rounded_tables:
            cos, sin = cos.to(dtype), sin.to(dtype)
        if self.full_tables:
            widen = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat((t, t), -1))
            cos, sin = widen(cos)[None].contiguous(), widen(sin)[None].contiguous()
        return cos, sin


def _fused(xs: list[Tensor], tables: Any, interleaved: bool, weights: list[Tensor]) -> list[Tensor]:
    options: dict[str, Any] = {"interleaved": interleaved}
    if weights:
        options |= {"q_norm": weights[0], "k_norm": weights[1], "norm_eps": NORM_EPS}
    return list(fused_rope_attn.apply_rope_qk(*xs, *tables, **options))


def _normed(norm: Callable[..., Tensor], rotate: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    """Return what norms (B, N, H, D) where there are weights, then rotates a pair of (B, H, N, D)."""

    def run(xs: list[Tensor], tables: Any, interleaved: bool, weights: list[Tensor]) -> list[Tensor]:
        normed = [norm(x.transpose(1, 2), weight, NORM_EPS, 0.0).transpose(1, 2) for x, weight in zip(xs, weights)]
        return list(rotate(*(normed or xs), tables, interleaved))

    return run


def _hf(q: Tensor, k: Tensor, tables: Any, interleaved: bool) -> Any:
    if not interleaved:
        return HF.rotate(q, k, tables)
    return load("transformers.models.cohere.modeling_cohere", "apply_rotary_pos_emb")(q, k, *tables)


@functools.cache
def _compiled() -> Callable[..., list[Tensor]]:
    def rotate(xs: list[Tensor], tables: Any, interleaved: bool, weights: list[Tensor]) -> list[Tensor]:
        # In memory as (B, N, H, D), like q, k and their gradients: a gradient with other strides would be copied.
        outs, (cos, sin) = [], (table[:, None] for table in tables)
        for i, x in enumerate(xs):
            y = x.transpose(1, 2).float()
            if weights:
                y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + NORM_EPS) * weights[i].float()
            a, b = y.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else y.chunk(2, -1)
            pair = a * cos - b * sin, b * cos + a * sin
            y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
            outs.append(y.to(x.dtype).transpose(1, 2))
        return outs

    return specialised(rotate)


class _Copy(torch.autograd.Function):
    """Reads and writes every byte once, forward and backward."""

    @staticmethod
    def forward(ctx, *xs):
        return tuple(x.clone() for x in xs)

    backward = forward


def _copy(xs: list[Tensor], tables: Any, interleaved: bool, weights: list[Tensor]) -> list[Tensor]:
    return list(_Copy.apply(*xs))


_LIGER: dict[str, Any] = LIGER_ROTATION.fields() | {"full_tables": True}
_HF: dict[str, Any] = HF_ROTATION.fields() | {"full_tables": True}
# Liger's patch of Qwen 3 does the same: the result of the norm is fresh, and is rotated in place.
_liger_norm = functools.partial(liger_norm, in_place=False)
_liger = _normed(_liger_norm, lambda q, k, tables, interleaved: LIGER.rotate(q, k, tables))
OURS = "apply_rope"
COPY = "copy"
PROVIDERS: dict[str, RopeProvider] = by_name(
    (
        RopeProvider(OURS, "apply_rope (ours)", "ours", run=_fused),
        # One launch for both. It overwrites q and k, which saves it the allocation of outputs but no memory traffic.
        RopeProvider("liger", "Liger", run=_liger, styles=(False,), in_place=True, **_LIGER),
        RopeProvider("compiled", "torch.compile", run=lambda *given: _compiled()(*given)),
        RopeProvider("hf", "HF eager", run=_normed(hf_norm, _hf), rounded_tables=True, **_HF),
        RopeProvider(COPY, "copy (ceiling)", "ceiling", run=_copy),
    )
)
