"""The cases of ``python -m verification`` as data: each names the feature it is there for.

Small ones fit Triton's interpreter, large ones need a GPU, and of these huge ones are alone on it. The command runs
each in every dtype that it was asked for, and those of attention by every backend and strategy.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from verification.attention import AttentionCheck, CoRopeCheck
from verification.calls import Call
from verification.decode import DecodeCheck
from verification.latent import LatentCheck
from verification.rotation import RopeCheck
from verification.testing import INTERVALS

SIZES = ("small", "large", "huge")

# 80 queries over 80 keys: several tiles of every configuration in use for the interpreter, with a tail.
_BASE = AttentionCheck(1, 2, 2, 80, 80, 32)


def _small(name: str, heads: int = 2, length: int = 80, **changes) -> AttentionCheck:
    """Return a case of as many queries as keys, and of as many heads of both, but for the changes."""
    sizes = {"heads_q": heads, "heads_kv": heads, "len_q": length, "len_k": length}
    return replace(_BASE, name=name, **(sizes | changes))


_SMALL = (
    _small("causal"),
    _small("not causal", causal=False),
    _small("batch of 2, 3 heads", batch=2, heads=3, length=33),
    _small("identical reruns", deterministic=True, heads_q=4),
    # lengths
    _small("one token", length=1),
    _small("63 tokens", length=63),
    _small("one past a tile: 129", heads=1, length=129),
    _small("one query, 100 keys", len_q=1, len_k=100),
    _small("33 queries, 100 keys", len_q=33, len_k=100),
    _small("33 queries, 100 keys, not causal", len_q=33, len_k=100, causal=False),
    _small("100 queries, 33 keys: rows that see nothing", len_q=100, len_k=33),
    _small("no queries", len_q=0, len_k=40),
    _small("no keys", len_q=40, len_k=0),
    _small("empty batch", batch=0),
    # heads
    _small("GQA 6 over 2", heads_q=6, heads_kv=2, length=50),
    _small("MQA 5 over 1, not causal", heads_q=5, heads_kv=1, length=50, causal=False),
    # head and rotary dimensions
    *(_small(f"D {d}", heads=1, length=66, head_dim=d) for d in (16, 24, 64, 80, 96, 128, 192, 256)),
    _small("R 2 of D 32", rotary_dim=2),
    _small("R 16 of D 64", head_dim=64, rotary_dim=16, heads=1),
    _small("R 26 of D 40", head_dim=40, rotary_dim=26, heads=1),
    _small("R 96 of D 128", head_dim=128, rotary_dim=96, heads=1, length=40),
    _small("interleaved", interleaved=True),
    _small("interleaved, R 26 of D 40, GQA", interleaved=True, head_dim=40, rotary_dim=26, heads_q=4),
    _small("interleaved D 128", interleaved=True, head_dim=128, heads=1, length=40),
    # tables
    _small("per-batch tables", batch=2, heads=1, table_batch=True),
    _small("full-width table, halves", full_width=True),
    _small("full-width table, interleaved", full_width=True, interleaved=True),
    _small("full-width per-batch table, R 16 of D 64", batch=2, heads=1, head_dim=64, rotary_dim=16, full_width=True,
           table_batch=True, length=40),
    _small("tables in float16", table_dtype=torch.float16, only=(torch.float16,)),
    _small("tables in bfloat16", table_dtype=torch.bfloat16, only=(torch.bfloat16,)),
    _small("YaRN tables, not unit-norm", tables="yarn"),
    _small("arbitrary tables, interleaved", tables="random", interleaved=True),
    _small("longer tables than keys", extra_rows=9),
    # memory
    _small("contiguous (B, H, N, D)", layout="bhnd"),
    _small("odd strides, unaligned", layout="odd"),
    _small("odd strides, unaligned, interleaved, GQA", layout="odd", interleaved=True, heads_q=4, batch=2, length=40),
    _small("expanded batch, stride 0", layout="expanded", batch=2, heads=1),
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
    # intervals of query rows
    *(_small(f"intervals: {kind}", causal=False, intervals=kind, hides_nan=True) for kind in INTERVALS),
    _small("random intervals, batch of 2, causal, kv_starts + kv_lens, GQA", batch=2, heads_q=4, intervals="random",
           kv_starts=(3, 20), kv_lens=(80, 61), hides_nan=True, len_q=50),
    _small("random intervals, window, softcap, sinks, norms", intervals="random", window=(30, 9), causal=False,
           softcap=5.0, sinks=True, norms=1.0, hides_nan=True),
    _small("window + softcap + GQA", window=(20, 0), softcap=5.0, heads_q=4),
    _small("sinks + window", sinks=True, window=(20, 0)),
    # norms of q and k
    _small("norms", norms=0.0),
    _small("norms, offset 1, interleaved, R 26 of D 40, GQA", norms=1.0, interleaved=True, head_dim=40, rotary_dim=26,
           heads_q=4),
    _small("norms of D 256", norms=1.0, head_dim=256, heads=1, length=40),
    _small("norms + kv_starts + window + sinks", norms=0.0, batch=2, kv_starts=(0, 41), window=(20, 0), sinks=True),
    _small("norms, packed sequences", norms=0.0, seqlens=((50, 50), (0, 0), (30, 30))),
    _small("packed sequences, an empty one", seqlens=((50, 50), (0, 0), (30, 30))),
    _small("packed, NQ and NK differ, not causal", seqlens=((10, 50), (40, 25)), len_q=50, len_k=75, causal=False),
    _small("packed, a short one behind a long one", seqlens=((50, 50), (7, 7), (23, 23)), heads_q=4),
    _small("packed + window", seqlens=((50, 50), (30, 30)), window=(20, 0)),
    _small("packed + window + softcap + sinks, identical reruns", deterministic=True, seqlens=((45, 45), (35, 35)),
           window=(20, 0), softcap=5.0, sinks=True),
)  # fmt: skip


def _large(name: str, batch: int, heads_q: int, heads_kv: int, length: int, head_dim: int, **changes) -> AttentionCheck:
    changes = {"size": "large", **changes}
    return AttentionCheck(batch, heads_q, heads_kv, length, length, head_dim, name=name, **changes)


# Sizes between 16 and 4096, in no order.
_MIXED = tuple(16 + 4080 * (37 * i % 64) // 63 for i in range(64))

_LARGE = (
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
    # masks at the lengths that they are for; without sinks, because only small cases compare their gradient
    _large("32K window (1024, 0) GQA", 1, 8, 2, 32768, 128, window=(1024, 0)),
    _large("4K window (1024, 0) + softcap, D 256 GQA", 1, 8, 4, 4096, 256, window=(1024, 0), softcap=50.0),
    _large("4K window (127, 0), D 64 GQA", 1, 16, 2, 4096, 64, window=(127, 0)),
    _large("4K kv_starts + kv_lens", 2, 8, 2, 4096, 128, kv_starts=(1000, 0), kv_lens=(4096, 2049)),
    _large("4K documents by intervals GQA", 1, 8, 2, 4096, 128, causal=False, intervals="documents"),
    _large("4K a tree by intervals GQA", 1, 8, 2, 4096, 128, causal=False, intervals="tree"),
    _large("4K blocks that see both ways, D 64", 2, 4, 4, 4096, 64, causal=False, intervals="blocks"),
    _large("4K random intervals, D 256 GQA", 1, 4, 2, 4096, 256, intervals="random", hides_nan=True),
    _large("64 packed sequences of 16 to 4096 tokens", 1, 8, 2, sum(_MIXED), 128, seqlens=tuple(zip(_MIXED, _MIXED))),
    _large("64 packed sequences, window (256, 0)", 1, 8, 2, sum(_MIXED), 128, seqlens=tuple(zip(_MIXED, _MIXED)),
           window=(256, 0)),
    _large("64 packed sequences, D 256 GQA", 1, 4, 2, sum(_MIXED), 256, seqlens=tuple(zip(_MIXED, _MIXED))),
    # norms; only small cases compare the gradients of their weights
    _large("Llama3-8B-4K with norms", 2, 32, 8, 4096, 128, norms=0.0),
    _large("2K D 256 GQA with norms", 2, 8, 2, 2048, 256, norms=1.0),
    # 32-bit offsets: across heads, and within one head with rows that are 16640 elements apart
    _large("q, k, v of 2**31 + 2**24 elements", 129, 256, 256, 512, 128, size="huge", only=(torch.bfloat16,)),
    _large("128K positions in tensors of 2**31 + 2**25 elements", 1, 4, 2, 131072, 128, size="huge",
           memory=("far", "far", "far", "bnhd"), only=(torch.bfloat16, torch.float16)),
)  # fmt: skip


def _rotation(name, batch=2, heads=(3, 1), length=37, head_dim=32, rotary_dim=32, **changes) -> RopeCheck:
    return RopeCheck(batch, *heads, length, max(length, 1), head_dim, rotary_dim=rotary_dim, name=name, **changes)


def step(name, heads, len_q, capacity, head_dim, lengths, **changes) -> DecodeCheck:
    """Return a generation step of ``len_q`` tokens after ``lengths`` in caches of ``capacity`` rows."""
    return DecodeCheck(len(lengths), *heads, len_q, capacity, head_dim, lengths=lengths, name=name, **changes)


def in_dtype(check: Call, dtype: torch.dtype) -> Call:
    """Return a case in a dtype, which the weights of its norms follow if they are not float32."""
    norm_dtype = torch.float32 if check.norm_dtype == torch.float32 else dtype
    return replace(check, dtype=dtype, norm_dtype=norm_dtype)


def _corope(name, batch, heads_q, heads_kv, length, head_dim, **changes) -> CoRopeCheck:
    return CoRopeCheck(batch, heads_q, heads_kv, length, length, head_dim, name=name, **changes)


ATTENTION = _SMALL + _LARGE
ROTATION = (
    _rotation("rotation"),
    _rotation("rotation, interleaved", interleaved=True),
    _rotation("rotation (B, N, H, D), R 10 of D 24", form="bshd", head_dim=24, rotary_dim=10),
    _rotation("rotation (N, B, H, D), interleaved, R 6 of D 7", form="sbhd", head_dim=7, rotary_dim=6,
              interleaved=True),
    _rotation("rotation of packed sequences", form="thd", batch=1, length=33, seqlens=((11, 11),) * 3),
    _rotation("rotation with position ids", positions="ids", tables="random"),
    _rotation("rotation with two ids a token", positions="two ids", interleaved=True, rotary_dim=24),
    _rotation("rotation with full-width tables, two angles a pair", full_width=True, tables="random"),
    _rotation("rotation in place, interleaved, R 16 of D 32", out="in place", interleaved=True, rotary_dim=16),
    _rotation("rotation of a single token", length=1, tables="random"),
    _rotation("rotation of nothing", length=0),
    _rotation("norm and rotation", norms=0.0, norm_dtype=torch.float16),
    _rotation("norm and rotation (B, N, H, D), interleaved, R 10 of D 24, offset 1", form="bshd", head_dim=24,
              rotary_dim=10, interleaved=True, norms=1.0),
    _rotation("norm and rotation of packed sequences", form="thd", batch=1, length=33, seqlens=((11, 11),) * 3,
              norms=0.0),
    _rotation("norm and rotation, two ids a token, R 24 of D 32, in place", positions="two ids", rotary_dim=24,
              norms=0.0, norm_dtype=torch.float16, out="in place", length=11),
    _rotation("norm and rotation of nothing", length=0, norms=0.0),
    _rotation("rotation Wide-1K", 10, (96, 8), 1024, 128, 128, form="bshd", size="large"),
    _rotation("rotation Llama3-8B-4K, interleaved", 2, (32, 8), 4096, 128, 128, interleaved=True, size="large"),
    _rotation("norm and rotation Qwen3-8B-4K", 2, (32, 8), 4096, 128, 128, form="bshd", size="large", norms=0.0,
              norm_dtype=torch.float16),
    _rotation("norm and rotation D256, interleaved, offset 1", 2, (16, 8), 1000, 256, 256, interleaved=True,
              size="large", norms=1.0),
    _rotation("rotation of 128K positions", 1, (4, 4), 131072, 128, 128, form="bshd", positions="ids", size="large"),
)  # fmt: skip
DECODE = (
    step("decode, GQA, lengths differ", (4, 2), 1, 70, 32, (37, 0, 69)),
    step("decode, a head shared by many", (2, 1), 1, 200, 16, (190,)),
    step("decode, many short sequences", (2, 2), 1, 20, 16, (0, 3, 19, 16, 17, 1, 5)),
    step("decode, keys rotated in the loop", (4, 2), 1, 70, 32, (37, 64), rotated=False),
    step("decode, keys rotated in the loop, R 10 of D 24, interleaved", (3, 1), 2, 70, 24, (37, 64),
         rotated=False, rotary_dim=10, interleaved=True, layout="odd"),
    step("decode, R 10 of D 24", (3, 1), 2, 70, 24, (37, 64), rotary_dim=10, layout="odd"),
    step("decode, R 12 of D 16, interleaved, any tables", (2, 1), 1, 40, 16, (33, 20), rotary_dim=12,
         interleaved=True, tables="random", table_batch=True, layout="bhnd"),
    step("decode, any tables, full-width", (2, 1), 3, 40, 16, (33, 20), tables="random", full_width=True),
    step("decode, window", (2, 1), 3, 100, 16, (90, 10), window=(20, 0)),
    step("decode, window, new tokens see one another", (2, 1), 5, 100, 16, (70, 10), window=(20, 2), causal=False),
    step("decode, softcap and sinks", (4, 2), 2, 70, 16, (50, 0), softcap=2.0, sinks=True, rotated=False),
    step("decode, window and sinks", (4, 2), 1, 70, 16, (60, 3), window=(32, 0), sinks=True),
    step("decode, 17 new tokens, GQA of 5", (5, 1), 17, 40, 16, (20, 0), layout="bhnd"),
    step("decode, scale negative", (8, 4), 1, 40, 16, (33, 20, 7, 39), softmax_scale=-0.7),
    step("decode, nothing new", (4, 2), 2, 70, 16, (50, 1, 0), append=False, layout="one batch"),
    step("decode, nothing new, window, all queries see all", (2, 1), 3, 70, 16, (50, 2), append=False,
         causal=False, window=(20, 1), rotated=False),
    step("decode, the cache is full", (2, 1), 3, 33, 16, (31, 33, 40, 20)),
    step("decode, pages of 16", (4, 2), 1, 64, 32, (37, 0, 63), page_size=16),
    step("decode, pages of 24, window, 5 tokens, sinks", (4, 2), 5, 96, 16, (70, 3, 91), page_size=24,
         window=(20, 0), sinks=True, layout="bhnd"),
    step("decode, pages of 16, keys rotated in the loop", (4, 2), 2, 64, 24, (37, 60), page_size=16,
         rotated=False, rotary_dim=10, layout="odd"),
    step("decode, pages of 32, nothing new, softcap", (2, 1), 2, 96, 16, (50, 1, 0), page_size=32, append=False,
         softcap=2.0),
    step("decode, pages of 16, the table is full", (2, 1), 3, 32, 16, (31, 33, 40, 20), page_size=16),
    step("decode, a chunk of 33 tokens in pages of 16, window", (8, 1), 33, 96, 16, (50,), page_size=16,
         window=(60, 0)),
    step("decode, a chunk of 33 tokens in pages of 32", (8, 1), 33, 128, 16, (70, 0), page_size=32),
    step("decode, a chunk of 33 tokens, for some of which there is no room", (8, 1), 33, 100, 16, (80,)),
    step("decode, a chunk of 33 tokens, read only", (8, 1), 33, 64, 16, (64,), append=False),
    step("decode, float8", (4, 2), 2, 70, 32, (37, 0), float8="head"),
    step("decode, float8, keys rotated in the loop", (4, 2), 2, 70, 16, (37, 64), rotated=False, float8="tensor"),
    step("decode, float8 in pages of 16, softcap", (2, 1), 1, 48, 16, (37, 4), page_size=16, float8="tensor",
         softcap=2.0),
    step("decode, norms", (4, 2), 2, 70, 24, (37, 0), rotary_dim=10, norms=0.0),
    step("decode, norms, keys rotated in the loop, interleaved", (4, 2), 2, 64, 16, (37, 60), page_size=16,
         rotated=False, interleaved=True, norms=1.0),
    step("decode, norms, float8", (4, 2), 2, 70, 32, (37, 0), float8="head", norms=0.0),
    step("decode Qwen3-8B, norms", (32, 8), 1, 4096, 128, (4095, 1, 2048, 777), norms=0.0, size="large"),
    step("decode Llama3-8B, 4096", (32, 8), 1, 4096, 128, (4095, 1, 2048, 777), size="large"),
    step("decode Llama3-8B, 4096, keys rotated in the loop", (32, 8), 1, 4096, 128, (4095, 1, 2048, 777),
         rotated=False, size="large"),
    step("decode Llama3-8B, 131072", (32, 8), 1, 131072, 128, (131071,), size="large"),
    step("decode 64 sequences", (32, 8), 4, 1024, 128, tuple(range(5, 965, 15)), size="large"),
    step("decode, D 256, window, softcap", (16, 8), 1, 8192, 256, (8000, 5000), window=(4095, 0), softcap=50.0,
         size="large"),
    step("decode, D 64, sinks, window", (64, 8), 1, 4096, 64, (4000, 100), window=(128, 0), sinks=True, size="large"),
    step("decode, D 80, MQA, 40 new tokens", (16, 1), 40, 3000, 80, (2960, 1), rotary_dim=32, size="large"),
    *(step(f"decode Llama3-8B, pages of {page_size}{words}", (32, 8), len_q, 4096, 128, (4090, 1, 2048, 777),
                    page_size=page_size, size="large", **options)
        for page_size in (16, 64, 128)
        for words, len_q, options in (
            ("", 1, {}),
            (", raw keys", 1, {"rotated": False}),
            (", float8", 1, {"float8": "head"}),
            (", window, sinks, 4 tokens", 4, {"window": (1000, 0), "sinks": True}),
        )
    ),
    step("decode, float8, raw keys, D 64, pages of 48", (16, 8), 3, 4080, 64, (4000, 5), rotated=False,
         float8="tensor", page_size=48, interleaved=True, size="large"),
    step("decode, a chunk of 300 tokens, pages of 16", (8, 2), 300, 4096, 128, (3000, 0), page_size=16, size="large"),
    step("decode, a chunk of 300 tokens, float8 in pages of 128", (8, 2), 300, 4096, 128, (3000, 3700),
         page_size=128, float8="head", size="large"),
    step("decode, a chunk of 300 tokens, pages of 128, window", (8, 2), 300, 4096, 128, (3000, 0),
         page_size=128, window=(700, 0), size="large"),
    step("decode, a chunk of 300 tokens, float8 in pages of 64, window", (8, 2), 300, 4096, 128, (3000, 3700),
         page_size=64, float8="head", window=(700, 0), size="large"),
)  # fmt: skip
COROPE = (
    _corope("Co-RoPE, GQA of 3", 1, 3, 1, 35, 32),
    _corope("Co-RoPE, D 64", 1, 1, 1, 33, 64),
    _corope("Co-RoPE, a single token", 2, 2, 1, 1, 32),
    _corope("Co-RoPE, heads 32/8, 1024 tokens", 1, 32, 8, 1024, 128, size="large"),
    _corope("Co-RoPE, heads 16/1, 1000 tokens, D 64", 1, 16, 1, 1000, 64, size="large"),
    _corope("Co-RoPE, heads 4/1, 8192 tokens", 1, 4, 1, 8192, 128, size="large"),
)


def _latent(name: str, heads: int, length: int, widths: tuple[int, int, int], **changes) -> LatentCheck:
    """Return a case of DN, R and DV columns; as many queries as keys but for the changes."""
    nope, rope, value = widths
    fields = {"len_q": length, "len_k": length, "head_dim": rope, "nope": nope, "value": value, "interleaved": True}
    fields |= {"batch": 1, "heads_q": heads, "variants": (("triton", "auto"),)} | changes
    return LatentCheck(name=name, heads_kv=heads, **fields)


_DEEPSEEK = (128, 64, 128)
LATENT = (
    _latent("MLA", 3, 70, (32, 16, 48)),
    _latent("MLA, the widths of DeepSeek, any tables", 5, 66, _DEEPSEEK, tables="random"),
    _latent("MLA, widths that are no powers of two, negative scale", 2, 40, (48, 48, 80), softmax_scale=-0.3,
            interleaved=False),
    _latent("MLA, unaligned rows, not causal, dlse", 2, 70, (32, 16, 32), causal=False, lse_gradient=True,
            memory=("odd", "offset", "odd", "columns", "wide", "bnhd")),
    _latent("MLA, window + kv_starts + kv_lens", 2, 75, (32, 16, 32), batch=2, len_q=40, window=(20, 3),
            kv_starts=(0, 33), kv_lens=(75, 60), deterministic=True),
    _latent("MLA, layout bshd, queries that see nothing", 2, 40, (16, 16, 16), len_q=70, form="bshd"),
    _latent("MLA, packed sequences, an empty one", 2, 80, (32, 16, 32), seqlens=((50, 50), (0, 0), (30, 30))),
    _latent("MLA, packed, NQ and NK differ, window", 2, 75, (32, 16, 32), len_q=50, seqlens=((10, 50), (40, 25)),
            window=(20, 0)),
    _latent("DeepSeek-V2-Lite-4K", 16, 4096, _DEEPSEEK, tables="yarn", size="large", deterministic=True),
    _latent("DeepSeek-V3-1K", 128, 1024, _DEEPSEEK, size="large"),
    _latent("MLA, odd lengths, padded", 16, 1111, _DEEPSEEK, batch=3, len_q=777, kv_starts=(0, 500, 1000),
            kv_lens=(1111, 900, 1050), lse_gradient=True, size="large"),
    _latent("MLA, 9 packed sequences", 16, 5000, _DEEPSEEK, size="large",
            seqlens=tuple((n, n) for n in (1000, 1, 999, 0, 64, 65, 1500, 371, 1000))),
)  # fmt: skip
CHECKS = ATTENTION + LATENT + ROTATION + DECODE + COROPE
