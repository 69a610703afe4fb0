"""Public functions of multi-head latent attention: documentation, validation, plan, call.

They describe their call in the records of ``rope_attention``, and from there on it is a call of attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from fused_rope_attn.attention.api import run
from fused_rope_attn.attention.planning import Plan
from fused_rope_attn.attention.problem import Options, Tensors
from fused_rope_attn.runtime import entry
from fused_rope_attn.runtime.layouts import Layout
from fused_rope_attn.runtime.options import Backend, LatentOptions, PackedLatentOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def rope_attention_mla(
    q_nope: torch.Tensor, q_rope: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, v: torch.Tensor,
    cos: torch.Tensor, sin: torch.Tensor, causal: bool = False, *,
    return_lse: Literal[False] = False, **options: Unpack[LatentOptions],
) -> torch.Tensor: ...  # fmt: skip


@overload
def rope_attention_mla(
    q_nope: torch.Tensor, q_rope: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, v: torch.Tensor,
    cos: torch.Tensor, sin: torch.Tensor, causal: bool = False, *,
    return_lse: Literal[True], **options: Unpack[LatentOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@overload
def rope_attention_mla(
    q_nope: torch.Tensor, q_rope: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, v: torch.Tensor,
    cos: torch.Tensor, sin: torch.Tensor, causal: bool = False, *,
    return_lse: bool, **options: Unpack[LatentOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@entry.explain_keywords
def rope_attention_mla(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    interleaved: bool = False,
    window: tuple[int, int] | None = None,
    kv_starts: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    deterministic: bool = False,
    backend: Backend = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend as multi-head latent attention does (DeepSeek-V2, 2024), with the rotation inside; differentiable.

    Scores are ``scale * (q_nope k_nope^T + rot(q_rope) rot(k_rope)^T)``. All heads share the rotated key head
    ``k_rope``, which is rotated once and never expanded; no tensor is concatenated. The GPU kernels take DN and DV that
    are multiples of 16 up to 128, and R that is a multiple of 16 up to 64; ``"auto"`` takes the reference for others.

    Args:
        q_nope: ``(B, H, NQ, DN)``, the columns of queries that are not rotated; float16, bfloat16 or float32, any
            strides: the views that ``q.split`` gives run without a copy. The other tensors likewise, in the same dtype.
        q_rope: ``(B, H, NQ, R)``, the columns that are rotated.
        k_nope: ``(B, H, NK, DN)``, for example a view of ``kv_b_proj(...).split``, and so is v.
        k_rope: ``(B, 1, NK, R)``.
        v: ``(B, H, NK, DV)``.
        cos, sin: as in ``rope_attention``; a table is full-width if it has R columns, else it has R/2.
        causal: bottom-right aligned, as in ``rope_attention``.
        softmax_scale: default ``(DN + R) ** -0.5``; any finite float. YaRN multiplies it by the square of its mscale.
        interleaved: True rotates pairs ``(x[2i], x[2i+1])``, as DeepSeek's weights have them.
        window, kv_starts, kv_lens, return_lse, deterministic: as in ``rope_attention``.
        layout: ``"bhsd"``, or ``"bshd"``: all five tensors and o are ``(B, N, H, columns)``.
        backend: as in ``rope_attention``; the sm_90 kernels, ``"hopper"``, serve DN = DV = 128, R = 64 and a positive
            scale.

    Returns:
        o ``(B, H, NQ, DV)`` in the inputs' dtype, and with ``return_lse`` also lse ``(B, H, NQ)`` float32. The gradient
        of k_rope is summed over heads in float32 and rounded once.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as ``rope_attention`` raises them.
    """
    nope = {"q_nope": q_nope, "k_nope": k_nope}
    tensors = Tensors(q_rope, k_rope, v, cos, sin, kv_starts=kv_starts, kv_lens=kv_lens, **nope)
    options = Options(
        softmax_scale, interleaved, window, backend, deterministic=deterministic, causal=causal, return_lse=return_lse
    )
    return run(tensors, options, layout, "rope_attention_mla", latent=True)


@overload
def rope_attention_mla_varlen(
    q_nope: torch.Tensor, q_rope: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, v: torch.Tensor,
    cos: torch.Tensor, sin: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, causal: bool = False, *,
    return_lse: Literal[False] = False, **options: Unpack[PackedLatentOptions],
) -> torch.Tensor: ...  # fmt: skip


@overload
def rope_attention_mla_varlen(
    q_nope: torch.Tensor, q_rope: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, v: torch.Tensor,
    cos: torch.Tensor, sin: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, causal: bool = False, *,
    return_lse: Literal[True], **options: Unpack[PackedLatentOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@overload
def rope_attention_mla_varlen(
    q_nope: torch.Tensor, q_rope: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, v: torch.Tensor,
    cos: torch.Tensor, sin: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, causal: bool = False, *,
    return_lse: bool, **options: Unpack[PackedLatentOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@entry.explain_keywords
def rope_attention_mla_varlen(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    interleaved: bool = False,
    window: tuple[int, int] | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: Backend = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend as ``rope_attention_mla`` does, within packed sequences, as ``rope_attention_varlen`` packs them.

    Args:
        q_nope, q_rope: ``(T_q, H, DN)`` and ``(T_q, H, R)``, the tokens of all sequences one after another.
        k_nope, k_rope, v: ``(T_k, H, DN)``, ``(T_k, 1, R)`` and ``(T_k, H, DV)``.
        cos, sin: ``(S, R/2)``, ``(S, R)``, or either with a leading 1; ``S >= max_seqlen_k``.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in ``rope_attention_varlen``.

    The other arguments, and the errors, are those of ``rope_attention_mla``.

    Returns:
        o ``(T_q, H, DV)`` in the inputs' dtype, and with ``return_lse`` also lse ``(H, T_q)`` float32, natural log.
    """
    nope = {"q_nope": q_nope, "k_nope": k_nope}
    tensors = Tensors(q_rope, k_rope, v, cos, sin, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **nope)
    options = Options(
        softmax_scale, interleaved, window, backend, deterministic=deterministic, causal=causal, return_lse=return_lse
    )
    return run(tensors, options, "thd", "rope_attention_mla_varlen", (max_seqlen_q, max_seqlen_k), latent=True)


def plan_mla(*arguments: Any, **options: Any) -> Plan:
    """Return ``plan(rope_attention_mla, ...)``."""
    return entry.plan_of_call(rope_attention_mla, *arguments, **options)


def plan_mla_varlen(*arguments: Any, **options: Any) -> Plan:
    """Return ``plan(rope_attention_mla_varlen, ...)``."""
    return entry.plan_of_call(rope_attention_mla_varlen, *arguments, **options)
