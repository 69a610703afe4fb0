"""The tensors of a generation step and of a write into a cache, every refusal of them before anything is written or
launched, and their ``Problem``s."""

import functools
import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fused_rope_attn.attention import problem as of_attention
from fused_rope_attn.attention.problem import Cache, OperatorArguments, Problem, Tensors
from fused_rope_attn.runtime import checks
from fused_rope_attn.runtime.differentiation import refuse_tangents
from fused_rope_attn.runtime.entry import fill
from fused_rope_attn.runtime.options import StepOptions
from fused_rope_attn.runtime.registration import is_plain

FLOAT8 = torch.float8_e4m3fn


class StepTensors(NamedTuple):
    """q ``(B, HQ, NQ, D)``; caches ``(B, HKV, S_max, D)``, or with a block_table ``(B, pages)`` int32 pools
    ``(num_pages, HKV, page_size, D)``; new k and v ``(B, HKV, NQ, D)`` or None, any strides.

    cos and sin ``([1|B,] S, R/2 | R)`` or None; cache_seqlens and kv_starts ``(B,)`` int32; sinks ``(HQ,)``; k_scale
    and v_scale of one element or ``(HKV,)``, float32; q_norm and k_norm ``(D,)``, the weights of the norms. Tensors
    that only the device reads (cache_seqlens, kv_starts, sinks, the norms) are contiguous.
    """

    q: Any
    k_cache: Any
    v_cache: Any
    cos: Any = None
    sin: Any = None
    k: Any = None
    v: Any = None
    cache_seqlens: Any = None
    kv_starts: Any = None
    sinks: Any = None
    block_table: Any = None
    k_scale: Any = None
    v_scale: Any = None
    q_norm: Any = None
    k_norm: Any = None


def cache_of(problem: Problem) -> Cache:
    """Return the ``Cache`` of a generation step's ``Problem``."""
    return cast(Cache, problem.cache)


def describe_step(tensors: Any, *, cache_is_rotated: bool, options: Any = None, **described: Any) -> Problem:
    """Return the ``Problem`` of a step: of checked ``Options`` and the rotary dim that the check has found, or of
    options as ``attention.problem.describe`` takes them."""
    q, k_cache, v_cache, cos, sin, k, _, cache_seqlens, kv_starts, sinks, block_table, _, _, q_norm, k_norm = tensors
    page_size = None if block_table is None else k_cache.shape[2]
    # Without tables keys are read as they are, like rotated ones.
    cache = Cache(cache_is_rotated or cos is None, k is not None, page_size, k_cache.dtype is FLOAT8)
    # The call is described as attention to the whole cache.
    seen = Tensors(q, k_cache, v_cache, cos, sin, sinks, kv_starts, cache_seqlens, None, None, q_norm, k_norm)
    if options is None:
        problem = of_attention.describe(seen, cache=cache, **described)
    else:
        problem = of_attention.problem_of(seen, options, cache=cache, **described)
    return problem if page_size is None else problem._replace(len_k=block_table.shape[1] * page_size)


_WRITTEN = ("k_cache", "v_cache")
# The arguments of the operators. ``StepOptions`` names a step's options, among tensors.
_STEP_OPTIONS = [name for name in of_attention.DESCRIBED if name in StepOptions.__annotations__]
STEP = OperatorArguments(StepTensors, ("rotary_dim", *_STEP_OPTIONS, "cache_is_rotated"), describe_step, _WRITTEN)


class Written(NamedTuple):
    """k and v ``(B, HKV, N, D)``, packed ones with B = 1; caches, tables and scales as in ``StepTensors``; new_lens
    ``(B,)`` and cu_seqlens ``(sequences + 1,)`` int32 or None, contiguous."""

    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    cos: Any = None
    sin: Any = None
    block_table: Any = None
    cache_seqlens: Any = None
    new_lens: Any = None
    cu_seqlens: Any = None
    k_scale: Any = None
    v_scale: Any = None


