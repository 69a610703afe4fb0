"""Public functions: documentation, validation, plan, call.

Multi-head latent attention describes its call in the records of ``rope_attention``, and is then a call of attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from fused_rope_attn.attention import planning, reference
from fused_rope_attn.attention.problem import Options, Problem, Tensors, problem_of
from fused_rope_attn.attention.validation import check_attention, check_position_ids
from fused_rope_attn.runtime import checks, entry
from fused_rope_attn.runtime.device import has_triton
from fused_rope_attn.runtime.differentiation import differentiable
from fused_rope_attn.runtime.layouts import Layout, from_heads_first, heads_first
from fused_rope_attn.runtime.options import (
    AttentionOptions,
    Backend,
    LatentOptions,
    PackedLatentOptions,
    Strategy,
    VarlenOptions,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

if has_triton():
    from fused_rope_attn.attention import ops
else:  # planning sends every call to the reference
    ops = None  # type: ignore[assignment]

_ROWS = ("q", "k", "v", "q_nope", "k_nope")
_DIFFERENTIABLE = ("q", "k", "v", "sinks", "q_norm", "k_norm", "q_nope", "k_nope")


@overload
def rope_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    causal: bool = False, *, return_lse: Literal[False] = False, return_max_logit: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...  # fmt: skip
@overload
def rope_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    causal: bool = False, *, return_lse: Literal[True], return_max_logit: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def rope_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    causal: bool = False, *, return_lse: bool, return_max_logit: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def rope_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    causal: bool = False, *, return_max_logit: Literal[True], return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> tuple[torch.Tensor, ...]: ...  # fmt: skip
@overload
def rope_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    causal: bool = False, *, return_max_logit: bool, return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor | tuple[torch.Tensor, ...]: ...  # fmt: skip
@entry.explain_keywords
def rope_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kv_starts: torch.Tensor | None = None,
    kv_lens: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    query_starts: torch.Tensor | None = None,
    query_ends: torch.Tensor | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    deterministic: bool = False,
    backend: Backend = "auto",
    strategy: Strategy = "auto",
    batch_invariant: bool = False,
    return_max_logit: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attend with rotated queries over rotated keys, ``softmax(scale * rot(q) rot(k)^T) v``, differentiable.

    RoPE as in RoFormer (Su et al. 2021), attention as in FlashAttention-2 (Dao 2023). Key ``j`` is rotated by row ``j``
    of the tables, query ``i`` by row ``L - NQ + i``, where L is ``kv_lens[b]`` or NK.

    Args:
        q: ``(B, HQ, NQ, D)``, float16, bfloat16 or float32, any strides: the ``(B, N, H, D).transpose(1, 2)`` views
            that models produce run without a copy. A tensor is copied once before the launches if its rows do not begin
            at multiples of 16 bytes, or if its columns are not adjacent; k and v likewise.
        k: ``(B, HKV, NK, D)``, q's dtype and device; HQ must be a multiple of HKV (GQA, MQA).
        v: shape, dtype and device of k.
        cos: ``(S, R/2)``, ``(S, R)``, or either with a leading 1 or B; float32 (preferred) or q's dtype; ``S >= NK``. A
            full-width table carries each angle twice, as the layout does. Need not be unit-norm (YaRN); no gradient.
            None, with sin: nothing is rotated, as in cross-attention or layers without positions. Then NQ may exceed NK
            without a causal mask, and ``rotary_dim`` and ``interleaved`` must keep their defaults.
        sin: shape and dtype of cos.
        causal: bottom-right aligned: query ``i`` sees keys ``j <= L - NQ + i``.
        softmax_scale: default ``D ** -0.5``; any finite float.
        rotary_dim: R, even, at most D; columns R to D pass through. Default: a table of width W is full-width (R = W)
            when ``W > D/2``, else half-width (R = 2W). Needed for a full-width table with ``R <= D/2``.
        interleaved: False rotates pairs ``(x[i], x[i + R/2])`` (NeoX, Llama), True ``(x[2i], x[2i+1])`` (GPT-J).
        window: ``(left, right)`` keys around the diagonal, -1 for unbounded.
        softcap: 0.0 is off; otherwise scores become ``softcap * tanh(scores / softcap)``.
        sinks: ``(HQ,)`` extra logit per head in the softmax denominator; differentiable.
        kv_starts, kv_lens: ``(B,)`` int32: keys outside ``[start, len)`` do not exist. Clamped to 0 and NK: a negative
            length means no keys, one beyond NK all of them, a start at or after the length none.
        q_norm, k_norm: weights ``(D,)`` of a root-mean-square norm over the D columns of each head of q and k, before
            the rotation (Qwen 3, Gemma 3): ``x * rsqrt(mean(x**2) + norm_eps) * (norm_offset + weight)``, in float32;
            normed and rotated q and k are rounded once. Both or neither, float32 or q's dtype, differentiable. Forward
            then also saves q and k as they are before the norm.
        norm_eps: at least 0. A row of zeros stays zero, even with an eps of 0.
        norm_offset: 1 for weights that are stored as their distance from one (Gemma).
        query_starts, query_ends: ``(B, NK)`` or ``(1, NK)`` int32, either or both: key ``j`` is visible only to the
            rows ``query_starts[b, j] <= i < query_ends[b, j]`` of q, which count from 0, in addition to every other
            mask. An empty interval hides the key. ``fused_rope_attn.masks`` makes them for documents, shared prefixes
            and trees, prefix-LM, bidirectional blocks and chunks. Blocks of keys that no row of a tile sees are not
            read.
        layout: ``"bhsd"``, or ``"bshd"``: q is ``(B, NQ, HQ, D)``, k and v are ``(B, NK, HKV, D)`` and o is
            ``(B, NQ, HQ, D)``, as flash-attn has them; lse keeps its shape. The tensors are viewed, not copied, and o
            and the gradients are contiguous if the inputs are.
        return_lse: also return the log-sum-exp of every row, differentiable.
        deterministic: bitwise equal gradients from run to run; ``torch.use_deterministic_algorithms(True)`` asks for
            the same. The sm_90 backward adds dq in the order of the keys then, and otherwise in any order. Gradients of
            the portable kernels are always equal.
        backend: ``"auto"``, ``"reference"`` (eager PyTorch), ``"triton"`` (portable kernels) or ``"hopper"`` (sm_90
            kernels: float16 and bfloat16, K rotated once).
        strategy: ``"auto"``, ``"inline"`` (K rotated in the inner loop) or ``"prepass"`` (K rotated once).
        batch_invariant: the bits of a row of o and lse depend on nothing but its query, the keys and values that it
            sees, their rows of the tables and the options: not on the batch, the other queries, packing, padding, or a
            cache. Gradients are deterministic then, and those of a sequence do not depend on the others. Within one
            backend, on one card with one PyTorch and one Triton. The reference, which CPU tensors take, promises
            nothing. See docs/guides/same-bits.md.
        return_max_logit: also return the largest logit of each batch entry and head, for QK-clip: over all visible
            pairs, times the scale and after the softcap, without sinks. Not differentiable, and the same bits in every
            run; undefined if a visible logit is NaN.

    Returns:
        o ``(B, HQ, NQ, D)`` in q's dtype. With ``return_lse`` lse ``(B, HQ, NQ)`` float32, natural log, follows, and
        with ``return_max_logit`` max_logit ``(B, HQ)`` float32. A row with no visible key has o = 0, lse = -inf and
        gradients 0. max_logit is -inf if no row sees a key.

    Raises:
        TypeError: wrong type or dtype.
        ValueError: wrong shape, range, device or combination.
        NotImplementedError: a call that an explicit backend does not serve; double backward and forward-mode
            differentiation (``torch.func.jvp``, ``torch.autograd.forward_ad``), on every backend.
        RuntimeError: an explicit backend that this machine cannot run.
    """
    tensors = Tensors(
        q, k, v, cos, sin, sinks, kv_starts, kv_lens, None, None, q_norm, k_norm, query_starts, query_ends
    )
    # In the order of ``Options``, because a record would cost a known call 0.2 us.
    common, scores = (softmax_scale, interleaved, window, backend), (rotary_dim, softcap, norm_eps, norm_offset)
    kernels = (batch_invariant, deterministic, strategy)
    options = (*common, *scores, *kernels, causal, return_lse, return_max_logit)
    known = None if ops is None else ops.find(tensors, layout, options)
    if known is None or entry.is_dry_run():
        return run(tensors, Options(*options), layout, "rope_attention")
    if layout == "bshd":
        tensors = tensors._replace(q=q.transpose(1, 2), k=k.transpose(1, 2), v=v.transpose(1, 2))
    o, lse, max_logit = known(tensors)
    return _asked_for(from_heads_first(o, layout), lse, max_logit, return_lse, return_max_logit)


