"""Hypothesis strategies of calls over the whole contract, for tests and for ``python -m verification --random``.

A call is drawn in two steps: a prototype, which fixes what compiled kernels depend on, and a call of this prototype,
which adds sizes and data. A run makes many calls of a prototype, because each prototype compiles for seconds on a GPU.
``calls(machine)`` does both steps. The first of several choices is the simplest, to which a failing call shrinks.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from verification.attention import WEIGHTS, AttentionCheck
from verification.calls import DTYPES, Machine
from verification.corope import NAMES, CoRopeCheck
from verification.decode import DecodeCheck, WriteCheck
from verification.memory import SHARED
from verification.refusals import MUTATIONS, IllegalCheck
from verification.rotation import NORMS, RopeCheck

KINDS = (AttentionCheck, DecodeCheck, WriteCheck, RopeCheck, CoRopeCheck, IllegalCheck)
Draw = Callable[[st.SearchStrategy], Any]

# Beyond these a float64 reference takes seconds, or Triton's interpreter does.
MOST_SCORES = 40_000_000  # of all heads together, on a GPU
MOST_TILES = 14  # programs times the tiles that each goes through, in the interpreter
TILE = 32
ILLEGAL = 1 / 6  # of all calls


class UniformProvider(providers.HypothesisProvider):
    """Draw each choice by its weight alone. Hypothesis also draws constants that it finds in the loaded modules, and
    repeats parts of earlier examples: then the calls of a seed depend on what the process did before."""

    def _maybe_draw_constant(self, *args: Any, **options: Any) -> None:
        return None


providers.AVAILABLE_PROVIDERS["uniform"] = f"{__name__}.UniformProvider"
SETTINGS = settings(
    backend="uniform", database=None, deadline=None, max_examples=2, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
)  # fmt: skip


def draw(strategy: st.SearchStrategy, *key: Any) -> Any:
    """Return one value of a strategy: the same for equal keys, which are numbers and strings."""
    drawn = []

    @seed(" ".join(map(str, key)))
    @SETTINGS
    @given(strategy)
    def collect(value: Any) -> None:
        drawn.append(value)  # first the simplest one, then one at random

    collect()
    return drawn[-1]


def minimise(strategy: st.SearchStrategy, fails: Callable[[Any], bool], *key: Any) -> Any | None:
    """Return the simplest value that hypothesis finds to fail, from the one that ``draw`` returns; None: none fails."""
    found = []

    @seed(" ".join(map(str, key)))
    @settings(SETTINGS, phases=[Phase.generate, Phase.shrink])
    @given(strategy)
    def shrink(value: Any) -> None:
        if fails(value):
            found.append(value)
            raise AssertionError

    try:
        shrink()
    except Exception:
        if not found:
            raise
    return found[-1] if found else None  # hypothesis runs the simplest one last


def pick(draw: Draw, weights: Mapping[Any, float]) -> Any:
    """Draw one of the keys, by weight in hundredths of all, or a value of the key if it is a strategy."""
    total = sum(weights.values())
    borders = list(itertools.accumulate(max(1, round(100 * weight / total)) for weight in weights.values()))
    value = list(weights)[bisect(borders, draw(_below(borders[-1])))]
    return draw(value) if isinstance(value, st.SearchStrategy) else value


@functools.cache
def _below(count: int) -> st.SearchStrategy:
    return st.integers(0, count - 1)


def chance(draw: Draw, probability: float) -> bool:
    return draw(_below(100)) >= 100 * (1 - probability)


def one_of(draw: Draw, *values: Any) -> Any:
    return pick(draw, dict.fromkeys(values, 1))


def _number(draw: Draw, least: int, most: int) -> int:
    return draw(st.integers(least, max(least, most)))


# Sizes and masks, which several families draw.


def _head_dim(draw: Draw, machine: Machine) -> int:
    """Mostly one of models; a few percent are served by the reference only."""
    # Kernels branch on the power of two that holds the columns, and on columns that only pad it.
    on_gpu = {
        16: 7, 24: 5, 32: 8, 40: 4, 64: 14, 72: 4, 80: 6, 96: 9, 120: 3, 128: 18, 160: 4, 192: 5, 256: 9, 8: 0.7,
        36: 0.7, 264: 0.4,
    }  # fmt: skip
    interpreted = {
        16: 30, 32: 22, 24: 10, 64: 8, 80: 3, 96: 3, 40: 3, 128: 3, 256: 1, 8: 1, 20: 1, 264: 0.5, 2: 0.5,
    }  # fmt: skip
    return pick(draw, on_gpu if machine.has_gpu else interpreted)


def _rotary_dim(draw: Draw, head_dim: int) -> int:
    if head_dim == 2 or not chance(draw, 0.35):
        return head_dim
    return pick(draw, {head_dim // 4 * 2 or 2: 2, st.integers(1, head_dim // 2).map(lambda x: 2 * x): 2, 2: 0.5})


def _length(draw: Draw, most: int) -> int:
    """From 1 to ``most``, short ones as likely as long ones, next to a tile's border now and then."""
    # One range within the other, so that a length shrinks across their borders.
    length = _number(draw, 1, pick(draw, {1: 1, 16: 3, 48: 5, most: 6}))
    if chance(draw, 0.15):
        length = one_of(draw, 32, 64, 128, 256, 512) + one_of(draw, -1, 0, 1)
    return max(1, min(length, most))


