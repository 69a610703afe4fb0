"""Public function of the generation step: documentation, validation, plan, call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from fused_rope_attn.attention.planning import Plan
from fused_rope_attn.attention.problem import Options, Problem
from fused_rope_attn.generation import planning, problem as steps, reference
from fused_rope_attn.generation.problem import StepTensors, Written
from fused_rope_attn.runtime import checks, entry
from fused_rope_attn.runtime.device import has_triton
from fused_rope_attn.runtime.layouts import Layout, from_heads_first, heads_first
from fused_rope_attn.runtime.options import Backend, StepOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

if has_triton():  # elsewhere planning sends every call to the reference
    from fused_rope_attn.generation import launch


# fmt: off
@overload
def rope_attention_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None, *, cache_seqlens: torch.Tensor,
    return_lse: Literal[False] = False, **options: Unpack[StepOptions],
) -> torch.Tensor: ...


@overload
def rope_attention_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None, *, cache_seqlens: torch.Tensor,
    return_lse: Literal[True], **options: Unpack[StepOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def rope_attention_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None, *, cache_seqlens: torch.Tensor,
    return_lse: bool, **options: Unpack[StepOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
# fmt: on


@entry.explain_keywords
def rope_attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor,
    cache_is_rotated: bool = True,
    kv_starts: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    layout: Layout = "bhsd",
    causal: bool = True,
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
    return_lse: bool = False,
    backend: Backend = "auto",
    batch_invariant: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Generation step: append a few tokens to a cache of keys and values and attend to all of it, in one call.

    The result is that of ``rope_attention(q, k_cache, v_cache, cos, sin, causal, kv_lens=cache_seqlens + NQ)`` after
    the new tokens are written, with keys that may have been rotated when they were. The cache is read once for all
    query heads of a group and all new tokens, by length: the caches may be as large as they like. Lengths stay on the
    device, nothing synchronises, and the call can be captured in a CUDA graph and replayed while ``cache_seqlens``
    grows.

    New token ``i`` of sequence ``b`` has position ``cache_seqlens[b] + i``: its key and value go into that row of the
    caches, and its key and query are rotated by that row of the tables. ``cache_seqlens`` is not changed.

    - Without ``k`` and ``v`` the caches are only read and ``cache_seqlens`` counts what is there: the queries are
      aligned with the last keys, query ``i`` at position ``cache_seqlens[b] - NQ + i``. With tables one before position
      0 sees nothing. (flash-attn masks so too; it does not rotate in such calls.)
    - A token beyond the end of the cache, ``cache_seqlens[b] + i >= S_max``, is not written, no query sees it, and its
      row gives o = 0 and lse = -inf. Negative lengths count as 0.
    - ``cache_is_rotated=False``: the cache holds keys as they were given. They are rotated each time they are read, by
      their row: if rows are moved they are at other positions without further work (examples/context_shift.py). Costs
      the tables' traffic on top of the cache's.
    - With ``block_table`` the caches are pools of pages, and row ``j`` of sequence ``b`` is in page
      ``block_table[b, j // page_size]``. Two sequences may share pages that neither writes. Entries of pages in which
      no row is read or written are never read. A needed one that is outside the pool trips a device-side assertion
      (ValueError on a CPU); nothing outside the pool is read or written.
    - Caches in float8_e4m3fn hold numbers that are keys and values when they are multiplied by ``k_scale`` and
      ``v_scale``. New tokens are divided by the scale when they are written, and rounded once; what is too large
      becomes the largest number. Queries see them as they are written. Products are of float16 where q has two bytes.
    - With norms the queries and the new keys are normed: caches hold keys that are normed already, rotated or not.
    - A chunk of a prompt may run on a contiguous copy of the keys that it sees, which has the size of the caches'
      capacity and at most 1 GiB; ``plan_with_kvcache`` says where.
    - No gradient: with gradients enabled, tensors that require one are refused.

    Args:
        q: ``(B, HQ, NQ, D)``, float16, bfloat16 or float32, any strides; NQ from 1 to a few dozen, or the hundreds of a
            chunk of a prompt.
        k_cache, v_cache: ``(B, HKV, S_max, D)``, or with a block_table ``(num_pages, HKV, page_size, D)``, page_size
            from 16 on, where S_max is ``pages * page_size``. q's dtype, or both float8_e4m3fn; q's device, any strides:
            pass ``(B, S_max, HKV, D)`` caches as ``.transpose(1, 2)``. HQ must be a multiple of HKV. Written in place
            where k and v are given. They may be views of one allocation, for example ``pool[:, 0]`` and ``pool[:, 1]``,
            but must share no element.
        cos, sin: ``(S, R/2)``, ``(S, R)``, or either with a leading 1 or B; float32 (preferred) or q's dtype;
            ``S >= S_max``. With a rotated cache only the new tokens' rows are read. Both None: no rotation, and
            ``cache_is_rotated`` means nothing.
        k, v: ``(B, HKV, NQ, D)``, the new tokens', k not rotated; or both None.
        cache_seqlens: ``(B,)`` int32 on q's device: keys in the caches before this call.
        cache_is_rotated: whether the keys in the cache are, and hence whether k is rotated before it is written.
        kv_starts: ``(B,)`` int32: keys before it do not exist (left-padded prompts).
        block_table: ``(B, pages)`` int32: the pages of each sequence.
        k_scale, v_scale: float32, of one element or ``(HKV,)``, positive, for float8_e4m3fn caches. Default: 1.
        layout: ``"bhsd"``, or ``"bshd"``: q and o are ``(B, NQ, HQ, D)``, the caches ``(B, S_max, HKV, D)`` or
            ``(num_pages, page_size, HKV, D)``, the new k and v ``(B, NQ, HKV, D)``, as flash-attn has them. The tensors
            are viewed, not copied; lse keeps its shape.
        causal: new token ``i`` sees the keys up to its own position; False: all new tokens too.
        softmax_scale, rotary_dim, interleaved, window, softcap, sinks: as in ``rope_attention``.
        q_norm, k_norm, norm_eps, norm_offset, return_lse: as in ``rope_attention``.
        backend: ``"auto"``, ``"reference"`` (eager PyTorch) or ``"triton"``; with ``batch_invariant`` also
            ``"hopper"``.
        batch_invariant: the bits of ``rope_attention(..., batch_invariant=True)`` over the whole sequence, whatever the
            step, the pages and the batch are. The keys are copied to contiguous memory for that. Causal steps, and
            caches in q's dtype.

    Returns:
        o ``(B, HQ, NQ, D)`` in q's dtype, and with ``return_lse`` also lse ``(B, HQ, NQ)`` float32, natural log.

    Raises:
        TypeError: wrong type or dtype.
        ValueError: wrong shape, range, device or combination; a tensor that requires a gradient.
        NotImplementedError: a call that an explicit backend or ``batch_invariant`` does not serve.
        RuntimeError: an explicit backend that this machine cannot run.
    """
    scales, weights = (k_scale, v_scale), (q_norm, k_norm)
    tensors = StepTensors(
        q, k_cache, v_cache, cos, sin, k, v, cache_seqlens, kv_starts, sinks, block_table, *scales, *weights
    )
    common, scores = (softmax_scale, interleaved, window, backend), (rotary_dim, softcap, norm_eps, norm_offset)
    options = Options(*common, *scores, batch_invariant, causal=causal, return_lse=return_lse)
    problem, tensors = _describe(tensors, options, cache_is_rotated, layout)
    if entry.is_dry_run():
        raise entry.Planned(planning.plan_step(problem))
    is_eager = planning.choose_step_backend(problem)[0] == "reference"
    o, lse = (reference.attention_with_kvcache if is_eager else launch.launch_step)(problem, tensors)
    o = from_heads_first(o, layout, contiguous=is_eager)
    return (o, lse) if return_lse else o


