# mypy: ignore-errors
"""Generation step: a few new queries against a long cache of keys and values, which the new ones join as well.

The cache is read once and little is computed, so that the kernel is as fast as it keeps bytes in flight. The query
heads of a group, and the new tokens, are the rows of one tile: a head's keys are read once for all of them. All
programs have equal shares of the work (``shares``), and each goes through the blocks in its share. What they have of
a block a second small kernel adds (``combine_kernel``), whose start overlaps with the end of the first (programmatic
dependent launch). There are two launches and no counter: nothing has to be reset, so that a captured graph and an eager
call may run at the same time.
"""

import triton
import triton.language as tl

from fused_rope_attn.generation.inputs import (
    Inputs,
    Outputs,
    QueryRows,
    cache_of_head,
    float8_of,
    load_queries,
    new_keys_of_head,
    store_rows,
)
from fused_rope_attn.generation.keys import attend_cached, attend_new, no_sums, whole_sums
from fused_rope_attn.generation.shares import (
    Caches,
    Parts,
    cached_keys,
    count_key_tiles,
    in_elements,
    part_pointers,
    sequence_of,
    share_of,
    tiles_before,
    whole_part_pointers,
)
from fused_rope_attn.kernels.masks import is_causal
from fused_rope_attn.kernels.schedule import let_next_launch_start
from fused_rope_attn.kernels.tiles import RowFormat, Rows, store_tile


@triton.jit
def keys_seen_by_all(keys, first_token, last_position, right, S):
    """The first cached key that a query of a block does not see: all of them see the keys before it, if they see each
    key from the first one on.

    The block's queries are those from ``first_token`` to the one at ``last_position``; one before position 0, or at S
    or behind it, sees nothing.
    """
    first_position = keys.q_offset + first_token
    end = keys.num_keys
    if right is not None:
        end = tl.minimum(end, first_position + right + 1)
    return tl.where((first_position >= 0) & (last_position < S), end, 0)


@triton.jit(do_not_specialize=["left", "right", "programs", "B", "HKV", "GROUP_SIZE", "NQ", "S", "num_pages",
                               "position_limit"])  # fmt: skip