def describe_write(tensors: Written, **options: Any) -> Problem:
    """Return the ``Problem`` of a write of checked new tokens: a step with the new keys as queries."""
    step = fill(StepTensors, tensors._asdict() | {"q": tensors.k})
    problem = describe_step(step, causal=True, **options)
    return problem if tensors.cu_seqlens is None else problem._replace(sequences=tensors.cu_seqlens.shape[0] - 1)


WRITE = OperatorArguments(Written, ("rotary_dim", "interleaved", "cache_is_rotated"), describe_write, _WRITTEN)


MIN_PAGE_SIZE = 16
_FLOAT8 = {"k_cache": FLOAT8, "v_cache": FLOAT8}
_NEW = {"k": "B HKV NQ D", "v": "B HKV NQ D"}
_CACHE, _POOL = "B HKV S_max D", "num_pages HKV page_size D"
# With and without a block_table. The last two are not given where nothing is appended.
_STEP_FORMS = {
    paged: checks.Forms(_FLOAT8, q="B HQ NQ D", k_cache=cache, v_cache=cache, **_NEW)
    for paged, cache in ((False, _CACHE), (True, _POOL))
}
_TOKENS = checks.Forms(k="B HKV N D", v="B HKV N D")
# Packed tokens are one batch entry, so that the caches' entries have another symbol.
_WRITE_FORMS = {
    paged: checks.Forms(_FLOAT8, k="B HKV N D", v="B HKV N D", k_cache=cache, v_cache=cache)
    for paged, cache in ((False, "sequences HKV S_max D"), (True, _POOL))
}
_LENGTHS, _ENDS = checks.Form("B", torch.int32), checks.Form("B+1", torch.int32)
_TABLE, _SCALE = checks.Form("B pages", torch.int32), checks.Form("1 | HKV", torch.float32)
_OPTIONS = of_attention.forms_of(StepTensors)


def check_kvcache(tensors: StepTensors, options: Any, cache_is_rotated: bool, layout: str = "bhsd") -> int:
    """Check a call of `rope_attention_with_kvcache` as its caller gave it, and return R, 0 without tables.

    tensors, options: `StepTensors` in the caller's `layout`, and attention's `Options`. `cache_seqlens` is not read.
    Raises TypeError or ValueError.
    """
    q, k_cache, v_cache, cos, sin, k, v, cache_seqlens, _, _, block_table, *_ = tensors
    if (k is None) != (v is None):
        checks.refuse_one_of_two(k=k, v=v)
    checks.check_bool("cache_is_rotated", cache_is_rotated)
    rows = (q, k_cache, v_cache) if k is None else (q, k_cache, v_cache, k, v)
    sizes = _STEP_FORMS[block_table is not None].check(layout, rows)
    batch, heads_q, len_q, head_dim = sizes[:4]
    checks.check_heads(heads_q, sizes[-2], head_dim, "k_cache")
    capacity, of_rows = check_kind_of_cache(tensors, "q", q, batch, sizes[-3:])
    check_apart(k_cache, v_cache, paged=block_table is not None)
    if k is not None:
        check_written(k_cache, v_cache)
        if len_q > capacity:
            raise ValueError(f"k must have at most {of_rows}'s S_max = {capacity} positions, but has {len_q}")
    _LENGTHS.check("cache_seqlens", cache_seqlens, "q", q, {"B": batch})
    of_attention.check_options(tensors, options, (batch, heads_q, capacity, head_dim), _OPTIONS)
    rotary_dim = 0
    if not checks.lacks_tables(cos, sin, options.rotary_dim, options.interleaved):
        rotary_dim = checks.check_tables(cos, sin, q, batch, capacity, head_dim, options.rotary_dim, "q", of_rows)
    refuse_gradients("rope_attention_with_kvcache", tensors)
    return rotary_dim


