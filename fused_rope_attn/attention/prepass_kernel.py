# mypy: ignore-errors
"""Norm and rotation alone: the pre-pass that writes rotated keys (and where asked, queries) once, in pair order."""

import triton
import triton.language as tl

from fused_rope_attn.kernels.lengths import (
    count_tiles,
    describe_tiles,
    existing_keys,
    packed_partner,
    packed_tile,
    padded_row,
)
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import (
    head_rotation,
    load_angles,
    load_pairs,
    norm_and_rotate,
    pack_pairs,
    pair_norm_weights,
    with_norm,
)
from fused_rope_attn.kernels.schedule import block_of_heads, let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.kernels.tiles import RowFormat, heads_from, rows_of_head, sequence_heads, store_tile

# int32 words that describe a tile of packed queries, and words of the counter that lies before them all: 32 bytes.
TILE_WORDS = tl.constexpr(8)


@record
class SequenceRows:
    """Where a sequence's rows lie: as the caller passes them, and in buffers in which they may be padded."""

    first_row: tl.tensor  # in the caller's tensors
    num_rows: tl.tensor
    first_padded: tl.tensor  # in the buffers
    num_padded: tl.tensor  # num_rows and the rows behind them that are written too


@triton.jit
def sequence_rows(block, cu_ptr, partner_ptr, num_sequences, N, partner_N, pitch, BLOCK_N: tl.constexpr,
                  PAD_TO: tl.constexpr):  # fmt: skip
    """(block within its sequence, sequence, ``SequenceRows``) of a block of BLOCK_N of N rows.

    partner_ptr and partner_N: as ``packed_tile`` takes them. pitch: a head's rows in the buffers where cu_ptr is None.
    PAD_TO, a multiple of BLOCK_N or 0: packed sequences begin there at ``padded_row`` each, and their last rows are
    padded to a multiple of PAD_TO.
    """
    if cu_ptr is None:
        return block, 0, SequenceRows(first_row=0, num_rows=N, first_padded=0, num_padded=pitch)
    else:
        if PAD_TO:
            PARTS: tl.constexpr = PAD_TO // BLOCK_N
            sequence, first_row, num_rows, tile = packed_tile(
                block // PARTS, cu_ptr, partner_ptr, num_sequences, N, partner_N, PAD_TO
            )
            rows = SequenceRows(
                first_row=first_row,
                num_rows=num_rows,
                first_padded=padded_row(first_row, sequence, PAD_TO),
                num_padded=tl.cdiv(num_rows, PAD_TO) * PAD_TO,
            )
            return tile * PARTS + block % PARTS, sequence, rows
        else:
            sequence, first_row, num_rows, block = packed_tile(
                block, cu_ptr, partner_ptr, num_sequences, N, partner_N, BLOCK_N
            )
            rows = SequenceRows(first_row=first_row, num_rows=num_rows, first_padded=first_row, num_padded=num_rows)
            return block, sequence, rows


@triton.jit
def rotate_heads(x, out, rotation, start, q_offset, sign, first_head, last_head, BLOCK_N: tl.constexpr):
    """Norm, where ``rotation`` says so, and rotate rows [start, start + BLOCK_N) of heads [first_head, last_head).

    The angles and the norm's weights are read once for all heads.

    x and out are ``Heads``, ``out`` in pair order and times ``sign``; row i has position ``q_offset + i``. Rows of
    ``out`` that x does not have become zero.
    """
    offs = tl.arange(0, BLOCK_N)
    cos, sin = load_angles(rotation, offs + (start + q_offset), x.rows.format.BLOCK_D, CHECK_POSITIONS=True)
    weights = None
    if rotation.norm is not None:
        weights = pair_norm_weights(rotation.norm, rotation.R, rotation.INTERLEAVED, x.rows.format.BLOCK_D)
    x, out = heads_from(x, start), heads_from(out, start)
    for head in range(first_head, last_head):
        first, second = load_pairs(rows_of_head(x, head), offs, rotation, CHECK_ROWS=True)
        first, second = norm_and_rotate(first, second, cos, sin, sign, rotation, weights)
        store_tile(rows_of_head(out, head), pack_pairs(first, second), offs)


@triton.jit(do_not_specialize=["H", "N", "num_sequences", "position_limit", "NQ", "NK"])
def rotate_kernel(x_ptr, out_ptr, cos_ptr, sin_ptr, norm_ptr, counter_ptr, lens_ptr, cu_ptr, cu_q_ptr, cu_k_ptr,
                  x_strides, out_strides, cos_strides, sin_strides, sign, norm_eps, norm_offset, H, N, num_sequences,
                  position_limit, NQ, NK, ZERO_COUNTER: tl.constexpr, TILE_ROWS: tl.constexpr, HEADS: tl.constexpr,
                  D: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                  INTERLEAVED: tl.constexpr, USE_INT64_OFFSETS: tl.constexpr, END_AFTER_PREVIOUS_LAUNCH: tl.constexpr,
                  PAD_TO: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Write x (B, H, N, D) rotated to out, in pair order. Grid: (row blocks * head chunks * batch).

    norm (D,): weights of a norm before the rotation, or None.

    The rows are N keys, or with NK, queries of as many keys, times ``sign``; sign and NK are None for keys. lens (B,)
    int32: the keys that exist; those past them are left alone, queries end with them. cu (sequences + 1,) int32:
    positions restart, and for queries cu_k says where their keys end. Either may be None.

    ZERO_COUNTER: set the word at ``counter`` to zero, in which the next launch counts. With cu_q, the same as cu for
    NQ queries, the counter is followed, TILE_WORDS words from it, by a table of the queries' tiles of TILE_ROWS rows:
    ``describe_tiles``.

    PAD_TO: packed rows of out are padded as ``sequence_rows`` says, with zeros.

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
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if PAD_TO:
        blocks = count_tiles(N, num_sequences, PAD_TO) * (PAD_TO // BLOCK_N)
    else:
        blocks = count_tiles(N, num_sequences, BLOCK_N)
    block, chunk, batch = block_of_heads(pid, blocks, tl.cdiv(H, HEADS))
    if lens_ptr is not None:
        if NK is None:
            N = existing_keys(lens_ptr, batch, N)
        else:
            NK = existing_keys(lens_ptr, batch, NK)
    block, sequence, rows = sequence_rows(block, cu_ptr, cu_k_ptr, num_sequences, N, NK, N, BLOCK_N, PAD_TO)
    if cu_ptr is not None:
        if NK is not None:
            _, NK = packed_partner(cu_k_ptr, sequence, num_sequences, NK)
    row_format = RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=USE_INT64_OFFSETS)
    rotate_heads(
        sequence_heads(x_ptr, x_strides, batch, rows.first_row, rows.num_rows, row_format),
        sequence_heads(out_ptr, out_strides, batch, rows.first_padded, rows.num_padded, row_format),
        with_norm(
            head_rotation(cos_ptr, sin_ptr, cos_strides, sin_strides, batch, position_limit, R, INTERLEAVED),
            norm_ptr,
            norm_eps,
            norm_offset,
            D,
        ),
        start=block * BLOCK_N,
        q_offset=0 if NK is None else NK - rows.num_rows,
        sign=1.0 if sign is None else sign,
        first_head=chunk * HEADS,
        last_head=tl.minimum(chunk * HEADS + HEADS, H),
        BLOCK_N=BLOCK_N,
    )
    wait_for_previous_launch(END_AFTER_PREVIOUS_LAUNCH)
