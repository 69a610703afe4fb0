"""Generation step: a few new queries against a long cache of keys and values, which the new ones join as well.

The cache is read once and little is computed, so that the kernel is as fast as it keeps bytes in flight. The query
heads of a group, and the new tokens, are the rows of one tile: a head's keys are read once for all of them. The work of
all heads is one row of key tiles, dealt to the programs in equal shares (stream-K, Osama et al. 2023): lengths are read
on the device, and a long sequence beside short ones is spread like all others. A program goes through the heads in its
share; where a head is shared, its parts go to a workspace, and a second small kernel, whose start overlaps with the end
of the first (programmatic dependent launch), adds them. Two launches and no counter: nothing has to be reset, so that a
captured graph and an eager call may run at the same time.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.lengths import existing_keys
from fused_rope_attn.kernels.masks import Mask, first_key, visible
from fused_rope_attn.kernels.products import ScoreScale, score_product
from fused_rope_attn.kernels.rotation import head_rotation, load_rotated, load_rotated_columns
from fused_rope_attn.kernels.schedule import let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.kernels.softmax import LOG2E, finish_softmax, online_softmax, rescale
from fused_rope_attn.kernels.tiles import RowFormat, Rows, load_tile, store_tile


@triton.jit
def in_elements(strides, UNIT: tl.constexpr, LONG: tl.constexpr):
    """Strides (batch, head, row, column) whose first three come in units, so that the compiler knows what divides them:
    by itself it looks for multiples of 16 elements only, and rows of 72 or 120 would be loaded element by element."""
    row = strides[2]
    if LONG:
        row = tl.cast(row, tl.int64)
    return tl.cast(strides[0], tl.int64) * UNIT, tl.cast(strides[1], tl.int64) * UNIT, row * UNIT, strides[3]


@triton.jit
def cached_keys(seqlens_ptr, starts_ptr, batch, NQ, S, left, APPEND: tl.constexpr):
    """(keys in the cache before this call, position of the first query, first key that a query sees) of a sequence.

    New tokens follow the cached ones; without new ones the queries are aligned with the last keys.
    """
    cached = existing_keys(seqlens_ptr, batch, S)
    q_offset = cached
    if not APPEND:
        q_offset = cached - NQ
    return cached, q_offset, first_key(starts_ptr, batch, q_offset, cached, left)


@triton.jit
def key_tiles(cached, first, BLOCK_N: tl.constexpr):
    """Tiles of the cached keys that a head reads; one where there are none, so that every head is somebody's."""
    return tl.maximum(1, tl.cdiv(cached - first, BLOCK_N))


@triton.jit
def key_tiles_of(sequences, seqlens_ptr, starts_ptr, B, NQ, S, left, APPEND: tl.constexpr, BLOCK_N: tl.constexpr):
    """``key_tiles`` of a vector of sequences, 0 for those past B."""
    known = tl.minimum(sequences, B - 1)
    cached, _, first = cached_keys(seqlens_ptr, starts_ptr, known, NQ, S, left, APPEND)
    return tl.where(sequences < B, key_tiles(cached, first, BLOCK_N), 0)


@triton.jit
def tiles_before(batch, seqlens_ptr, starts_ptr, B, NQ, S, left, APPEND: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_B: tl.constexpr):  # fmt: skip
    """Tiles of one head of every sequence: (of all sequences, of those before ``batch``)."""
    total = 0
    before = 0
    for start in range(0, B, BLOCK_B):
        sequences = start + tl.arange(0, BLOCK_B)
        tiles = key_tiles_of(sequences, seqlens_ptr, starts_ptr, B, NQ, S, left, APPEND, BLOCK_N)
        total += tl.sum(tiles, 0)
        before += tl.sum(tl.where(sequences < batch, tiles, 0), 0)
    return total, before