def check_kind_of_cache(
    tensors: StepTensors | Written, of: str, first: Tensor, batch: int, pool: tuple[int, ...]
) -> tuple[int, str]:
    """Check what caches in pages or in float8_e4m3fn need; return the rows of a sequence and the argument that says so.

    of, first: the call's first tensor. pool: the last sizes of the caches before D; of pages num_pages, HKV, page_size.
    """
    pages, heads_kv, rows = pool
    if tensors.v_cache.dtype != tensors.k_cache.dtype:
        expected = f"k_cache's dtype {checks.named(tensors.k_cache.dtype)}"
        raise TypeError(f"v_cache must have {expected}, but is {checks.named(tensors.v_cache.dtype)}")
    for name, scale in (("k_scale", tensors.k_scale), ("v_scale", tensors.v_scale)):
        if scale is not None:
            if tensors.k_cache.dtype != FLOAT8:
                is_now = checks.named(tensors.k_cache.dtype)
                raise ValueError(f"{name} must be None unless the caches are float8_e4m3fn; they are {is_now}")
            checks.check_kinds(**{name: scale})
            _SCALE.check(name, scale.reshape(-1) if scale.numel() == 1 else scale, of, first, {"HKV": heads_kv})
    if tensors.block_table is None:
        return rows, "k_cache"
    if pages < 1:
        raise ValueError("k_cache must have at least one page, but has 0")
    if rows < MIN_PAGE_SIZE:
        raise ValueError(f"k_cache must have pages of at least {MIN_PAGE_SIZE} rows, but has {rows}")
    _TABLE.check("block_table", tensors.block_table, of, first, {"B": batch})
    return tensors.block_table.shape[1] * rows, "block_table"


def check_apart(k_cache: Tensor, v_cache: Tensor, paged: bool = False) -> None:
    """Check that caches of one shape and dtype have no element in common. They may be views of one allocation.

    Pages with one number must be apart. Pages with other numbers need not be, because only the device knows which are
    in use: transformers stores the values of a page one page after its keys, and uses every second number.
    """
    found = "is k_cache"
    if k_cache is not v_cache:
        # A tracer would make conditions of addresses and sizes.
        if torch.compiler.is_compiling() or not torch._C._is_alias_of(k_cache, v_cache):  # type: ignore[attr-defined]
            return
        distance = v_cache.storage_offset() - k_cache.storage_offset()
        layouts = k_cache.stride(), v_cache.stride()
        sizes = (1, *k_cache.shape[1:]) if paged else k_cache.shape
        if not is_plain(k_cache, v_cache) or not share_elements(sizes, *layouts, distance):
            return
        found = f"begins {distance} elements after it in one allocation, with strides {layouts[1]} and {layouts[0]}"
    raise ValueError(f"v_cache must not overlap k_cache in memory, but {found}")