@overload
def rope_attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, causal: bool = False,
    *, return_lse: Literal[False] = False, return_max_logit: Literal[False] = False, **options: Unpack[VarlenOptions],
) -> torch.Tensor: ...  # fmt: skip
@overload
def rope_attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, causal: bool = False,
    *, return_lse: Literal[True], return_max_logit: Literal[False] = False, **options: Unpack[VarlenOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def rope_attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, causal: bool = False,
    *, return_lse: bool, return_max_logit: Literal[False] = False, **options: Unpack[VarlenOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def rope_attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, causal: bool = False,
    *, return_max_logit: Literal[True], return_lse: bool = False, **options: Unpack[VarlenOptions],
) -> tuple[torch.Tensor, ...]: ...  # fmt: skip
@overload
def rope_attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, causal: bool = False,
    *, return_max_logit: bool, return_lse: bool = False, **options: Unpack[VarlenOptions],
) -> torch.Tensor | tuple[torch.Tensor, ...]: ...  # fmt: skip
@entry.explain_keywords
def rope_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    token_tables: bool = False,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: Backend = "auto",
    strategy: Strategy = "auto",
    batch_invariant: bool = False,
    return_max_logit: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attend as ``rope_attention`` does, within packed sequences: no padding, positions restart in each, no host sync.

    Sequences may be empty, and there may be thousands of them. Within a sequence of LQ queries and LK keys everything
    is as in ``rope_attention``: query ``i`` has position ``LK - LQ + i``, and with tables one before position 0 sees
    nothing.

    Args:
        q: ``(T_q, HQ, D)``, the tokens of all sequences one after another; dtypes as in ``rope_attention``.
        k, v: ``(T_k, HKV, D)``.
        cos, sin: ``(S, R/2)``, ``(S, R)``, or either with a leading 1; ``S >= max_seqlen_k``. Both None: no rotation.
        cu_seqlens_q, cu_seqlens_k: ``(sequences + 1,)`` int32 on q's device, as in flash-attn: sequence ``s`` is rows
            ``[cu[s], cu[s + 1])``; ``cu_seqlens_from_position_ids`` makes them from position ids. Rows after the last
            sequence give 0, lse -inf and gradients 0. They begin with 0, never fall, and end at or before T. On a CPU
            anything else is a ValueError. On a GPU the host does not wait to read them: all rows give 0, lse -inf and
            gradients 0, and with ``TRITON_DEBUG=1`` in the environment a device-side assertion fails.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths of sequences. They choose a configuration, and the
            tables must have at least max_seqlen_k rows.
        token_tables: row ``t`` of the tables belongs to packed token ``t`` instead: for positions that do not count the
            tokens of a sequence (multimodal RoPE, documents that continue, trees). cos and sin have exactly T rows, and
            queries and keys are the same sequences: T_q is T_k, and cu_seqlens_q equals cu_seqlens_k.

    The other arguments, and the errors, are those of ``rope_attention``.

    Returns:
        o ``(T_q, HQ, D)`` in q's dtype. With ``return_lse`` lse ``(HQ, T_q)`` float32, natural log, follows, and with
        ``return_max_logit`` max_logit ``(sequences, HQ)`` float32.
    """
    tensors = Tensors(q, k, v, cos, sin, sinks, None, None, cu_seqlens_q, cu_seqlens_k, q_norm, k_norm)
    common, scores = (softmax_scale, interleaved, window, backend), (rotary_dim, softcap, norm_eps, norm_offset)
    kernels = (batch_invariant, deterministic, strategy)
    options = Options(*common, *scores, *kernels, causal, return_lse, return_max_logit)
    longest = (max_seqlen_q, max_seqlen_k)
    return run(tensors, options, "thd", "rope_attention_varlen", longest, token_tables=token_tables)


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


def cu_seqlens_from_position_ids(
    position_ids: torch.Tensor, max_sequences: int | None = None
) -> tuple[torch.Tensor, int]:
    """Return (cu_seqlens, max_seqlen) of sequences packed into rows, for ``rope_attention_varlen``.

    Call it once for a batch, not for each layer. A sequence begins with every row, and with every position that is not
    the one before it plus one, as in batches of Hugging Face's flattening and packing collators. Tokens are counted
    through all rows: ``flatten(0, 1)`` turns tensors ``(B, N, H, D)`` into ``(B * N, H, D)``. Attention restarts
    positions at 0 in every sequence, which is right because scores depend on differences of positions only.

    Args:
        position_ids: ``(N,)`` or ``(B, N)``, int32 or int64, any device.
        max_sequences: None reads the number of sequences and the length of the longest from the device, which
            synchronises once. A number is an upper bound of the sequences, and avoids the synchronisation: cu_seqlens
            then ends with empty sequences, and max_seqlen is N, which may choose tiles that are too large. Tokens of
            sequences past this number belong to none.

    Returns:
        cu_seqlens ``(sequences + 1,)`` or ``(max_sequences + 1,)`` int32 on the device of position_ids, and the length
        of the longest sequence (an upper bound with ``max_sequences``).

    Raises:
        TypeError, ValueError: wrong type, dtype, shape or range.
    """
    check_position_ids(position_ids, max_sequences)
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[..., 1:] = position_ids[..., 1:] != position_ids[..., :-1] + 1
    return bounds_of_sequences(begins, max_sequences)


def bounds_of_sequences(begins: torch.Tensor, max_sequences: int | None) -> tuple[torch.Tensor, int]:
    """Return ``cu_seqlens_from_position_ids`` of rows in which begins, (N,) or (B, N) bool, marks first tokens."""
    longest, begins = begins.shape[-1], begins.flatten()
    total = begins.shape[0]
    index = torch.arange(total, dtype=torch.int32, device=begins.device)
    if max_sequences is None:
        ages = index - torch.where(begins, index, 0).cummax(0).values if total else index.new_full((1,), -1)
        max_sequences, longest = torch.stack((begins.sum(), ages.max() + 1)).tolist()
    # Every first token writes its index into its sequence's slot. All other tokens, and sequences past max_sequences,
    # write to one extra slot.
    slot = torch.where(begins, begins.cumsum(0) - 1, max_sequences + 1).clamp(max=max_sequences + 1)
    cu_seqlens = torch.full((max_sequences + 2,), total, dtype=torch.int32, device=begins.device)
    return cu_seqlens.scatter_(0, slot, index)[:-1], longest


def plan(*arguments: Any, **options: Any) -> planning.Plan:
    """Return the plan of a call of attention: backend, strategy, configurations and the reason.

    ``plan(q, k, v, cos, sin, ...)`` is for ``rope_attention``. Any other function of attention is the first argument,
    and its own arguments follow, as in ``plan(rope_attention_varlen, q, k, v, ...)``.

    Launch and write nothing. Raise the errors that the function would raise.
    """
    if arguments and callable(arguments[0]):
        return entry.plan_of_call(*arguments, **options)
    return entry.plan_of_call(rope_attention, *arguments, **options)


def plan_varlen(*arguments: Any, **options: Any) -> planning.Plan:
    """Return ``plan(rope_attention_varlen, ...)``."""
    return entry.plan_of_call(rope_attention_varlen, *arguments, **options)


def plan_mla(*arguments: Any, **options: Any) -> planning.Plan:
    """Return ``plan(rope_attention_mla, ...)``."""
    return entry.plan_of_call(rope_attention_mla, *arguments, **options)


def plan_mla_varlen(*arguments: Any, **options: Any) -> planning.Plan:
    """Return ``plan(rope_attention_mla_varlen, ...)``."""
    return entry.plan_of_call(rope_attention_mla_varlen, *arguments, **options)


def describe_call(
    tensors: Tensors, options: Any, layout: str, function: str, longest: tuple[int, int] | None = None, **kind: bool
) -> tuple[Problem, Tensors]:
    """Check the records of a call and return the ``Problem``, and the tensors as (B, H, N, D) whatever the layout.

    function: the public function that messages name. longest: max_seqlen_q and max_seqlen_k of packed sequences. kind:
    latent or token_tables, as ``check_attention`` takes them.
    """
    entry.refuse_context_parallel(function)
    if longest is None:
        checks.check_layout(layout)
    tensors = entry.autocast(tensors, _ROWS)
    rotary_dim = check_attention(tensors, options, layout, longest, **kind)
    tensors = heads_first(tensors, layout, _ROWS)
    max_seqlen, token_tables = 0 if longest is None else max(longest), kind.get("token_tables", False)
    return problem_of(tensors, options, rotary_dim, max_seqlen, token_tables=token_tables), tensors


def run(
    tensors: Tensors, options: Any, layout: str, function: str, longest: tuple[int, int] | None = None, **kind: bool
) -> Any:
    """Describe a call as ``describe_call`` does, attend by the backend that planning chooses, and return the results.

    Remember calls of ``rope_attention``. function: the public function that messages name.
    """
    problem, described = describe_call(tensors, options, layout, function, longest, **kind)
    if entry.is_dry_run():
        raise entry.Planned(planning.plan_call(problem))
    chosen, _ = planning.choose_backend(problem)
    if chosen != "reference":
        problem = problem if chosen == problem.backend else problem._replace(backend=chosen)
        o, lse, max_logit = ops.attention(problem, described, options.return_lse)
        if function == "rope_attention" and not torch.compiler.is_compiling():
            ops.remember(tensors, layout, options, problem, described)
    else:
        views = differentiable(function, [getattr(described, name) for name in _DIFFERENTIABLE])
        described = described._replace(**dict(zip(_DIFFERENTIABLE, views)))
        o, lse, *more = reference.attention(problem, described)
        max_logit = more[0] if more else None
    o = from_heads_first(o, layout, contiguous=chosen == "reference")
    lse = lse.squeeze(0) if layout == "thd" else lse
    return _asked_for(o, lse, max_logit, options.return_lse, options.return_max_logit)


def _asked_for(o: Any, lse: Any, max_logit: Any, return_lse: bool, return_max_logit: bool) -> Any:
    """Return o, or a tuple of o and the other results that the caller asked for."""
    if return_max_logit:
        return (o, lse, max_logit) if return_lse else (o, max_logit)
    return (o, lse) if return_lse else o
