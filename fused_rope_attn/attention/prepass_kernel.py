# mypy: ignore-errors
"""The launches before attention: rows normed and rotated once, in pair order, and the statistics of a backward's rows.

The portable kernels and those of sm_90 share them.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels import rotation as rotations
from fused_rope_attn.kernels import schedule, sequences, softmax, tiles
from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.records import record, replace, unpack

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
        sequence, first_row, num_rows, tile = sequences.packed_tile(
            pid // PARTS, cu_ptr, partner_ptr, num_sequences, N, partner_N, TILE
        )
        if PAD_TO:
            first_padded = sequences.padded_row(first_row, sequence, PAD_TO)
            rows = SequenceRows(first_row, num_rows, first_padded, num_padded=tl.cdiv(num_rows, PAD_TO) * PAD_TO)
            return tile * PARTS + pid % PARTS, sequence, rows
        else:
            return tile, sequence, SequenceRows(first_row, num_rows, first_row, num_rows)


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

    x: tiles.TensorView
    out: tiles.TensorView
    tables: rotations.RotaryTables
    norm: Norm | None  # before the rotation
    sign: tl.tensor | None  # None: 1
    lens_ptr: tl.tensor | None
    cu_ptr: tl.tensor | None
    cu_k_ptr: tl.tensor | None
    format: tiles.RowFormat
    TOKEN_TABLES: tl.constexpr  # row t of the tables belongs to packed key t


@triton.jit
def first_position(inputs, rows, batch, sequence, num_sequences, NK):
    """Return the position of a sequence's first query. inputs: ``PrepassInputs`` of queries of NK keys."""
    NK = sequences.existing_keys(inputs.lens_ptr, batch, NK)
    if inputs.cu_ptr is not None:
        _, NK = sequences.packed_partner(inputs.cu_k_ptr, sequence, num_sequences, NK)
    return NK - rows.num_rows


@triton.jit
def rotate_block(inputs, rows, batch, start, position, position_limit, first_head, last_head, BLOCK_N: tl.constexpr):
    """Norm, if there is a norm, and rotate rows [start, start + BLOCK_N) of heads [first_head, last_head).

    inputs: ``PrepassInputs``; rows: the ``SequenceRows``; position: of the sequence's first row. Rows of out that x
    does not have become zero. The angles and the norm's weights are read once for all heads.
    """
    if inputs.TOKEN_TABLES:
        position_limit -= rows.first_row
    rotation = rotations.head_rotation(inputs.tables, batch, position_limit, inputs.norm)
    if inputs.TOKEN_TABLES:
        rotation = rotations.rotation_from(rotation, rows.first_row)
    BLOCK_D: tl.constexpr = inputs.format.BLOCK_D
    offs = tl.arange(0, BLOCK_N)
    cos, sin = rotations.load_angles(rotation, offs + (start + position), BLOCK_D)
    weights = None
    if inputs.norm is not None:
        weights = rotations.pair_norm_weights(inputs.norm, rotation, BLOCK_D)
    sign = 1.0 if inputs.sign is None else inputs.sign
    for head in range(first_head, last_head):
        origin = tiles.Origin(batch, tl.cast(head, tl.int64), rows.first_row + start)
        x = tiles.head_rows(inputs.x, origin, rows.num_rows - start, inputs.format)
        first, second = rotations.load_pairs(x, offs, rotation)
        first, second = rotations.norm_and_rotate(first, second, cos, sin, sign, rotation, weights)
        origin = replace(origin, row=rows.first_padded + start)
        out = tiles.head_rows(inputs.out, origin, rows.num_padded - start, inputs.format)
        tiles.store_tile(out, rotations.pack_pairs(first, second), offs)


