"""Rotation alone: the pre-pass that writes rotated keys (and where asked, queries) once, in pair order."""

import triton
import triton.language as tl

from fused_rope_attn.kernels.lengths import count_tiles, describe_tiles, existing_keys, packed_partner, packed_tile
from fused_rope_attn.kernels.rotation import head_rotation, load_angles, load_pairs, pack_pairs, rotate
from fused_rope_attn.kernels.schedule import block_of_heads, let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.kernels.tiles import Origin, RowFormat, head_rows, rows_from, shifted, store_tile

# int32 words that describe a tile of packed queries, and words of the counter that lies before them all: 32 bytes.
TILE_WORDS = tl.constexpr(8)


@triton.jit
def rotate_heads(x, out, x_stride_head, out_stride_head, rotation, position_offset, sign, first_head, last_head,
                 BLOCK_N: tl.constexpr):  # fmt: skip
    """Rotate BLOCK_N rows of heads [first_head, last_head), times ``sign``; the angles are read once for all heads.

    x and out are ``Rows`` of head 0; row i has position ``position_offset + i``. Rows of ``out`` that x does not have
    become zero. ``out`` is in pair order.
    """
    offs = tl.arange(0, BLOCK_N)
    cos, sin = load_angles(rotation, offs + position_offset, x.format.BLOCK_D, CHECK_POSITIONS=True)
    for head in range(first_head, last_head):
        x_head = shifted(x, tl.cast(head, tl.int64) * x_stride_head)
        out_head = shifted(out, tl.cast(head, tl.int64) * out_stride_head)
        first, second = load_pairs(x_head, offs, rotation, CHECK_ROWS=True)
        first, second = rotate(first, second, cos, sin, CONJUGATE=False)
        store_tile(out_head, pack_pairs(first * sign, second * sign), offs)


@triton.jit(do_not_specialize=["H", "N", "num_sequences", "position_limit", "NQ", "NK"])
def rotate_kernel(x_ptr, out_ptr, cos_ptr, sin_ptr, counter_ptr, lens_ptr, cu_ptr, cu_q_ptr, cu_k_ptr, x_strides,
                  out_strides, cos_strides, sin_strides, sign, H, N, num_sequences, position_limit, NQ, NK,
                  ZERO_COUNTER: tl.constexpr, TILE_ROWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
                  R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
                  USE_INT64_OFFSETS: tl.constexpr, END_AFTER_PREVIOUS_LAUNCH: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """Write x (B, H, N, D) rotated to out, in pair order. Grid: (row blocks * head chunks * batch).

    The rows are N keys, or with NK, queries of as many keys, times ``sign``; sign and NK are None for keys. lens (B,)
    int32: the keys that exist; those past them are left alone, queries end with them. cu (sequences + 1,) int32:
    positions restart, and for queries cu_k says where their keys end. Either may be None.

    ZERO_COUNTER: set the word at ``counter`` to zero, in which the next launch counts. With cu_q, the same as cu for
    NQ queries, the counter is followed, TILE_WORDS words from it, by a table of the queries' tiles of TILE_ROWS rows:
    ``describe_tiles``.

    END_AFTER_PREVIOUS_LAUNCH: launched while another pre-pass runs, to end after it, so that what waits for this
    launch finds both complete.
    """
    let_next_launch_start(PDL)
    if ZERO_COUNTER:
        if tl.program_id(0) == 0:
            tl.store(counter_ptr, 0)
    if cu_q_ptr is not None:
        describe_tiles(counter_ptr + TILE_WORDS, cu_q_ptr, cu_ptr, num_sequences, NQ, N, TILE_ROWS, TILE_WORDS)
    # Last head first: the attention kernel begins with the first ones, whose keys then still lie in the L2.
    block, chunk, batch = block_of_heads(
        tl.num_programs(0) - 1 - tl.program_id(0), count_tiles(N, num_sequences, BLOCK_N), tl.cdiv(H, HEADS)
    )
    if lens_ptr is not None:
        if NK is None:
            N = existing_keys(lens_ptr, batch, N)
        else:
            NK = existing_keys(lens_ptr, batch, NK)
    first_row = 0
    if cu_ptr is not None:
        sequence, first_row, N, block = packed_tile(block, cu_ptr, num_sequences, N, BLOCK_N)
        if NK is not None:
            _, NK = packed_partner(cu_k_ptr, sequence, num_sequences, NK)
    start = block * BLOCK_N
    position_offset = start
    if NK is not None:
        position_offset += NK - N
    origin = Origin(batch=batch, head=0, row=first_row)
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
    rotate_heads(
        rows_from(head_rows(x_ptr, x_strides, origin, N, row_format), start),
        rows_from(head_rows(out_ptr, out_strides, origin, N, row_format), start),
        x_strides[1],
        out_strides[1],
        head_rotation(cos_ptr, sin_ptr, cos_strides, sin_strides, batch, position_limit, R, INTERLEAVED),
        position_offset,
        1.0 if sign is None else sign,
        first_head=chunk * HEADS,
        last_head=tl.minimum(chunk * HEADS + HEADS, H),
        BLOCK_N=BLOCK_N,
    )
    wait_for_previous_launch(END_AFTER_PREVIOUS_LAUNCH)
