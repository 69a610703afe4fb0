"""The attentions of the rivals, without a rotation.

GQA never expands K or V here: every backend takes fewer heads by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from baselines.base import Attention, import_error, missing_package

# flash-attn and FlashAttention-3 and -4 take (B, N, H, D). The moves are views, about 3 µs of host time each.
_TO_BNHD = "b h n d -> b n h d"
_TO_BHND = "b n h d -> b h n d"


def _nothing_missing() -> None:
    return None


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _sdpa_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _sdpa(q, k, v, causal)


def _sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _sdpa(q, k, v, causal)


@functools.cache
def _flash_attn() -> Callable[..., Tensor] | None:
    """The package's function, or None. flash-attn-4 alone also creates a ``flash_attn``, without this function."""
    if import_error("flash_attn", "flash_attn_func"):
        return None
    from flash_attn import flash_attn_func

    return flash_attn_func


def _flash_attn_label() -> str:
    return "flash-attn" if _flash_attn() else "FA2 (PyTorch's build)"


def _flash_attn_or_sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    flash_attn_func = _flash_attn()
    if flash_attn_func is None:
        return _sdpa_flash(q, k, v, causal)
    o = flash_attn_func(*(rearrange(x, _TO_BNHD) for x in (q, k, v)), causal=causal)
    return rearrange(o, _TO_BHND)


_missing_fa4 = functools.partial(missing_package, "flash-attn-4", "flash_attn.cute", "flash_attn_func")


@functools.cache
def _flash_attn_cute() -> Callable[..., tuple[Tensor, Tensor]]:
    from flash_attn.cute import flash_attn_func

    return flash_attn_func


def _fa4(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    o = _flash_attn_cute()(*(rearrange(x, _TO_BNHD) for x in (q, k, v)), causal=causal)
    return rearrange(o[0] if isinstance(o, tuple) else o, _TO_BHND)


_missing_fa3 = functools.partial(missing_package, "fa3-fwd", "fa3_fwd_interface", "flash_attn_func")


@functools.cache
def _flash_attn_3() -> Callable[..., Tensor]:
    from fa3_fwd_interface import flash_attn_func

    return flash_attn_func


def _fa3(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    o = _flash_attn_3()(*(rearrange(x, _TO_BNHD) for x in (q, k, v)), causal=causal)
    return rearrange(o[0] if isinstance(o, tuple) else o, _TO_BHND)


_ANY_DTYPE = (torch.float16, torch.bfloat16, torch.float32)

# PyTorch chooses the backend, as in every Hugging Face model with attn_implementation="sdpa".
SDPA = Attention("SDPA", (), _nothing_missing, _sdpa, _ANY_DTYPE, max_head_dim=1024, head_dim_multiple=1)
SDPA_FLASH = Attention("SDPA flash", (), _nothing_missing, _sdpa_flash)
CUDNN = Attention("cuDNN", (), _nothing_missing, _sdpa_cudnn)
# The official package; where it is absent, the same kernels as PyTorch builds them, and the label says so.
FLASH_ATTN = Attention(_flash_attn_label, ("flash-attn",), _nothing_missing, _flash_attn_or_sdpa)
# The wheel has no backward kernels and none for float16.
FA3 = Attention("FA3", ("fa3-fwd",), _missing_fa3, _fa3, (torch.bfloat16,), backward=False)
FA4 = Attention("FA4", ("flash-attn-4",), _missing_fa4, _fa4)
