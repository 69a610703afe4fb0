"""Types of the options of the public functions: words that an argument may have, and keywords for overloads.

The functions spell their options out, with defaults and documentation. Their overloads on ``return_lse`` take the
keywords from here, because each would repeat them otherwise.
"""

from __future__ import annotations

from typing import Literal, TypedDict

import torch

Layout = Literal["bhsd", "bshd"]
RotationLayout = Literal["bhsd", "bshd", "sbhd", "thd"]
Backend = Literal["auto", "reference", "triton", "hopper"]
Strategy = Literal["auto", "inline", "prepass"]
CpMethod = Literal["auto", "all_gather", "all_to_all"]


class ScoreOptions(TypedDict, total=False):
    """Options of every function of attention."""

    softmax_scale: float | None
    rotary_dim: int | None
    interleaved: bool
    window: tuple[int, int] | None
    softcap: float
    sinks: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    norm_eps: float
    norm_offset: float


class PackedOptions(ScoreOptions, total=False):
    """Options of ``rope_attention_varlen``."""

    deterministic: bool
    backend: Backend
    strategy: Strategy


class AttentionOptions(PackedOptions, total=False):
    """Options of ``rope_attention``."""

    kv_starts: torch.Tensor | None
    kv_lens: torch.Tensor | None
    layout: Layout


class StepOptions(ScoreOptions, total=False):
    """Options of ``rope_attention_with_kvcache``."""

    cache_is_rotated: bool
    kv_starts: torch.Tensor | None
    block_table: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    layout: Layout
    causal: bool


class PackedCpOptions(ScoreOptions, total=False):
    """Options of ``rope_attention_varlen_cp``."""

    method: CpMethod
    deterministic: bool
    backend: Backend


class CpOptions(PackedCpOptions, total=False):
    """Options of ``rope_attention_cp``."""

    sharding: str
    total_len: int | None
    layout: Layout
