"""Rivals for windows, packed sequences and intervals: attentions that serve them, with three signatures, no rotation.

``window(q, k, v, left) -> o``: causal, each query sees ``left`` keys before its own; q ``(B, HQ, N, D)``, k and v ``(B,
HKV, N, D)``. ``packed(q, k, v, ends, longest) -> o``: causal within each sequence; q ``(T, HQ, D)``, k and v ``(T, HKV,
D)``, ``ends`` (sequences + 1,) int32 on the device, ``longest`` an int. ``intervals(q, k, v, starts, ends) -> o``: key
j is visible to the rows ``starts[0, j] <= i < ends[0, j]``, (1, N) int32. A rival that lacks one has None.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from baselines.attentions import compiled_flex, first, flash
from baselines.base import Package, load


@dataclass(frozen=True)
class MaskedAttention:
    """One rival; ``missing`` as in ``base.Attention``."""

    name: str
    label: str
    missing: Callable[[], str | None]
    window: Callable[[Tensor, Tensor, Tensor, int], Tensor] | None = None
    packed: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor] | None = None
    intervals: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None


VARLEN = Package("torch>=2.10", "torch.nn.attention.varlen", "varlen_attn")


@functools.cache
def _varlen_attn() -> tuple[Callable[..., Tensor], frozenset[str]]:
    """Return PyTorch's function and its keywords, which changed from 2.10 on: ``is_causal`` became ``window_size``."""
    return VARLEN.load(), frozenset(inspect.signature(VARLEN.load()).parameters)


def _torch_packed(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, left: int = -1) -> Tensor:
    function, keywords = _varlen_attn()
    options = {"enable_gqa": True} if "enable_gqa" in keywords and q.shape[1] != k.shape[1] else {}
    if "window_size" in keywords:
        options["window_size"] = (left, 0)
    elif left < 0:
        options["is_causal"] = True
    else:
        raise NotImplementedError(f"varlen_attn of torch {torch.__version__} takes no window_size")
    return function(q, k, v, ends, ends, longest, longest, **options)


def _torch_window(q: Tensor, k: Tensor, v: Tensor, left: int) -> Tensor:
    batch, _, length, _ = q.shape
    ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    o = _torch_packed(*(rearrange(x, "b h n d -> (b n) h d") for x in (q, k, v)), ends, length, left)
    return rearrange(o, "(b n) h d -> b h n d", b=batch)


def _flash_functions(module: str) -> tuple[Callable, Callable]:
    """Return (window, packed) of flash-attn or FlashAttention-4: their functions have the same names and keywords."""

    def window(q: Tensor, k: Tensor, v: Tensor, left: int) -> Tensor:
        return flash(load(module, "flash_attn_func"), q, k, v, True, window_size=(left, 0))

    def packed(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
        return first(
            load(module, "flash_attn_varlen_func")(
                q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
            )
        )

    return window, packed


@functools.cache
def _band(length: int, left: int, device: str) -> Any:
    return create_block_mask(lambda b, h, i, j: (j <= i) & (i - j <= left), None, None, length, length, device=device)


def _flex_window(q: Tensor, k: Tensor, v: Tensor, left: int) -> Tensor:
    mask = _band(q.shape[2], left, str(q.device))
    return compiled_flex()(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@functools.cache
def _block_mask(starts: Tensor, ends: Tensor) -> Any:
    """Return the BlockMask of intervals, made once for a case: it is not timed."""
    (first, last), length = (starts[0], ends[0]), starts.shape[1]
    return create_block_mask(
        lambda b, h, i, j: (first[j] <= i) & (i < last[j]), None, None, length, length, device=str(starts.device)
    )


def _flex_intervals(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    return compiled_flex()(q, k, v, block_mask=_block_mask(starts, ends), enable_gqa=q.shape[1] != k.shape[1])


@functools.cache
def _fa4_mask_mod() -> Callable:
    """Return the mask of intervals in the language of FlashAttention-4's kernels."""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute import utils

    @cute.jit
    def sees(batch, head, row, key, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        starts = utils.scalar_to_ssa(aux_tensors[0][key[0]], cutlass.Int32)
        ends = utils.scalar_to_ssa(aux_tensors[1][key[0]], cutlass.Int32)
        return (starts <= row) & (row < ends)

    return sees


def _fa4_intervals(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    blocks, tensors = _block_mask(starts, ends), load("flash_attn.cute.block_sparsity", "BlockSparseTensorsTorch")
    keys = blocks.kv_num_blocks, blocks.kv_indices, blocks.full_kv_num_blocks, blocks.full_kv_indices
    rows = blocks.q_num_blocks, blocks.q_indices, blocks.full_q_num_blocks, blocks.full_q_indices
    sparse = [tensors(*each, block_size=blocks.BLOCK_SIZE) for each in (keys, rows)]
    options = dict(zip(("block_sparse_tensors", "block_sparse_tensors_bwd"), sparse))
    options |= {"mask_mod": _fa4_mask_mod(), "aux_tensors": [starts[0], ends[0]]}
    return flash(load("flash_attn.cute", "flash_attn_func"), q, k, v, False, **options)


TORCH = MaskedAttention("torch_varlen", "PyTorch varlen_attn", VARLEN.missing, _torch_window, _torch_packed)
FLASH = MaskedAttention(
    "flash_attn",
    "flash-attn",
    Package("flash-attn", "flash_attn", "flash_attn_varlen_func").missing,
    *_flash_functions("flash_attn"),
)
FA4 = MaskedAttention(
    "fa4",
    "FA4",
    Package("flash-attn-4", "flash_attn.cute", "flash_attn_varlen_func").missing,
    *_flash_functions("flash_attn.cute"),
    _fa4_intervals,
)
FLEX = MaskedAttention("flex", "FlexAttention, compiled", lambda: None, _flex_window, intervals=_flex_intervals)

MASKED = (TORCH, FLASH, FA4, FLEX)
