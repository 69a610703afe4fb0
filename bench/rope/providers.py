"""Providers of the rotation: ours, packages that a user can install, and a copy as the ceiling.

A provider gets tensors ``(B, N, H, D)``, one of them or q and k, and half-width float32 tables. Other forms (views,
full-width tables, tables in its dtype) are prepared before any clock runs. Some also norm q and k before they rotate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baselines.base import missing_package
from baselines.norms import hf_norm, liger_norm
from baselines.rotations import LIGER, specialised
from bench.suite import Provider

Rotate = Callable[[list[Tensor], Any, bool], list[Tensor]]
Norm = Callable[[list[Tensor], list[Tensor], Any, bool], list[Tensor]]
NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class RopeProvider(Provider):
    """One rotation.

    rotate: ``rotate(xs, tables, interleaved)`` returns the rotated tensors, differentiable. norm: the same with ``(xs,
    weights, tables, interleaved)`` for normed ones. styles: the values of ``interleaved`` that it serves. pairs: it
    takes two tensors, so that a single one is given as two with half of the heads. heads_first: it takes (B, H, N, D)
    views. in_place: it overwrites its inputs, and its gradients. tables: "half", "full" or "none". rounded_tables: in
    the dtype of x.
    """

    rotate: Rotate
    norm: Norm | None = None
    styles: tuple[bool, ...] = (False, True)
    pairs: bool = False
    heads_first: bool = False
    in_place: bool = False
    tables: str = "half"
    rounded_tables: bool = False

    def unsupported(self, interleaved: bool, norms: bool = False) -> str | None:
        """Return why it does not serve a style, or norms; or None."""
        if norms and self.norm is None:
            return "has no norm"
        if interleaved in self.styles:
            return None
        return f"rotates {'halves' if interleaved else 'interleaved pairs'} only"

    def prepare(self, cos: Tensor, sin: Tensor, dtype: torch.dtype, interleaved: bool) -> tuple[Tensor, Tensor] | None:
        """Bring (N, D/2) float32 tables into the form that ``rotate`` takes."""
        if self.tables == "none":
            return None
        if self.rounded_tables:
            cos, sin = cos.to(dtype), sin.to(dtype)
        if self.tables == "full":
            widen = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat((t, t), -1))
            cos, sin = widen(cos)[None].contiguous(), widen(sin)[None].contiguous()
        return cos, sin

    def views(self, xs: list[Tensor]) -> list[Tensor]:
        """Return ``xs`` as ``rotate`` takes them: views, or copies of the halves of a single tensor."""
        if self.pairs and len(xs) == 1:
            xs = [half.contiguous() for half in xs[0].chunk(2, dim=2)]
        return [x.transpose(1, 2) for x in xs] if self.heads_first else list(xs)

    def back(self, xs: list[Tensor], count: int) -> list[Tensor]:
        """Undo ``views`` for ``count`` tensors."""
        xs = [x.transpose(1, 2) for x in xs] if self.heads_first else list(xs)
        return [torch.cat(xs, dim=2)] if count < len(xs) else xs


def _fused(xs: list[Tensor], tables: Any, interleaved: bool) -> list[Tensor]:
    import fused_rope_attn

    if len(xs) == 1:
        return [fused_rope_attn.apply_rope(xs[0], *tables, interleaved=interleaved, layout="bshd")]
    return list(fused_rope_attn.apply_rope_qk(*xs, *tables, interleaved=interleaved, layout="bshd"))


def _fused_norm(xs: list[Tensor], weights: list[Tensor], tables: Any, interleaved: bool) -> list[Tensor]:
    import fused_rope_attn

    options = {"q_norm": weights[0], "k_norm": weights[1], "norm_eps": NORM_EPS}
    return list(fused_rope_attn.apply_rope_qk(*xs, *tables, interleaved=interleaved, layout="bshd", **options))


def _liger(xs: list[Tensor], tables: Any, interleaved: bool) -> list[Tensor]:
    return list(LIGER.rotate(*xs, tables))


def _liger_norm(xs: list[Tensor], weights: list[Tensor], tables: Any, interleaved: bool) -> list[Tensor]:
    # Its patch of Qwen 3 does the same: norm (B, N, H, D), then rotate the fresh result in place.
    normed = [liger_norm(x.transpose(1, 2), weight, NORM_EPS, 0.0, in_place=False) for x, weight in zip(xs, weights)]
    return _liger([x.transpose(1, 2) for x in normed], tables, interleaved)


@functools.cache
def _flash_function() -> Callable[..., Tensor]:
    from flash_attn.layers.rotary import apply_rotary_emb

    return apply_rotary_emb


def _flash(xs: list[Tensor], tables: Any, interleaved: bool) -> list[Tensor]:
    return [_flash_function()(x, *tables, interleaved=interleaved) for x in xs]


@functools.cache
def _hf_function(interleaved: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    if interleaved:
        from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb
    else:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    return apply_rotary_pos_emb


def _hf(xs: list[Tensor], tables: Any, interleaved: bool) -> list[Tensor]:
    return list(_hf_function(interleaved)(*xs, *tables))


def _hf_norm(xs: list[Tensor], weights: list[Tensor], tables: Any, interleaved: bool) -> list[Tensor]:
    normed = [hf_norm(x.transpose(1, 2), weight, NORM_EPS, 0.0).transpose(1, 2) for x, weight in zip(xs, weights)]
    return _hf(normed, tables, interleaved)


@functools.cache
def _compiled_function() -> Callable[..., list[Tensor]]:
    def rotate(
        xs: list[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, weights: list[Tensor] | None = None
    ) -> list[Tensor]:
        cos, sin = cos[:, None], sin[:, None]
        outs = []
        for i, x in enumerate(xs):
            y = x.float()
            if weights is not None:
                y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + NORM_EPS) * weights[i].float()
            if interleaved:
                a, b = y.unflatten(-1, (-1, 2)).unbind(-1)
                outs.append(torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype))
            else:
                a, b = y.chunk(2, -1)
                outs.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype))
        return outs

    return specialised(rotate)


def _compiled(xs: list[Tensor], tables: Any, interleaved: bool) -> list[Tensor]:
    return _compiled_function()(xs, *tables, interleaved)


def _compiled_norm(xs: list[Tensor], weights: list[Tensor], tables: Any, interleaved: bool) -> list[Tensor]:
    return _compiled_function()(xs, *tables, interleaved, weights)


class _Copy(torch.autograd.Function):
    """Reads and writes every byte once, forward and backward."""

    @staticmethod
    def forward(ctx, *xs):
        return tuple(x.clone() for x in xs)

    @staticmethod
    def backward(ctx, *dos):
        return tuple(do.clone() for do in dos)


def _copy(xs: list[Tensor], tables: Any, interleaved: bool) -> list[Tensor]:
    return list(_Copy.apply(*xs))


def _copy_norm(xs: list[Tensor], weights: list[Tensor], tables: Any, interleaved: bool) -> list[Tensor]:
    return _copy(xs, tables, interleaved)


def _needs_transformers() -> str | None:
    return missing_package("transformers", "transformers.models.llama.modeling_llama", "apply_rotary_pos_emb")


def _needs_flash() -> str | None:
    return missing_package("flash-attn", "flash_attn.layers.rotary", "apply_rotary_emb")


OURS = "apply_rope"
COPY = "copy"
PROVIDERS: dict[str, RopeProvider] = {
    provider.name: provider
    for provider in (
        RopeProvider(OURS, "apply_rope (ours)", "ours", rotate=_fused, norm=_fused_norm),
        # One launch for both. It overwrites q and k, which saves it the allocation of outputs but no memory traffic.
        RopeProvider(
            "liger",
            "Liger",
            missing=LIGER.missing,
            pip=LIGER.pip,
            rotate=_liger,
            norm=_liger_norm,
            styles=(False,),
            pairs=True,
            heads_first=True,
            in_place=True,
            tables="full",
        ),
        RopeProvider(
            "flash_attn",
            "flash-attn Triton",
            missing=_needs_flash,
            pip=("flash-attn",),
            rotate=_flash,
            rounded_tables=True,
        ),
        RopeProvider("compiled", "torch.compile", rotate=_compiled, norm=_compiled_norm),
        RopeProvider(
            "hf",
            "HF eager",
            missing=_needs_transformers,
            pip=("transformers",),
            rotate=_hf,
            norm=_hf_norm,
            pairs=True,
            heads_first=True,
            tables="full",
            rounded_tables=True,
        ),
        RopeProvider(COPY, "copy (ceiling)", "ceiling", rotate=_copy, norm=_copy_norm, tables="none"),
    )
}
