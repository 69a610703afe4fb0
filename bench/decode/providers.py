"""Providers of a step of generation: ours, packages that a user can install, and a copy as the ceiling.

A step appends one token to every sequence and attends to the whole cache. Caches are ``(B, HKV, S, D)``, contiguous, as
Hugging Face's static cache has them. Every sequence holds S - 1 tokens, so that a step can be repeated. Tables are
``(S, D/2)`` float32. Other forms (tables in their dtype, pages) are prepared before any clock runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from baselines.attentions import FA4
from baselines.base import missing_package
from bench.decode.pages import Run, Step, by_flash_attention_4, by_flashinfer, gathered, in_parts, stored_step
from bench.suite import Provider

# The most bytes that the copy moves; its time is scaled to a larger cache.
COPY_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class DecodeProvider(Provider):
    """``make(step)`` prepares and returns a function that runs one step and returns o (B, HQ, 1, D).

    raw: the cache holds keys that are not rotated. rounded_tables: it rotates by tables in q's dtype. page_size,
    float8: of its cache. even: it serves sequences of one length only. A "bare" one attends only.
    """

    make: Callable[[Step], Run]
    raw: bool = False
    rounded_tables: bool = False
    page_size: int | None = None
    float8: bool = False
    even: bool = False

    @property
    def stored(self) -> bool:
        """Return whether its cache is in pages or in float8."""
        return self.page_size is not None or self.float8


def _ours(rotated: bool) -> Callable[[Step], Run]:
    def make(step: Step) -> Run:
        from fused_rope_attn import rope_attention_with_kvcache

        q, k, v, k_cache, v_cache, lengths, cos, sin = step
        return lambda: rope_attention_with_kvcache(
            q, k_cache, v_cache, cos, sin, k, v, cache_seqlens=lengths, cache_is_rotated=rotated
        )

    return make


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


def _sdpa(backend: SDPBackend) -> Callable[[Step], Run]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return lambda step: appending(step, attend)


def _flash(step: Step) -> Run:
    from flash_attn import flash_attn_with_kvcache

    q, k, v, k_cache, v_cache = (x.transpose(1, 2) for x in step[:5])
    cos, sin = (table.to(step.q.dtype) for table in step[6:])

    def run() -> Tensor:
        tables = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
        o = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=step.lengths, causal=True, **tables)
        return o.transpose(1, 2)

    return run


def _fa4(step: Step) -> Run:
    return appending(step, lambda q, k, v: FA4.attend(q, k, v, True))


def _copy(step: Step) -> Run:
    """Read and write together as many bytes as the step reads, or COPY_BYTES."""
    flat = step.k_cache.view(torch.uint8).flatten()
    source = flat[: min(step.bytes, COPY_BYTES) // 2]
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _read(step: Step) -> Run:
    """Read as many bytes as the step reads, or COPY_BYTES, by one of PyTorch's reductions.

    A copy leaves what it writes in the L2; this shows what a kernel that only reads reaches at the same size.
    """
    source = torch.zeros(min(step.bytes, COPY_BYTES) // 4, dtype=torch.int32, device=step.q.device)
    return lambda: source.amax()


def _stored(page_size: int | None, float8: bool = False) -> DecodeProvider:
    """Return our step on caches in pages, in float8, or both."""
    words = [] if page_size is None else [f"pages of {page_size}"]
    words += ["float8"] if float8 else []
    name = "_".join([OURS, *words]).replace("pages of ", "page")
    label = f"the same, {', '.join(words)}"
    return DecodeProvider(name, label, "ours", make=stored_step(page_size, float8), page_size=page_size, float8=float8)


def _no_fa4_pages() -> str | None:
    return missing_package("flash-attn-4", "flash_attn.cute", "flash_attn_varlen_func")


def _no_flashinfer() -> str | None:
    return missing_package("flashinfer-python", "flashinfer", "BatchDecodeWithPagedKVCacheWrapper")


def _no_flash() -> str | None:
    return missing_package("flash-attn", "flash_attn", "flash_attn_with_kvcache")


OURS, RAW, COPY, READ = "fused", "fused_raw", "copy", "read"
_SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _providers() -> Iterator[DecodeProvider]:
    parts = "rotate + write + "
    yield DecodeProvider(OURS, "rope_attention_with_kvcache", "ours", make=_ours(True))
    yield DecodeProvider(RAW, "the same, raw keys", "ours", make=_ours(False), raw=True)
    for page_size, float8 in ((16, False), (64, False), (256, False), (None, True), (16, True), (64, True)):
        yield _stored(page_size, float8)
    gather = f"{parts}gather pages of 16 + SDPA flash"
    yield DecodeProvider("gather_sdpa", gather, make=in_parts(16, gathered), page_size=16, even=True)
    for size in (16, 128):
        made = in_parts(size, by_flash_attention_4)
        label = f"{parts}FlashAttention-4, pages of {size}"
        yield DecodeProvider(f"fa4_page{size}", label, missing=_no_fa4_pages, pip=FA4.pip, make=made, page_size=size)
    for size in (16, 64):
        made = in_parts(size, by_flashinfer)
        label, pip = f"{parts}FlashInfer, pages of {size}", ("flashinfer-python",)
        yield DecodeProvider(
            f"flashinfer_page{size}", label, missing=_no_flashinfer, pip=pip, make=made, page_size=size
        )
    for name, backend in _SDPA.items():
        yield DecodeProvider(f"sdpa_{name.lower()}", f"{parts}SDPA {name}", make=_sdpa(backend), even=True)
    yield DecodeProvider(
        "flash_attn",
        "flash_attn_with_kvcache",
        missing=_no_flash,
        pip=("flash-attn",),
        make=_flash,
        rounded_tables=True,
    )
    yield DecodeProvider("fa4", f"{parts}FlashAttention-4", missing=FA4.missing, pip=FA4.pip, make=_fa4, even=True)
    yield DecodeProvider(COPY, "copy (ceiling)", "ceiling", make=_copy)
    yield DecodeProvider(READ, "plain read (amax)", "ceiling", make=_read)


PROVIDERS: dict[str, DecodeProvider] = {provider.name: provider for provider in _providers()}
