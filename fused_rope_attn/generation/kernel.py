"""Generation step: a few new queries against a long cache of keys and values, which the new ones join as well.

The cache is read once and little is computed, so that the kernel is as fast as it keeps bytes in flight. The query
heads of a group, and the new tokens, are the rows of one tile: a head's keys are read once for all of them. All
programs have equal shares of the work (``shares``), and each goes through the blocks in its share. What they have of
shared blocks a second small kernel adds, whose start overlaps with the end of the first (programmatic dependent
launch). There are two launches and no counter: nothing has to be reset, so that a captured graph and an eager call may
run at the same time.
"""

import triton
import triton.language as tl

from fused_rope_attn.generation.float8 import Float8, head_scale, scaled, scaled_queries
from fused_rope_attn.generation.keys import (
    KeyRows,
    NewKeys,
    Queries,
    RunningSums,
    attend_cached,
    attend_new,
    load_new,
    no_sums,
    whole_sums,
)
from fused_rope_attn.generation.pages import sequence_pages
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
)
from fused_rope_attn.kernels.products import ScoreScale
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import head_rotation, with_norm
from fused_rope_attn.kernels.schedule import let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.kernels.softmax import LOG2E, finish_softmax, rescale
from fused_rope_attn.kernels.tiles import Origin, RowFormat, Rows, head_rows, store_tile


@record
class QueryRows:
    """Up to BLOCK_M query rows of one sequence, each with a query head and a token of its own."""

    batch: tl.tensor  # int64
    heads: tl.tensor  # (BLOCK_M,) int64
    tokens: tl.tensor  # (BLOCK_M,)
    offs_m: tl.tensor  # (BLOCK_M,), 0 to BLOCK_M
    num_rows: tl.tensor  # rows from this one on do not exist


@record
class Outputs:
    """What ``store_rows`` writes and reads: o (B, HQ, NQ, D), lse (B, HQ, NQ) float32, sinks (HQ,) or None."""

    o_ptr: tl.tensor
    o_strides: tl.tuple
    lse_ptr: tl.tensor
    sinks_ptr: tl.tensor | None
    HQ: tl.tensor
    NQ: tl.tensor
    format: RowFormat


@triton.jit
def rows_of_queries(ptr, strides, rows, format):
    """``Rows`` of a (B, HQ, NQ, D) tensor at ``QueryRows``: they are not evenly spaced, each brings its pointer."""
    pointers = ptr + rows.batch * strides[0] + rows.heads * strides[1] + rows.tokens.to(tl.int64) * strides[2]
    return Rows(
        ptr=pointers[:, None], stride_row=0, stride_column=strides[3], num_rows=rows.num_rows, first_row=None,
        format=format,
    )  # fmt: skip


@triton.jit
def store_rows(outputs, rows, sums):
    """Write o and lse of ``QueryRows``, those that exist."""
    sink = None
    if outputs.sinks_ptr is not None:
        sink = tl.load(outputs.sinks_ptr + rows.heads, mask=rows.offs_m < rows.num_rows, other=0.0)
        sink = sink.to(tl.float32) * LOG2E
    o, lse = finish_softmax(sums.acc, sums.row_max, sums.row_sum, sink)
    o_rows = rows_of_queries(outputs.o_ptr, outputs.o_strides, rows, outputs.format)
    store_tile(o_rows, o, rows.offs_m)
    exists = rows.offs_m < rows.num_rows
    lse_rows = outputs.lse_ptr + (rows.batch * outputs.HQ + rows.heads) * outputs.NQ + rows.tokens
    tl.store(lse_rows, lse, mask=exists)