def _group(draw: Draw, machine: Machine, probability: float) -> int:
    """Query heads of one key head: more than one with this probability."""
    if not chance(draw, probability):
        return 1
    return pick(draw, {2: 4, 3: 2, 4: 4, 5: 1, 7: 1, 8: 2, 16: 0.5} if machine.has_gpu else {2: 5, 3: 2, 4: 1, 5: 0.5})


def _heads(draw: Draw, machine: Machine) -> tuple[int, int]:
    """(B, HKV)."""
    if machine.has_gpu:
        return pick(draw, {1: 6, 2: 5, 3: 2, 4: 1, 0: 0.15}), pick(draw, {1: 4, 2: 5, 3: 2, 4: 2, 8: 2})
    return pick(draw, {1: 10, 2: 5, 3: 1, 0: 0.2}), pick(draw, {1: 6, 2: 3, 3: 1})


def _fitted(machine: Machine, batch: int, heads_kv: int, group: int, len_q: int, len_k: int) -> tuple[int, ...]:
    """Return (B, HKV, NQ, NK), made smaller until their scores take a reasonable time."""

    def is_affordable() -> bool:
        if machine.has_gpu:
            return batch * heads_kv * group * len_q * len_k <= MOST_SCORES
        return batch * heads_kv * group * -(-len_q // TILE) * -(-len_k // TILE) <= MOST_TILES

    while not is_affordable():
        if batch > 1:
            batch -= 1
        elif heads_kv > 1:
            heads_kv -= 1
        else:
            len_q, len_k = (-(-n * 3 // 4) for n in (len_q, len_k))
    return batch, heads_kv, len_q, len_k


def _scale(draw: Draw, head_dim: int) -> float | None:
    usual = head_dim**-0.5
    one = {1: 0.5} if head_dim <= 64 else {}  # an int; where heads are wide, only the largest score would count
    return pick(draw, {None: 12, usual: 2, 0.0: 1, -usual: 1, -3 * usual: 0.5, 2.5 * usual: 1} | one)


def _window(draw: Draw, prototype: tuple[int, int] | None, length: int) -> tuple[int, int] | None:
    """Draw sizes for the sides that the prototype bounds; -1 stands for unbounded."""
    if prototype in (None, (0, 0)):
        return prototype
    size = {0: 1, 1: 1, st.integers(0, max(1, length)): 6, st.integers(0, 20): 3, 2**31 - 1: 0.3}
    return tuple(-1 if side < 0 else pick(draw, size) for side in prototype)


_WINDOWS = {None: 9, (-1, -1): 3, (7, -1): 4, (-1, 7): 1.5, (7, 7): 2, (0, 0): 0.7}


def _bounds(draw: Draw, batch: int, length: int, *, upper: bool) -> tuple[int, ...]:
    """``kv_lens`` (``upper``) or ``kv_starts`` of each batch entry; some lie outside the keys."""
    whole, other = (length, 0) if upper else (0, length)
    some = st.integers(length // 2, length) if upper else st.integers(0, length // 2)
    weights = {whole: 3.4, other: 0.4, st.integers(0, length): 5, some: 6, length + 3: 0.3, -2: 0.3}
    return tuple(pick(draw, weights) for _ in range(batch))


# A prototype has None where its calls have no such bound.
_BOUNDS = ("window", "kv_starts", "kv_lens", "seqlens", "lengths", "norms")
_MEMORY = {
    "bnhd": 10, "bhnd": 5, "nbhd": 2, "columns": 2, "odd": 3, "offset": 3, "wide": 2, "fused": 3, "skipped": 2,
    "one batch": 1, "one head": 1, "one token": 0.5,
}  # fmt: skip
_ALONE = {name: weight for name, weight in _MEMORY.items() if name not in SHARED}
_GRADIENT = {**_MEMORY, "one number": 3}  # ``out.sum()`` expands the gradient of o from one number
_TABLE_MEMORY = {"plain": 8, "columns": 1, "odd": 1}
_SEED = st.integers(1, 10**6)


def _some(draw: Draw, names: tuple[str, ...]) -> tuple[str, ...]:
    """Mostly all of the names."""
    return names if not chance(draw, 0.3) else tuple(name for name in names if chance(draw, 0.5))


def _common(draw: Draw, machine: Machine) -> dict[str, Any]:
    """What the prototypes of attention and of a step have in common."""
    dtype = DTYPES[one_of(draw, *reversed(machine.dtypes))]
    head_dim = _head_dim(draw, machine)
    masks = chance(draw, 0.7)  # the plain call is what most models make
    return {
        "dtype": dtype,
        "head_dim": head_dim,
        "rotary_dim": _rotary_dim(draw, head_dim),
        "interleaved": chance(draw, 0.4),
        "table_dtype": dtype if chance(draw, 0.2) else torch.float32,
        "full_width": chance(draw, 0.35),
        "window": pick(draw, _WINDOWS) if masks else None,
        "softcap": one_of(draw, 2.0, 15.0, 50.0) if masks and chance(draw, 0.25) else 0.0,
        "sinks": masks and chance(draw, 0.3),
        "sinks_dtype": dtype if chance(draw, 0.3) else torch.float32,
        "kv_starts": () if masks and chance(draw, 0.33) else None,
        "norm_dtype": dtype if chance(draw, 0.4) else torch.float32,
        "table_memory": pick(draw, _TABLE_MEMORY),
    }


# Families: a prototype, and a call of it.


def _attention_prototype(draw: Draw, machine: Machine, *, packed: bool) -> AttentionCheck:
    common = _common(draw, machine)
    if packed:
        common["kv_starts"] = None
    return AttentionCheck(
        1, 1, 1, 1, 1, **common,
        causal=not chance(draw, 0.4), norms=0.0 if chance(draw, 0.45) else None,
        table_batch=not packed and chance(draw, 0.2), seqlens=() if packed else None,
        kv_lens=() if not packed and chance(draw, 0.2) else None,
        memory=tuple(pick(draw, _GRADIENT if name == "do" else _MEMORY) for name in ("q", "k", "v", "do")),
        leading_one=chance(draw, 0.2), deterministic=chance(draw, 0.12), variants=_variants(draw, machine),
    )  # fmt: skip


def _variants(draw: Draw, machine: Machine) -> tuple[tuple[str, str], ...]:
    """One or two: to compile a prototype for more would leave time for fewer prototypes."""
    on_gpu, weights = machine.has_gpu, {}
    if "triton" in machine.backends:
        weights |= {("triton", "inline"): 3, ("triton", "prepass"): 3, ("triton", "auto"): 1}
        weights |= {("auto", "auto"): 2 if on_gpu else 0.5, ("auto", "inline"): 0.5, ("auto", "prepass"): 0.5}
    if "hopper" in machine.backends:
        weights |= {("hopper", "auto"): 5, ("hopper", "prepass"): 0.5, ("hopper", "inline"): 0.2}
    elif weights:
        weights |= {("hopper", "auto"): 0.2}  # must be refused
    found = [pick(draw, weights)] if weights else []
    if found and on_gpu and chance(draw, 0.15):
        found.append(pick(draw, weights))
    if "reference" in machine.backends and (not found or chance(draw, 0.3 if on_gpu else 0.5)):
        found.append(("reference", "auto"))
    return tuple(dict.fromkeys(found))


def _attention_call(draw: Draw, prototype: AttentionCheck, machine: Machine) -> AttentionCheck:
    p = prototype
    most = pick(draw, {600: 14, 1024: 1, 3000: 1}) if machine.has_gpu else 90
    group, (batch, heads_kv) = _group(draw, machine, 0.5), _heads(draw, machine)
    sizes: dict[str, Any] = {}
    if p.seqlens is None:
        len_k = _length(draw, most)
        kind = pick(draw, {"same": 9, "fewer": 5, "one": 2, "more": 3, "no keys": 0.3, "no queries": 0.3})
        len_q = {"same": len_k, "one": 1, "no queries": 0}.get(kind)
        if len_q is None:
            len_q = _number(draw, 1, len_k) if kind == "fewer" else _length(draw, most)
        len_k = 0 if kind == "no keys" else len_k
        batch, heads_kv, len_q, len_k = _fitted(machine, batch, heads_kv, group, len_q, len_k)
        if not p.causal and p.kv_lens is None:
            len_q = min(len_q, len_k)  # more queries than keys are refused then: ``refusals``
        if p.kv_starts is not None:
            sizes["kv_starts"] = _bounds(draw, batch, len_k, upper=False)
        if p.kv_lens is not None:
            sizes["kv_lens"] = _bounds(draw, batch, len_k, upper=True)
        longest = len_k
    else:
        seqlens = []
        more = st.integers(4, 12) if machine.has_gpu else 3
        for _ in range(pick(draw, {1: 2, 2: 5, 3: 3, more: 2, 0: 0.3})):
            len_k = _length(draw, most)
            len_q = pick(draw, {len_k: 6, st.integers(0, len_k): 2, 1: 1, st.integers(1, most): 1})
            seqlens.append(pick(draw, {(len_q, len_k): 12, (0, len_k): 0.5, (len_q, 0): 0.5, (0, 0): 0.5}))
        tails = [pick(draw, {0: 5, 1: 1, st.integers(1, 20): 1}) for _ in range(2)]

        def total(i: int) -> int:
            return tails[i] + sum(pair[i] for pair in seqlens)

        while len(seqlens) > 1 and _fitted(machine, 1, 1, group, total(0), total(1))[2:] != (total(0), total(1)):
            seqlens.pop()
        batch, heads_kv, *_ = _fitted(machine, 1, heads_kv, group, total(0), total(1))
        len_q, len_k = total(0), total(1)
        ends = [max((pair[i] for pair in seqlens), default=0) for i in range(2)]
        more_q, more_k = (pick(draw, {0: 4, st.integers(0, 50): 1}) for _ in range(2))
        # The reference takes its tables from the case: there must be as many rows as max_seqlen_k asks for.
        sizes = {"seqlens": tuple(seqlens), "max_seqlens": (ends[0] + more_q, min(ends[1] + more_k, len_k))}
        longest = max(ends)
    norms = {}
    if p.norms is not None:
        norms = {"norms": pick(draw, {0.0: 3, 1.0: 3, 0.5: 1}), "norm_eps": _norm_eps(draw)}
    return replace(
        p, **sizes, **norms, batch=batch, heads_q=heads_kv * group, heads_kv=heads_kv, len_q=len_q, len_k=len_k,
        window=_window(draw, p.window, longest), softmax_scale=_scale(draw, p.head_dim),
        tables=pick(draw, {"rope": 4, "yarn": 2, "random": 4}),
        extra_rows=pick(draw, {0: 4, 1: 1, st.integers(0, 40): 1}), seed=draw(_SEED),
        wanted=_some(draw, ("q", "k", "v", *WEIGHTS)), return_lse=chance(draw, 0.5),
        infers_rotary_dim=not chance(draw, 0.4), hides_nan=chance(draw, 0.5),
        bshd=p.seqlens is None and chance(draw, 0.3),
    )  # fmt: skip


def _norm_eps(draw: Draw) -> float:
    return pick(draw, {1e-6: 4, 1e-5: 2, 0.0: 1, 1e-2: 1})


def _page_size(draw: Draw) -> int | None:
    return pick(draw, {None: 6, 16: 4, 32: 1, 64: 1, st.integers(17, 47): 1})


def _step_backends(draw: Draw, machine: Machine) -> tuple[str, ...]:
    weights = {"auto": 5.0 if machine.has_gpu else 0.5, "hopper": 0.2}
    if "triton" in machine.backends:
        weights = {"triton": 5.0} | weights
    found = [pick(draw, weights)]
    if "reference" in machine.backends and chance(draw, 0.3):
        found.append("reference")
    return tuple(found)


def _decode_prototype(draw: Draw, machine: Machine) -> DecodeCheck:
    append, page_size = chance(draw, 0.7), _page_size(draw)
    caches = [pick(draw, _ALONE if append or page_size is not None else _MEMORY) for _ in range(2)]
    return DecodeCheck(
        "", (_group(draw, machine, 0.7), 1),
        pick(draw, {1: 10, st.integers(2, 8): 4, st.integers(9, 40 if machine.has_gpu else 20): 1}), 1,
        lengths=(), **_common(draw, machine),
        causal=not chance(draw, 0.25), rotated=not chance(draw, 0.4), append=append, page_size=page_size,
        float8=pick(draw, {None: 7, "tensor": 1, "head": 2}), table_batch=chance(draw, 0.2), layout=caches[0],
        v_layout=caches[1], memory=tuple(pick(draw, _MEMORY) for _ in range(3)),
        norms=one_of(draw, 0.0, 1.0) if chance(draw, 0.3) else None, norm_eps=one_of(draw, 1e-6, 1e-2),
        backends=_step_backends(draw, machine),
    )  # fmt: skip


def _decode_call(draw: Draw, prototype: DecodeCheck, machine: Machine) -> DecodeCheck:
    p, on_gpu = prototype, machine.has_gpu
    batch, heads_kv = _heads(draw, machine)
    if on_gpu and chance(draw, 0.15):
        batch = _number(draw, 5, 40)
    most = pick(draw, {700: 10, 5000: 3, 20000: 1}) if on_gpu else 70
    capacity = _number(draw, p.len_q, pick(draw, {most: 2, 40: 1}))
    capacity = -(-capacity // (p.page_size or 1)) * (p.page_size or 1)
    group = p.heads[0]
    # In the interpreter each row of the output has a program of its own.
    while batch * heads_kv > 1 and (
        heads_kv * batch * capacity > 300_000 if on_gpu else batch * heads_kv * group * p.len_q > 16
    ):
        batch, heads_kv = (batch - 1, heads_kv) if batch > 1 else (batch, heads_kv - 1)
    free = capacity - p.len_q if p.append else capacity
    lengths = tuple(
        pick(draw, {st.integers(0, free): 8, st.integers(free // 2, free): 6, free: 2, 0: 1, capacity: 0.5,
                    capacity + 2: 0.2, -1: 0.2, max(0, capacity - 1): 0.3})
        for _ in range(batch)
    )  # fmt: skip
    starts = p.kv_starts
    if starts is not None:
        starts = tuple(pick(draw, {0: 3, st.integers(0, max(0, n)): 5, n + 1: 0.4, n + p.len_q + 3: 0.2, -2: 0.2})
                       for n in lengths)  # fmt: skip
    return replace(
        p, heads=(heads_kv * group, heads_kv), capacity=capacity, lengths=lengths, kv_starts=starts,
        window=_window(draw, p.window, capacity), softmax_scale=_scale(draw, p.head_dim),
        random_tables=not chance(draw, 0.5), extra_rows=pick(draw, {0: 4, 1: 1, st.integers(0, 40): 1}),
        return_lse=chance(draw, 0.5), infers_rotary_dim=not chance(draw, 0.4), bshd=chance(draw, 0.3),
        seed=draw(_SEED),
    )  # fmt: skip


def _write_prototype(draw: Draw, machine: Machine) -> WriteCheck:
    dtype, head_dim = DTYPES[one_of(draw, *reversed(machine.dtypes))], _head_dim(draw, machine)
    heads = _number(draw, 1, 9 if machine.has_gpu else 5)
    return WriteCheck(
        "", (heads, heads), 1, 1, head_dim, (), dtype=dtype, rotary_dim=_rotary_dim(draw, head_dim),
        interleaved=chance(draw, 0.35), rotated=not chance(draw, 0.3), random_tables=True,
        table_dtype=dtype if chance(draw, 0.2) else torch.float32, packed=chance(draw, 0.5),
        page_size=_page_size(draw), float8=pick(draw, {None: 6, "tensor": 1, "head": 2}),
        memory=tuple(pick(draw, _MEMORY) for _ in range(3)), layout=pick(draw, _ALONE), v_layout=pick(draw, _ALONE),
        table_memory=pick(draw, _TABLE_MEMORY), backends=_write_backends(draw, machine),
    )  # fmt: skip


def _write_backends(draw: Draw, machine: Machine) -> tuple[str, ...]:
    first = "triton" if "triton" in machine.backends else "auto"
    return (first, "reference") if "reference" in machine.backends and chance(draw, 0.3) else (first,)


def _write_call(draw: Draw, prototype: WriteCheck, machine: Machine) -> WriteCheck:
    page_size = prototype.page_size or 1
    most = pick(draw, {600: 5, 3000: 1}) if machine.has_gpu else 60
    capacity = -(-_number(draw, 1, most) // page_size) * page_size
    batch = _number(draw, 1, 12 if machine.has_gpu else 3)
    new = tuple(pick(draw, {st.integers(0, capacity): 6, 0: 1, capacity + 5: 0.5}) for _ in range(batch))
    cached = {0: 4, st.integers(0, capacity): 4, -2: 0.3, capacity + 3: 0.3}
    return replace(
        prototype, lengths=tuple(pick(draw, cached) for _ in new), new=new, capacity=capacity,
        len_q=(sum(new) if prototype.packed else max(new)) + pick(draw, {0: 2, 7: 1}), bshd=chance(draw, 0.4),
        seed=draw(_SEED),
    )  # fmt: skip


def _rope_prototype(draw: Draw, machine: Machine, *, several: bool) -> RopeCheck:
    dtype = pick(draw, {DTYPES[name]: 1.0 for name in reversed(machine.dtypes)} | {torch.float64: 0.1})
    names = ("x",) if not several else pick(draw, {("q", "k"): 3, ("q", "k", "v"): 1})
    # Any head dim from 2 up is served, odd ones too.
    head_dim = pick(draw, {64: 4, 128: 4, 32: 3, 16: 2, 80: 2, 96: 1, 256: 1, 24: 1, 7: 1, 2: 0.5, 320: 0.5})
    layout = pick(draw, {"bhsd": 4, "bshd": 4, "sbhd": 2, "thd": 3})
    if layout == "thd":
        positions = pick(draw, {"index": 4, "ids": 1, "row ids": 1})
    else:
        positions = pick(draw, {"index": 5, "ids": 2, "row ids": 1} | ({"two ids": 1} if head_dim >= 4 else {}))
    rotary_dim = _rotary_dim(draw, head_dim // 2 * 2)
    out = pick(draw, {"none": 6, "new": 1, "in place": 2})
    memory = [pick(draw, _ALONE if out == "in place" else _MEMORY) for _ in names]
    # Tiles are sized by heads, so that these belong to the prototype.
    heads = tuple(_number(draw, 1, 12 if machine.has_gpu else 4) for _ in range(2))
    return RopeCheck(
        "", names=names, dtype=dtype, head_dim=head_dim, layout=layout, positions=positions,
        rotary_dim=max(4, rotary_dim // 4 * 4) if positions == "two ids" else rotary_dim,
        lengths=() if layout == "thd" and positions == "index" else None,
        interleaved=chance(draw, 0.4), inverse=chance(draw, 0.3), full_width=chance(draw, 0.4), random_tables=True,
        table_dtype=dtype if dtype == torch.float64 or chance(draw, 0.25) else torch.float32,
        table_form=pick(draw, {"plain": 4, "lead": 1, "batch": 1}), table_memory=pick(draw, _TABLE_MEMORY),
        memory=(*memory, *(pick(draw, _GRADIENT) for _ in names)), out=out, heads=(*heads, heads[1])[: len(names)],
        norms=one_of(draw, "float32", "input") if several and chance(draw, 0.5) else "",
        strided_norms=chance(draw, 0.1),
    )  # fmt: skip


def _rope_call(draw: Draw, prototype: RopeCheck, machine: Machine) -> RopeCheck:
    p = prototype
    most = pick(draw, {600: 10, 3000: 1}) if machine.has_gpu else 40
    length = 0 if chance(draw, 0.025) else _length(draw, most)
    lengths = p.lengths
    if lengths is not None:
        lengths, left = (), length
        for _ in range(_number(draw, 0, 5)):
            lengths += (_number(draw, 0, left),)
            left -= lengths[-1]
        rows = max(lengths, default=0) + _number(draw, 0, 3)
    else:
        rows = length + _number(draw, 0, 5) if p.positions == "index" else _number(draw, 1, most)
    return replace(
        p, batch=1 if p.layout == "thd" else pick(draw, {1: 6, 2: 5, 3: 2, 0: 0.3}), length=length, rows=rows,
        lengths=lengths, outside=p.positions != "index" and chance(draw, 0.2),
        wanted=_some(draw, (*p.names, *NORMS)), infers_rotary_dim=not chance(draw, 0.4), norm_eps=_norm_eps(draw),
        norm_offset=pick(draw, {0.0: 3, 1.0: 3, -0.25: 1}), seed=draw(_SEED),
    )  # fmt: skip


def _corope_prototype(draw: Draw, machine: Machine) -> CoRopeCheck:
    head_dim = pick(draw, {32: 4, 64: 3, 96: 1, 128: 1, 40: 1, 16: 0.5})
    is_served = "triton" in machine.backends and 32 <= head_dim <= 128
    return CoRopeCheck(
        "", 1, _group(draw, machine, 0.6), 1, 1, head_dim, dtype=DTYPES[one_of(draw, *reversed(machine.dtypes))],
        memory=tuple(pick(draw, memory) for memory in (_MEMORY, _MEMORY, _MEMORY, _GRADIENT)),
        public=machine.has_gpu or not is_served or chance(draw, 0.2),
    )  # fmt: skip


def _corope_call(draw: Draw, prototype: CoRopeCheck, machine: Machine) -> CoRopeCheck:
    group, (batch, heads_kv) = prototype.heads_q, _heads(draw, machine)
    length = _length(draw, 400 if machine.has_gpu else 40)
    cost = group * (prototype.head_dim if machine.has_gpu else 1)  # the reference keeps a vector of each score
    batch, heads_kv, length, _ = _fitted(machine, max(batch, 1), heads_kv, cost, length, length)
    return replace(
        prototype, batch=batch, heads_q=heads_kv * group, heads_kv=heads_kv, length=length,
        base=one_of(draw, 10000.0, 500.0, 500000, 10.0),
        softmax_scale=pick(draw, {None: 4, 0.1: 1, 0.0: 0.5, -0.1: 0.5}), wanted=_some(draw, NAMES), seed=draw(_SEED),
    )  # fmt: skip


@dataclass(frozen=True)
class Family:
    """The calls of one public function, and how often they are drawn on a GPU and in Triton's interpreter.

    sizes: the fields that a call adds to its prototype.
    """

    prototype: Callable[..., Any]
    call: Callable[..., Any]
    weights: tuple[float, float]
    options: tuple[tuple[str, bool], ...] = ()

    def prototypes(self, machine: Machine) -> st.SearchStrategy:
        return st.composite(lambda draw: self.prototype(draw, machine, **dict(self.options)))()

    def calls_of(self, prototype: Any, machine: Machine) -> st.SearchStrategy:
        """Calls of a prototype; one in six is made illegal."""

        def drawn(draw: Draw) -> Any:
            call = self.call(draw, prototype, machine)
            # What makes a call illegal is written for calls with queries, or with x.
            if self.call is not _write_call and chance(draw, ILLEGAL):
                return IllegalCheck(call, MUTATIONS[draw(st.integers(0, len(MUTATIONS) - 1))].name)
            return call

        return st.composite(drawn)()


FAMILIES = {
    "attention": Family(_attention_prototype, _attention_call, (8, 8), (("packed", False),)),
    "packed": Family(_attention_prototype, _attention_call, (4, 4), (("packed", True),)),
    "decode": Family(_decode_prototype, _decode_call, (5, 2)),
    "rope": Family(_rope_prototype, _rope_call, (1.5, 2), (("several", False),)),
    "rope of several": Family(_rope_prototype, _rope_call, (2, 2), (("several", True),)),
    "corope": Family(_corope_prototype, _corope_call, (1, 0.7)),
    "write": Family(_write_prototype, _write_call, (1.5, 1)),
}


def calls(machine: Machine, *names: str) -> st.SearchStrategy:
    """Calls of these families, or of all, for tests."""

    def drawn(draw: Draw) -> Any:
        weights = {name: FAMILIES[name].weights[not machine.has_gpu] for name in names or FAMILIES}
        family = FAMILIES[pick(draw, weights)]
        return draw(family.calls_of(draw(family.prototypes(machine)), machine))

    return st.composite(drawn)()


def calls_of_a_prototype(machine: Machine) -> int:
    """A prototype compiles for seconds on a GPU; in the interpreter it costs nothing."""
    return 30 if machine.has_gpu else 3


def drawn_call(run: int, index: int, machine: Machine) -> Any:
    """Return the call number ``index`` of a run with this seed."""
    family, prototype = drawn_prototype(run, index, machine)
    return draw(family.calls_of(prototype, machine), run, "call", index)


def drawn_prototype(run: int, index: int, machine: Machine) -> tuple[Family, Any]:
    """Return the family and the prototype of the call number ``index``."""
    number = index // calls_of_a_prototype(machine)
    family = FAMILIES[draw(_families(machine), run, "family", number)]
    return family, draw(family.prototypes(machine), run, "prototype", number)


def _families(machine: Machine) -> st.SearchStrategy:
    weights = {name: family.weights[not machine.has_gpu] for name, family in FAMILIES.items()}
    return st.composite(lambda draw: pick(draw, weights))()


def shrunk_call(run: int, index: int, machine: Machine, fails: Callable[[Any], bool]) -> Any | None:
    """Return the simplest call found that fails, from call ``index``: first its sizes shrink, which compiles nothing
    new, then what kernels depend on. None: the call does not fail."""
    family, prototype = drawn_prototype(run, index, machine)
    found = minimise(family.calls_of(prototype, machine), fails, run, "call", index)
    if found is None:
        return None
    is_illegal = isinstance(found, IllegalCheck)
    legal = found.legal if is_illegal else found
    drawn = {name: value for name, value in vars(legal).items() if getattr(prototype, name) != value}

    def of(other: Any) -> Any:
        """Give another prototype the sizes of the call; where it has no bound, the call has none."""
        sizes = {name: x for name, x in drawn.items() if name not in _BOUNDS or getattr(other, name) is not None}
        call = replace(other, **sizes)
        return replace(found, legal=call) if is_illegal else call

    number = index // calls_of_a_prototype(machine)
    simplest = minimise(family.prototypes(machine), lambda other: fails(of(other)), run, "prototype", number)
    return found if simplest is None else of(simplest)
