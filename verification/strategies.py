"""Hypothesis strategies of calls over the whole contract, for tests and for ``python -m verification --random``.

A call is drawn in two steps: a prototype, which fixes what compiled kernels depend on, and a call of this prototype,
which adds sizes and data. A run makes many calls of a prototype, because each prototype compiles for seconds on a GPU.
``drawn_call`` does both steps. The first of several choices is the simplest, to which a failing call shrinks.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings, strategies as st
from hypothesis.internal.conjecture import providers

from verification.attention import TENSORS, WEIGHTS, AttentionCheck, CoRopeCheck, LatentCheck
from verification.calls import DTYPES, Call, Machine
from verification.decode import DecodeCheck, WriteCheck
from verification.memory import SHARED
from verification.pairs import PairCheck, Way
from verification.refusals import MUTATIONS, IllegalCheck
from verification.rotation import NORMS, RopeCheck
from verification.testing import INTERVALS, ROWS

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
    backend="uniform",
    database=None,
    deadline=None,
    max_examples=2,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,
)


def draw(strategy: st.SearchStrategy, *key: Any) -> Any:
    """Return one value of a strategy: the same for equal keys, which are numbers and strings."""
    drawn = []
    minimise(strategy, drawn.append, *key)  # first the simplest one, then one at random
    return drawn[-1]


def minimise(strategy: st.SearchStrategy, fails: Callable[[Any], Any], *key: Any) -> Any | None:
    """Return the simplest value that hypothesis finds to fail, from the one that ``draw`` returns; None: none fails."""
    found = []

    def shrink(value: Any) -> None:
        if fails(value):
            found.append(value)
            raise AssertionError

    try:
        seed(" ".join(map(str, key)))(SETTINGS(given(strategy)(shrink)))()
    except Exception:
        if not found:
            raise
    return found[-1] if found else None  # hypothesis runs the simplest one last


def pick(draw: Draw, weights: Mapping[Any, float]) -> Any:
    """Draw one of the keys, by weight in hundredths of all, or a value of the key if it is a strategy."""
    total = sum(weights.values())
    borders = list(itertools.accumulate(max(1, round(100 * weight / total)) for weight in weights.values()))
    value = list(weights)[bisect(borders, draw(st.integers(0, borders[-1] - 1)))]
    return draw(value) if isinstance(value, st.SearchStrategy) else value


def chance(draw: Draw, probability: float) -> bool:
    return draw(st.integers(0, 99)) >= 100 * (1 - probability)


def _number(draw: Draw, least: int, most: int) -> int:
    return draw(st.integers(least, max(least, most)))


# Fields that are drawn by weight alone.

_ON_GPU = {
    "head_dim": {16: 7, 24: 5, 32: 8, 40: 4, 64: 14, 72: 4, 80: 6, 96: 9, 120: 3, 128: 18, 160: 4, 192: 5, 256: 9,
                 8: 0.7, 36: 0.7, 264: 0.4},  # the reference alone serves the last three
    "group": {1: 11, 2: 4, 3: 2, 4: 4, 5: 1, 7: 1, 8: 2, 16: 0.5},
    "batch": {1: 6, 2: 5, 3: 2, 4: 1, 0: 0.15},
    "heads_kv": {1: 4, 2: 5, 3: 2, 4: 2, 8: 2},
    "len_q": {1: 10, st.integers(2, 8): 4, st.integers(9, 40): 1},  # of a step
}  # fmt: skip
_INTERPRETED = {
    "head_dim": {16: 30, 32: 22, 24: 10, 64: 8, 80: 3, 96: 3, 40: 3, 128: 3, 256: 1, 8: 1, 20: 1, 264: 0.5, 2: 0.5},
    "group": {1: 6, 2: 5, 3: 2, 4: 1, 5: 0.5},
    "batch": {1: 10, 2: 5, 3: 1, 0: 0.2},
    "heads_kv": {1: 6, 2: 3, 3: 1},
    "len_q": {1: 10, st.integers(2, 8): 4, st.integers(9, 20): 1},
}  # fmt: skip
_MEMORY = {
    "bnhd": 10, "bhnd": 5, "nbhd": 2, "columns": 2, "odd": 3, "offset": 3, "wide": 2, "fused": 3, "skipped": 2,
    "one batch": 1, "one head": 1, "one token": 0.5,
}  # fmt: skip
_ALONE = {name: weight for name, weight in _MEMORY.items() if name not in SHARED}
_GRADIENT = {**_MEMORY, "one number": 3}  # ``out.sum()`` expands the gradient of o from one number
_TABLES = {
    "interleaved": {False: 6, True: 4},
    "full_width": {False: 65, True: 35},
    "table_memory": {"plain": 8, "columns": 1, "odd": 1},
    "table_batch": {False: 8, True: 2},
    "leading_one": {False: 8, True: 2},
}
_OF_ATTENTION = {
    "causal": {True: 6, False: 4},
    "norms": {None: 55, 0.0: 45},
    "deterministic": {False: 88, True: 12},
    "kv_lens": {None: 8, (): 2},
    "lse_gradient": {False: 85, True: 15},
}
_PACKED = {"seqlens": (), "kv_starts": None, "kv_lens": None, "intervals": None, "table_batch": False}
_OF_CACHES = {
    "rotated": {True: 6, False: 4},
    "page_size": {None: 6, 16: 4, 32: 1, 64: 1, st.integers(17, 47): 1},
    "float8": {None: 7, "tensor": 1, "head": 2},
}
_OF_DECODE = _OF_CACHES | {
    "causal": {True: 75, False: 25},
    "append": {True: 7, False: 3},
    "norms": {None: 70, 0.0: 15, 1.0: 15},
}
_OF_WRITE = _OF_CACHES | {"packed": {False: 1, True: 1}}
_OF_PAIRS = {
    "head_dim": {32: 2, 64: 4, 128: 4, 16: 1, 96: 3, 256: 3},
    "causal": {True: 93, False: 7},
    "norms": {None: 70, 0.0: 30},
    "peaks": {False: 1, True: 1},
    "rotated": {True: 6, False: 4},
    "page_size": {16: 4, 64: 1, 128: 1, st.integers(17, 47): 1},
}
# Any head dim from 2 up is served, odd ones too.
_OF_ROPE = {
    "head_dim": {64: 4, 128: 4, 32: 3, 16: 2, 80: 2, 96: 1, 256: 1, 24: 1, 7: 1, 2: 0.5, 320: 0.5},
    "form": {"bhsd": 4, "bshd": 4, "sbhd": 2, "thd": 3},
    "inverse": {False: 7, True: 3},
    "out": {"none": 6, "new": 1, "in place": 2},
    "norms": {None: 1, 0.0: 1},
    "strided_norms": {False: 9, True: 1},
}
_OF_COROPE = {
    "base": {10000.0: 1, 500.0: 1, 500000: 1, 10.0: 1},
    "softmax_scale": {None: 4, 0.1: 1, 0.0: 0.5, -0.1: 0.5},
    "seed": {st.integers(1, 10**6): 1},
}
_OF_CALLS = {
    "extra_rows": {0: 4, 1: 1, st.integers(0, 40): 1},
    "return_lse": {True: 1, False: 1},
    "infers_rotary_dim": {False: 4, True: 6},
    "tables": {"rope": 4, "yarn": 2, "random": 4},
    "form": {"bhsd": 7, "bshd": 3},
    "norm_eps": {1e-6: 4, 1e-5: 2, 0.0: 1, 1e-2: 1},
    "seed": {st.integers(1, 10**6): 1},
}
_OF_MASKS = {
    "window": {None: 9, (-1, -1): 3, (7, -1): 4, (-1, 7): 1.5, (7, 7): 2, (0, 0): 0.7},
    "softcap": {0.0: 9, 2.0: 1, 15.0: 1, 50.0: 1},
    "sinks": {False: 7, True: 3},
    "kv_starts": {None: 2, (): 1},
    "intervals": {None: 8, "random": 2} | dict.fromkeys(INTERVALS, 0.4),
}
# A prototype has None where its calls have no such bound.
_BOUNDS = ("window", "kv_starts", "kv_lens", "seqlens", "norms")


def _fields(draw: Draw, *tables: Mapping[str, Mapping[Any, float]]) -> dict[str, Any]:
    return {name: pick(draw, weights) for table in tables for name, weights in table.items()}


def _size(draw: Draw, machine: Machine, name: str) -> int:
    return pick(draw, (_ON_GPU if machine.has_gpu else _INTERPRETED)[name])


def _dtype(draw: Draw, machine: Machine) -> torch.dtype:
    return pick(draw, {DTYPES[name]: 1 for name in reversed(machine.dtypes)})


def _some(draw: Draw, names: tuple[str, ...]) -> tuple[str, ...]:
    """Mostly all of the names."""
    return names if not chance(draw, 0.3) else tuple(name for name in names if chance(draw, 0.5))


# Sizes, which several families draw.


def _length(draw: Draw, most: int) -> int:
    """From 1 to ``most``, short ones as likely as long ones, next to a tile's border now and then."""
    # One range within the other, so that a length shrinks across their borders.
    length = _number(draw, 1, pick(draw, {1: 1, 16: 3, 48: 5, most: 6}))
    if chance(draw, 0.15):
        length = _near_border(draw, most)
    return max(1, min(length, most))