def plan_with_kvcache(*arguments: Any, **options: Any) -> Plan:
    """Return ``plan(rope_attention_with_kvcache, ...)``."""
    return entry.plan_of_call(rope_attention_with_kvcache, *arguments, **options)


@entry.explain_keywords
def write_kvcache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    cache_seqlens: torch.Tensor | None = None,
    new_lens: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cache_is_rotated: bool = True,
    block_table: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    layout: Layout = "bhsd",
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> None:
    """Put a prompt, or a part of one, into a cache: rotate the keys, quantise, and scatter them, in one launch.

    Token ``i`` of sequence ``b`` goes to row ``cache_seqlens[b] + i`` of its sequence, and its key is rotated by that
    row of the tables. One beyond the end of the cache is not written, and neither is one that does not exist. Lengths
    and tables stay on the device, nothing synchronises, and the call can be captured in a CUDA graph. No gradient.

    ``rope_attention`` or ``rope_attention_varlen`` attend to a whole prompt; a chunk of one attends to the cache
    by ``rope_attention_with_kvcache``, which writes it too, or without k and v after this call.

    Args:
        k, v: ``(B, HKV, N, D)``, float16, bfloat16 or float32, any strides, k not rotated; or with ``cu_seqlens``
            packed sequences ``(T, HKV, D)``.
        k_cache, v_cache: ``(B, HKV, S_max, D)``, or pools of pages with a ``block_table``; k's dtype or float8_e4m3fn.
            They must share no element.
        cos, sin: as in ``rope_attention_with_kvcache``.
        cache_seqlens: ``(B,)`` int32: keys in the cache before this call. Default: none.
        new_lens: ``(B,)`` int32: tokens from this one on do not exist (right-padded prompts). Default: all N do.
        cu_seqlens: ``(B + 1,)`` int32: where packed sequences begin, and the last one ends. Tokens after it belong to
            none. They begin with 0, never fall, and end at or before T: on a CPU anything else is a ValueError, on a
            GPU nothing is written.
        cache_is_rotated: whether the cache holds rotated keys, or keys as they are given.
        block_table, k_scale, v_scale, rotary_dim, interleaved: as in ``rope_attention_with_kvcache``.
        layout: ``"bhsd"``, or ``"bshd"``: k and v are ``(B, N, HKV, D)``, unless they are packed, and the caches
            ``(B, S_max, HKV, D)`` or ``(num_pages, page_size, HKV, D)``.

    Raises:
        TypeError: wrong type or dtype.
        ValueError: wrong shape, range, device or combination; a tensor that requires a gradient.
    """
    rows, scales = (block_table, cache_seqlens, new_lens, cu_seqlens), (k_scale, v_scale)
    tensors = Written(k, v, k_cache, v_cache, cos, sin, *rows, *scales)
    run_write(tensors, layout, cache_is_rotated=cache_is_rotated, rotary_dim=rotary_dim, interleaved=interleaved)