def decode_kernel(q_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, seqlens_ptr, starts_ptr, sinks_ptr,
                  table_ptr, k_scale_ptr, v_scale_ptr, q_norm_ptr, k_norm_ptr, o_ptr, lse_ptr, parts_ptr, q_strides,
                  k_cache_strides, v_cache_strides, cos_strides, sin_strides, k_strides, v_strides, o_strides,
                  table_strides, k_scale_stride, v_scale_stride, qk_scale, q_sign, cap_scale, norm_eps, norm_offset,
                  left, right, programs, B, HKV, GROUP_SIZE, NQ, S, num_pages, position_limit, D: tl.constexpr,
                  R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_NEW: tl.constexpr,
                  BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr, LEAST_TILES: tl.constexpr, INTERLEAVED: tl.constexpr,
                  CACHE_IS_ROTATED: tl.constexpr, HAS_NEW_KEYS: tl.constexpr,
                  PRECISION: tl.constexpr, STRIDE_UNIT: tl.constexpr, PAGE_SIZE: tl.constexpr,
                  ALIGNMENT: tl.constexpr, IS_CHUNK: tl.constexpr, FLOAT8_DTYPE: tl.constexpr,
                  IS_ALIGNED: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr, NEW_WITH_PARTS: tl.constexpr,
                  ONE_PASS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One share of all key tiles. Grid: (programs,).

    q (B, HQ, NQ, D), caches (B, HKV, S, D) with strides in units of STRIDE_UNIT (``in_elements``), new k and v (B, HKV,
    NQ, D), tables of position_limit rows, o like q, lse (B, HQ, NQ) float32. What a call does not use is None: k, v,
    starts, sinks, cap_scale, left, right, and q_norm and k_norm (D,), the weights of norms of q and of the new k. With
    a block table (B, pages) int32 the caches are pools (num_pages, HKV, PAGE_SIZE, D), and S is as many rows as the
    table has. ALIGNMENT: tiles begin at multiples of so many keys, where they lie within a page or begin with one; else
    1. FLOAT8_DTYPE: of products with caches of float8_e4m3fn, in units of the scales (HKV,), or of one element with a
    stride of 0, or None; IS_ALIGNED: as in ``Float8``.

    IS_CHUNK: there are many tokens, of which a block leaves out those behind its last query. NEW_WITH_PARTS: the new
    tokens are left to ``combine_kernel``, and so are blocks that no other program shares.

    A block is one key head of one sequence with BLOCK_M of its ``NQ * GROUP_SIZE`` query rows; row m belongs to token
    ``m // GROUP_SIZE``. What a program computes of a shared block goes to parts (``part_pointers``).
    """
    let_next_launch_start(PDL)
    caches = Caches(
        seqlens_ptr, starts_ptr, B, NQ, S, left, HAS_NEW_KEYS=HAS_NEW_KEYS, BLOCK_N=BLOCK_N, BLOCK_B=BLOCK_B,
        ALIGNMENT=ALIGNMENT, ONE_PASS=ONE_PASS,
    )  # fmt: skip
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
    inputs = Inputs(
        q_ptr=q_ptr, q_strides=q_strides, k_cache_ptr=k_cache_ptr, v_cache_ptr=v_cache_ptr,
        k_cache_strides=in_elements(k_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS),
        v_cache_strides=in_elements(v_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS), k_ptr=k_ptr, v_ptr=v_ptr,
        k_strides=k_strides, v_strides=v_strides, cos_ptr=cos_ptr, sin_ptr=sin_ptr, cos_strides=cos_strides,
        sin_strides=sin_strides, position_limit=position_limit, starts_ptr=starts_ptr, table_ptr=table_ptr,
        table_strides=table_strides, num_pages=num_pages, k_scale_ptr=k_scale_ptr, v_scale_ptr=v_scale_ptr,
        k_scale_stride=k_scale_stride, v_scale_stride=v_scale_stride, q_norm_ptr=q_norm_ptr, k_norm_ptr=k_norm_ptr,
        norm_eps=norm_eps, norm_offset=norm_offset, qk_scale=qk_scale, q_sign=q_sign, cap_scale=cap_scale, left=left,
        right=right, NQ=NQ, S=S, format=row_format, R=R, INTERLEAVED=INTERLEAVED,
        CACHE_IS_ROTATED=CACHE_IS_ROTATED, PRECISION=PRECISION, PAGE_SIZE=PAGE_SIZE, ALIGNMENT=ALIGNMENT,
        FLOAT8_DTYPE=FLOAT8_DTYPE, IS_ALIGNED=IS_ALIGNED,
    )  # fmt: skip
    m_blocks = tl.cdiv(NQ * GROUP_SIZE, BLOCK_M)
    blocks = HKV * m_blocks  # of one sequence
    total, _ = tiles_before(caches, 0)
    share = share_of(total * blocks, programs, LEAST_TILES)
    pid = tl.program_id(0)
    remaining = tl.minimum(share, total * blocks - pid * share)
    if remaining <= 0:
        return
    # The tiles of a sequence are those of one of its blocks times ``blocks``, and so are the tiles before it.
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
        rows = QueryRows(batch=batch, heads=heads, tokens=tokens, offs_m=offs_m, num_rows=num_rows)
        float8 = None
        if FLOAT8_DTYPE is not None:
            float8 = float8_of(inputs, head_kv)
        queries = load_queries(inputs, rows, keys, float8)
        first_row = None
        if ALIGNMENT > 1 and (starts_ptr is not None or left is not None):
            first_row = keys.first_key
        cache = cache_of_head(inputs, keys, batch, head_kv, first_row, float8)
        sums = no_sums(BLOCK_M, BLOCK_D, IS_FLOAT8=FLOAT8_DTYPE is not None)
        first = keys.first_tile + tile * BLOCK_N
        end = tl.minimum(keys.num_keys, keys.first_tile + last_tile * BLOCK_N)
        last_token = (start_m + BLOCK_M - 1) // GROUP_SIZE
        if IS_CHUNK and is_causal(right) and not HAS_NEW_KEYS:
            end = tl.minimum(end, keys.q_offset + last_token + 1)
        seen_by_all = None
        if IS_CHUNK and left is None and first_row is None:
            last_position = keys.q_offset + tl.minimum(last_token, NQ - 1)
            seen_by_all = keys_seen_by_all(keys, start_m // GROUP_SIZE, last_position, right, S)
        sums = attend_cached(sums, queries, cache, first, seen_by_all, end, offs_n)

        if HAS_NEW_KEYS and not NEW_WITH_PARTS:
            if last_tile == tiles:
                # The program that has a block's last tile adds the new tokens, from the arguments: their rows of the
                # cache are written by the first block of a key head and read by nobody.
                first_new = None
                if starts_ptr is not None:
                    first_new = tl.load(starts_ptr + sequence)
                new = new_keys_of_head(inputs, keys, batch, head_kv)
                num_seen = new.k.num_rows
                if IS_CHUNK and is_causal(right):
                    num_seen = tl.where(start_m == 0, num_seen, tl.minimum(num_seen, last_token + 1))
                sums = attend_new(sums, queries, cache, new, num_seen, first_new, start_m == 0, BLOCK_NEW)
        sums = whole_sums(sums, float8)

        is_whole = (tile == 0) & (last_tile == tiles)
        if is_whole and not NEW_WITH_PARTS:
            outputs = Outputs(o_ptr, o_strides, lse_ptr, sinks_ptr, HQ=HKV * GROUP_SIZE, NQ=NQ, format=row_format)
            store_rows(outputs, rows, sums)
        else:
            parts = Parts(parts_ptr, programs, BLOCK_M=BLOCK_M, D=D)
            part, stats = part_pointers(parts, pid, tile == 0)
            if NEW_WITH_PARTS:
                if is_whole:
                    part, stats = whole_part_pointers(parts, sequence * blocks + block)
            part_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=False)
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
