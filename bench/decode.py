"""``python -m bench decode``: a step of generation, its rivals, and a copy of as many bytes as the ceiling.

A step appends one token to every sequence and attends to the whole cache. Caches are ``(B, HKV, S, D)``, contiguous, as
Hugging Face's static cache has them. Every sequence holds S - 1 tokens, so that a step can be repeated. Pages are
prepared before any clock runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from baselines.attentions import CUDNN, FA4, SDPA_FLASH, UNSPLIT
from baselines.base import Attention
from bench import timing
from bench.gate import Compared, Verdict, ends, judge
from bench.report import Row
from bench.suite import SHORT_DTYPES, Entry, Provider, Suite, Times, Trial, by_name, length_name, normal
from fused_rope_attn import apply_rope_qk, rope_attention_with_kvcache, rope_tables
from fused_rope_attn.generation.problem import StepTensors
from fused_rope_attn.generation.reference import quantise
from verification.calls import Made
from verification.decode import DecodeCheck

# A power of two, with which normally distributed numbers fill float8_e4m3fn's range.
_FLOAT8_SCALE = 2.0**-6
# Caches in pages or float8 are copies, one for each provider.
_MOST_STORED_BYTES = 2 << 30


# Cases


@dataclass(frozen=True)
class DecodeCase:
    """One step of ``batch`` sequences with caches of ``length`` rows, all but the last in use before it.

    mixed: sequence i of 1 to batch has length / i tokens instead (Zipf's law), and the last one has 1.
    """

    batch: int
    length: int
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    mixed: bool = False

    @property
    def name(self) -> str:
        return f"{'mixed' if self.mixed else 'B'}{self.batch}-{length_name(self.length)}"

    @property
    def groups(self) -> tuple[str, ...]:
        return (f"b{self.batch}",) if not self.mixed else ("mixed",)

    @property
    def lengths(self) -> list[int]:
        """Return the tokens of each sequence after the step."""
        if not self.mixed:
            return [self.length] * self.batch
        return [self.length // i for i in range(1, self.batch)] + [1]

    @property
    def shape(self) -> str:
        """Return ``B8 H32/8 S4096 D128 bf16``."""
        heads = f"{self.heads_q}/{self.heads_kv}"
        return f"B{self.batch} H{heads} S{self.length} D{self.head_dim} {SHORT_DTYPES[self.dtype]}"

    @property
    def bytes(self) -> int:
        """Return the bytes of keys and values: what a step reads. Everything else is a thousandth of it."""
        return 2 * sum(self.lengths) * self.heads_kv * self.head_dim * self.dtype.itemsize

    def step(self, device: torch.device) -> StepTensors:
        """Return normally distributed inputs, equal for equal device."""
        sizes = (self.heads_q, 1), *[(self.heads_kv, 1)] * 2, *[(self.heads_kv, self.length)] * 2
        shapes = [(self.batch, *size, self.head_dim) for size in sizes]
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device) - 1
        tables = rope_tables(self.length, self.head_dim, device=device)
        q, k, v, *caches = normal(shapes, self.dtype, device)
        return StepTensors(q, *caches, *tables, k, v, lengths)


CASES = tuple(DecodeCase(b, n) for b, n in itertools.product((1, 8, 64), (4096, 32768, 131072)))
CASES += (DecodeCase(64, 65536, mixed=True),)


# Providers


@dataclass(frozen=True, kw_only=True)
class DecodeProvider(Provider):
    """``make(step)`` prepares and returns a function that runs one step and returns o (B, HQ, 1, D).

    float8: its cache is. stored: its cache is a copy, in pages or in float8.
    """

    make: Callable[[StepTensors], Callable[[], Tensor]]
    float8: bool = False
    stored: bool = False


def pools_of(step: StepTensors, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (pool of K, pool of V, block_table) of a step's caches, with as many pages as the lengths need, shuffled.

    In memory a pool is (num_pages, page_size, HKV, D), as servers have it. Entries past a sequence's end are -1.
    """
    device = step.q.device
    exists = torch.arange(0, step.k_cache.shape[2], page_size, device=device) <= step.cache_seqlens[:, None]
    order = torch.randperm(int(exists.sum()), generator=torch.Generator().manual_seed(0)).to(device)
    table = torch.full_like(exists, -1, dtype=torch.int32).masked_scatter_(exists, order.int())
    caches = (cache.unflatten(2, (-1, page_size)).permute(0, 2, 3, 1, 4) for cache in (step.k_cache, step.v_cache))
    k_pool, v_pool = (pages[exists][order.argsort()].contiguous().transpose(1, 2) for pages in caches)
    return k_pool, v_pool, table


def in_float8(step: StepTensors) -> StepTensors:
    """Return a step with its caches in float8."""
    scale = torch.full((1,), _FLOAT8_SCALE, device=step.q.device)
    caches = quantise(step.k_cache, scale), quantise(step.v_cache, scale)
    return step._replace(k_cache=caches[0], v_cache=caches[1], k_scale=scale, v_scale=scale)


def ours(name: str, label: str, page_size: int | None = None, float8: bool = False, **options: bool) -> DecodeProvider:
    """Return our step with ``options``, on contiguous caches, in pages or in float8."""

    def make(step: StepTensors) -> Callable[[], Tensor]:
        step = in_float8(step) if float8 else step
        if page_size is not None:
            k_cache, v_cache, table = pools_of(step, page_size)
            step = step._replace(k_cache=k_cache, v_cache=v_cache, block_table=table)
        given = {name: getattr(step, name) for name in ("cache_seqlens", "block_table", "k_scale", "v_scale")}
        return lambda: rope_attention_with_kvcache(*step[:7], **given, **options)

    return DecodeProvider(name, label, "ours", make=make, float8=float8, stored=float8 or page_size is not None)


def rival(name: str, attention: Attention, label: str = "", causal: bool = False) -> DecodeProvider:
    """Return the best of separate parts: rotate in one launch, write in two, then attend to the cache.

    causal: aligned to the last key, as FlashAttention has it.
    """

    def make(step: StepTensors) -> Callable[[], Tensor]:
        q, k_cache, v_cache, cos, sin, k, v, lengths, *_ = step
        row = lengths[:1].long()  # all sequences have the same length

        def run() -> Tensor:
            q_rot, k_rot = apply_rope_qk(q, k, cos, sin, position_ids=row)
            k_cache.index_copy_(2, row, k_rot)
            v_cache.index_copy_(2, row, v)
            return attention.attend(q_rot, k_cache, v_cache, causal)

        return run

    label = f"rotate + write + {label or attention.label}"
    return DecodeProvider(name, label, "rival", attention.missing, make=make)


def _copy(step: StepTensors) -> Callable[[], Tensor]:
    """Read and write together as many bytes as the step reads."""
    used = 2 * int((step.cache_seqlens + 1).sum()) * step.k[0].numel() * step.k.element_size()
    source = step.k_cache.view(torch.uint8).flatten()[: used // 2]
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


PROVIDERS: dict[str, DecodeProvider] = by_name(
    (
        ours("fused", "rope_attention_with_kvcache"),
        *(ours(f"fused_page{size}", f"the same, pages of {size}", size) for size in (16, 64, 256)),
        ours("fused_float8", "the same, float8", float8=True),
        ours("fused_same_bits", "the same, batch_invariant", batch_invariant=True),
        rival("sdpa_flash", SDPA_FLASH),
        rival("sdpa_cudnn", CUDNN, "SDPA cuDNN"),
        rival("fa4", FA4, "FlashAttention-4", causal=True),
        *(rival(name, attention) for name, attention in UNSPLIT.items()),
        DecodeProvider("copy", "copy (ceiling)", "ceiling", make=_copy),
    )
)


# The trial


def compared(o: Tensor, step: StepTensors, float8: bool) -> Iterator[Compared]:
    """Yield the group of the first key head of the first sequence, and the last of the last, with float64 and eager."""
    group, head_dim = step.q.shape[1] // step.k.shape[1], step.q.shape[3]
    check = DecodeCheck(1, group, 1, 1, step.k_cache.shape[2], head_dim, dtype=step.q.dtype)
    for b, h in ends(step.q.shape[0], step.k.shape[1]):
        batch, heads = slice(b, b + 1), slice(h * group, (h + 1) * group)
        own = {name: getattr(step, name)[batch, h : h + 1] for name in ("k", "v", "k_cache", "v_cache")}
        own = step._replace(q=step.q[batch, heads], cache_seqlens=step.cache_seqlens[batch], **own)
        made = Made((in_float8(own) if float8 else own)._asdict(), {})
        yield "o", o[batch, heads], *(check.reference(made, dtype)["o"] for dtype in (torch.float64, check.dtype))


class DecodeTrial(Trial):
    """One case. Every provider runs without gradients. A copy is timed directly."""

    case: DecodeCase
    default_modes = ("eager", "graph")
    default_passes = ("decode",)
    facts = ("batch", "length", "heads_q", "heads_kv", "head_dim", "bytes", "dtype")

    def open(self) -> None:
        self._step = self.case.step(self.clock.device)

    def unsupported(self, provider: DecodeProvider) -> str | None:
        if provider.role == "rival" and self.case.mixed:
            return "serves sequences of one length only"
        if provider.stored and self.case.bytes > _MOST_STORED_BYTES:
            return "its caches would be another copy of so many bytes"
        return None

    @torch.no_grad()
    def enter(self, provider: DecodeProvider) -> Entry:
        run = provider.make(self._step)
        out, verdict, ceiling = run(), Verdict(), provider.role == "ceiling"
        if not ceiling:
            verdict = judge(compared(out, self._step, provider.float8), self.case.dtype, forgiving=not provider.ours)
        return Entry(provider, verdict, lambda part: run, active=torch.no_grad, captures=not ceiling)

    def figures(self, part: str, mode: str, measured: Times) -> dict[str, Row]:
        moved = {p.name: self.case.bytes / 2 if p.float8 else self.case.bytes for p in self.providers}
        return timing.bandwidths(moved, measured, "copy")


DECODE = Suite(
    name="decode",
    description="Time one step of generation with a cache.",
    cases=CASES,
    trial=DecodeTrial,
    table=lambda case: PROVIDERS,
    passes=("decode",),
    rounds=3,
    # A step reads and hardly writes. After a flush by writing, the write-back would take a good part of its time.
    clock=lambda device, options: timing.GpuClock(device, reads=True),
)
