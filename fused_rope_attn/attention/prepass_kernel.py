# mypy: ignore-errors
"""The launches before attention: rows normed and rotated once, in pair order, and the statistics of a backward's rows.

The portable kernels and those of sm_90 share them.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels import rotation as rotations, schedule, sequences, softmax, tiles
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
    PAD_TO: as ``prepass_kernel`` takes it.
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


@record
class SequenceEnds:
    """The ends of sequences: lens (B,) int32, the keys that exist, or cu (sequences + 1,) of both tensors; or None."""

    lens_ptr: tl.tensor | None
    cu_q_ptr: tl.tensor | None
    cu_k_ptr: tl.tensor | None
    TOKEN_TABLES: tl.constexpr  # row t of the tables belongs to packed key t


@record
class PrepassInputs:
    """The tensors of a rotation: x (B, H, N, D) and out, which is in pair order and times ``sign``."""

    x: tiles.TensorView
    out: tiles.TensorView
    tables: rotations.RotaryTables
    norm: Norm | None  # before the rotation
    sign: tl.tensor | None  # None: 1
    format: tiles.RowFormat


@triton.jit
def rotate_block(
    inputs, rows, batch, start, position, position_limit, first_head, last_head, ends, BLOCK_N: tl.constexpr
):
    """Norm, if there is a norm, and rotate rows [start, start + BLOCK_N) of heads [first_head, last_head).

    inputs: ``PrepassInputs``; rows: the ``SequenceRows``; position: of the sequence's first row. Rows of out that x
    does not have become zero. The angles and the norm's weights are read once for all heads.
    """
    rotation = rotations.head_rotation(inputs.tables, batch, position_limit, inputs.norm)
    if ends.TOKEN_TABLES:
        rotation = replace(rotation, num_positions=position_limit - rows.first_row)
        rotation = rotations.rotation_from(rotation, rows.first_row)
    BLOCK_D: tl.constexpr = inputs.format.BLOCK_D
    offs = tl.arange(0, BLOCK_N)
    angles = rotations.load_angles(rotation, offs + (start + position), BLOCK_D)
    weights = None
    if inputs.norm is not None:
        if rotation.INTERLEAVED:
            weights = rotations.row_norm_weights(inputs.norm, offs, BLOCK_D)
        else:
            weights = rotations.pair_norm_weights(inputs.norm, rotation, BLOCK_D)
    sign = 1.0 if inputs.sign is None else inputs.sign
    for head in range(first_head, last_head):
        origin = tiles.Origin(batch, tl.cast(head, tl.int64), rows.first_row + start)
        x = tiles.head_rows(inputs.x, origin, rows.num_rows - start, inputs.format)
        first, second = rotations.load_pairs(x, offs, rotation)
        first, second = rotations.norm_and_rotate(first, second, angles, sign, rotation, weights)
        origin = replace(origin, row=rows.first_padded + start)
        out = tiles.head_rows(inputs.out, origin, rows.num_padded - start, inputs.format)
        tiles.store_tile(out, rotations.pack_pairs(first, second), offs)


@triton.jit
def rotate_keys(pid, keys, ends, H, N, num_sequences, position_limit, HEADS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write block ``pid`` of rotated keys: BLOCK_N rows of HEADS heads. Keys that do not exist are left alone."""
    blocks = schedule.count_tiles(N, num_sequences, BLOCK_N)
    block, chunk, batch = schedule.block_of_heads(pid, blocks, tl.cdiv(H, HEADS))
    N = sequences.existing_keys(ends.lens_ptr, batch, N)
    block, _, rows = sequence_rows(block, ends.cu_k_ptr, None, num_sequences, N, None, N, BLOCK_N, PAD_TO=0)
    first, last = chunk * HEADS, tl.minimum(chunk * HEADS + HEADS, H)
    rotate_block(keys, rows, batch, block * BLOCK_N, 0, position_limit, first, last, ends, BLOCK_N)


@record
class Statistics:
    """The statistics of query rows, the tensors that they are made of, and buffers that become zero.

    stats (2, B, HQ, pitch) float32: lse in base 2 (+inf if a row saw nothing, so that p = exp2(s - lse) = 0) and delta
    = sum(o * do) - dlse; both are 0 from NQ to pitch, which are equal for packed sequences.
    """

    o: tiles.TensorView  # (B, HQ, NQ, DV)
    do: tiles.TensorView
    lse_ptr: tl.tensor  # (B, HQ, NQ) float32
    dlse_ptr: tl.tensor | None  # the gradient of lse
    stats_ptr: tl.tensor
    accumulator_ptr: tl.tensor | None  # (B, HQ, pitch, COLUMNS) float32
    progress_ptr: tl.tensor | None  # (B * HQ * pitch / PROGRESS_ROWS,) int32
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
    """Buffers that a pre-pass prepares for the next launch; each may be None."""

    counters_ptr: tl.tensor | None  # num_counters int32 words, None: one, that become zero
    maxima_ptr: tl.tensor | None  # num_maxima float32 that become -inf
    TILE_ROWS: tl.constexpr  # 0, or of the tiles that ``describe_tiles`` puts TILE_WORDS words after the first counter


