"""Rotation alone: the pre-pass that writes rotated keys (and where asked, queries) once, in pair order."""

import triton
import triton.language as tl

from fused_rope_attn.kernels.lengths import count_tiles, describe_tiles, existing_keys, packed_partner, packed_tile
from fused_rope_attn.kernels.primitives import (
    head_tables,
    let_next_launch_start,
    load_angles,
    load_pairs,
    pack_pairs,
    rotate,
    store_tile,
    wait_for_previous_launch,
)

# int32 words of what is known of a tile of packed queries, and of the counter that lies before them all: 32 bytes.
TABLE = tl.constexpr(8)


@triton.jit
def rotate_rows(x_ptr, out_ptr, x_strides, out_strides, tables, sign, N, position_offset, position_limit, batch,
                first_head, last_head, start, BLOCK_N: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
                BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, LONG: tl.constexpr, written=None):  # fmt: skip
    """Rotate rows [start, start + BLOCK_N) of heads [first_head, last_head); the angles are read once for all heads.

    Of N rows; ``written``, None for N, is how many ``out`` has, of which those past N become zero.
    """
    if written is None:
        written = N
    rows = tl.arange(0, BLOCK_N)
    cos, sin = load_angles(tables, rows + (start + position_offset), position_limit, R, BLOCK_D, CHECK_ROWS=True)
    start64 = tl.cast(start, tl.int64)
    x_ptr += batch * x_strides[0] + start64 * x_strides[2]
    out_ptr += batch * out_strides[0] + start64 * out_strides[2]
    for head in range(first_head, last_head):
        x = x_ptr + tl.cast(head, tl.int64) * x_strides[1]
        out = out_ptr + tl.cast(head, tl.int64) * out_strides[1]
        first, second = load_pairs(
            x, rows, N - start, x_strides[2], x_strides[3], D, R, BLOCK_D, INTERLEAVED, True, LONG
        )
        first, second = rotate(first, second, cos, sin, CONJUGATE=False)
        packed = pack_pairs(first * sign, second * sign)
        store_tile(out, packed, rows, written - start, out_strides[2], out_strides[3], D, BLOCK_D, LONG)


@triton.jit(do_not_specialize=["H", "N", "num_sequences", "position_limit", "NQ", "NK"])
def rotate_kernel(x_ptr, out_ptr, cos_ptr, sin_ptr, counter_ptr, lens_ptr, cu_ptr, cu_q_ptr, cu_k_ptr, x_strides,
                  out_strides, cos_strides, sin_strides, sign, H, N, num_sequences, position_limit, NQ, NK,
                  COUNTER: tl.constexpr, TILE_ROWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
                  R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
                  LONG: tl.constexpr, FOLLOWS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Grid: (row blocks * head chunks * batch). With COUNTER also zeroes the next launch's counter.

    Rows are N keys, or with NK, queries of as many keys, times ``sign``; sign and NK are None for keys. lens (B,)
    int32: the keys that exist; those past them are left alone, queries end with them. cu (sequences + 1,) int32:
    positions restart, and for queries cu_k says where their keys end. Either may be None. With cu_q, the same for NQ
    queries, the counter is followed, TABLE words from it, by a table of their tiles of TILE_ROWS rows:
    ``describe_tiles``.

    FOLLOWS: launched while another pre-pass runs, to end after it, so that who waits for this one has both.
    """
    let_next_launch_start(PDL)
    if COUNTER:
        if tl.program_id(0) == 0:
            tl.store(counter_ptr, 0)
    if cu_q_ptr is not None:
        describe_tiles(counter_ptr + TABLE, cu_q_ptr, cu_ptr, num_sequences, NQ, N, TILE_ROWS, TABLE)
    num_blocks = count_tiles(N, num_sequences, BLOCK_N)
    num_chunks = tl.cdiv(H, HEADS)
    # Last head first: the attention kernel begins with the first ones, whose keys then still lie in the L2.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    block = pid % num_blocks
    chunk = (pid // num_blocks) % num_chunks
    batch = (pid // (num_blocks * num_chunks)).to(tl.int64)
    tables = head_tables(cos_ptr, sin_ptr, cos_strides, sin_strides, batch)
    if lens_ptr is not None:
        if NK is None:
            N = existing_keys(lens_ptr, batch, N)
        else:
            NK = existing_keys(lens_ptr, batch, NK)
    if cu_ptr is not None:
        sequence, first_row, N, block = packed_tile(block, cu_ptr, num_sequences, N, BLOCK_N)
        x_ptr += tl.cast(first_row, tl.int64) * x_strides[2]
        out_ptr += tl.cast(first_row, tl.int64) * out_strides[2]
        if NK is not None:
            _, NK = packed_partner(cu_k_ptr, sequence, num_sequences, NK)
    rotate_rows(
        x_ptr, out_ptr, x_strides, out_strides, tables, 1.0 if sign is None else sign, N, 0 if NK is None else NK - N,
        position_limit, batch, chunk * HEADS, tl.minimum(chunk * HEADS + HEADS, H), block * BLOCK_N, BLOCK_N, D, R,
        BLOCK_D, INTERLEAVED, LONG,
    )  # fmt: skip
    wait_for_previous_launch(FOLLOWS)
