"""Who is measured at a step of generation: this project, what a user can install, and a copy as the ceiling.

A step appends one token to every sequence and attends to the whole cache. Caches are ``(B, HKV, S, D)``, contiguous, as
Hugging Face's static cache has them; every sequence holds S - 1 tokens, so that a step can be repeated. Tables come as
``(S, D/2)`` float32. Whatever else somebody wants (tables in their dtype, pages) is prepared before any clock runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from baselines.attentions import FA4
from baselines.base import missing_package
from bench.suite import never_missing
from bench.suites.generation.pages import by_flash_attention_4, by_flashinfer, gathered, in_parts, stored_step
from bench.suites.generation.step import Run, Step

# What the copy moves at most; its time is taken in proportion to a larger cache.
COPY_BYTES = 2 << 30


@dataclass(frozen=True)
class DecodeProvider:
    """``make(step)`` prepares and returns a function that runs one step and returns o (B, HQ, 1, D).

    raw: the cache holds keys as they came. bare: attends only; nothing is rotated or written. rounded_tables: rotates
    by tables in q's dtype. copies: no attention, but what memory gives at most. page_size: of a cache in pages, float8:
    of one in float8_e4m3fn. even: serves sequences of one length only.
    """

    name: str
    label: str
    missing: Callable[[], str | None]
    make: Callable[[Step], Run]
    raw: bool = False
    bare: bool = False
    rounded_tables: bool = False
    copies: bool = False
    page_size: int | None = None
    float8: bool = False
    even: bool = False
    pip: tuple[str, ...] = ()


def _ours(rotated: bool) -> Callable[[Step], Run]:
    def make(step: Step) -> Run:
        from fused_rope_attn import rope_attention_with_kvcache

        q, k, v, k_cache, v_cache, lengths, cos, sin = step
        return lambda: rope_attention_with_kvcache(
            q, k_cache, v_cache, cos, sin, k, v, cache_seqlens=lengths, cache_is_rotated=rotated
        )

    return make


def appending(step: Step, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Run:
    """Rotate in one launch, write in two, then ``attend(q, k_cache, v_cache)``: the best that separate parts can do."""
    from fused_rope_attn import apply_rope_qk

    q, k, v, k_cache, v_cache, lengths, cos, sin = step
    row = lengths[:1].long()  # all sequences are as long

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
        o = flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=step.lengths, causal=True,
            rotary_interleaved=False,
        )  # fmt: skip
        return o.transpose(1, 2)

    return run


def _fa4(step: Step) -> Run:
    return appending(step, lambda q, k, v: FA4.attend(q, k, v, True))


def _copy(step: Step) -> Run:
    """Reads and writes together as many bytes as the step reads, or COPY_BYTES."""
    flat = step.k_cache.view(torch.uint8).flatten()
    source = flat[: min(step.bytes, COPY_BYTES) // 2]
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _read(step: Step) -> Run:
    """Reads as many bytes as the step reads, or COPY_BYTES, by one of PyTorch's reductions: what a kernel that only
    reads reaches at this size, where beginning and end weigh and nothing of what a copy writes stays in the L2."""
    source = torch.zeros(min(step.bytes, COPY_BYTES) // 4, dtype=torch.int32, device=step.q.device)
    return lambda: source.amax()


def _stored(page_size: int | None, float8: bool = False) -> DecodeProvider:
    """Our step on caches in pages, in float8, or both."""
    words = [] if page_size is None else [f"pages of {page_size}"]
    words += ["float8"] if float8 else []
    name = "_".join([OURS, *words]).replace("pages of ", "page")
    label = f"the same, {', '.join(words)}"
    make = stored_step(page_size, float8)
    return DecodeProvider(name, label, never_missing, make, page_size=page_size, float8=float8)


OURS, RAW, COPY, READ = "fused", "fused_raw", "copy", "read"
PROVIDERS: dict[str, DecodeProvider] = {
    provider.name: provider
    for provider in (
        DecodeProvider(OURS, "rope_attention_with_kvcache", never_missing, _ours(True)),
        DecodeProvider(RAW, "the same, raw keys", never_missing, _ours(False), raw=True),
        *(_stored(page_size) for page_size in (16, 64, 256)),
        _stored(None, float8=True),
        _stored(16, float8=True),
        _stored(64, float8=True),
        DecodeProvider(
            "gather_sdpa", "rotate + write + gather pages of 16 + SDPA flash", never_missing, in_parts(16, gathered),
            page_size=16, even=True,
        ),
        *(
            DecodeProvider(
                f"fa4_page{page_size}", f"rotate + write + FlashAttention-4, pages of {page_size}",
                lambda: missing_package("flash-attn-4", "flash_attn.cute", "flash_attn_varlen_func"),
                in_parts(page_size, by_flash_attention_4), page_size=page_size, pip=FA4.pip,
            )
            for page_size in (16, 128)
        ),
        *(
            DecodeProvider(
                f"flashinfer_page{page_size}", f"rotate + write + FlashInfer, pages of {page_size}",
                lambda: missing_package("flashinfer-python", "flashinfer", "BatchDecodeWithPagedKVCacheWrapper"),
                in_parts(page_size, by_flashinfer), page_size=page_size, pip=("flashinfer-python",),
            )
            for page_size in (16, 64)
        ),
        DecodeProvider("sdpa_flash", "rotate + write + SDPA flash", never_missing, _sdpa(SDPBackend.FLASH_ATTENTION),
                       even=True),
        DecodeProvider("sdpa_cudnn", "rotate + write + SDPA cuDNN", never_missing, _sdpa(SDPBackend.CUDNN_ATTENTION),
                       even=True),
        DecodeProvider(
            "sdpa_efficient", "rotate + write + SDPA efficient", never_missing, _sdpa(SDPBackend.EFFICIENT_ATTENTION),
            even=True,
        ),
        DecodeProvider(
            "flash_attn", "flash_attn_with_kvcache",
            lambda: missing_package("flash-attn", "flash_attn", "flash_attn_with_kvcache"), _flash,
            rounded_tables=True, pip=("flash-attn",),
        ),
        DecodeProvider("fa4", "rotate + write + FlashAttention-4", FA4.missing, _fa4, even=True, pip=FA4.pip),
        DecodeProvider(COPY, "copy (ceiling)", never_missing, _copy, copies=True),
        DecodeProvider(READ, "plain read (amax)", never_missing, _read, copies=True),
    )
}  # fmt: skip