@functools.lru_cache(maxsize=1024)  # a pool that holds both caches is checked at every step
def share_elements(
    sizes: tuple[int, ...], strides: tuple[int, ...], other_strides: tuple[int, ...], distance: int
) -> bool:
    """Return whether two tensors of these sizes have an element in common, if the other begins ``distance`` later.

    They have one if ``sum(i * stride) - sum(j * other_stride) == distance`` for some indices i and j. Terms of one
    stride are added up, and the largest strides are tried first: since strides are nearly always nested, no more than
    three multiples of each leave a distance that the smaller ones can reach. A distance that their divisor does not
    divide needs no search, for example that of even and odd columns.
    """
    ranges: dict[int, tuple[int, int]] = {}
    for first, signs in ((strides, (0, 1)), (other_strides, (-1, 0))):
        for size, stride in zip(sizes, first):
            if stride:
                low, high = ranges.get(stride, (0, 0))
                ranges[stride] = low + signs[0] * (size - 1), high + signs[1] * (size - 1)
    terms = sorted((stride, *bounds) for stride, bounds in ranges.items() if bounds != (0, 0))

    def reaches(distance: int, count: int) -> bool:
        """Return whether the ``count`` smallest terms can add up to a distance."""
        if count == 0:
            return distance == 0
        if distance % math.gcd(*(term[0] for term in terms[:count])):
            return False
        stride, low, high = terms[count - 1]
        least, most = (sum(term[0] * term[end] for term in terms[: count - 1]) for end in (1, 2))
        low, high = max(low, -((most - distance) // stride)), min(high, (distance - least) // stride)
        return any(reaches(distance - stride * x, count - 1) for x in range(low, high + 1))

    return 0 not in sizes and reaches(distance, len(terms))


def check_written(k_cache: Tensor, v_cache: Tensor) -> None:
    """Check that the caches can be written."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        strides = cache.stride() if cache.numel() else ()
        if 0 in strides and any(stride == 0 and size > 1 for stride, size in zip(strides, cache.shape)):
            raise ValueError(
                f"{name} must not be expanded, since it is written: several elements share memory, strides {strides}"
            )


def check_write(tensors: Written, *, cache_is_rotated: Any, rotary_dim: Any, interleaved: Any, layout: str) -> int:
    """Check the arguments of `write_kvcache`, in the caller's `layout`, and return the rotary dim R."""
    k, v, k_cache, v_cache, cos, sin, block_table, cache_seqlens, new_lens, cu_seqlens, *_ = tensors
    checks.check_bool("cache_is_rotated", cache_is_rotated)
    checks.check_bool("interleaved", interleaved)
    packed = cu_seqlens is not None
    if packed and new_lens is not None:
        raise ValueError("new_lens must be None where cu_seqlens is given, which says how long each sequence is")
    if packed:
        _TOKENS.check("thd", (k, v))
        _ENDS.check("cu_seqlens", cu_seqlens, "k", k, {})
        if cu_seqlens.shape[0] < 2:
            raise ValueError(f"cu_seqlens must have shape (B+1,) with B >= 1, but has {checks.shown(cu_seqlens.shape)}")
        checks.check_ends("cu_seqlens", cu_seqlens, k.shape[0], "k")
        k, v = (x.unsqueeze(0) if layout == "bshd" else x.transpose(0, 1).unsqueeze(0) for x in (k, v))
    sizes = _WRITE_FORMS[block_table is not None].check(layout, (k, v, k_cache, v_cache))
    batch, heads_kv, _, head_dim, entries, rows = sizes
    batch = cu_seqlens.shape[0] - 1 if packed else batch
    checks.check_columns("k", heads_kv, head_dim)
    rows, of_rows = check_kind_of_cache(tensors, "k", k, batch, (entries, heads_kv, rows))
    if block_table is None and entries != batch:
        raise ValueError(f"k_cache must have one entry for each of {batch} sequences, but has {entries}")
    for name, bounds in (("cache_seqlens", cache_seqlens), ("new_lens", new_lens)):
        if bounds is not None:
            _LENGTHS.check(name, bounds, "k", k, {"B": batch})
    check_apart(k_cache, v_cache, paged=block_table is not None)
    check_written(k_cache, v_cache)
    if checks.lacks_tables(cos, sin, rotary_dim, interleaved):
        rotary_dim = 0
    else:
        rotary_dim = checks.check_tables(cos, sin, k, batch, rows, head_dim, rotary_dim, "k", of_rows)
    refuse_gradients("write_kvcache", tensors)
    return rotary_dim


def refuse_gradients(function: str, tensors: StepTensors | Written) -> None:
    """Refuse tensors that require a gradient while gradients are enabled, and in the name of `function` tangents."""
    given = {name: x for name, x in tensors._asdict().items() if x is not None and name not in ("cos", "sin")}
    refuse_tangents(function, given.values())
    for name, x in given.items() if torch.is_grad_enabled() else ():
        if x.requires_grad:
            raise ValueError(
                f"{name} must not require a gradient: the generation step has none; call it under torch.no_grad() "
                f"or pass {name}.detach()"
            )
