"""The cases of ``python -m verification``: data, and drawn calls. Small ones are named after their fields.

Small ones fit Triton's interpreter, large ones need a GPU, and of these huge ones are alone on it. The command runs
each in every dtype that it was asked for, and those of attention by every backend and strategy.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from verification import strategies
from verification.attention import AttentionCheck, CoRopeCheck, LatentCheck
from verification.calls import Call, Machine
from verification.decode import DecodeCheck
from verification.rotation import RopeCheck
from verification.testing.cases import INTERVALS

SIZES = ("small", "large", "huge")

# 80 queries over 80 keys: several tiles of every configuration in use for the interpreter, with a tail.
_BASE = AttentionCheck(1, 2, 2, 80, 80, 32)


def _small(heads: int = 2, length: int = 80, **changes) -> AttentionCheck:
    """Return a case of as many queries as keys, and of as many heads of both, but for the changes."""
    sizes = {"heads_q": heads, "heads_kv": heads, "len_q": length, "len_k": length}
    return replace(_BASE, **(sizes | changes))


# Cases of one feature: its field or argument, and the values.
_ONE = {
    "causal": (True, False), "length": (1, 63), "batch": (0,), "rotary_dim": (2,), "interleaved": (True,),
    "full_width": (True,), "tables": ("yarn", "none"), "extra_rows": (9,), "layout": ("bhnd", "odd"),
    "window": ((20, 0),), "softmax_scale": (0.0, -0.3, 1.0), "softcap": (5.0,), "sinks": (True,),
    "norms": (0.0,),
}  # fmt: skip
_SMALL = (
    *(_small(**{name: value}) for name, values in _ONE.items() for value in values),
    *(_small(len_q=len_q, len_k=len_k) for len_q, len_k in ((1, 100), (33, 100), (100, 33), (0, 40), (40, 0))),
    *(_small(heads=1, length=66, head_dim=d) for d in (16, 24, 64, 80, 96, 128, 192, 256)),
    *(_small(table_dtype=dtype, only=(dtype,)) for dtype in (torch.float16, torch.bfloat16)),
    *(_small(causal=False, intervals=kind, hides_nan=True) for kind in INTERVALS),
    _small(heads_q=6, heads_kv=2, length=50),
    _small(batch=2, kv_lens=(80, 37)),
    _small(len_q=100, len_k=33, causal=False, tables="none"),
    _small(seqlens=((50, 50), (0, 0), (30, 30))),
)


def _large(name: str, batch: int, heads_q: int, heads_kv: int, length: int, head_dim: int, **changes) -> AttentionCheck:
    changes = {"size": "large", **changes}
    return AttentionCheck(batch, heads_q, heads_kv, length, length, head_dim, title=name, **changes)


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
    return RopeCheck(*sizes, rotary_dim=rotary_dim, title=name, **changes)


def step(name, heads, len_q, capacity, head_dim, lengths, **changes) -> DecodeCheck:
    """Return a generation step of ``len_q`` tokens after ``lengths`` in caches of ``capacity`` rows."""
    return DecodeCheck(len(lengths), *heads, len_q, capacity, head_dim, lengths=lengths, title=name, **changes)


def in_dtype(check: Call, dtype: torch.dtype) -> Call:
    """Return a case in a dtype, which its tables and weights follow if they are not float32."""
    others = [x for x in ("table_dtype", "sinks_dtype", "norm_dtype") if getattr(check, x) != torch.float32]
    return replace(check, title=check.name, dtype=dtype, **dict.fromkeys(others, dtype))


def drawn_cases() -> list[Call]:
    """Return legal calls of every family as small cases, the same in each run."""
    machine = Machine("cpu", "interpreter", ("float16", "float32"), ("reference", "triton"))
    found = []
    for name, count in _DRAWN.items():
        family = strategies.FAMILIES[name]
        for i in range(count):
            prototype = strategies.draw(family.prototypes(machine), "case", name, i)
            call = strategies.draw(family.calls_of(prototype, machine), "case", name, i)
            call = call.legal if isinstance(call, strategies.IllegalCheck) else call
            if call.dtype != torch.float64:
                backend = "auto" if name.startswith(("rope", "corope")) else "triton"
                found.append(replace(call, variants=((backend, "auto"),)))
    return found


ATTENTION = _SMALL + _LARGE
ROTATION = (
    _rotation(""),
    _rotation("", positions="two ids", interleaved=True, rotary_dim=24),
    _rotation("", form="thd", batch=1, length=33, seqlens=((11, 11),) * 3, norms=0.0),
    *(replace(check, size="large") for check in (
        _rotation("rotation Wide-1K", 10, (96, 8), 1024, 128, 128, form="bshd"),
        _rotation("rotation Llama3-8B-4K, interleaved", 2, (32, 8), 4096, 128, 128, interleaved=True),
        _rotation("", 2, (32, 8), 4096, 128, 128, form="bshd", norms=0.0, norm_dtype=torch.float16),
        _rotation("", 2, (16, 8), 1000, 256, 256, interleaved=True, norms=1.0),
        _rotation("", 1, (4, 4), 131072, 128, 128, form="bshd", positions="ids"),
    )),
)  # fmt: skip
# The number of drawn small cases, by family.
_DRAWN = {"attention": 20, "packed": 10, "mla": 5, "decode": 15, "rope": 4, "rope of several": 6, "corope": 2,
          "write": 4, "pairs": 3}  # fmt: skip
DECODE = (
    step("", (4, 2), 1, 70, 32, (37, 0, 69)),
    step("", (8, 1), 33, 96, 16, (50,), page_size=16, window=(60, 0)),
    step("", (8, 1), 33, 128, 16, (70, 0), page_size=32),
    step("", (8, 1), 33, 100, 16, (80,)),
    step("", (8, 1), 33, 64, 16, (64,), append=False),
    step("", (2, 1), 1, 48, 16, (37, 4), page_size=16, float8="tensor", softcap=2.0),
    step("", (4, 2), 2, 70, 16, (37, 64), rotated=False, float8="tensor"),
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
COROPE = tuple(
    CoRopeCheck(batch, heads_q, heads_kv, length, length, head_dim, size="small" if length < 100 else "large")
    for batch, heads_q, heads_kv, length, head_dim in (
        (1, 3, 1, 35, 32), (1, 32, 8, 1024, 128), (1, 16, 1, 1000, 64), (1, 4, 1, 8192, 128)
    )
)  # fmt: skip


def _latent(name: str, heads: int, length: int, widths: tuple[int, int, int], **changes) -> LatentCheck:
    """Return a case of DN, R and DV columns; as many queries as keys but for the changes."""
    nope, rope, value = widths
    fields = {"len_q": length, "len_k": length, "head_dim": rope, "nope": nope, "value": value, "interleaved": True}
    fields |= {"batch": 1, "heads_q": heads, "variants": (("triton", "auto"),)} | changes
    return LatentCheck(title=name, heads_kv=heads, **fields)


_DEEPSEEK = (128, 64, 128)
LATENT = (
    _latent("", 3, 70, (32, 16, 48)),
    _latent("", 5, 66, _DEEPSEEK, tables="random"),
    _latent("DeepSeek-V2-Lite-4K", 16, 4096, _DEEPSEEK, tables="yarn", size="large", deterministic=True),
    _latent("DeepSeek-V3-1K", 128, 1024, _DEEPSEEK, size="large"),
    _latent("MLA, odd lengths, padded", 16, 1111, _DEEPSEEK, batch=3, len_q=777, kv_starts=(0, 500, 1000),
        kv_lens=(1111, 900, 1050), lse_gradient=True, size="large"),
    _latent("MLA, 9 packed sequences", 16, 5000, _DEEPSEEK, size="large",
        seqlens=tuple((n, n) for n in (1000, 1, 999, 0, 64, 65, 1500, 371, 1000))),
)  # fmt: skip
CHECKS = ATTENTION + LATENT + ROTATION + DECODE + COROPE
