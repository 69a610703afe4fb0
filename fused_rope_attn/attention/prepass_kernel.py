# mypy: ignore-errors
"""Norm and rotation alone: the pre-pass that writes rotated keys, or queries, once, in pair order."""

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
from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.records import record, unpack
from fused_rope_attn.kernels.rotation import (
    RotaryTables,
    head_rotation,
    load_angles,
    load_pairs,
    norm_and_rotate,
    pack_pairs,
    pair_norm_weights,
    rotation_from,
)
from fused_rope_attn.kernels.schedule import block_of_heads, let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.kernels.tiles import RowFormat, TensorView, heads_from, rows_of_head, sequence_heads, store_tile

# int32 words that describe a tile of packed queries, and words of the counter before the first of them: 32 bytes.
TILE_WORDS = tl.constexpr(8)


@record
class SequenceRows:
    """A sequence's rows in the tensors that the caller passes, and in buffers, which may pad them."""

    first_row: tl.tensor  # in the caller's tensors
    num_rows: tl.tensor
    first_padded: tl.tensor  # in the buffers
    num_padded: tl.tensor  # num_rows and the padding that follows them, which is written too


@triton.jit
def sequence_rows(pid, cu_ptr, partner_ptr, num_sequences, N, partner_N, pitch, BLOCK_N: tl.constexpr, PAD_TO):
    """Return (block within its sequence, sequence, ``SequenceRows``) of block ``pid`` of BLOCK_N of N rows.

    partner_ptr and partner_N: as ``packed_tile`` takes them. pitch: a head's rows in the buffers if cu_ptr is None.
    PAD_TO, a multiple of BLOCK_N or 0: each packed sequence begins at its ``padded_row`` in the buffers, and its last
    rows are padded to a multiple of PAD_TO.
    """
    if cu_ptr is None:
        return pid, 0, SequenceRows(first_row=0, num_rows=N, first_padded=0, num_padded=pitch)
    else:
        TILE: tl.constexpr = PAD_TO if PAD_TO else BLOCK_N
        PARTS: tl.constexpr = TILE // BLOCK_N
        sequence, first_row, num_rows, tile = packed_tile(
            pid // PARTS, cu_ptr, partner_ptr, num_sequences, N, partner_N, TILE
        )
        if PAD_TO:
            first_padded, num_padded = padded_row(first_row, sequence, PAD_TO), tl.cdiv(num_rows, PAD_TO) * PAD_TO
            return tile * PARTS + pid % PARTS, sequence, SequenceRows(first_row, num_rows, first_padded, num_padded)
        else:
            return tile, sequence, SequenceRows(first_row, num_rows, first_row, num_rows)


@triton.jit
def rotate_heads(x, out, rotation, start, q_offset, sign, first_head, last_head, BLOCK_N: tl.constexpr):
    """Norm, if ``rotation`` has a norm, and rotate rows [start, start + BLOCK_N) of heads [first_head, last_head).

    x and out are ``Heads``, ``out`` in pair order and times ``sign``; row i has position ``q_offset + i``. Rows of
    ``out`` that x does not have become zero. The angles and the norm's weights are read once for all heads.
    """
    offs = tl.arange(0, BLOCK_N)
    cos, sin = load_angles(rotation, offs + (start + q_offset), x.rows.format.BLOCK_D)
    weights = None
    if rotation.norm is not None:
        weights = pair_norm_weights(rotation.norm, rotation, x.rows.format.BLOCK_D)
    x, out = heads_from(x, start), heads_from(out, start)
    for head in range(first_head, last_head):
        first, second = load_pairs(rows_of_head(x, head), offs, rotation)
        first, second = norm_and_rotate(first, second, cos, sin, sign, rotation, weights)
        store_tile(rows_of_head(out, head), pack_pairs(first, second), offs)


