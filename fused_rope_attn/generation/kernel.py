# mypy: ignore-errors
"""Generation step: a few new queries against a long cache of keys and values, to which the new tokens are appended.

The cache is read once and little is computed, so bytes in flight determine the time. The query heads of a group, and
the new tokens, are the rows of one tile: a head's keys are read once for all of them. All programs have equal shares of
the work (``shares``), and each goes through the blocks in its share. A second small kernel adds up the parts of each
block (``combine_kernel``). Its start overlaps with the end of the first one (programmatic dependent launch). There are
two launches and no counter: nothing has to be reset, so that a captured graph and an eager call may run concurrently.

In a step that appends, the second kernel also folds the new tokens into each row and writes them into the cache. That
needs nothing of the first kernel and precedes the wait for it: if the first kernel leaves registers and shared memory
free, it takes no time at all. At the end of the first kernel it would take three round trips to memory.
"""

import triton
import triton.language as tl

from fused_rope_attn.generation.float8 import HeadScales
from fused_rope_attn.generation.inputs import (
    STEP_NUMBERS,
    CacheInputs,
    QueryRows,
    StepInputs,
    StepOutputs,
    cache_of_head,
    float8_of,
    load_queries,
    new_keys_of_head,
    store_rows,
)
from fused_rope_attn.generation.keys import RunningSums, attend_cached, attend_new, no_sums, whole_sums
from fused_rope_attn.generation.pages import BlockTable
from fused_rope_attn.generation.shares import (
    Caches,
    Parts,
    cache_view,
    cached_keys,
    count_key_tiles,
    part_pointers,
    sequence_of,
    share_of,
    tiles_before,
    whole_part_pointers,
)
from fused_rope_attn.kernels.masks import is_causal, window_of
from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.products import ScoreScale
from fused_rope_attn.kernels.rotation import RotaryTables
from fused_rope_attn.kernels.schedule import let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.kernels.softmax import rescale
from fused_rope_attn.kernels.tiles import RowFormat, Rows, TensorView, store_tile

# Rows of a tensor core's product. The one query row is the first of them.
ROWS = tl.constexpr(16)


@triton.jit
def keys_seen_by_all(keys, first_token, last_position, right, S):
    """Return the first cached key that some query of a block does not see.

    The block's queries are those from ``first_token`` to the one at ``last_position``; a query before position 0, or
    from S on, sees nothing.
    """
    first_position = keys.q_offset + first_token
    end = keys.num_keys
    if right is not None:
        end = tl.minimum(end, first_position + right + 1)
    return tl.where((first_position >= 0) & (last_position < S), end, 0)