@triton.jit
def sequence_of(tile, seqlens_ptr, starts_ptr, B, NQ, S, left, APPEND: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_B: tl.constexpr):  # fmt: skip
    """(sequence, tiles before it) of a tile among those of one head of every sequence."""
    batch = 0
    before = 0
    passed = 0
    for start in range(0, B, BLOCK_B):
        tiles = key_tiles_of(
            start + tl.arange(0, BLOCK_B), seqlens_ptr, starts_ptr, B, NQ, S, left, APPEND, BLOCK_N
        )  # fmt: skip
        behind = (passed + tl.cumsum(tiles, 0) <= tile) & (tiles > 0)
        batch += tl.sum(behind.to(tl.int32), 0)
        before += tl.sum(tl.where(behind, tiles, 0), 0)
        passed += tl.sum(tiles, 0)
    return batch, before


@triton.jit
def share_of(total, programs, LEAST: tl.constexpr):
    """Tiles that each program takes: equal shares, none smaller than LEAST."""
    return tl.maximum(LEAST, tl.cdiv(total, programs))


@triton.jit
def part_of(parts_ptr, program, begins, programs, BLOCK_M: tl.constexpr, D: tl.constexpr):
    """Where a program's part of a shared head lies: pointers to its sums (BLOCK_M, D), and to its BLOCK_M maxima, which
    its BLOCK_M sums of weights follow. Float32.

    A program shares at most two heads: one that began before its share, and one that ``begins`` in it and goes on.
    """
    part = tl.cast(2 * program + begins.to(tl.int32), tl.int64)
    stats = parts_ptr + tl.cast(2 * programs, tl.int64) * (BLOCK_M * D) + part * (2 * BLOCK_M)
    return parts_ptr + part * (BLOCK_M * D), stats