@triton.jit
def fill_minus_infinity(ptr, length, BLOCK: tl.constexpr):
    """Set ``length`` float32 at ``ptr`` to -inf; each program of the grid sets its part."""
    for start in range(tl.program_id(0) * BLOCK, length, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(ptr + offs, float("-inf"), mask=offs < length)


@record
class PrepassInputs:
    """The tensors of a pre-pass: x (B, H, N, D) and out, which is in pair order and times ``sign``.

    lens (B,) int32: the keys that exist; those past them are left alone, queries end with them. cu (sequences + 1,)
    int32: positions restart, and for queries cu_k holds the ends of their keys. Each may be None.
    """

    x: TensorView
    out: TensorView
    tables: RotaryTables
    norm: Norm | None  # before the rotation
    sign: tl.tensor | None  # None: 1
    lens_ptr: tl.tensor | None
    cu_ptr: tl.tensor | None
    cu_k_ptr: tl.tensor | None
    format: RowFormat
    TOKEN_TABLES: tl.constexpr  # row t of the tables belongs to packed key t


@record
class NextLaunch:
    """Buffers that a pre-pass prepares for the next launch; each may be None.

    counter: an int32 word that becomes zero. With cu_q, those of the queries, a table of the queries' tiles of
    TILE_ROWS rows (``describe_tiles``) follows TILE_WORDS words later. max_logit: float32 that become -inf.
    """

    counter_ptr: tl.tensor | None
    cu_q_ptr: tl.tensor | None
    max_logit_ptr: tl.tensor | None
    TILE_ROWS: tl.constexpr


@triton.jit(do_not_specialize=["H", "N", "num_sequences", "position_limit", "NQ", "NK", "num_maxima"])
def rotate_kernel(
    inputs, following, H, N, num_sequences, position_limit, NQ, NK, num_maxima, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, END_AFTER_PREVIOUS_LAUNCH: tl.constexpr, PAD_TO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write x of ``PrepassInputs`` rotated to out. Grid: (row blocks * head chunks * batch).

    The rows are N keys, or with NK, queries of as many keys. following: ``NextLaunch``, with tiles of NQ queries and
    num_maxima numbers.

    PAD_TO: packed rows of out are padded as ``sequence_rows`` says, with zeros.

    END_AFTER_PREVIOUS_LAUNCH: the launch overlaps with another pre-pass and ends after it, so that a kernel that waits
    for this launch finds both complete.
    """
    inputs, following = unpack((inputs, following))
    lens_ptr, cu_ptr, cu_k_ptr = inputs.lens_ptr, inputs.cu_ptr, inputs.cu_k_ptr
    let_next_launch_start(PDL)
    if following.counter_ptr is not None:
        if tl.program_id(0) == 0:
            tl.store(following.counter_ptr, 0)
    if following.max_logit_ptr is not None:
        fill_minus_infinity(following.max_logit_ptr, num_maxima, BLOCK=128)
    if following.cu_q_ptr is not None:
        table_ptr = following.counter_ptr + TILE_WORDS
        describe_tiles(table_ptr, following.cu_q_ptr, cu_ptr, num_sequences, NQ, N, following.TILE_ROWS, TILE_WORDS)
    # Last head first, because the attention kernel begins with the first ones: their keys are then still in the L2.
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
    if inputs.TOKEN_TABLES:
        position_limit -= rows.first_row
    rotation = head_rotation(inputs.tables, batch, position_limit, inputs.norm)
    if inputs.TOKEN_TABLES:
        rotation = rotation_from(rotation, rows.first_row)
    rotate_heads(
        sequence_heads(inputs.x, batch, rows.first_row, rows.num_rows, inputs.format),
        sequence_heads(inputs.out, batch, rows.first_padded, rows.num_padded, inputs.format),
        rotation,
        start=block * BLOCK_N,
        q_offset=0 if NK is None else NK - rows.num_rows,
        sign=1.0 if inputs.sign is None else inputs.sign,
        first_head=chunk * HEADS,
        last_head=tl.minimum(chunk * HEADS + HEADS, H),
        BLOCK_N=BLOCK_N,
    )
    wait_for_previous_launch(END_AFTER_PREVIOUS_LAUNCH)