@triton.jit
def prepare_next_launch(following, ends, num_counters, num_maxima, NQ, NK, num_sequences):
    """Fill the buffers of ``NextLaunch``; the programs of the grid share the work."""
    if following.counters_ptr is not None:
        if num_counters is None:
            if tl.program_id(0) == 0:
                tl.store(following.counters_ptr, 0)
        elif tl.program_id(0) == 0:
            for first in range(0, num_counters, 1024):
                words = first + tl.arange(0, 1024)
                tl.store(following.counters_ptr + words, tl.zeros((1024,), tl.int32), mask=words < num_counters)
    if following.maxima_ptr is not None:
        for first in range(tl.program_id(0) * 128, num_maxima, tl.num_programs(0) * 128):
            offs = first + tl.arange(0, 128)
            tl.store(following.maxima_ptr + offs, float("-inf"), mask=offs < num_maxima)
    if following.TILE_ROWS:
        table_ptr, TILE_ROWS = following.counters_ptr + TILE_WORDS, following.TILE_ROWS
        describe_tiles(table_ptr, ends.cu_q_ptr, ends.cu_k_ptr, num_sequences, NQ, NK, TILE_ROWS, TILE_WORDS)


_NUMBERS = "num_counters num_maxima B HQ HKV NQ pitch NK num_sequences position_limit".split()


@triton.jit(do_not_specialize=_NUMBERS)
def prepass_kernel(statistics, queries, keys, ends, following, num_counters, num_maxima, B, HQ, HKV, NQ, pitch, NK,
                   num_sequences, position_limit, HEADS: tl.constexpr, BLOCK_N: tl.constexpr, PAD_TO: tl.constexpr,
                   END_AFTER_PREVIOUS_LAUNCH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Write rotated copies of queries, keys or both, ``PrepassInputs``, and a backward pass's ``Statistics``.

    Each of them may be None. Grid: row blocks * head chunks * B of queries, with queries or statistics, then of keys.
    ends: ``SequenceEnds``; following: ``NextLaunch``.

    PAD_TO, a multiple of BLOCK_N or 0: the statistics, the accumulator and the rotated queries have a packed sequence's
    rows from ``padded_row`` on, up to a multiple of PAD_TO. Rows without a query are 0 there too, and pitch is that of
    ``count_tiles`` tiles.

    END_AFTER_PREVIOUS_LAUNCH: the launch overlaps with another pre-pass and ends after it, so that a kernel that waits
    for this launch finds both complete.
    """
    statistics, queries, keys, ends, following = unpack((statistics, queries, keys, ends, following))
    schedule.let_next_launch_start(PDL)
    prepare_next_launch(following, ends, num_counters, num_maxima, NQ, NK, num_sequences)
    pid = tl.program_id(0)
    if statistics is None:
        # Last head first, because attention begins with the first ones: their keys are then still in the L2.
        pid = tl.num_programs(0) - 1 - pid
    q_blocks = pitch // BLOCK_N if PAD_TO else schedule.count_tiles(pitch, num_sequences, BLOCK_N)
    q_chunks = tl.cdiv(HQ, HEADS)
    if statistics is None and queries is None:
        if keys is not None:
            rotate_keys(pid, keys, ends, HKV, NK, num_sequences, position_limit, HEADS, BLOCK_N)
    elif pid < q_blocks * q_chunks * B:
        block, chunk, batch = schedule.block_of_heads(pid, q_blocks, q_chunks)
        first_head, last_head = chunk * HEADS, tl.minimum(chunk * HEADS + HEADS, HQ)
        block, sequence, rows = sequence_rows(
            block, ends.cu_q_ptr, ends.cu_k_ptr, num_sequences, NQ, NK, pitch, BLOCK_N, PAD_TO
        )
        if queries is not None:
            num_keys = sequences.existing_keys(ends.lens_ptr, batch, NK)
            if ends.cu_q_ptr is not None:
                _, num_keys = sequences.packed_partner(ends.cu_k_ptr, sequence, num_sequences, NK)
            position = num_keys - rows.num_rows
        start = block * BLOCK_N
        if statistics is not None:
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
            rotate_block(queries, rows, batch, start, position, position_limit, first_head, last_head, ends, BLOCK_N)
    elif keys is not None:
        pid -= q_blocks * q_chunks * B
        rotate_keys(pid, keys, ends, HKV, NK, num_sequences, position_limit, HEADS, BLOCK_N)
    schedule.wait_for_previous_launch(END_AFTER_PREVIOUS_LAUNCH)