@triton.jit
def attend_keys(acc, row_max, row_sum, q, positions_q, k, v, positions_k, key_limit, start, qk_scale, cap_scale, left,
                right, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Fold one tile of keys and values into the running softmax. Rows at negative positions see nothing."""
    scores = score_product(q, k, ScoreScale(qk_scale=qk_scale, cap_scale=cap_scale, PRECISION=PRECISION))
    mask = Mask(num_keys=key_limit, first_key=start, left=left, right=right, IS_CAUSAL=IS_CAUSAL, READS_LENGTHS=True)
    scores = tl.where(visible(mask, positions_q[:, None], positions_k[None, :]), scores, float("-inf"))
    p, correction, row_max, row_sum = online_softmax(scores, row_max, row_sum, qk_scale, HAS_EMPTY_ROWS=True)
    acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["left", "right", "programs", "B", "HKV", "GROUP_SIZE", "NQ", "S", "position_limit"])
def decode_kernel(q_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, seqlens_ptr, starts_ptr, sinks_ptr,
                  o_ptr, lse_ptr, parts_ptr, q_strides, k_cache_strides, v_cache_strides, cos_strides,
                  sin_strides, k_strides, v_strides, o_strides, qk_scale, q_sign, cap_scale, left, right, programs, B,
                  HKV, GROUP_SIZE, NQ, S, position_limit, D: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_NEW: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr,
                  LEAST: tl.constexpr, INTERLEAVED: tl.constexpr, IS_CAUSAL: tl.constexpr, ROTATED: tl.constexpr,
                  APPEND: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
                  LONG: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One share of all key tiles. Grid: (programs,). The caches' strides are ``in_elements``.

    A head here is one key head of one sequence with BLOCK_M of its ``NQ * GROUP_SIZE`` query rows; row m belongs to
    token ``m // GROUP_SIZE``. What a program has of shared heads goes to parts (``part_of``). None where a call
    does not use it: k, v, starts, sinks, cap_scale, left, right.
    """
    let_next_launch_start(PDL)
    k_cache_strides = in_elements(k_cache_strides, UNIT, LONG)
    v_cache_strides = in_elements(v_cache_strides, UNIT, LONG)
    m_tiles = tl.cdiv(NQ * GROUP_SIZE, BLOCK_M)
    heads = HKV * m_tiles
    total, _ = tiles_before(0, seqlens_ptr, starts_ptr, B, NQ, S, left, APPEND, BLOCK_N, BLOCK_B)
    share = share_of(total * heads, programs, LEAST)
    pid = tl.program_id(0)
    remaining = tl.minimum(share, total * heads - pid * share)
    if remaining <= 0:
        return
    # Sequences begin at multiples of ``heads``.
    batch, before = sequence_of(
        pid * share // heads, seqlens_ptr, starts_ptr, B, NQ, S, left, APPEND, BLOCK_N, BLOCK_B
    )  # fmt: skip
    cached, _, first = cached_keys(seqlens_ptr, starts_ptr, batch, NQ, S, left, APPEND)
    rest = pid * share - before * heads
    head = rest // key_tiles(cached, first, BLOCK_N)
    tile = rest % key_tiles(cached, first, BLOCK_N)

    rows = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=LONG)
    while remaining > 0:
        cached, q_offset, first = cached_keys(seqlens_ptr, starts_ptr, batch, NQ, S, left, APPEND)
        tiles = key_tiles(cached, first, BLOCK_N)
        last_tile = tl.minimum(tiles, tile + remaining)
        batch64 = tl.cast(batch, tl.int64)
        head_kv = tl.cast(head // m_tiles, tl.int64)
        first_row = head % m_tiles * BLOCK_M
        row_limit = NQ * GROUP_SIZE - first_row
        tokens = (first_row + rows) // GROUP_SIZE
        heads_q = head_kv * GROUP_SIZE + (first_row + rows) % GROUP_SIZE
        rotation = head_rotation(cos_ptr, sin_ptr, cos_strides, sin_strides, batch64, position_limit, R, INTERLEAVED)
        cached_rotation = head_rotation(cos_ptr, sin_ptr, cos_strides, sin_strides, batch64, cached, R, INTERLEAVED)
        # A query whose token has no place in the cache sees nothing, like one before position 0.
        positions_q = tl.where(q_offset + tokens < S, q_offset + tokens, -1)
        # Rows are not evenly spaced: each brings its own pointer, and ``rows`` only says which exist.
        q_rows = q_ptr + batch64 * q_strides[0] + heads_q * q_strides[1] + tokens.to(tl.int64) * q_strides[2]
        q_rows = Rows(q_rows[:, None], 0, q_strides[3], row_limit, None, row_format)
        # Cached keys that are rotated already are used in the order of memory, raw ones come out in pair order.
        if ROTATED:
            q = load_rotated_columns(q_rows, rows, rotation, positions_q - rows, q_sign)
        else:
            q = load_rotated(q_rows, rows, rotation, positions_q - rows, q_sign)

        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_M,), tl.float32)
        k_cache = k_cache_ptr + batch64 * k_cache_strides[0] + head_kv * k_cache_strides[1]
        v_cache = v_cache_ptr + batch64 * v_cache_strides[0] + head_kv * v_cache_strides[1]
        end = tl.minimum(cached, first + last_tile * BLOCK_N)
        for start_n in range(first + tile * BLOCK_N, end, BLOCK_N):
            start64 = tl.cast(start_n, tl.int64)
            k_rows = Rows(
                k_cache + start64 * k_cache_strides[2], k_cache_strides[2], k_cache_strides[3], cached - start_n, None,
                row_format,
            )  # fmt: skip
            if ROTATED:
                k = load_tile(k_rows, offs_n, CHECK_ROWS=True)
            else:
                k = load_rotated(k_rows, offs_n, cached_rotation, start_n)
            v_rows = Rows(
                v_cache + start64 * v_cache_strides[2], v_cache_strides[2], v_cache_strides[3], cached - start_n, None,
                row_format,
            )  # fmt: skip
            v = load_tile(v_rows, offs_n, CHECK_ROWS=True)
            acc, row_max, row_sum = attend_keys(
                acc, row_max, row_sum, q, positions_q, k, v, start_n + offs_n, cached, None, qk_scale, cap_scale, left,
                right, IS_CAUSAL, PRECISION,
            )  # fmt: skip

        if APPEND:
            if last_tile == tiles:
                # Whoever has a head's last tile adds the new tokens, from the arguments: their rows of the cache are
                # written by one of the head's row tiles and read by nobody.
                start = None
                if starts_ptr is not None:
                    start = tl.load(starts_ptr + batch)
                fitting = tl.minimum(NQ, S - cached)
                k_new = k_ptr + batch64 * k_strides[0] + head_kv * k_strides[1]
                v_new = v_ptr + batch64 * v_strides[0] + head_kv * v_strides[1]
                for start_n in tl.range(0, fitting, BLOCK_NEW, num_stages=1):
                    offs_new = tl.arange(0, BLOCK_NEW)
                    here = tl.cast(start_n, tl.int64)
                    there = tl.cast(cached + start_n, tl.int64)
                    limit = fitting - start_n
                    k_rows = Rows(k_new + here * k_strides[2], k_strides[2], k_strides[3], limit, None, row_format)
                    if ROTATED:
                        k = load_rotated_columns(k_rows, offs_new, rotation, cached + start_n)
                        k_kept = k
                    else:
                        k = load_rotated(k_rows, offs_new, rotation, cached + start_n)
                        k_kept = load_tile(k_rows, offs_new, CHECK_ROWS=True)
                    v_rows = Rows(v_new + here * v_strides[2], v_strides[2], v_strides[3], limit, None, row_format)
                    v = load_tile(v_rows, offs_new, CHECK_ROWS=True)
                    if first_row == 0:
                        k_kept_rows = Rows(
                            k_cache + there * k_cache_strides[2], k_cache_strides[2], k_cache_strides[3], limit, None,
                            row_format,
                        )  # fmt: skip
                        v_kept_rows = Rows(
                            v_cache + there * v_cache_strides[2], v_cache_strides[2], v_cache_strides[3], limit, None,
                            row_format,
                        )  # fmt: skip
                        store_tile(k_kept_rows, k_kept, offs_new)
                        store_tile(v_kept_rows, v, offs_new)
                    acc, row_max, row_sum = attend_keys(
                        acc, row_max, row_sum, q, positions_q, k, v, cached + start_n + offs_new, cached + fitting,
                        start, qk_scale, cap_scale, left, right, IS_CAUSAL, PRECISION,
                    )  # fmt: skip

        if (tile == 0) & (last_tile == tiles):
            store_rows(
                o_ptr, lse_ptr, sinks_ptr, o_strides, acc, row_max, row_sum, batch64, heads_q, tokens, rows, row_limit,
                HKV * GROUP_SIZE, NQ, D, BLOCK_D, LONG,
            )  # fmt: skip
        else:
            sums, stats = part_of(parts_ptr, pid, tile == 0, programs, BLOCK_M, D)
            sum_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=False)
            store_tile(Rows(sums, D, 1, row_limit, None, sum_format), acc, rows)
            tl.store(stats + rows, row_max, mask=rows < row_limit)
            tl.store(stats + BLOCK_M + rows, row_sum, mask=rows < row_limit)
        remaining -= last_tile - tile
        tile = 0
        head += 1
        if head == heads:
            head = 0
            batch += 1


