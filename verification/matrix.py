"""The cases: each names the feature it is there for.

Small ones fit Triton's interpreter, large ones need a GPU. A case has no dtype of its own: the command runs each in
every dtype it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fused_rope_attn.testing import Case

SCALES = ("small", "large", "huge")


@dataclass(frozen=True)
class Check:
    """A named case. ``scale``: "small" (every row of every head is compared, and without a GPU too), "large" (some
    heads, whole) or "huge" (the same, alone on the GPU)."""

    name: str
    case: Case
    scale: str = "small"
    rerun: bool = False  # run twice: bitwise equal results
    packed_heads: int = 0  # q, k, v are views of one (B, N, packed_heads, D) tensor, as a fused projection leaves them
    only: tuple[torch.dtype, ...] = ()  # the dtypes it makes sense in; empty: all


# 80 queries over 80 keys: several tiles of every configuration in use for the interpreter, with a tail.
_BASE = Case(batch=1, heads_q=2, heads_kv=2, len_q=80, len_k=80, head_dim=32)


def _small(name: str, rerun: bool = False, only: tuple[torch.dtype, ...] = (), **changes) -> Check:
    return Check(name, replace(_BASE, **changes), rerun=rerun, only=only)


SMALL = (
    _small("causal"),
    _small("not causal", causal=False),
    _small("batch of 2, 3 heads", batch=2, heads_q=3, heads_kv=3, len_q=33, len_k=33),
    _small("identical reruns", rerun=True, heads_q=4),
    # lengths
    _small("one token", len_q=1, len_k=1),
    _small("63 tokens", len_q=63, len_k=63),
    _small("one past a tile: 129", heads_q=1, heads_kv=1, len_q=129, len_k=129),
    _small("one query, 100 keys", len_q=1, len_k=100),
    _small("33 queries, 100 keys", len_q=33, len_k=100),
    _small("33 queries, 100 keys, not causal", len_q=33, len_k=100, causal=False),
    _small("100 queries, 33 keys: rows that see nothing", len_q=100, len_k=33),
    _small("no queries", len_q=0, len_k=40),
    _small("no keys", len_q=40, len_k=0),
    _small("empty batch", batch=0),
    # heads
    _small("GQA 6 over 2", heads_q=6, heads_kv=2, len_q=50, len_k=50),
    _small("MQA 5 over 1, not causal", heads_q=5, heads_kv=1, len_q=50, len_k=50, causal=False),
    # head and rotary dimensions
    *(
        _small(f"D {head_dim}", heads_q=1, heads_kv=1, len_q=66, len_k=66, head_dim=head_dim)
        for head_dim in (16, 24, 64, 80, 96, 128, 192, 256)
    ),
    _small("R 2 of D 32", rotary_dim=2),
    _small("R 16 of D 64", head_dim=64, rotary_dim=16, heads_q=1, heads_kv=1),
    _small("R 26 of D 40", head_dim=40, rotary_dim=26, heads_q=1, heads_kv=1),
    _small("R 96 of D 128", head_dim=128, rotary_dim=96, heads_q=1, heads_kv=1, len_q=40, len_k=40),
    _small("interleaved", interleaved=True),
    _small("interleaved, R 26 of D 40, GQA", interleaved=True, head_dim=40, rotary_dim=26, heads_q=4),
    _small("interleaved D 128", interleaved=True, head_dim=128, heads_q=1, heads_kv=1, len_q=40, len_k=40),
    # tables
    _small("per-batch tables", batch=2, heads_q=1, heads_kv=1, table_batch=True),
    _small("full-width table, halves", full_width=True),
    _small("full-width table, interleaved", full_width=True, interleaved=True),
    _small("full-width per-batch table, R 16 of D 64", batch=2, heads_q=1, heads_kv=1, head_dim=64, rotary_dim=16,
           full_width=True, table_batch=True, len_q=40, len_k=40),
    _small("tables in float16", table_dtype=torch.float16, only=(torch.float16,)),
    _small("tables in bfloat16", table_dtype=torch.bfloat16, only=(torch.bfloat16,)),
    _small("YaRN tables, not unit-norm", tables="yarn"),
    _small("arbitrary tables, interleaved", tables="random", interleaved=True),
    _small("longer tables than keys", extra_rows=9),
    # memory
    _small("contiguous (B, H, N, D)", layout="bhnd"),
    _small("odd strides, unaligned", layout="odd"),
    _small("odd strides, unaligned, interleaved, GQA", layout="odd", interleaved=True, heads_q=4, batch=2, len_q=40,
           len_k=40),
    _small("expanded batch, stride 0", layout="expanded", batch=2, heads_q=1, heads_kv=1),
    # scale
    _small("scale 0", softmax_scale=0.0),
    _small("negative scale", softmax_scale=-0.3),
    _small("large scale", softmax_scale=1.0),
    # masks, and the pairs of them that models combine
    _small("window (20, 0)", window=(20, 0)),
    _small("window (20, 5), not causal, 33 queries, 100 keys", window=(20, 5), causal=False, len_q=33, len_k=100),
    _small("softcap", softcap=5.0),
    _small("sinks", sinks=True),
    _small("kv_lens", batch=2, kv_lens=(80, 37)),
    _small("kv_starts, not causal", batch=2, kv_starts=(50, 7), causal=False),
    _small("kv_lens, not causal, an empty entry", batch=2, kv_lens=(0, 37), causal=False, len_q=33),
    _small("kv_starts + causal + per-batch tables", batch=2, kv_starts=(0, 41), table_batch=True),
    _small("window + softcap + GQA", window=(20, 0), softcap=5.0, heads_q=4),
    _small("sinks + window", sinks=True, window=(20, 0)),
    # norms of q and k
    _small("norms", norms=0.0),
    _small("norms, offset 1, interleaved, R 26 of D 40, GQA", norms=1.0, interleaved=True, head_dim=40, rotary_dim=26,
           heads_q=4),
    _small("norms of D 256", norms=1.0, head_dim=256, heads_q=1, heads_kv=1, len_q=40, len_k=40),
    _small("norms + kv_starts + window + sinks", norms=0.0, batch=2, kv_starts=(0, 41), window=(20, 0), sinks=True),
    _small("norms, packed sequences", norms=0.0, seqlens=((50, 50), (0, 0), (30, 30))),
    _small("packed sequences, an empty one", seqlens=((50, 50), (0, 0), (30, 30))),
    _small("packed, NQ and NK differ, not causal", seqlens=((10, 50), (40, 25)), len_q=50, len_k=75, causal=False),
    _small("packed, a short one behind a long one", seqlens=((50, 50), (7, 7), (23, 23)), heads_q=4),
    _small("packed + window", seqlens=((50, 50), (30, 30)), window=(20, 0)),
    _small("packed + window + softcap + sinks, identical reruns", rerun=True, seqlens=((45, 45), (35, 35)),
           window=(20, 0), softcap=5.0, sinks=True),
)  # fmt: skip


def _large(name: str, batch: int, heads_q: int, heads_kv: int, length: int, head_dim: int, **changes) -> Check:
    scale = changes.pop("scale", "large")
    extra = {key: changes.pop(key) for key in ("packed_heads", "only") if key in changes}
    return Check(name, Case(batch, heads_q, heads_kv, length, length, head_dim, **changes), scale=scale, **extra)


# Of every size between 16 and 4096, in no order.
_MIXED = tuple(16 + 4080 * (37 * i % 64) // 63 for i in range(64))

LARGE = (
    # every shape of the performance table
    _large("Small-512", 4, 8, 8, 512, 64),
    _large("Small-1K", 4, 8, 8, 1024, 64),
    _large("Llama7B-2K", 2, 32, 32, 2048, 128),
    _large("Llama7B-4K", 2, 32, 32, 4096, 128),
    _large("Llama70B-1K", 2, 64, 64, 1024, 128),
    _large("Llama3-8B-4K", 2, 32, 8, 4096, 128),
    _large("Llama3-8B-16K", 1, 32, 8, 16384, 128),
    _large("Long-64K", 1, 8, 8, 65536, 128),
    _large("128K positions", 1, 4, 4, 131072, 128),
    # what those leave out
    _large("4K not causal", 2, 8, 8, 4096, 128, causal=False),
    _large("4K D 64 GQA not causal", 2, 16, 4, 4096, 64, causal=False),
    _large("4K D 96 interleaved", 2, 8, 8, 4096, 96, interleaved=True),
    _large("2K D 256 GQA", 2, 8, 2, 2048, 256),
    _large("1000 tokens, odd strides", 2, 8, 2, 1000, 128, layout="odd"),
    # masks at the lengths that they are for; without sinks, of which only small cases have the gradient's reference
    _large("32K window (1024, 0) GQA", 1, 8, 2, 32768, 128, window=(1024, 0)),
    _large("4K window (1024, 0) + softcap, D 256 GQA", 1, 8, 4, 4096, 256, window=(1024, 0), softcap=50.0),
    _large("4K window (127, 0), D 64 GQA", 1, 16, 2, 4096, 64, window=(127, 0)),
    _large("4K kv_starts + kv_lens", 2, 8, 2, 4096, 128, kv_starts=(1000, 0), kv_lens=(4096, 2049)),
    _large("64 packed sequences of 16 to 4096 tokens", 1, 8, 2, sum(_MIXED), 128, seqlens=tuple(zip(_MIXED, _MIXED))),
    _large("64 packed sequences, window (256, 0)", 1, 8, 2, sum(_MIXED), 128, seqlens=tuple(zip(_MIXED, _MIXED)),
           window=(256, 0)),
    _large("64 packed sequences, D 256 GQA", 1, 4, 2, sum(_MIXED), 256, seqlens=tuple(zip(_MIXED, _MIXED))),
    # norms; without the gradients of their weights, of which only small cases have the reference
    _large("Llama3-8B-4K with norms", 2, 32, 8, 4096, 128, norms=0.0),
    _large("2K D 256 GQA with norms", 2, 8, 2, 2048, 256, norms=1.0),
    # 32-bit offsets: across heads, and within one head, whose rows are 16640 elements apart
    _large("q, k, v of 2**31 + 2**24 elements", 129, 256, 256, 512, 128, scale="huge", only=(torch.bfloat16,)),
    _large("128K positions in a packed tensor of 2**31 + 2**25 elements", 1, 4, 2, 131072, 128, scale="huge",
           packed_heads=130, only=(torch.bfloat16, torch.float16)),
)  # fmt: skip

CHECKS = SMALL + LARGE