@triton.jit(do_not_specialize=STEP_NUMBERS)
def decode_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, cache_seqlens_ptr, kv_starts_ptr, sinks_ptr,
    block_table_ptr, k_scale_ptr, v_scale_ptr, q_norm_ptr, k_norm_ptr, o_ptr, lse_ptr, parts_ptr, q_strides,
    k_cache_strides, v_cache_strides, cos_strides, sin_strides, k_strides, v_strides, o_strides, table_strides,
    k_scale_stride, v_scale_stride, qk_scale, q_sign, cap_scale, norm_eps, norm_offset, window, programs, B, HKV,
    GROUP_SIZE, NQ, S, num_pages, position_limit, D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_NEW: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr,
    INTERLEAVED: tl.constexpr, CACHE_IS_ROTATED: tl.constexpr, HAS_NEW_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, STRIDE_UNIT: tl.constexpr, PAGE_SIZE: tl.constexpr, ALIGNMENT: tl.constexpr,
    IS_CHUNK: tl.constexpr, FLOAT8_DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr,
    NEW_WITH_PARTS: tl.constexpr, ONE_PASS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend to one share of all key tiles. Grid: (programs,).

    q (B, HQ, NQ, D), caches (B, HKV, S, D) with strides in units of STRIDE_UNIT (``cache_view``), new k and v (B, HKV,
    NQ, D), tables of position_limit rows, o like q, lse (B, HQ, NQ) float32. Arguments that a call does not use are
    None: k, v, starts, sinks, cap_scale, window, and q_norm and k_norm (D,), the weights of norms of q and of the
    new k. With a block table (B, pages) int32 the caches are pools (num_pages, HKV, PAGE_SIZE, D), and S is as many
    rows as the table has. ALIGNMENT: tiles begin at multiples of so many keys, if they are within a page or begin with
    one; else 1. FLOAT8_DTYPE: of products with caches of float8_e4m3fn, in units of the scales (HKV,), or of one
    element with a stride of 0, or None; IS_ALIGNED: as in ``Float8``.

    IS_CHUNK: there are many tokens, and a block leaves out those after its last query. NEW_WITH_PARTS: the new tokens
    are left to ``combine_kernel``, and so are blocks that no other program shares.

    A block is one key head of one sequence with BLOCK_M of its ``NQ * GROUP_SIZE`` query rows; row m belongs to token
    ``m // GROUP_SIZE``. Partial sums of a shared block are written to parts (``part_pointers``).
    """
    let_next_launch_start(PDL)
    caches = Caches(
        cache_seqlens_ptr, kv_starts_ptr, B, NQ, S, window[0], HAS_NEW_KEYS, BLOCK_N, BLOCK_B, ALIGNMENT, ONE_PASS
    )
    row_format = RowFormat(D, BLOCK_D, USE_INT64_OFFSETS)
    k_cache = cache_view(k_cache_ptr, k_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    v_cache = cache_view(v_cache_ptr, v_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    table = BlockTable(block_table_ptr, table_strides, num_pages, PAGE_SIZE)
    k_scales, v_scales = HeadScales(k_scale_ptr, k_scale_stride), HeadScales(v_scale_ptr, v_scale_stride)
    stored = CacheInputs(
        k_cache, v_cache, table, k_scales, v_scales, CACHE_IS_ROTATED, ALIGNMENT, FLOAT8_DTYPE, IS_ALIGNED
    )
    q, k, v = TensorView(q_ptr, q_strides), TensorView(k_ptr, k_strides), TensorView(v_ptr, v_strides)
    tables = RotaryTables(cos_ptr, sin_ptr, cos_strides, sin_strides, R, INTERLEAVED)
    q_norm = Norm(q_norm_ptr, norm_eps, norm_offset, D) if q_norm_ptr is not None else None
    k_norm = Norm(k_norm_ptr, norm_eps, norm_offset, D) if k_norm_ptr is not None else None
    scale, limit, starts = ScoreScale(qk_scale, cap_scale, PRECISION), position_limit, kv_starts_ptr
    inputs = StepInputs(
        q, k, v, stored, tables, limit, q_norm, k_norm, scale, q_sign, starts, window_of(window), NQ, S, row_format
    )
    m_blocks = tl.cdiv(NQ * GROUP_SIZE, BLOCK_M)
    blocks = HKV * m_blocks  # of one sequence
    total, _ = tiles_before(caches, 0)
    share = share_of(total * blocks, programs)
    pid = tl.program_id(0)
    remaining = tl.minimum(share, total * blocks - pid * share)
    if remaining <= 0:
        return
    # A sequence has ``blocks`` times the tiles of one of its blocks, and so do the sequences before it.
    sequence, before = sequence_of(caches, pid * share // blocks)
    keys = cached_keys(caches, sequence)
    rest = pid * share - before * blocks
    block = rest // count_key_tiles(keys, BLOCK_N)
    tile = rest % count_key_tiles(keys, BLOCK_N)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    while remaining > 0:
        keys = cached_keys(caches, sequence)
        tiles = count_key_tiles(keys, BLOCK_N)
        last_tile = tl.minimum(tiles, tile + remaining)
        batch = tl.cast(sequence, tl.int64)
        head_kv = tl.cast(block // m_blocks, tl.int64)
        start_m = block % m_blocks * BLOCK_M
        num_rows = NQ * GROUP_SIZE - start_m
        tokens = (start_m + offs_m) // GROUP_SIZE
        heads = head_kv * GROUP_SIZE + (start_m + offs_m) % GROUP_SIZE
        rows = QueryRows(batch, heads, tokens, offs_m, num_rows)
        float8 = None
        if FLOAT8_DTYPE is not None:
            float8 = float8_of(stored, head_kv)
        queries = load_queries(inputs, rows, keys, float8)
        first_row = None
        if ALIGNMENT > 1 and (kv_starts_ptr is not None or window[0] is not None):
            first_row = keys.first_key
        cache = cache_of_head(inputs, keys, batch, head_kv, first_row, float8)
        sums = no_sums(BLOCK_M, BLOCK_D, IS_FLOAT8=FLOAT8_DTYPE is not None)
        first = keys.first_tile + tile * BLOCK_N
        end = tl.minimum(keys.num_keys, keys.first_tile + last_tile * BLOCK_N)
        last_token = (start_m + BLOCK_M - 1) // GROUP_SIZE
        if IS_CHUNK and is_causal(window[1]) and not HAS_NEW_KEYS:
            end = tl.minimum(end, keys.q_offset + last_token + 1)
        seen_by_all = None
        if IS_CHUNK and window[0] is None and first_row is None:
            last_position = keys.q_offset + tl.minimum(last_token, NQ - 1)
            seen_by_all = keys_seen_by_all(keys, start_m // GROUP_SIZE, last_position, window[1], S)
        sums = attend_cached(sums, queries, cache, first, seen_by_all, end, offs_n)

        if HAS_NEW_KEYS and not NEW_WITH_PARTS:
            if last_tile == tiles:
                # The program with the last tile also attends to the new tokens. It reads them from the arguments,
                # because another program may still be writing them to the cache.
                first_new = None
                if kv_starts_ptr is not None:
                    first_new = tl.load(kv_starts_ptr + sequence)
                new = new_keys_of_head(inputs, keys, batch, head_kv)
                num_seen = new.k.num_rows
                if IS_CHUNK and is_causal(window[1]):
                    num_seen = tl.where(start_m == 0, num_seen, tl.minimum(num_seen, last_token + 1))
                sums = attend_new(sums, queries, cache, new, num_seen, first_new, start_m == 0, BLOCK_NEW)
        sums = whole_sums(sums, float8)

        is_whole = (tile == 0) & (last_tile == tiles)
        if is_whole and not NEW_WITH_PARTS:
            outputs = StepOutputs(TensorView(o_ptr, o_strides), lse_ptr, sinks_ptr, HKV * GROUP_SIZE, NQ, row_format)
            store_rows(outputs, rows, sums)
        else:
            parts = Parts(parts_ptr, programs, BLOCK_M=BLOCK_M, D=D)
            part, stats = part_pointers(parts, pid, tile == 0)
            if NEW_WITH_PARTS:
                if is_whole:
                    part, stats = whole_part_pointers(parts, sequence * blocks + block)
            part_format = RowFormat(D, BLOCK_D, USE_INT64_OFFSETS=False)
            part_rows = Rows(part, D, 1, num_rows=num_rows, first_row=None, format=part_format)
            store_tile(part_rows, sums.acc, offs_m)
            tl.store(stats + offs_m, sums.row_max, mask=offs_m < num_rows)
            tl.store(stats + BLOCK_M + offs_m, sums.row_sum, mask=offs_m < num_rows)
        remaining -= last_tile - tile
        tile = 0
        block += 1
        if block == blocks:
            block = 0
            sequence += 1


@triton.jit
def new_tokens_of_row(inputs, keys, batch, head_kv, head, row, GROUP_SIZE, BLOCK_NEW: tl.constexpr):
    """Return the ``RunningSums`` of one query row over the new tokens. The first row of a key head appends these.

    batch, head_kv and head are int64; row: of the ``NQ * GROUP_SIZE`` of the key head.
    """
    offs = tl.arange(0, ROWS)
    heads, tokens = head + tl.zeros((ROWS,), tl.int64), row // GROUP_SIZE + tl.zeros((ROWS,), tl.int32)
    rows = QueryRows(batch, heads, tokens, offs, num_rows=1)
    IS_FLOAT8: tl.constexpr = inputs.cache.FLOAT8_DTYPE is not None
    float8 = None
    if IS_FLOAT8:
        float8 = float8_of(inputs.cache, head_kv)
    queries = load_queries(inputs, rows, keys, float8)
    cache = cache_of_head(inputs, keys, batch, head_kv, None, float8)
    first_new = None
    if inputs.starts_ptr is not None:
        first_new = tl.load(inputs.starts_ptr + batch)
    new = new_keys_of_head(inputs, keys, batch, head_kv)
    sums = no_sums(ROWS, inputs.format.BLOCK_D, IS_FLOAT8)
    sums = attend_new(sums, queries, cache, new, new.k.num_rows, first_new, row == 0, BLOCK_NEW)
    sums = whole_sums(sums, float8)
    is_row = offs == 0
    return RunningSums(
        acc=tl.sum(tl.where(is_row[:, None], sums.acc, 0.0), 0)[None, :],
        row_max=tl.zeros((1,), tl.float32) + tl.max(tl.where(is_row, sums.row_max, float("-inf")), 0),
        row_sum=tl.zeros((1,), tl.float32) + tl.sum(tl.where(is_row, sums.row_sum, 0.0), 0),
    )


@triton.jit(do_not_specialize=STEP_NUMBERS)
def combine_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, cache_seqlens_ptr, kv_starts_ptr, sinks_ptr,
    block_table_ptr, k_scale_ptr, v_scale_ptr, q_norm_ptr, k_norm_ptr, o_ptr, lse_ptr, parts_ptr, q_strides,
    k_cache_strides, v_cache_strides, cos_strides, sin_strides, k_strides, v_strides, o_strides, table_strides,
    k_scale_stride, v_scale_stride, qk_scale, q_sign, cap_scale, norm_eps, norm_offset, window, programs, B, HKV,
    GROUP_SIZE, NQ, S, num_pages, position_limit, D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_NEW: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr, INTERLEAVED: tl.constexpr, CACHE_IS_ROTATED: tl.constexpr,
    HAS_NEW_KEYS: tl.constexpr, PRECISION: tl.constexpr, STRIDE_UNIT: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ALIGNMENT: tl.constexpr, FLOAT8_DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr,
    NEW_WITH_PARTS: tl.constexpr, ONE_PASS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add up one query row: the new tokens (NEW_WITH_PARTS), and its parts. Grid: (B * HKV * NQ * GROUP_SIZE,).

    Without the new tokens only rows with parts from several programs are written. The arguments are those of
    ``decode_kernel``; BLOCK_PARTS parts are added at once.
    """
    caches = Caches(
        cache_seqlens_ptr, kv_starts_ptr, B, NQ, S, window[0], HAS_NEW_KEYS, BLOCK_N, BLOCK_B, ALIGNMENT, ONE_PASS
    )
    row_format = RowFormat(D, BLOCK_D, USE_INT64_OFFSETS)
    k_cache = cache_view(k_cache_ptr, k_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    v_cache = cache_view(v_cache_ptr, v_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    table = BlockTable(block_table_ptr, table_strides, num_pages, PAGE_SIZE)
    k_scales, v_scales = HeadScales(k_scale_ptr, k_scale_stride), HeadScales(v_scale_ptr, v_scale_stride)
    stored = CacheInputs(
        k_cache, v_cache, table, k_scales, v_scales, CACHE_IS_ROTATED, ALIGNMENT, FLOAT8_DTYPE, IS_ALIGNED
    )
    q, k, v = TensorView(q_ptr, q_strides), TensorView(k_ptr, k_strides), TensorView(v_ptr, v_strides)
    tables = RotaryTables(cos_ptr, sin_ptr, cos_strides, sin_strides, R, INTERLEAVED)
    q_norm = Norm(q_norm_ptr, norm_eps, norm_offset, D) if q_norm_ptr is not None else None
    k_norm = Norm(k_norm_ptr, norm_eps, norm_offset, D) if k_norm_ptr is not None else None
    scale, limit, starts = ScoreScale(qk_scale, cap_scale, PRECISION), position_limit, kv_starts_ptr
    inputs = StepInputs(
        q, k, v, stored, tables, limit, q_norm, k_norm, scale, q_sign, starts, window_of(window), NQ, S, row_format
    )
    pid = tl.program_id(0)
    group_rows = NQ * GROUP_SIZE
    m_blocks = tl.cdiv(group_rows, BLOCK_M)
    blocks = HKV * m_blocks
    row = pid % group_rows
    head_kv = pid // group_rows % HKV
    sequence = pid // group_rows // HKV
    batch = tl.cast(sequence, tl.int64)
    head = tl.cast(head_kv * GROUP_SIZE + row % GROUP_SIZE, tl.int64)
    total, before = tiles_before(caches, sequence)
    keys = cached_keys(caches, sequence)
    tiles = count_key_tiles(keys, BLOCK_N)
    share = share_of(total * blocks, programs)
    first_tile = before * blocks + (head_kv * m_blocks + row // BLOCK_M) * tiles
    first_program = first_tile // share
    last_program = (first_tile + tiles - 1) // share
    if NEW_WITH_PARTS:
        head_kv64 = tl.cast(head_kv, tl.int64)
        sums = new_tokens_of_row(inputs, keys, batch, head_kv64, head, row, GROUP_SIZE, BLOCK_NEW)
        acc, row_max, row_sum = sums.acc, sums.row_max, sums.row_sum
    else:
        acc = tl.zeros((1, BLOCK_D), tl.float32)
        row_max = tl.full((1,), float("-inf"), tl.float32)
        row_sum = tl.zeros((1,), tl.float32)
    # Programs with nothing to add wait too, because the next kernel may begin when all programs have ended.
    wait_for_previous_launch(PDL)
    if first_program == last_program and not NEW_WITH_PARTS:
        return

    columns = tl.arange(0, BLOCK_D)
    parts = Parts(parts_ptr, programs, BLOCK_M=BLOCK_M, D=D)
    for start in range(first_program, last_program + 1, BLOCK_PARTS):
        program = start + tl.arange(0, BLOCK_PARTS)
        exists = program <= last_program
        part, stats = part_pointers(parts, program, program == first_program)
        if NEW_WITH_PARTS:
            whole, whole_stats = whole_part_pointers(parts, (sequence * HKV + head_kv) * m_blocks + row // BLOCK_M)
            is_whole = first_program == last_program
            part, stats = tl.where(is_whole, whole, part), tl.where(is_whole, whole_stats, stats)
        row_stats = stats + row % BLOCK_M
        part_max = tl.load(row_stats, mask=exists, other=float("-inf"))
        part_sum = tl.load(row_stats + BLOCK_M, mask=exists, other=0.0)
        part_rows = part[:, None] + (row % BLOCK_M) * D + columns[None, :]
        part_acc = tl.load(part_rows, mask=exists[:, None] & (columns[None, :] < D), other=0.0)
        new_max = tl.maximum(row_max, tl.max(part_max, 0))
        weight = rescale(row_max, new_max)
        part_weight = rescale(part_max, new_max)
        acc = acc * weight[:, None] + tl.sum(part_acc * part_weight[:, None], 0)[None, :]
        row_sum = row_sum * weight + tl.sum(part_sum * part_weight, 0)
        row_max = new_max
    offs_m = tl.arange(0, 1)
    rows = QueryRows(batch, head + offs_m, row // GROUP_SIZE + offs_m, offs_m, num_rows=1)
    outputs = StepOutputs(TensorView(o_ptr, o_strides), lse_ptr, sinks_ptr, HKV * GROUP_SIZE, NQ, row_format)
    store_rows(outputs, rows, RunningSums(acc, row_max, row_sum))