def _near_border(draw: Draw, most: int) -> int:
    """A number of rows or of keys at which tiles end, or up to two more or fewer; the border is at ``most`` at most."""
    borders = (16, *(border for border in (32, 64, 128, 256, 512) if border <= most))
    return pick(draw, dict.fromkeys(borders, 1)) + pick(draw, {0: 1, -1: 1, 1: 1, -2: 2, 2: 1})


def _fitted(
    machine: Machine, batch: int, heads_kv: int, group: int, len_q: int, len_k: int, most_scores: int = MOST_SCORES
) -> dict[str, int]:
    """Return the sizes of a call, made smaller until their scores take a reasonable time."""
    tile, most = (1, most_scores) if machine.has_gpu else (TILE, MOST_TILES)
    while batch * heads_kv * group * -(-len_q // tile) * -(-len_k // tile) > most:
        if batch > 1:
            batch -= 1
        elif heads_kv > 1:
            heads_kv -= 1
        else:
            len_q, len_k = (-(-n * 3 // 4) for n in (len_q, len_k))
    sizes = {"batch": batch, "heads_q": heads_kv * group, "heads_kv": heads_kv}
    return sizes | {"len_q": len_q, "len_k": len_k}


def _window(draw: Draw, prototype: tuple[int, int] | None, length: int) -> tuple[int, int] | None:
    """Draw sizes for the sides that the prototype bounds; -1 is unbounded."""
    if prototype in (None, (0, 0)):
        return prototype
    size = {0: 1, 1: 1, st.integers(0, max(1, length)): 6, st.integers(0, 20): 3, 2**31 - 1: 0.3}
    return tuple(
        -1 if side < 0 else _near_border(draw, length) if chance(draw, 0.2) else pick(draw, size) for side in prototype
    )


def _bounds(draw: Draw, batch: int, length: int, *, upper: bool) -> tuple[int, ...]:
    """``kv_lens`` (``upper``) or ``kv_starts`` of each batch entry; some are outside the keys."""
    whole, other = (length, 0) if upper else (0, length)
    some = st.integers(length // 2, length) if upper else st.integers(0, length // 2)
    weights = {whole: 3.4, other: 0.4, st.integers(0, length): 5, some: 6, length + 3: 0.3, -2: 0.3}
    return tuple(pick(draw, weights) for _ in range(batch))


# Families: a prototype, and a call of it.


def _prototype(
    draw: Draw, kind: type[Call], machine: Machine, table: Mapping[str, Any], memory: Sequence[Any] = (), **others: Any
) -> Any:
    """Draw a call of the smallest sizes and the fields of every function; ``others`` as they are.

    memory: the layouts of each tensor. others["variants"]: weights of the (backend, strategy) pairs."""
    dtype = _dtype(draw, machine)
    fields = dict.fromkeys(("batch", "heads_q", "heads_kv", "len_q", "len_k"), 1) | {"dtype": dtype}
    for name, probability in (("table_dtype", 0.2), ("sinks_dtype", 0.3), ("norm_dtype", 0.4)):
        fields[name] = dtype if chance(draw, probability) else torch.float32
    fields |= {"head_dim": _size(draw, machine, "head_dim")} | _fields(draw, _TABLES, table)
    rotary_dim = head_dim = fields["head_dim"] // 2 * 2
    if head_dim > 2 and chance(draw, 0.35):
        evens = st.integers(1, head_dim // 2).map(lambda x: 2 * x)
        rotary_dim = pick(draw, {head_dim // 4 * 2 or 2: 2, evens: 2, 2: 0.5})
    if "variants" in others:
        others["variants"] = _variants(draw, machine, others["variants"])
    fields |= {"rotary_dim": rotary_dim, "memory": tuple(pick(draw, layouts) for layouts in memory)}
    return kind(**(fields | others))


def _masks(draw: Draw) -> dict[str, Any]:
    """Draw masks, or none: the plain call is what most models make."""
    return _fields(draw, _OF_MASKS) if chance(draw, 0.7) else {}


def _variants(draw: Draw, machine: Machine, weights: Mapping[tuple[str, str], float]) -> tuple[tuple[str, str], ...]:
    """One or two: to compile a prototype for more would leave time for fewer prototypes."""
    if machine.backends == ("reference",):
        return (("reference", "auto"),)
    weights = {pair: w for pair, w in weights.items() if pair[0] != "triton" or "triton" in machine.backends}
    weights = weights or {("auto", "auto"): 1}
    found = [pick(draw, weights) for _ in range(1 + (machine.has_gpu and chance(draw, 0.1)))]
    if "reference" in machine.backends and chance(draw, 0.3):
        found.append(("reference", "auto"))
    return tuple(dict.fromkeys(found))


def _attention_prototype(draw: Draw, machine: Machine, **others: Any) -> AttentionCheck:
    weights = {("triton", "inline"): 3, ("triton", "prepass"): 3, ("triton", "auto"): 1, ("hopper", "auto"): 0.2}
    weights |= {("auto", "auto"): 2 if machine.has_gpu else 0.5, ("auto", "inline"): 0.5, ("auto", "prepass"): 0.5}
    if "hopper" in machine.backends:  # elsewhere it must be refused
        weights |= {("hopper", "auto"): 5, ("hopper", "prepass"): 0.5, ("hopper", "inline"): 0.2}
    memory, fields = (*[_MEMORY] * 3, _GRADIENT), _masks(draw) | others
    fields["return_max_logit"] = chance(draw, 0.2)
    return _prototype(draw, AttentionCheck, machine, _OF_ATTENTION, memory, variants=weights, **fields)


def _latent_prototype(draw: Draw, machine: Machine) -> LatentCheck:
    weights = {("triton", "auto"): 6, ("auto", "auto"): 2 if machine.has_gpu else 0.5, ("hopper", "auto"): 0.3}
    wide = 5 if machine.has_gpu else 1
    columns = {16: 3, 32: 3, 48: 1, 64: 1, 80: 0.5, 128: wide, 144: 0.1, 20: 0.1}
    table = {"head_dim": {16: 3, 32: 2, 64: wide, 48: 0.5, 80: 0.1}, "nope": columns, "value": columns}
    fields = _fields(draw, table, {name: _OF_MASKS[name] for name in ("window", "kv_starts")})
    fields |= {"norms": None, "variants": weights} | (_PACKED if chance(draw, 0.35) else {})
    found = _prototype(draw, LatentCheck, machine, _OF_ATTENTION, (*[_MEMORY] * 5, _GRADIENT), **fields)
    return replace(found, rotary_dim=None)


def _call(draw: Draw, prototype: Call, **fields: Any) -> Any:
    """Return a call of a prototype with these fields, and others that all functions have."""
    scales = {None: 12} | {x * prototype.head_dim**-0.5: w for x, w in ((1, 2), (0, 1), (-1, 1), (-3, 0.5), (2.5, 1))}
    # An int; where heads are wide, only the largest score would count.
    scales |= {1: 0.5} if prototype.head_dim <= 64 else {}
    found = _fields(draw, _OF_CALLS) | {"softmax_scale": pick(draw, scales)}
    found |= {"tables": "none"} if prototype.tables == "none" else {}
    if prototype.norms is not None:
        found["norms"] = pick(draw, {0.0: 3, 1.0: 3, 0.5: 1, -0.25: 1})
    return replace(prototype, **(found | fields))


def _with_or_without_tables(draw: Draw, p: Any) -> Any:
    """Return the prototype, and in 15 of 100 draws a copy of it without tables."""
    return replace(p, tables="none", rotary_dim=None, interleaved=False) if chance(draw, 0.15) else p


def _attention_call(draw: Draw, p: AttentionCheck, machine: Machine) -> AttentionCheck:
    is_latent = isinstance(p, LatentCheck)
    p = p if is_latent else _with_or_without_tables(draw, p)
    most = pick(draw, {600: 14, 1024: 1, 3000: 1}) if machine.has_gpu else 90
    group = 1 if is_latent else _size(draw, machine, "group")
    fields = (_dense_sizes if p.seqlens is None else _packed_sizes)(draw, p, machine, group, most)
    fields["hides_nan"] = not is_latent and chance(draw, 0.5)
    fields |= {"return_lse": True} if p.lse_gradient else {}
    return _call(draw, p, **fields, wanted=_some(draw, ROWS if is_latent else (*TENSORS[:3], *WEIGHTS)))


def _dense_sizes(draw: Draw, p: AttentionCheck, machine: Machine, group: int, most: int) -> dict[str, Any]:
    batch, heads_kv, len_k = _size(draw, machine, "batch"), _size(draw, machine, "heads_kv"), _length(draw, most)
    kind = pick(draw, {"same": 8, "fewer": 6, "one": 2, "more": 3, "no keys": 0.3, "no queries": 0.3})
    len_q = {"same": len_k, "one": 1, "no queries": 0}.get(kind)
    if kind == "fewer":
        len_q = _number(draw, 1, len_k)
        if chance(draw, 0.75):
            len_q = max(1, len_k - _near_border(draw, len_k))  # then the diagonal crosses tiles at their borders
    len_q, len_k = _length(draw, most) if len_q is None else len_q, 0 if kind == "no keys" else len_k
    found = _fitted(machine, batch, heads_kv, group, len_q, len_k)
    batch, len_k = found["batch"], found["len_k"]
    if not p.causal and p.kv_lens is None and p.tables != "none":
        found["len_q"] = min(found["len_q"], len_k)  # more queries than keys are refused then: ``refusals``
    bounds = [name for name in ("kv_starts", "kv_lens") if getattr(p, name) is not None]
    found |= {name: _bounds(draw, batch, len_k, upper=name == "kv_lens") for name in bounds}
    return found | {"window": _window(draw, p.window, len_k)}


def _packed_sizes(draw: Draw, p: AttentionCheck, machine: Machine, group: int, most: int) -> dict[str, Any]:
    own_tables, seqlens = type(p) is AttentionCheck and p.tables != "none" and chance(draw, 0.2), []
    for _ in range(pick(draw, {1: 2, 2: 5, 3: 3, st.integers(4, 12) if machine.has_gpu else 3: 2, 0: 0.3})):
        len_k = _length(draw, most)
        len_q = pick(draw, {len_k: 6, st.integers(0, len_k): 2, 1: 1, st.integers(1, most): 1})
        if chance(draw, 0.35):
            len_q = max(0, len_k - _near_border(draw, len_k))
        len_q = len_k if own_tables else len_q
        seqlens.append(pick(draw, {(len_q, len_k): 12, (0, len_k): 0.5, (len_q, 0): 0.5, (0, 0): 0.5}))
    # A tail may have more rows than the tables.
    tails = [pick(draw, {0: 5, 1: 1, st.integers(1, 20): 1, 40: 0.3}) for _ in range(2)]
    if own_tables:
        seqlens, tails = [(n, n) for n, _ in seqlens], [tails[0]] * 2

    def totals() -> tuple[int, ...]:
        return tuple(sum(lengths) for lengths in zip(tails, *seqlens))

    while len(seqlens) > 1 and (*_fitted(machine, 1, 1, group, *totals()).values(),)[3:] != totals():
        seqlens.pop()
    len_q, len_k = totals()
    found = _fitted(machine, 1, _size(draw, machine, "heads_kv"), group, len_q, len_k)
    longest = [max(lengths) for lengths in zip((0, 0), *seqlens)]
    more_q, more_k = (pick(draw, {0: 4, st.integers(0, 50): 1}) for _ in range(2))
    # The reference takes its tables from the case: there must be as many rows as max_seqlen_k asks for.
    max_seqlens = longest[0] + more_q, min(longest[1] + more_k, len_k)
    found |= {"len_q": len_q, "len_k": len_k, "seqlens": tuple(seqlens), "max_seqlens": max_seqlens}
    found |= {"token_tables": True, "extra_rows": 0} if own_tables else {}
    return found | {"window": _window(draw, p.window, max(longest))}


def _decode_prototype(draw: Draw, machine: Machine) -> DecodeCheck:
    weights = {("triton", "auto"): 5, ("auto", "auto"): 5 if machine.has_gpu else 0.5, ("hopper", "auto"): 0.2}
    fields = {name: _size(draw, machine, size) for name, size in (("heads_q", "group"), ("len_q", "len_q"))}
    fields |= _masks(draw) | {"intervals": None, "variants": weights}
    found = _prototype(draw, DecodeCheck, machine, _OF_DECODE, (*[_MEMORY] * 3, *[_ALONE] * 2), **fields)
    if found.append or found.page_size is not None or chance(draw, 0.5):
        return found
    return replace(found, memory=(*found.memory[:3], pick(draw, _MEMORY), pick(draw, _MEMORY)))  # nothing is written


def _decode_call(draw: Draw, p: DecodeCheck, machine: Machine) -> DecodeCheck:
    on_gpu, group = machine.has_gpu, p.heads_q
    batch, heads_kv = _size(draw, machine, "batch"), _size(draw, machine, "heads_kv")
    if on_gpu and chance(draw, 0.15):
        batch = _number(draw, 5, 40)
    most = pick(draw, {700: 10, 5000: 3, 20000: 1}) if on_gpu else 70
    capacity = _in_pages(p, _number(draw, p.len_q, pick(draw, {most: 2, 40: 1})))
    # In the interpreter each row of the output has a program of its own.
    cost, most_cost = (capacity, 299_999) if on_gpu else (group * p.len_q, 16)
    while batch * heads_kv > 1 and batch * heads_kv * cost > most_cost:
        batch, heads_kv = (batch - 1, heads_kv) if batch > 1 else (batch, heads_kv - 1)
    free = capacity - p.len_q if p.append else capacity
    usual = {st.integers(0, free): 8, st.integers(free // 2, free): 6, free: 2, 0: 1}
    odd = {capacity: 0.5, capacity + 2: 0.2, -1: 0.2, max(0, capacity - 1): 0.3}
    lengths = tuple(pick(draw, usual | odd) for _ in range(batch))
    fields = {"batch": batch, "heads_q": heads_kv * group, "heads_kv": heads_kv, "len_k": capacity, "lengths": lengths}
    if p.kv_starts is not None:
        fields["kv_starts"] = tuple(
            pick(draw, {0: 3, st.integers(0, max(0, n)): 5, n + 1: 0.4, n + p.len_q + 3: 0.2, -2: 0.2}) for n in lengths
        )
    return _call(draw, _with_or_without_tables(draw, p), **fields, window=_window(draw, p.window, capacity))


def _in_pages(check: DecodeCheck, rows: int) -> int:
    """Round a number of rows up to whole pages, if the caches have pages."""
    size = check.page_size or 1
    return -(-rows // size) * size


def _write_prototype(draw: Draw, machine: Machine) -> WriteCheck:
    heads, memory = _number(draw, 1, 9 if machine.has_gpu else 5), [_MEMORY, _MEMORY, _ALONE, _ALONE]
    fields = {"heads_q": heads, "heads_kv": heads, "variants": {("triton", "auto"): 1}}
    return _prototype(draw, WriteCheck, machine, _OF_WRITE, memory, **fields)


def _write_call(draw: Draw, p: WriteCheck, machine: Machine) -> WriteCheck:
    capacity = _in_pages(p, _number(draw, 1, pick(draw, {600: 5, 3000: 1}) if machine.has_gpu else 60))
    weights = {st.integers(0, capacity): 6, 0: 1, capacity + 5: 0.5}
    new = tuple(pick(draw, weights) for _ in range(_number(draw, 1, 12 if machine.has_gpu else 3)))
    cached = {0: 4, st.integers(0, capacity): 4, -2: 0.3, capacity + 3: 0.3}
    rows = (sum(new) if p.packed else max(new)) + pick(draw, {0: 2, 7: 1})
    fields = {"batch": len(new), "len_q": rows, "len_k": capacity, "new": new}
    lengths = tuple(pick(draw, cached) for _ in new)
    return _call(draw, _with_or_without_tables(draw, p), **fields, lengths=lengths)


def _rope_prototype(draw: Draw, machine: Machine, several: bool = True) -> RopeCheck:
    fields = {"names": pick(draw, {("q", "k"): 3, ("q", "k", "v"): 1}) if several else ("x",)}
    # Tiles are sized by heads, so that these belong to the prototype.
    fields |= {name: _number(draw, 1, 12 if machine.has_gpu else 4) for name in ("heads_q", "heads_kv")}
    p = _prototype(draw, RopeCheck, machine, _OF_ROPE, **fields, **({} if several else {"norms": None}))
    two_ids = {"two ids": 1} if p.head_dim >= 4 and p.form != "thd" else {}
    positions = pick(draw, {"index": 5, "ids": 2, "row ids": 1} | two_ids)
    tensors = [_ALONE if p.out == "in place" else _MEMORY] * len(p.names)
    fields = {"positions": positions, "memory": tuple(pick(draw, x) for x in tensors + [_GRADIENT] * len(p.names))}
    if positions == "two ids":
        fields["rotary_dim"] = max(4, p.rotary_dim // 4 * 4)
    if p.form == "thd" and positions == "index":
        fields["seqlens"] = ()
    if chance(draw, 0.03):
        fields |= dict.fromkeys(("dtype", "table_dtype", "norm_dtype"), torch.float64)
    return replace(p, **fields)


def _rope_call(draw: Draw, p: RopeCheck, machine: Machine) -> RopeCheck:
    most = pick(draw, {600: 10, 3000: 1}) if machine.has_gpu else 40
    length = 0 if chance(draw, 0.025) else _length(draw, most)
    rows = length + _number(draw, 0, 5) if p.positions == "index" else _number(draw, 1, most)
    batch = 1 if p.form == "thd" else pick(draw, {1: 6, 2: 5, 3: 2, 0: 0.3})
    fields = {"form": p.form, "extra_rows": 0, "batch": batch}
    if p.seqlens is not None:
        lengths, left = (), length
        for _ in range(_number(draw, 0, 5)):
            lengths += (_number(draw, 0, left),)
            left -= lengths[-1]
        rows = max(lengths, default=0) + _number(draw, 0, 3)
        fields["seqlens"] = tuple((n, n) for n in lengths)
    fields |= {"outside": p.positions != "index" and chance(draw, 0.2), "wanted": _some(draw, (*p.names, *NORMS))}
    return _call(draw, p, **fields, len_q=length, len_k=rows)


def _corope_prototype(draw: Draw, machine: Machine) -> CoRopeCheck:
    head_dim, group = pick(draw, {32: 4, 64: 3, 96: 1, 128: 1, 40: 1, 16: 0.5}), _size(draw, machine, "group")
    is_served = "triton" in machine.backends and 32 <= head_dim <= 128
    fields = {"public": machine.has_gpu or not is_served or chance(draw, 0.2), "dtype": _dtype(draw, machine)}
    memory = tuple(pick(draw, layouts) for layouts in (*[_MEMORY] * 3, _GRADIENT))
    return CoRopeCheck(1, group, 1, 1, 1, head_dim, memory=memory, **fields)


def _corope_call(draw: Draw, p: CoRopeCheck, machine: Machine) -> CoRopeCheck:
    group, length = p.heads_q, _length(draw, 400 if machine.has_gpu else 40)
    cost = p.head_dim if machine.has_gpu else 1  # the reference keeps a vector of each score
    batch, heads_kv = max(_size(draw, machine, "batch"), 1), _size(draw, machine, "heads_kv")
    sizes = _fitted(machine, batch, heads_kv, group, length, length, MOST_SCORES // cost)
    return replace(p, **sizes, **_fields(draw, _OF_COROPE), wanted=_some(draw, TENSORS[:3]))


def _pair_prototype(draw: Draw, machine: Machine) -> PairCheck:
    weights = {("triton", "auto"): 4, ("hopper", "auto"): 8 if "hopper" in machine.backends else 0.2}
    weights |= {("auto", "auto"): 2} if machine.has_gpu else {}  # on a CPU the reference, which promises nothing
    fields = _masks(draw) | {"kv_starts": None, "intervals": None, "table_batch": False, "variants": weights}
    found = _prototype(draw, PairCheck, machine, _OF_PAIRS, heads_q=_size(draw, machine, "group"), **fields)
    # Raw keys with norms are rounded twice.
    return replace(found, rotated=found.rotated or found.norms is not None)


def _pair_call(draw: Draw, p: PairCheck, machine: Machine) -> PairCheck:
    length = _length(draw, pick(draw, {600: 8, 5000: 4, 20000: 1}) if machine.has_gpu else 90)
    batch, heads_kv = (max(1, _size(draw, machine, name)) for name in ("batch", "heads_kv"))
    fields = _fitted(machine, batch, heads_kv, p.heads_q, length, length, 1 << 30) | {"form": "bhsd"}
    batch, length = fields.pop("batch"), fields["len_k"]
    row = _number(draw, 0, length - 1)
    fields["ways"] = tuple(_way(draw, p, machine, length, row, batch) for _ in range(2))
    return _call(draw, _with_or_without_tables(draw, p), **fields, window=_window(draw, p.window, length))


def _way(draw: Draw, p: PairCheck, machine: Machine, length: int, row: int, most: int) -> Way:
    """Draw a way to ``row`` in a call of ``most`` sequences at most. Rows that see later keys need all of them."""
    kind = pick(draw, {"batch": 4, "pack": 3} | ({"pages": 4, "cache": 3} if p.causal else {}))
    is_step = kind in ("pages", "cache")
    alone = 8 if is_step else 2
    first = pick(draw, {0: 5, row: alone, max(0, row - 5): 2, st.integers(0, row): 3})
    ends = {length: 5, row + 1: alone, min(length, row + 5): 2, st.integers(row + 1, length): 3}
    end = pick(draw, ends) if p.causal else length
    before, after = (pick(draw, {0: 4, 1: 1, st.integers(1, 300 if machine.has_gpu else 40): 5}) for _ in range(2))
    batch = _number(draw, 1, most)
    place, appends = _number(draw, 0, batch - 1), not (is_step and chance(draw, 0.2))
    return Way(kind, first, end, before, after, batch, place, appends)


@dataclass(frozen=True)
class Family:
    """The calls of one public function, and how often they are drawn on a GPU and in Triton's interpreter."""

    prototype: Callable[..., Call]
    call: Callable[..., Call]
    weights: tuple[float, float]

    def prototypes(self, machine: Machine) -> st.SearchStrategy:
        return st.composite(lambda draw: self.prototype(draw, machine))()

    def calls_of(self, prototype: Any, machine: Machine) -> st.SearchStrategy:
        """Calls of a prototype; one in six is made illegal."""

        def drawn(draw: Draw) -> Any:
            call = self.call(draw, prototype, machine)
            # Mutations expect one call, with queries or with x.
            if self.call not in (_write_call, _pair_call) and chance(draw, ILLEGAL):
                return IllegalCheck(call, MUTATIONS[draw(st.integers(0, len(MUTATIONS) - 1))].name)
            return call

        return st.composite(drawn)()


FAMILIES = {
    "attention": Family(_attention_prototype, _attention_call, (8, 8)),
    "packed": Family(functools.partial(_attention_prototype, **_PACKED), _attention_call, (4, 4)),
    "mla": Family(_latent_prototype, _attention_call, (3, 3)),
    "decode": Family(_decode_prototype, _decode_call, (5, 2)),
    "rope": Family(functools.partial(_rope_prototype, several=False), _rope_call, (1.5, 2)),
    "rope of several": Family(_rope_prototype, _rope_call, (2, 2)),
    "corope": Family(_corope_prototype, _corope_call, (1, 0.7)),
    "write": Family(_write_prototype, _write_call, (1.5, 1)),
    "pairs": Family(_pair_prototype, _pair_call, (2, 1)),
}


def calls_of_a_prototype(machine: Machine) -> int:
    """Return how many calls in a row one process draws from a prototype: kernels are compiled once for all of them.

    In the interpreter that costs nothing. Pairs alone compile for half a minute, because each has two ways of many,
    and then run several a second: 16 processes draw 2,000 from one prototype each.
    """
    if not machine.has_gpu:
        return 3
    return 125 if machine.families == ("pairs",) else 30


def drawn_call(run: int, index: int, machine: Machine) -> Any:
    """Return the call number ``index`` of a run with this seed."""
    family, prototype = _drawn_prototype(run, index // calls_of_a_prototype(machine), machine)
    return draw(family.calls_of(prototype, machine), run, "call", index)


@functools.lru_cache(1)
def _drawn_prototype(run: int, number: int, machine: Machine) -> tuple[Family, Any]:
    families = [FAMILIES[name] for name in machine.families or FAMILIES]
    weights = {family: family.weights[not machine.has_gpu] for family in families}
    family = draw(st.composite(pick)(weights), run, "family", number)
    return family, draw(family.prototypes(machine), run, "prototype", number)


def shrunk_call(run: int, index: int, machine: Machine, fails: Callable[[Any], bool]) -> Any | None:
    """Return the simplest call found that fails, from call ``index``: first its sizes shrink, which compiles nothing
    new, then what kernels depend on. None: the call does not fail."""
    number = index // calls_of_a_prototype(machine)
    family, prototype = _drawn_prototype(run, number, machine)
    found = minimise(family.calls_of(prototype, machine), fails, run, "call", index)
    if found is None:
        return None
    is_illegal = isinstance(found, IllegalCheck)
    legal = found.legal if is_illegal else found
    drawn = {name: value for name, value in vars(legal).items() if getattr(prototype, name) != value}

    def of(other: Any) -> Any:
        """Give another prototype the sizes of the call; if it has no bound, the call gets none."""
        sizes = {name: x for name, x in drawn.items() if name not in _BOUNDS or getattr(other, name) is not None}
        call = replace(other, **sizes)
        return replace(found, legal=call) if is_illegal else call

    simplest = minimise(family.prototypes(machine), lambda other: fails(of(other)), run, "prototype", number)
    return found if simplest is None else of(simplest)