@triton.jit
def describe_tiles(
    table_ptr, cu_q_ptr, cu_k_ptr, num_sequences, NQ, NK, BLOCK: tl.constexpr, ENTRY_WORDS: tl.constexpr
):
    """Write what attention needs to know of each tile of BLOCK queries; the programs of a launch share the tiles.

    table (``count_tiles``, ENTRY_WORDS) int32: the tile's first row, the row after its sequence's last (not greater
    than the first: the tile holds no query), the sequence's first key row, its numbers of keys and of queries, and the
    sequence's own number. The other words are not written.
    """
    for tile in range(tl.program_id(0), schedule.count_tiles(NQ, num_sequences, BLOCK), tl.num_programs(0)):
        sequence, first_q, len_q, block = sequences.packed_tile(tile, cu_q_ptr, cu_k_ptr, num_sequences, NQ, NK, BLOCK)
        first_k, len_k = sequences.packed_partner(cu_k_ptr, sequence, num_sequences, NK)
        entry = table_ptr + tile * ENTRY_WORDS
        tl.store(entry, first_q + block * BLOCK)
        tl.store(entry + 1, first_q + len_q)
        tl.store(entry + 2, first_k)
        tl.store(entry + 3, len_k)
        tl.store(entry + 4, len_q)
        tl.store(entry + 5, sequence)


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
    cu_ptr, cu_k_ptr = inputs.cu_ptr, inputs.cu_k_ptr
    schedule.let_next_launch_start(PDL)
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
        blocks = schedule.count_tiles(N, num_sequences, PAD_TO) * (PAD_TO // BLOCK_N)
    else:
        blocks = schedule.count_tiles(N, num_sequences, BLOCK_N)
    block, chunk, batch = schedule.block_of_heads(pid, blocks, tl.cdiv(H, HEADS))
    if NK is None:
        N = sequences.existing_keys(inputs.lens_ptr, batch, N)
    block, sequence, rows = sequence_rows(block, cu_ptr, cu_k_ptr, num_sequences, N, NK, N, BLOCK_N, PAD_TO)
    position = 0
    if NK is not None:
        position = first_position(inputs, rows, batch, sequence, num_sequences, NK)
    first_head, last_head = chunk * HEADS, tl.minimum(chunk * HEADS + HEADS, H)
    rotate_block(inputs, rows, batch, block * BLOCK_N, position, position_limit, first_head, last_head, BLOCK_N)
    schedule.wait_for_previous_launch(END_AFTER_PREVIOUS_LAUNCH)


@record
class Statistics:
    """The statistics of query rows, the tensors that they are made of, and buffers that become zero.

    stats (2, B, HQ, pitch) float32: lse in base 2 (+inf if a row saw nothing, so that p = exp2(s - lse) = 0) and delta
    = sum(o * do) - dlse; both are 0 from NQ to pitch, which are equal for packed sequences. accumulator (B, HQ, pitch,
    COLUMNS) float32, progress (B * HQ * pitch / PROGRESS_ROWS,) int32, and counters (num_counters,) int32 become zero.
    """

    o: tiles.TensorView  # (B, HQ, NQ, DV)
    do: tiles.TensorView
    lse_ptr: tl.tensor  # (B, HQ, NQ) float32
    dlse_ptr: tl.tensor | None  # the gradient of lse
    cu_q_ptr: tl.tensor | None
    cu_k_ptr: tl.tensor | None
    stats_ptr: tl.tensor
    accumulator_ptr: tl.tensor | None
    progress_ptr: tl.tensor | None
    counters_ptr: tl.tensor | None
    format: tiles.RowFormat  # of o and do
    PROGRESS_ROWS: tl.constexpr
    COLUMNS: tl.constexpr
    READS_LENGTHS: tl.constexpr


@triton.jit
def write_statistics(out, o, do, rows, batch_head, start, NQ, pitch, size, BLOCK_N: tl.constexpr):
    """Write lse and delta of rows [start, start + BLOCK_N) of the head batch * HQ + head = batch_head (int64).

    out: ``Statistics``; o and do: ``Rows`` from ``start`` on; rows: ``SequenceRows``; size: B * HQ * pitch.
    """
    offs = tl.arange(0, BLOCK_N)
    exists = offs < rows.num_rows - start
    is_written = offs < rows.num_padded - start
    o_tile = tiles.load_tile(o, offs, CHECK_ROWS=True)
    do_tile = tiles.load_tile(do, offs, CHECK_ROWS=True)
    lse = tl.load(out.lse_ptr + batch_head * NQ + rows.first_row + start + offs, mask=exists, other=0.0)
    lse = tl.where(lse == float("-inf"), float("inf"), lse * softmax.LOG2E)
    dlse = None
    if out.dlse_ptr is not None:
        dlse = tl.load(out.dlse_ptr + batch_head * NQ + rows.first_row + start + offs, mask=exists, other=0.0)
    index = batch_head * pitch + rows.first_padded + start + offs
    tl.store(out.stats_ptr + index, lse, mask=is_written)
    delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if dlse is not None:
        # The derivative of lse is P, as that of the scores is, so that dS = P * (dP - delta).
        delta -= dlse
    if out.READS_LENGTHS or dlse is not None:
        # Padding may hold anything: nothing of a row that saw nothing may reach a gradient.
        delta = tl.where(lse == float("inf"), 0.0, delta)
    tl.store(out.stats_ptr + size + index, delta, mask=is_written)
    if out.progress_ptr is not None:
        words = out.progress_ptr + index // out.PROGRESS_ROWS
        tl.store(words, 0, mask=(index % out.PROGRESS_ROWS == 0) & is_written)
    if out.accumulator_ptr is not None:
        BLOCK_D: tl.constexpr = out.format.BLOCK_D
        cleared_ptr = out.accumulator_ptr + (batch_head * pitch + rows.first_padded + start) * out.COLUMNS
        row_format = tiles.RowFormat(out.COLUMNS, BLOCK_D, USE_INT64_OFFSETS=False)
        cleared = tiles.Rows(cleared_ptr, out.COLUMNS, 1, rows.num_padded - start, first_row=None, format=row_format)
        tiles.store_tile(cleared, tl.zeros((BLOCK_N, BLOCK_D), tl.float32), offs)


@triton.jit(do_not_specialize="num_counters B HQ HKV NQ pitch NK num_sequences position_limit".split())
def preprocess_kernel(statistics, queries, keys, num_counters, B, HQ, HKV, NQ, pitch, NK, num_sequences, position_limit,
                      HEADS: tl.constexpr, BLOCK_N: tl.constexpr, PAD_TO: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Write ``Statistics``, and rotated copies of queries and keys, ``PrepassInputs``, unless both are None.

    Grid: query programs, then key programs.

    PAD_TO, a multiple of BLOCK_N or 0: stats, accumulator and the rotated q have a packed sequence's rows from
    ``padded_row`` on, up to a multiple of PAD_TO. Rows without a query are 0 there too, and pitch is that of
    ``count_tiles`` tiles.
    """
    statistics, queries, keys = unpack((statistics, queries, keys))
    schedule.let_next_launch_start(PDL)
    pid = tl.program_id(0)
    if statistics.counters_ptr is not None:
        if pid == 0:
            for first in range(0, num_counters, 1024):
                words = first + tl.arange(0, 1024)
                tl.store(statistics.counters_ptr + words, tl.zeros((1024,), tl.int32), mask=words < num_counters)
    if PAD_TO:
        q_blocks = pitch // BLOCK_N
    else:
        q_blocks = schedule.count_tiles(pitch, num_sequences, BLOCK_N)
    q_chunks = tl.cdiv(HQ, HEADS)
    if pid < q_blocks * q_chunks * B:
        block, chunk, batch = schedule.block_of_heads(pid, q_blocks, q_chunks)
        first_head = chunk * HEADS
        last_head = tl.minimum(first_head + HEADS, HQ)
        block, sequence, rows = sequence_rows(
            block, statistics.cu_q_ptr, statistics.cu_k_ptr, num_sequences, NQ, NK, pitch, BLOCK_N, PAD_TO
        )
        if queries is not None:
            position = first_position(queries, rows, batch, sequence, num_sequences, NK)
        start = block * BLOCK_N
        size = tl.cast(B, tl.int64) * HQ * pitch
        for head in range(first_head, last_head):
            origin = tiles.Origin(batch, tl.cast(head, tl.int64), rows.first_row + start)
            o = tiles.head_rows(statistics.o, origin, rows.num_rows - start, statistics.format)
            do = tiles.head_rows(statistics.do, origin, rows.num_rows - start, statistics.format)
            batch_head = batch * HQ + origin.head
            write_statistics(statistics, o, do, rows, batch_head, start, NQ, pitch, size, BLOCK_N)
        if queries is not None:
            if not PAD_TO:
                rows = replace(rows, num_padded=rows.num_rows)
            rotate_block(queries, rows, batch, start, position, position_limit, first_head, last_head, BLOCK_N)
    else:
        if keys is not None:
            pid -= q_blocks * q_chunks * B
            blocks = schedule.count_tiles(NK, num_sequences, BLOCK_N)
            block, chunk, batch = schedule.block_of_heads(pid, blocks, tl.cdiv(HKV, HEADS))
            NK = sequences.existing_keys(keys.lens_ptr, batch, NK)
            block, _, rows = sequence_rows(block, keys.cu_ptr, None, num_sequences, NK, None, NK, BLOCK_N, PAD_TO=0)
            first_head, last_head = chunk * HEADS, tl.minimum(chunk * HEADS + HEADS, HKV)
            rotate_block(keys, rows, batch, block * BLOCK_N, 0, position_limit, first_head, last_head, BLOCK_N)
