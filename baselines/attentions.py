"""The attentions of the rivals, without a rotation.

GQA never expands K or V here: every backend takes fewer heads by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from baselines.base import Attention, Package
from baselines.rotations import specialised

# flash-attn and FlashAttention-3 and -4 take (B, N, H, D). The moves are views, about 3 µs of host time each.
_TO_BNHD = "b h n d -> b n h d"
_TO_BHND = "b n h d -> b h n d"


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _sdpa_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _sdpa(q, k, v, causal)


def _sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _sdpa(q, k, v, causal)


def first(o: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return o of a function that may return (o, lse)."""
    return o[0] if isinstance(o, tuple) else o


def flash(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, causal: bool, **options: Any) -> Tensor:
    """Call a function of (B, N, H, D), which gets ``options`` too."""
    o = function(*(rearrange(x, _TO_BNHD) for x in (q, k, v)), causal=causal, **options)
    return rearrange(first(o), _TO_BHND)


FLASH_2 = Package("flash-attn", "flash_attn", "flash_attn_func")
FLASH_3 = Package("fa3-fwd", "fa3_fwd_interface", "flash_attn_func")
FLASH_4 = Package("flash-attn-4", "flash_attn.cute", "flash_attn_func")


def _flash_attn_label() -> str:
    # flash-attn-4 alone also creates a package ``flash_attn``, without this function.
    return "FA2 (PyTorch's build)" if FLASH_2.missing() else "flash-attn"


def _flash_attn_or_sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return _sdpa_flash(q, k, v, causal) if FLASH_2.missing() else flash(FLASH_2.load(), q, k, v, causal)


def _fa3(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flash(FLASH_3.load(), q, k, v, causal)


def _fa4(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flash(FLASH_4.load(), q, k, v, causal)


def _fa3_unsplit(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flash(FLASH_3.load(), q, k, v, causal, num_splits=1)


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    """Return FlexAttention, compiled for each shape."""
    from torch.nn.attention.flex_attention import flex_attention

    return specialised(flex_attention)


@functools.cache
def _causal_blocks(length: int, device: str) -> Any:
    """Return the causal block mask without a mask of all pairs: row i has i full blocks, and one with the diagonal."""
    from torch.nn.attention.flex_attention import BlockMask

    every = torch.arange(-(-length // 128), dtype=torch.int32, device=device)
    full = every.expand(1, 1, len(every), -1).contiguous()
    counts = torch.ones_like(every)[None, None], every[None, None]
    return BlockMask.from_kv_blocks(
        counts[0],
        full.mT.contiguous(),
        counts[1],
        full,
        mask_mod=lambda b, h, i, j: j <= i,
        seq_lengths=(length, length),
    )


def _flex(block: int, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    mask = _causal_blocks(q.shape[2], str(q.device)) if causal else None
    options = {"BLOCK_M": block, "BLOCK_N": block, "FORCE_USE_FLEX_ATTENTION": True}
    return compiled_flex()(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1], kernel_options=options)


_ANY_DTYPE = (torch.float16, torch.bfloat16, torch.float32)

# PyTorch chooses the backend, as in every Hugging Face model with attn_implementation="sdpa".
SDPA = Attention("SDPA", _sdpa, _ANY_DTYPE, max_head_dim=1024, head_dim_multiple=1)
SDPA_FLASH = Attention("SDPA flash", _sdpa_flash)
CUDNN = Attention("cuDNN", _sdpa_cudnn)
# The official package; where it is absent, the same kernels as PyTorch builds them, and the label says so.
FLASH_ATTN = Attention(_flash_attn_label, _flash_attn_or_sdpa)
# The wheel has no backward kernels and none for float16.
FA3 = Attention("FA3", _fa3, (torch.bfloat16,), backward=False, missing=FLASH_3.missing)
FA4 = Attention("FA4", _fa4, missing=FLASH_4.missing)

# The order of their sums is the same for any batch. vLLM's batch-invariant mode has blocks of 16.
UNSPLIT: dict[str, Attention] = {
    "flex16": Attention("FlexAttention, blocks of 16", functools.partial(_flex, 16), backward=False),
    "flex64": Attention("FlexAttention, blocks of 64", functools.partial(_flex, 64), backward=False),
    "fa3_unsplit": Attention("FA3, one split", _fa3_unsplit, FA3.dtypes, backward=False, missing=FLASH_3.missing),
}
