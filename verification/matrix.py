"""The cases of ``python -m verification`` as data. Small ones are named after their fields.

Small ones fit Triton's interpreter, large ones need a GPU, and of these huge ones are alone on it. The command runs
each in every dtype that it was asked for, and those of attention by every backend and strategy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from verification.attention import AttentionCheck, CoRopeCheck
from verification.calls import Call
from verification.decode import DecodeCheck
from verification.latent import LatentCheck
from verification.rotation import RopeCheck
from verification.testing.cases import INTERVALS, described

SIZES = ("small", "large", "huge")

# 80 queries over 80 keys: several tiles of every configuration in use for the interpreter, with a tail.
_BASE = AttentionCheck(1, 2, 2, 80, 80, 32)


def _small(heads: int = 2, length: int = 80, **changes) -> AttentionCheck:
    """Return a case of as many queries as keys, and of as many heads of both, but for the changes."""
    sizes = {"heads_q": heads, "heads_kv": heads, "len_q": length, "len_k": length}
    return _named(replace(_BASE, **(sizes | changes)))


def _named(check: Call) -> Any:
    """Name a case after its fields, unless it has a name."""
    return replace(check, name=check.name or described(check))


# Cases of one feature: its field or argument, and the values.
_ONE = {
    "causal": (True, False), "length": (1, 63), "batch": (0,), "rotary_dim": (2,), "interleaved": (True,),
    "full_width": (True,), "tables": ("yarn",), "extra_rows": (9,), "layout": ("bhnd", "odd"), "window": ((20, 0),),
    "softmax_scale": (0.0, -0.3, 1.0), "softcap": (5.0,), "sinks": (True,), "norms": (0.0,),
}  # fmt: skip
_SMALL = (
    *(_small(**{name: value}) for name, values in _ONE.items() for value in values),
    _small(batch=2, heads=3, length=33),
    _small(deterministic=True, heads_q=4),
    # lengths: past a tile, rows that see nothing, no queries, no keys
    _small(heads=1, length=129),
    *(_small(len_q=len_q, len_k=len_k) for len_q, len_k in ((1, 100), (33, 100), (100, 33), (0, 40), (40, 0))),
    _small(len_q=33, len_k=100, causal=False),
    # heads
    _small(heads_q=6, heads_kv=2, length=50),
    _small(heads_q=5, heads_kv=1, length=50, causal=False),
    # head and rotary dimensions
    *(_small(heads=1, length=66, head_dim=d) for d in (16, 24, 64, 80, 96, 128, 192, 256)),
    _small(head_dim=64, rotary_dim=16, heads=1),
    _small(head_dim=40, rotary_dim=26, heads=1),
    _small(head_dim=128, rotary_dim=96, heads=1, length=40),
    _small(interleaved=True, head_dim=40, rotary_dim=26, heads_q=4),
    _small(interleaved=True, head_dim=128, heads=1, length=40),
    # tables
    _small(batch=2, heads=1, table_batch=True),
    _small(full_width=True, interleaved=True),
    _small(batch=2, heads=1, head_dim=64, rotary_dim=16, full_width=True, table_batch=True, length=40),
    *(_small(table_dtype=dtype, only=(dtype,)) for dtype in (torch.float16, torch.bfloat16)),
    _small(tables="random", interleaved=True),
    # memory
    _small(layout="odd", interleaved=True, heads_q=4, batch=2, length=40),
    _small(layout="one batch", batch=2, heads=1),
    # masks, and the pairs of them that models combine
    _small(window=(20, 5), causal=False, len_q=33, len_k=100),
    _small(batch=2, kv_lens=(80, 37)),
    _small(batch=2, kv_starts=(50, 7), causal=False),
    _small(batch=2, kv_lens=(0, 37), causal=False, len_q=33),
    _small(batch=2, kv_starts=(0, 41), table_batch=True),
    # intervals of query rows
    *(_small(causal=False, intervals=kind, hides_nan=True) for kind in INTERVALS),
    _small(batch=2, heads_q=4, intervals="random", kv_starts=(3, 20), kv_lens=(80, 61), hides_nan=True, len_q=50),
    _small(intervals="random", window=(30, 9), causal=False, softcap=5.0, sinks=True, norms=1.0, hides_nan=True),
    _small(window=(20, 0), softcap=5.0, heads_q=4),
    _small(sinks=True, window=(20, 0)),
    # norms of q and k
    _small(norms=1.0, interleaved=True, head_dim=40, rotary_dim=26, heads_q=4),
    _small(norms=1.0, head_dim=256, heads=1, length=40),
    _small(norms=0.0, batch=2, kv_starts=(0, 41), window=(20, 0), sinks=True),
    _small(norms=0.0, seqlens=((50, 50), (0, 0), (30, 30))),
    _small(seqlens=((50, 50), (0, 0), (30, 30))),
    _small(seqlens=((10, 50), (40, 25)), len_q=50, len_k=75, causal=False),
    _small(seqlens=((50, 50), (7, 7), (23, 23)), heads_q=4),
    _small(seqlens=((50, 50), (30, 30)), window=(20, 0)),
    _small(deterministic=True, seqlens=((45, 45), (35, 35)), window=(20, 0), softcap=5.0, sinks=True),
)  # fmt: skip


def _large(name: str, batch: int, heads_q: int, heads_kv: int, length: int, head_dim: int, **changes) -> AttentionCheck:
    changes = {"size": "large", **changes}
    return _named(AttentionCheck(batch, heads_q, heads_kv, length, length, head_dim, name=name, **changes))


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
    _large("", 2, 8, 8, 4096, 128, causal=False),
    _large("", 2, 16, 4, 4096, 64, causal=False),
    _large("", 2, 8, 8, 4096, 96, interleaved=True),
    _large("", 2, 8, 2, 2048, 256),
    _large("", 2, 8, 2, 1000, 128, layout="odd"),
    # masks at the lengths that they are for; without sinks, because only small cases compare their gradient
    _large("", 1, 8, 2, 32768, 128, window=(1024, 0)),
    _large("", 1, 8, 4, 4096, 256, window=(1024, 0), softcap=50.0),
    _large("", 1, 16, 2, 4096, 64, window=(127, 0)),
    _large("", 2, 8, 2, 4096, 128, kv_starts=(1000, 0), kv_lens=(4096, 2049)),
    _large("", 1, 8, 2, 4096, 128, causal=False, intervals="documents"),
    _large("", 1, 8, 2, 4096, 128, causal=False, intervals="tree"),
    _large("", 2, 4, 4, 4096, 64, causal=False, intervals="blocks"),
    _large("", 1, 4, 2, 4096, 256, intervals="random", hides_nan=True),
    *(_large(f"64 packed sequences of 16 to 4096 tokens, {words}", 1, heads, 2, sum(_MIXED), head_dim,
             seqlens=tuple(zip(_MIXED, _MIXED)), window=window)
        for words, heads, head_dim, window in (
            ("D 128", 8, 128, None), ("window", 8, 128, (256, 0)), ("D 256", 4, 256, None)
        )
    ),
    # norms; only small cases compare the gradients of their weights
    _large("", 2, 32, 8, 4096, 128, norms=0.0),
    _large("", 2, 8, 2, 2048, 256, norms=1.0),
    # 32-bit offsets: across heads, and within one head with rows that are 16640 elements apart
    _large("q, k, v of 2**31 + 2**24 elements", 129, 256, 256, 512, 128, size="huge", only=(torch.bfloat16,)),
    _large("128K positions in tensors of 2**31 + 2**25 elements", 1, 4, 2, 131072, 128, size="huge",
           memory=("far", "far", "far", "bnhd"), only=(torch.bfloat16, torch.float16)),
)  # fmt: skip


def _rotation(name, batch=2, heads=(3, 1), length=37, head_dim=32, rotary_dim=32, **changes) -> RopeCheck:
    sizes = batch, *heads, length, max(length, 1), head_dim
    return _named(RopeCheck(*sizes, rotary_dim=rotary_dim, name=name, **changes))


def step(name, heads, len_q, capacity, head_dim, lengths, **changes) -> DecodeCheck:
    """Return a generation step of ``len_q`` tokens after ``lengths`` in caches of ``capacity`` rows."""
    return _named(DecodeCheck(len(lengths), *heads, len_q, capacity, head_dim, lengths=lengths, name=name, **changes))


def in_dtype(check: Call, dtype: torch.dtype) -> Call:
    """Return a case in a dtype, which the weights of its norms follow if they are not float32."""
    norm_dtype = torch.float32 if check.norm_dtype == torch.float32 else dtype
    return replace(check, dtype=dtype, norm_dtype=norm_dtype)


def _corope(batch, heads_q, heads_kv, length, head_dim, **changes) -> CoRopeCheck:
    return _named(CoRopeCheck(batch, heads_q, heads_kv, length, length, head_dim, **changes))


ATTENTION = _SMALL + _LARGE
ROTATION = (
    _rotation(""),
    _rotation("", interleaved=True),
    _rotation("", form="bshd", head_dim=24, rotary_dim=10),
    _rotation("", form="sbhd", head_dim=7, rotary_dim=6, interleaved=True),
    _rotation("", form="thd", batch=1, length=33, seqlens=((11, 11),) * 3),
    _rotation("", positions="ids", tables="random"),
    _rotation("", positions="two ids", interleaved=True, rotary_dim=24),
    _rotation("", full_width=True, tables="random"),
    _rotation("", out="in place", interleaved=True, rotary_dim=16),
    _rotation("", length=1, tables="random"),
    _rotation("", length=0),
    _rotation("", norms=0.0, norm_dtype=torch.float16),
    _rotation("", form="bshd", head_dim=24, rotary_dim=10, interleaved=True, norms=1.0),
    _rotation("", form="thd", batch=1, length=33, seqlens=((11, 11),) * 3, norms=0.0),
    _rotation("", positions="two ids", rotary_dim=24, norms=0.0, norm_dtype=torch.float16, out="in place", length=11),
    _rotation("", length=0, norms=0.0),
    *(replace(check, size="large") for check in (
        _rotation("rotation Wide-1K", 10, (96, 8), 1024, 128, 128, form="bshd"),
        _rotation("rotation Llama3-8B-4K, interleaved", 2, (32, 8), 4096, 128, 128, interleaved=True),
        _rotation("", 2, (32, 8), 4096, 128, 128, form="bshd", norms=0.0, norm_dtype=torch.float16),
        _rotation("", 2, (16, 8), 1000, 256, 256, interleaved=True, norms=1.0),
        _rotation("", 1, (4, 4), 131072, 128, 128, form="bshd", positions="ids"),
    )),
)  # fmt: skip
DECODE = (
    step("", (4, 2), 1, 70, 32, (37, 0, 69)),
    step("", (2, 1), 1, 200, 16, (190,)),
    step("", (2, 2), 1, 20, 16, (0, 3, 19, 16, 17, 1, 5)),
    step("", (4, 2), 1, 70, 32, (37, 64), rotated=False),
    step("", (3, 1), 2, 70, 24, (37, 64), rotated=False, rotary_dim=10, interleaved=True, layout="odd"),
    step("", (3, 1), 2, 70, 24, (37, 64), rotary_dim=10, layout="odd"),
    step("", (2, 1), 1, 40, 16, (33, 20), rotary_dim=12, interleaved=True, tables="random", table_batch=True,
        layout="bhnd"),
    step("", (2, 1), 3, 40, 16, (33, 20), tables="random", full_width=True),
    step("", (2, 1), 3, 100, 16, (90, 10), window=(20, 0)),
    step("", (2, 1), 5, 100, 16, (70, 10), window=(20, 2), causal=False),
    step("", (4, 2), 2, 70, 16, (50, 0), softcap=2.0, sinks=True, rotated=False),
    step("", (4, 2), 1, 70, 16, (60, 3), window=(32, 0), sinks=True),
    step("", (5, 1), 17, 40, 16, (20, 0), layout="bhnd"),
    step("", (8, 4), 1, 40, 16, (33, 20, 7, 39), softmax_scale=-0.7),
    step("", (4, 2), 2, 70, 16, (50, 1, 0), append=False, layout="one batch"),
    step("", (2, 1), 3, 70, 16, (50, 2), append=False, causal=False, window=(20, 1), rotated=False),
    step("", (2, 1), 3, 33, 16, (31, 33, 40, 20)),
    step("", (4, 2), 1, 64, 32, (37, 0, 63), page_size=16),
    step("", (4, 2), 5, 96, 16, (70, 3, 91), page_size=24, window=(20, 0), sinks=True, layout="bhnd"),
    step("", (4, 2), 2, 64, 24, (37, 60), page_size=16, rotated=False, rotary_dim=10, layout="odd"),
    step("", (2, 1), 2, 96, 16, (50, 1, 0), page_size=32, append=False, softcap=2.0),
    step("", (2, 1), 3, 32, 16, (31, 33, 40, 20), page_size=16),
    step("", (8, 1), 33, 96, 16, (50,), page_size=16, window=(60, 0)),
    step("", (8, 1), 33, 128, 16, (70, 0), page_size=32),
    step("", (8, 1), 33, 100, 16, (80,)),
    step("", (8, 1), 33, 64, 16, (64,), append=False),
    step("", (4, 2), 2, 70, 32, (37, 0), float8="head"),
    step("", (4, 2), 2, 70, 16, (37, 64), rotated=False, float8="tensor"),
    step("", (2, 1), 1, 48, 16, (37, 4), page_size=16, float8="tensor", softcap=2.0),
    step("", (4, 2), 2, 70, 24, (37, 0), rotary_dim=10, norms=0.0),
    step("", (4, 2), 2, 64, 16, (37, 60), page_size=16, rotated=False, interleaved=True, norms=1.0),
    step("", (4, 2), 2, 70, 32, (37, 0), float8="head", norms=0.0),
    *(replace(check, size="large") for check in (
        step("decode Llama3-8B, 4096", (32, 8), 1, 4096, 128, (4095, 1, 2048, 777)),
        step("", (32, 8), 1, 4096, 128, (4095, 1, 2048, 777), norms=0.0),
        step("", (32, 8), 1, 4096, 128, (4095, 1, 2048, 777), rotated=False),
        step("", (32, 8), 1, 131072, 128, (131071,)),
        step("decode 64 sequences", (32, 8), 4, 1024, 128, tuple(range(5, 965, 15))),
        step("", (16, 8), 1, 8192, 256, (8000, 5000), window=(4095, 0), softcap=50.0),
        step("", (64, 8), 1, 4096, 64, (4000, 100), window=(128, 0), sinks=True),
        step("", (16, 1), 40, 3000, 80, (2960, 1), rotary_dim=32),
        *(step("", (32, 8), 1, 4096, 128, (4090, 1, 2048, 777), page_size=page_size, **changes)
            for page_size in (16, 64, 128) for changes in ({}, {"rotated": False}, {"float8": "head"})
        ),
        *(step("", (32, 8), 4, 4096, 128, (4090, 1, 2048, 777), page_size=page_size, window=(1000, 0), sinks=True)
            for page_size in (16, 64, 128)
        ),
        step("", (16, 8), 3, 4080, 64, (4000, 5), rotated=False, float8="tensor", page_size=48, interleaved=True),
        *(step("", (8, 2), 300, 4096, 128, lengths, page_size=page_size, **changes)
            for lengths, page_size, changes in (
                ((3000, 0), 16, {}), ((3000, 0), 128, {"window": (700, 0)}), ((3000, 3700), 128, {"float8": "head"}),
                ((3000, 3700), 64, {"float8": "head", "window": (700, 0)}),
            )
        ),
    )),
)  # fmt: skip
COROPE = (
    _corope(1, 3, 1, 35, 32),
    _corope(1, 1, 1, 33, 64),
    _corope(2, 2, 1, 1, 32),
    _corope(1, 32, 8, 1024, 128, size="large"),
    _corope(1, 16, 1, 1000, 64, size="large"),
    _corope(1, 4, 1, 8192, 128, size="large"),
)


def _latent(name: str, heads: int, length: int, widths: tuple[int, int, int], **changes) -> LatentCheck:
    """Return a case of DN, R and DV columns; as many queries as keys but for the changes."""
    nope, rope, value = widths
    fields = {"len_q": length, "len_k": length, "head_dim": rope, "nope": nope, "value": value, "interleaved": True}
    fields |= {"batch": 1, "heads_q": heads, "variants": (("triton", "auto"),)} | changes
    return _named(LatentCheck(name=name, heads_kv=heads, **fields))


_DEEPSEEK = (128, 64, 128)
LATENT = (
    _latent("", 3, 70, (32, 16, 48)),
    _latent("", 5, 66, _DEEPSEEK, tables="random"),
    _latent("", 2, 40, (48, 48, 80), softmax_scale=-0.3, interleaved=False),
    _latent("", 2, 70, (32, 16, 32), causal=False, lse_gradient=True,
        memory=("odd", "offset", "odd", "columns", "wide", "bnhd")),
    _latent("", 2, 75, (32, 16, 32), batch=2, len_q=40, window=(20, 3), kv_starts=(0, 33), kv_lens=(75, 60),
        deterministic=True),
    _latent("", 2, 40, (16, 16, 16), len_q=70, form="bshd"),
    _latent("", 2, 80, (32, 16, 32), seqlens=((50, 50), (0, 0), (30, 30))),
    _latent("", 2, 75, (32, 16, 32), len_q=50, seqlens=((10, 50), (40, 25)), window=(20, 0)),
    _latent("DeepSeek-V2-Lite-4K", 16, 4096, _DEEPSEEK, tables="yarn", size="large", deterministic=True),
    _latent("DeepSeek-V3-1K", 128, 1024, _DEEPSEEK, size="large"),
    _latent("MLA, odd lengths, padded", 16, 1111, _DEEPSEEK, batch=3, len_q=777, kv_starts=(0, 500, 1000),
        kv_lens=(1111, 900, 1050), lse_gradient=True, size="large"),
    _latent("MLA, 9 packed sequences", 16, 5000, _DEEPSEEK, size="large",
        seqlens=tuple((n, n) for n in (1000, 1, 999, 0, 64, 65, 1500, 371, 1000))),
)  # fmt: skip
CHECKS = ATTENTION + LATENT + ROTATION + DECODE + COROPE
