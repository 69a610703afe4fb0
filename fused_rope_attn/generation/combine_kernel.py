# mypy: ignore-errors
"""Second kernel of a generation step: it adds up what the programs of the first one have of a query row.

In a step that appends, it also folds the new tokens into the row and writes them into the cache. That needs nothing of
the first kernel, and comes before the wait for it: where the first kernel leaves registers and shared memory free, it
takes no time at all, while the end of the first kernel would take as long as memory takes to answer three times.
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
from fused_rope_attn.generation.keys import RunningSums, attend_new, no_sums, whole_sums
from fused_rope_attn.generation.shares import (
    Caches,
    Parts,
    cached_keys,
    count_key_tiles,
    in_elements,
    part_pointers,
    share_of,
    tiles_before,
    whole_part_pointers,
)
from fused_rope_attn.kernels.schedule import wait_for_previous_launch
from fused_rope_attn.kernels.softmax import rescale
from fused_rope_attn.kernels.tiles import RowFormat

# Rows of a tensor core's product, of which the one query row fills the first.
ROWS = tl.constexpr(16)


@triton.jit
def new_tokens_of_row(inputs, keys, batch, head_kv, head, row, GROUP_SIZE, BLOCK_NEW: tl.constexpr):
    """``RunningSums`` of one query row over the new tokens, which the first row of a key head writes into the cache.

    batch, head_kv and head are int64; row: of the ``NQ * GROUP_SIZE`` of the key head.
    """
    offs = tl.arange(0, ROWS)
    rows = QueryRows(
        batch=batch, heads=head + tl.zeros((ROWS,), tl.int64), tokens=row // GROUP_SIZE + tl.zeros((ROWS,), tl.int32),
        offs_m=offs, num_rows=1,
    )  # fmt: skip
    float8 = None
    if inputs.FLOAT8_DTYPE is not None:
        float8 = float8_of(inputs, head_kv)
    queries = load_queries(inputs, rows, keys, float8)
    cache = cache_of_head(inputs, keys, batch, head_kv, None, float8)
    first_new = None
    if inputs.starts_ptr is not None:
        first_new = tl.load(inputs.starts_ptr + batch)
    new = new_keys_of_head(inputs, keys, batch, head_kv)
    sums = no_sums(ROWS, inputs.format.BLOCK_D, IS_FLOAT8=inputs.FLOAT8_DTYPE is not None)
    sums = attend_new(sums, queries, cache, new, new.k.num_rows, first_new, row == 0, BLOCK_NEW)
    sums = whole_sums(sums, float8)
    is_row = offs == 0
    return RunningSums(
        acc=tl.sum(tl.where(is_row[:, None], sums.acc, 0.0), 0)[None, :],
        row_max=tl.zeros((1,), tl.float32) + tl.max(tl.where(is_row, sums.row_max, float("-inf")), 0),
        row_sum=tl.zeros((1,), tl.float32) + tl.sum(tl.where(is_row, sums.row_sum, 0.0), 0),
    )


@triton.jit(do_not_specialize=["left", "right", "programs", "B", "HKV", "GROUP_SIZE", "NQ", "S", "num_pages",
                               "position_limit"])  # fmt: skip
def combine_kernel(q_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, seqlens_ptr, starts_ptr, sinks_ptr,
                   table_ptr, k_scale_ptr, v_scale_ptr, q_norm_ptr, k_norm_ptr, o_ptr, lse_ptr, parts_ptr, q_strides,
                   k_cache_strides, v_cache_strides, cos_strides, sin_strides, k_strides, v_strides, o_strides,
                   table_strides, k_scale_stride, v_scale_stride, qk_scale, q_sign, cap_scale, norm_eps, norm_offset,
                   left, right, programs, B, HKV, GROUP_SIZE, NQ, S, num_pages, position_limit, D: tl.constexpr,
                   R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_NEW: tl.constexpr,
                   BLOCK_PARTS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr, LEAST_TILES: tl.constexpr,
                   INTERLEAVED: tl.constexpr, CACHE_IS_ROTATED: tl.constexpr,
                   HAS_NEW_KEYS: tl.constexpr, PRECISION: tl.constexpr, STRIDE_UNIT: tl.constexpr,
                   PAGE_SIZE: tl.constexpr, ALIGNMENT: tl.constexpr, FLOAT8_DTYPE: tl.constexpr,
                   IS_ALIGNED: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr, NEW_WITH_PARTS: tl.constexpr,
                   ONE_PASS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One query row: the new tokens (NEW_WITH_PARTS), and its parts. Grid: (B * HKV * NQ * GROUP_SIZE,).

    Without the new tokens only rows of which several programs have parts are written. The arguments are those of
    ``decode_kernel``; BLOCK_PARTS parts are added at once.
    """
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
    share = share_of(total * blocks, programs, LEAST_TILES)
    first_tile = before * blocks + (head_kv * m_blocks + row // BLOCK_M) * tiles
    first_program = first_tile // share
    last_program = (first_tile + tiles - 1) // share
    if NEW_WITH_PARTS:
        sums = new_tokens_of_row(
            inputs, keys, batch, tl.cast(head_kv, tl.int64), head, row, GROUP_SIZE, BLOCK_NEW
        )  # fmt: skip
        acc, row_max, row_sum = sums.acc, sums.row_max, sums.row_sum
    else:
        acc = tl.zeros((1, BLOCK_D), tl.float32)
        row_max = tl.full((1,), float("-inf"), tl.float32)
        row_sum = tl.zeros((1,), tl.float32)
    # Also where there is nothing to add: what follows this kernel may begin when all of its programs have ended.
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
    rows = QueryRows(batch=batch, heads=head + offs_m, tokens=row // GROUP_SIZE + offs_m, offs_m=offs_m, num_rows=1)
    outputs = Outputs(o_ptr, o_strides, lse_ptr, sinks_ptr, HQ=HKV * GROUP_SIZE, NQ=NQ, format=row_format)
    store_rows(outputs, rows, RunningSums(acc=acc, row_max=row_max, row_sum=row_sum))