@triton.jit
def store_rows(o_ptr, lse_ptr, sinks_ptr, o_strides, acc, row_max, row_sum, batch, heads_q, tokens, rows, row_limit,
               HQ, NQ, D: tl.constexpr, BLOCK_D: tl.constexpr, LONG: tl.constexpr):  # fmt: skip
    """Write o and lse of the query rows (heads_q, tokens), those of them below row_limit. batch and heads_q int64."""
    sink = None
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads_q, mask=rows < row_limit, other=0.0).to(tl.float32) * LOG2E
    o, lse = finish_softmax(acc, row_max, row_sum, sink)
    o_rows = o_ptr + batch * o_strides[0] + heads_q * o_strides[1] + tokens.to(tl.int64) * o_strides[2]
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=LONG)
    store_tile(Rows(o_rows[:, None], 0, o_strides[3], row_limit, None, row_format), o, rows)
    tl.store(lse_ptr + (batch * HQ + heads_q) * NQ + tokens, lse, mask=rows < row_limit)


@triton.jit(do_not_specialize=["left", "programs", "B", "HKV", "GROUP_SIZE", "NQ", "S"])
def combine_kernel(seqlens_ptr, starts_ptr, sinks_ptr, parts_ptr, o_ptr, lse_ptr, o_strides, left, programs,
                   B, HKV, GROUP_SIZE, NQ, S, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   BLOCK_PARTS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr, LEAST: tl.constexpr,
                   APPEND: tl.constexpr, LONG: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Add the parts of one query row, where its head was shared. Grid: (B * HKV * NQ * GROUP_SIZE,)."""
    pid = tl.program_id(0)
    group_rows = NQ * GROUP_SIZE
    m_tiles = tl.cdiv(group_rows, BLOCK_M)
    heads = HKV * m_tiles
    row = pid % group_rows
    head_kv = pid // group_rows % HKV
    batch = pid // group_rows // HKV
    total, before = tiles_before(batch, seqlens_ptr, starts_ptr, B, NQ, S, left, APPEND, BLOCK_N, BLOCK_B)
    cached, _, first = cached_keys(seqlens_ptr, starts_ptr, batch, NQ, S, left, APPEND)
    tiles = key_tiles(cached, first, BLOCK_N)
    share = share_of(total * heads, programs, LEAST)
    begin = before * heads + (head_kv * m_tiles + row // BLOCK_M) * tiles
    first_program = begin // share
    last_program = (begin + tiles - 1) // share
    # Also where there is nothing to add: what follows this kernel may begin when all of its programs have ended.
    wait_for_previous_launch(PDL)
    if first_program == last_program:
        return

    row_max = tl.full((1,), float("-inf"), tl.float32)
    row_sum = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, BLOCK_D), tl.float32)
    columns = tl.arange(0, BLOCK_D)
    for start in range(first_program, last_program + 1, BLOCK_PARTS):
        program = start + tl.arange(0, BLOCK_PARTS)
        there = program <= last_program
        sums, stats = part_of(parts_ptr, program, program == first_program, programs, BLOCK_M, D)
        row_stats = stats + row % BLOCK_M
        part_max = tl.load(row_stats, mask=there, other=float("-inf"))
        part_sum = tl.load(row_stats + BLOCK_M, mask=there, other=0.0)
        row_sums = sums[:, None] + (row % BLOCK_M) * D + columns[None, :]
        parts = tl.load(row_sums, mask=there[:, None] & (columns[None, :] < D), other=0.0)
        new_max = tl.maximum(row_max, tl.max(part_max, 0))
        weight = rescale(row_max, new_max)
        part_weight = rescale(part_max, new_max)
        acc = acc * weight[:, None] + tl.sum(parts * part_weight[:, None], 0)[None, :]
        row_sum = row_sum * weight + tl.sum(part_sum * part_weight, 0)
        row_max = new_max
    rows = tl.arange(0, 1)
    heads_q = tl.cast(head_kv * GROUP_SIZE + row % GROUP_SIZE, tl.int64) + rows
    tokens = row // GROUP_SIZE + rows
    store_rows(
        o_ptr, lse_ptr, sinks_ptr, o_strides, acc, row_max, row_sum, tl.cast(batch, tl.int64), heads_q, tokens, rows, 1,
        HKV * GROUP_SIZE, NQ, D, BLOCK_D, LONG,
    )  # fmt: skip
