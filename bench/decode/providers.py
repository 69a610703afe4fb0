"""Providers of a step of generation: ours, packages that a user can install, and a copy as the ceiling.

A step appends one token to every sequence and attends to the whole cache. Caches are ``(B, HKV, S, D)``, contiguous, as
Hugging Face's static cache has them. Every sequence holds S - 1 tokens, so that a step can be repeated. Tables are
``(S, D/2)`` float32. Pages are prepared before any clock runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baselines.attentions import CUDNN, FA4, FLASH_4, SDPA_FLASH, UNSPLIT
from baselines.base import Attention, Package
from bench.decode.pages import Run, Step, by_flash_attention_4, by_flashinfer, gathered, in_parts, ours
from bench.suite import Provider, by_name


@dataclass(frozen=True, kw_only=True)
class DecodeProvider(Provider):
    """``make(step)`` prepares and returns a function that runs one step and returns o (B, HQ, 1, D).

    raw: the cache holds keys that are not rotated. page_size, float8: of its cache. even: it serves sequences of one
    length only.
    """

    make: Callable[[Step], Run]
    raw: bool = False
    page_size: int | None = None
    float8: bool = False
    even: bool = False

    @property
    def stored(self) -> bool:
        """Return whether its cache is in pages or in float8."""
        return self.page_size is not None or self.float8


def appending(step: Step, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Run:
    """Rotate in one launch, write in two, then call ``attend(q, k_cache, v_cache)``: the best of separate parts."""
    from fused_rope_attn import apply_rope_qk

    q, k, v, k_cache, v_cache, lengths, cos, sin = step
    row = lengths[:1].long()  # all sequences have the same length

    def run() -> Tensor:
        q_rot, k_rot = apply_rope_qk(q, k, cos, sin, position_ids=row)
        k_cache.index_copy_(2, row, k_rot)
        v_cache.index_copy_(2, row, v)
        return attend(q_rot, k_cache, v_cache)

    return run


def _contiguous(attention: Attention, causal: bool) -> Callable[[Step], Run]:
    """Return what makes a step of separate parts. causal: aligned to the last key, as FlashAttention has it."""
    return lambda step: appending(step, lambda q, k, v: attention.attend(q, k, v, causal))


def _copy(step: Step) -> Run:
    """Read and write together as many bytes as the step reads."""
    flat = step.k_cache.view(torch.uint8).flatten()
    source = flat[: step.bytes // 2]
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _read(step: Step) -> Run:
    """Read as many bytes as the step reads, by one of PyTorch's reductions.

    A copy leaves what it writes in the L2; this shows what a kernel that only reads reaches at the same size.
    """
    source = torch.zeros(step.bytes // 4, dtype=torch.int32, device=step.q.device)
    return lambda: source.amax()


OURS, RAW, SAME_BITS, COPY, READ = "fused", "fused_raw", "same_bits", "copy", "read"
_FA4_PAGES = Package("flash-attn-4", "flash_attn.cute", "flash_attn_varlen_func")
_FLASHINFER = Package("flashinfer-python", "flashinfer", "BatchDecodeWithPagedKVCacheWrapper")


def _ours(page_size: int | None, float8: bool) -> DecodeProvider:
    """Return our step on caches in pages, in float8, or both."""
    words = [f"pages of {page_size}"] * (page_size is not None) + ["float8"] * float8
    name, label = "_".join([OURS, *words]).replace("pages of ", "page"), f"the same, {', '.join(words)}"
    return DecodeProvider(name, label, "ours", make=ours(page_size, float8), page_size=page_size, float8=float8)


def _rival(name: str, label: str, page_size: int, attend: Any, **fields: Any) -> DecodeProvider:
    """Return a rival that attends to pages."""
    make = in_parts(page_size, attend)
    return DecodeProvider(name, f"rotate + write + {label}", make=make, page_size=page_size, **fields)


def _providers() -> Iterator[DecodeProvider]:
    yield DecodeProvider(OURS, "rope_attention_with_kvcache", "ours", make=ours())
    yield DecodeProvider(RAW, "the same, raw keys", "ours", make=ours(cache_is_rotated=False), raw=True)
    for page_size, float8 in ((16, False), (64, False), (256, False), (None, True), (16, True), (64, True)):
        yield _ours(page_size, float8)
    for name, page_size in ((OURS, None), (f"{OURS}_page16", 16)):
        make = ours(page_size, batch_invariant=True)
        label = "the same, batch_invariant" + ", pages of 16" * (page_size is not None)
        yield DecodeProvider(f"{name}_{SAME_BITS}", label, "ours", make=make, page_size=page_size)
    yield _rival("gather_sdpa", "gather pages of 16 + SDPA flash", 16, gathered, even=True)
    for size in (16, 128):
        about = f"fa4_page{size}", f"FlashAttention-4, pages of {size}"
        yield _rival(*about, size, by_flash_attention_4, **_FA4_PAGES.fields())
    for size in (16, 64):
        about = f"flashinfer_page{size}", f"FlashInfer, pages of {size}"
        yield _rival(*about, size, by_flashinfer, **_FLASHINFER.fields())
    for name, attention in (("flash", SDPA_FLASH), ("cuDNN", CUDNN)):
        make = _contiguous(attention, causal=False)
        yield DecodeProvider(f"sdpa_{name.lower()}", f"rotate + write + SDPA {name}", make=make, even=True)
    make = _contiguous(FA4, causal=True)
    yield DecodeProvider("fa4", "rotate + write + FlashAttention-4", make=make, even=True, **FLASH_4.fields())
    for name, attention in UNSPLIT.items():
        make = _contiguous(attention, causal=False)
        label = f"rotate + write + {attention.label}"
        yield DecodeProvider(name, label, missing=attention.missing, pip=attention.pip, make=make, even=True)
    yield DecodeProvider(COPY, "copy (ceiling)", "ceiling", make=_copy)
    yield DecodeProvider(READ, "plain read (amax)", "ceiling", make=_read)


PROVIDERS: dict[str, DecodeProvider] = by_name(_providers())