@triton.jit
def keys_seen_by_all(keys, first_token, last_position, right, S, IS_CAUSAL: tl.constexpr):
    """The first cached key that a query of a block does not see: all of them see the keys before it, if they see each
    key from the first one on.

    The block's queries are those from ``first_token`` to the one at ``last_position``; one before position 0, or at S
    or behind it, sees nothing.
    """
    first_position = keys.q_offset + first_token
    end = keys.num_keys
    if IS_CAUSAL:
        end = tl.minimum(end, first_position + 1)
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
                  IS_CAUSAL: tl.constexpr, CACHE_IS_ROTATED: tl.constexpr, HAS_NEW_KEYS: tl.constexpr,
                  PRECISION: tl.constexpr, STRIDE_UNIT: tl.constexpr, PAGE_SIZE: tl.constexpr,
                  ALIGNS_TILES: tl.constexpr, IS_CHUNK: tl.constexpr, FLOAT8_DTYPE: tl.constexpr,
                  IS_ALIGNED: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One share of all key tiles. Grid: (programs,).

    q (B, HQ, NQ, D), caches (B, HKV, S, D) with strides in units of STRIDE_UNIT (``in_elements``), new k and v (B, HKV,
    NQ, D), tables of position_limit rows, o like q, lse (B, HQ, NQ) float32. What a call does not use is None: k, v,
    starts, sinks, cap_scale, left, right, and q_norm and k_norm (D,), the weights of norms of q and of the new k. With
    a block table (B, pages) int32 the caches are pools (num_pages, HKV, PAGE_SIZE, D), and S is as many rows as the
    table has; ALIGNS_TILES: each page holds whole tiles. FLOAT8_DTYPE: of products with caches of float8_e4m3fn, in
    units of the scales (HKV,), or of one element with a stride of 0, or None; IS_ALIGNED: as in ``Float8``.

    IS_CHUNK: there are many tokens, of which a block leaves out those behind its last query.

    A block is one key head of one sequence with BLOCK_M of its ``NQ * GROUP_SIZE`` query rows; row m belongs to token
    ``m // GROUP_SIZE``. What a program computes of a shared block goes to parts (``part_pointers``).
    """
    let_next_launch_start(PDL)
    k_cache_strides = in_elements(k_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    v_cache_strides = in_elements(v_cache_strides, STRIDE_UNIT, USE_INT64_OFFSETS)
    caches = Caches(
        seqlens_ptr, starts_ptr, B, NQ, S, left, HAS_NEW_KEYS=HAS_NEW_KEYS, BLOCK_N=BLOCK_N, BLOCK_B=BLOCK_B,
        ALIGNS_TILES=ALIGNS_TILES,
    )  # fmt: skip
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
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
        rotation = head_rotation(cos_ptr, sin_ptr, cos_strides, sin_strides, batch, position_limit, R, INTERLEAVED)
        # A query whose token finds no room in the cache sees nothing, like one before position 0.
        positions_q = tl.where(keys.q_offset + tokens < S, keys.q_offset + tokens, -1)
        q_rows = rows_of_queries(q_ptr, q_strides, rows, row_format)
        q_rotation = with_norm(rotation, q_norm_ptr, norm_eps, norm_offset, D)
        if FLOAT8_DTYPE is None:
            q = load_new(q_rows, offs_m, q_rotation, positions_q - offs_m, q_sign, CACHE_IS_ROTATED)
            q_scale = None
            scale = ScoreScale(qk_scale=qk_scale, cap_scale=cap_scale, PRECISION=PRECISION)
            float8 = None
        else:
            wide = load_new(
                q_rows, offs_m, q_rotation, positions_q - offs_m, q_sign, CACHE_IS_ROTATED, DTYPE=tl.float32
            )
            q, q_scale = scaled_queries(wide, FLOAT8_DTYPE)
            float8 = Float8(
                k_scale=head_scale(k_scale_ptr, k_scale_stride, head_kv),
                v_scale=head_scale(v_scale_ptr, v_scale_stride, head_kv),
                DTYPE=FLOAT8_DTYPE,
                IS_ALIGNED=IS_ALIGNED,
            )
            scale = scaled(qk_scale, cap_scale, float8.k_scale, PRECISION)
        queries = Queries(
            q=q, q_scale=q_scale, positions=positions_q, left=left, right=right, IS_CAUSAL=IS_CAUSAL, scale=scale
        )

        sums = no_sums(BLOCK_M, BLOCK_D, IS_FLOAT8=FLOAT8_DTYPE is not None)
        cache_rotation = None
        if not CACHE_IS_ROTATED:
            cache_rotation = head_rotation(
                cos_ptr, sin_ptr, cos_strides, sin_strides, batch, keys.num_keys, R, INTERLEAVED
            )  # fmt: skip
        origin = Origin(batch=batch, head=head_kv, row=0)
        cache_origin = origin
        pages = None
        if table_ptr is not None:
            cache_origin = Origin(batch=tl.full((), 0, tl.int64), head=head_kv, row=0)
            pages = sequence_pages(
                table_ptr, table_strides, batch, num_pages, k_cache_strides[0], v_cache_strides[0], PAGE_SIZE,
                HOLDS_TILES=ALIGNS_TILES,
            )  # fmt: skip
        first_row = None
        if ALIGNS_TILES and (starts_ptr is not None or left is not None):
            first_row = keys.first_key
        cache = KeyRows(
            k=head_rows(k_cache_ptr, k_cache_strides, cache_origin, keys.num_keys, row_format, first_row),
            v=head_rows(v_cache_ptr, v_cache_strides, cache_origin, keys.num_keys, row_format, first_row),
            rotation=cache_rotation,
            pages=pages,
            float8=float8,
        )
        first = keys.first_tile + tile * BLOCK_N
        end = tl.minimum(keys.num_keys, keys.first_tile + last_tile * BLOCK_N)
        last_token = (start_m + BLOCK_M - 1) // GROUP_SIZE
        if IS_CHUNK and IS_CAUSAL and not HAS_NEW_KEYS:
            end = tl.minimum(end, keys.q_offset + last_token + 1)
        seen_by_all = None
        if IS_CHUNK and left is None and first_row is None:
            last_position = keys.q_offset + tl.minimum(last_token, NQ - 1)
            seen_by_all = keys_seen_by_all(keys, start_m // GROUP_SIZE, last_position, right, S, IS_CAUSAL)
        sums = attend_cached(sums, queries, cache, first, seen_by_all, end, offs_n)

        if HAS_NEW_KEYS:
            if last_tile == tiles:
                # The program that has a block's last tile adds the new tokens, from the arguments: their rows of the
                # cache are written by the first block of a key head and read by nobody.
                first_new = None
                if starts_ptr is not None:
                    first_new = tl.load(starts_ptr + sequence)
                num_new = tl.minimum(NQ, S - keys.num_keys)
                new = NewKeys(
                    k=head_rows(k_ptr, k_strides, origin, num_new, row_format),
                    v=head_rows(v_ptr, v_strides, origin, num_new, row_format),
                    rotation=with_norm(rotation, k_norm_ptr, norm_eps, norm_offset, D),
                )
                num_seen = num_new
                if IS_CHUNK and IS_CAUSAL:
                    num_seen = tl.where(start_m == 0, num_new, tl.minimum(num_new, last_token + 1))
                sums = attend_new(sums, queries, cache, new, num_seen, first_new, start_m == 0, BLOCK_NEW)
        sums = whole_sums(sums, float8)

        if (tile == 0) & (last_tile == tiles):
            outputs = Outputs(o_ptr, o_strides, lse_ptr, sinks_ptr, HQ=HKV * GROUP_SIZE, NQ=NQ, format=row_format)
            store_rows(outputs, rows, sums)
        else:
            parts = Parts(parts_ptr, programs, BLOCK_M=BLOCK_M, D=D)
            part, stats = part_pointers(parts, pid, tile == 0)
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


@triton.jit(do_not_specialize=["left", "programs", "B", "HKV", "GROUP_SIZE", "NQ", "S"])
def combine_kernel(seqlens_ptr, starts_ptr, sinks_ptr, parts_ptr, o_ptr, lse_ptr, o_strides, left, programs,
                   B, HKV, GROUP_SIZE, NQ, S, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   BLOCK_PARTS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr, LEAST_TILES: tl.constexpr,
                   HAS_NEW_KEYS: tl.constexpr, ALIGNS_TILES: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """Add the parts of one query row, where several programs shared its block. Grid: (B * HKV * NQ * GROUP_SIZE,).

    The arguments are those of ``decode_kernel``; BLOCK_PARTS parts are added at once.
    """
    caches = Caches(
        seqlens_ptr, starts_ptr, B, NQ, S, left, HAS_NEW_KEYS=HAS_NEW_KEYS, BLOCK_N=BLOCK_N, BLOCK_B=BLOCK_B,
        ALIGNS_TILES=ALIGNS_TILES,
    )  # fmt: skip
    pid = tl.program_id(0)
    group_rows = NQ * GROUP_SIZE
    m_blocks = tl.cdiv(group_rows, BLOCK_M)
    blocks = HKV * m_blocks
    row = pid % group_rows
    head_kv = pid // group_rows % HKV
    sequence = pid // group_rows // HKV
    total, before = tiles_before(caches, sequence)
    tiles = count_key_tiles(cached_keys(caches, sequence), BLOCK_N)
    share = share_of(total * blocks, programs, LEAST_TILES)
    first_tile = before * blocks + (head_kv * m_blocks + row // BLOCK_M) * tiles
    first_program = first_tile // share
    last_program = (first_tile + tiles - 1) // share
    # Also where there is nothing to add: what follows this kernel may begin when all of its programs have ended.
    wait_for_previous_launch(PDL)
    if first_program == last_program:
        return

    row_max = tl.full((1,), float("-inf"), tl.float32)
    row_sum = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, BLOCK_D), tl.float32)
    columns = tl.arange(0, BLOCK_D)
    parts = Parts(parts_ptr, programs, BLOCK_M=BLOCK_M, D=D)
    for start in range(first_program, last_program + 1, BLOCK_PARTS):
        program = start + tl.arange(0, BLOCK_PARTS)
        exists = program <= last_program
        part, stats = part_pointers(parts, program, program == first_program)
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
    heads = tl.cast(head_kv * GROUP_SIZE + row % GROUP_SIZE, tl.int64) + offs_m
    tokens = row // GROUP_SIZE + offs_m
    rows = QueryRows(batch=tl.cast(sequence, tl.int64), heads=heads, tokens=tokens, offs_m=offs_m, num_rows=1)
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
    outputs = Outputs(o_ptr, o_strides, lse_ptr, sinks_ptr, HQ=HKV * GROUP_SIZE, NQ=NQ, format=row_format)
    store_rows(outputs, rows, RunningSums(acc=acc, row_max=row_max, row_sum=row_sum))