def run_write(tensors: Written, layout: str, *, backend: str = "auto", **options: Any) -> None:
    """Run ``write_kvcache`` by a backend of choice, which is not public."""
    entry.refuse_context_parallel("write_kvcache")
    checks.check_layout(layout)
    options["rotary_dim"] = steps.check_write(tensors, layout=layout, **options)
    tensors = heads_first(tensors, layout, ("k_cache", "v_cache"))
    tensors = heads_first(tensors, layout if tensors.cu_seqlens is None else "thd", ("k", "v"))
    problem = steps.describe_write(tensors, **options, backend=backend)
    is_eager = planning.choose_step_backend(problem)[0] == "reference"
    (reference.write_kvcache if is_eager else launch.launch_write)(problem, tensors)


def _describe(tensors: StepTensors, options: Any, cache_is_rotated: bool, layout: str) -> tuple[Problem, StepTensors]:
    """Check the records of a step and return the ``Problem``, and the tensors as (B, H, N, D) whatever the layout."""
    entry.refuse_context_parallel("rope_attention_with_kvcache")
    checks.check_layout(layout)
    tensors = entry.autocast(tensors, ("q", "k", "v"))
    rotary_dim = steps.check_kvcache(tensors, options, cache_is_rotated, layout)
    tensors = heads_first(tensors, layout, ("q", "k_cache", "v_cache", "k", "v"))
    described = steps.describe_step(tensors, cache_is_rotated=cache_is_rotated, options=options, rotary_dim=rotary_dim)
    return described, tensors
