# mypy: ignore-errors
"""Rows of q and k in one part or two, and the keys of a head, as the forward and the backward pass read them.

Multi-head latent attention has two parts. The rope part holds the columns of ``q`` and ``k``, in pair order. The nope
part holds columns that another tensor has and no call rotates; it is None in every other call, and then these functions
compile to those of the rope part alone.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels import masks, rotation, softmax, tiles
from fused_rope_attn.kernels.records import record

# Blocks of keys that ``next_run`` reads at once.
CHUNK = tl.constexpr(128)


@record
class NopeViews:
    """The nope parts of a call's q and k, and of their gradients; None in a kernel that does not use one."""

    q: tiles.TensorView | None
    k: tiles.TensorView | None
    dq: tiles.TensorView | None
    dk: tiles.TensorView | None
    sign: tl.tensor | None  # of the scale, which the caller's q lacks; None: 1
    format: tiles.RowFormat


@record
class Parts:
    """A tile of rows of q or k, or of their gradients."""

    rope: tl.tensor  # (rows, BLOCK_D)
    nope: tl.tensor | None  # (rows, BLOCK_DN)


@record
class HeadTiles:
    """Rows of one head of one sequence that are read tile by tile: by pointers, or by the TMA.

    With a ``descriptor``, of the whole (B, H, N, D) tensor, ``rows.ptr`` is None. The TMA gives zeros past the end of
    the tensor; where READS_LENGTHS, the sequence may end before it.
    """

    rows: tiles.Rows
    descriptor: tl.tensor_descriptor | None
    origin: tiles.Origin
    READS_LENGTHS: tl.constexpr


@record
class PartTiles:
    """Rows of q or k of one head of a sequence, read tile by tile as ``Parts``."""

    rope: HeadTiles
    nope: HeadTiles | None
    rotation: rotation.Rotation | None  # of the rope part, which ``sign`` then multiplies; None: it is stored rotated
    position: tl.tensor  # of the first row
    sign: tl.tensor
    nope_sign: tl.tensor | None  # None: 1


@record
class HeadKeys:
    """Keys and values of one head of a sequence, read BLOCK_N at a time."""

    k: PartTiles
    v: HeadTiles
    mask: masks.Mask
    BLOCK_N: tl.constexpr


@triton.jit
def head_tiles(view, origin, num_rows, format, first_row, READS_LENGTHS: tl.constexpr, USE_TMA: tl.constexpr):
    """Return the ``HeadTiles`` of one head of one sequence of a ``TensorView``."""
    if USE_TMA:
        rows = tiles.Rows(None, view.strides[2], view.strides[3], num_rows, first_row, format)
        return HeadTiles(rows, descriptor=view.ptr, origin=origin, READS_LENGTHS=READS_LENGTHS)
    else:
        rows = tiles.head_rows(view, origin, num_rows, format, first_row)
        return HeadTiles(rows, descriptor=None, origin=origin, READS_LENGTHS=READS_LENGTHS)


@triton.jit
def load_head_tile(of_head, start, offs, CHECK_ROWS: tl.constexpr):
    """Load the rows ``start + offs`` of ``HeadTiles`` as ``load_tile`` does; offs: 0 to the tile's number of rows."""
    rows, origin = of_head.rows, of_head.origin
    if of_head.descriptor is not None:
        where = [origin.batch.to(tl.int32), origin.head.to(tl.int32), origin.row + start, 0]
        tile = tl.reshape(of_head.descriptor.load(where), (offs.shape[0], rows.format.BLOCK_D))
        if CHECK_ROWS:
            if of_head.READS_LENGTHS or rows.first_row is not None:
                tile = tl.where(tiles.row_mask(rows, offs, start), tile, 0.0).to(tile.dtype)
        return tile
    else:
        return tiles.load_tile(tiles.rows_from(rows, start), offs, CHECK_ROWS)


@triton.jit
def query_parts(inputs, sequence, origin, first_row, rotation, sign, USE_TMA: tl.constexpr):
    """Return the ``PartTiles`` of the queries of a head of a ``Sequence`` that begin at ``origin``.

    inputs: the record of a kernel. first_row: rows before it may hold anything, and are read as zero; None: 0.
    """
    nope, num_rows, READS_LENGTHS = inputs.nope, sequence.num_queries, sequence.mask.READS_LENGTHS
    rope = head_tiles(inputs.q, origin, num_rows, inputs.format, first_row, READS_LENGTHS, USE_TMA)
    q_nope, nope_sign = None, None
    if nope is not None:
        q_nope = head_tiles(nope.q, origin, num_rows, nope.format, first_row, READS_LENGTHS, USE_TMA=False)
        nope_sign = nope.sign
    return PartTiles(rope, q_nope, rotation, sequence.q_offset, sign, nope_sign)


@triton.jit
def keys_of_head(inputs, sequence, head, first_key, rotation, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr):
    """Return the ``HeadKeys`` of key head ``head`` (int64) of a ``Sequence``. The rest as in ``query_parts``."""
    origin = tiles.Origin(batch=sequence.batch, head=head, row=sequence.first_k)
    mask, nope, num_keys = sequence.mask, inputs.nope, sequence.num_keys
    k = head_tiles(inputs.k, origin, num_keys, inputs.format, first_key, mask.READS_LENGTHS, USE_TMA)
    v = head_tiles(inputs.v, origin, num_keys, inputs.value_format, first_key, mask.READS_LENGTHS, USE_TMA)
    k_nope = None
    if nope is not None:
        k_nope = head_tiles(nope.k, origin, num_keys, nope.format, first_key, mask.READS_LENGTHS, USE_TMA=False)
    return HeadKeys(PartTiles(k, k_nope, rotation, position=0, sign=1.0, nope_sign=None), v, mask, BLOCK_N)


@triton.jit
def load_nope(part_tiles, start, offs, CHECK_ROWS: tl.constexpr = True):
    """Load the nope part of the rows ``start + offs`` of ``PartTiles``."""
    tile = load_head_tile(part_tiles.nope, start, offs, CHECK_ROWS)
    if part_tiles.nope_sign is None:
        return tile
    else:
        return (tile.to(tl.float32) * part_tiles.nope_sign).to(tile.dtype)


@triton.jit
def load_rope(part_tiles, start, offs, CHECK_ROWS: tl.constexpr = True):
    """Load the rope part of the rows ``start + offs`` of ``PartTiles``, in pair order."""
    turned, position, sign = part_tiles.rotation, part_tiles.position, part_tiles.sign
    if turned is None:
        return load_head_tile(part_tiles.rope, start, offs, CHECK_ROWS)
    else:
        rows = tiles.rows_from(part_tiles.rope.rows, start)
        return rotation.load_rotated(rows, offs, turned, start + position, sign, CHECK_ROWS)


@triton.jit
def load_parts(part_tiles, start, offs, CHECK_ROWS: tl.constexpr = True):
    """Load the rows ``start + offs`` of ``PartTiles`` as ``Parts``."""
    rope = load_rope(part_tiles, start, offs, CHECK_ROWS)
    if part_tiles.nope is None:
        return Parts(rope=rope, nope=None)
    else:
        return Parts(rope=rope, nope=load_nope(part_tiles, start, offs, CHECK_ROWS))


@triton.jit
def parts_product(a, b, scale):
    """Return ``score_product`` of ``Parts`` a and b: the sum over the columns of both parts."""
    if a.nope is None:
        return softmax.score_product(a.rope, b.rope, scale)
    else:
        product = tl.dot(a.nope, tl.trans(b.nope), input_precision=scale.PRECISION)
        return tl.dot(a.rope, tl.trans(b.rope), product, input_precision=scale.PRECISION)


@triton.jit
def without_unseen(tile, mask, start_n, offs):
    """Return a tile (len(offs), columns) of the keys ``start_n + offs``, with zeros for keys that no query sees.

    Such keys may hold NaN, and their weight is 0, but 0 * NaN is NaN. Without intervals loads check the rows.
    """
    if mask.intervals is not None:
        first, end = masks.row_interval(mask, start_n + offs)
        tile = tl.where((first < end)[:, None], tile, 0.0).to(tile.dtype)
    return tile


@triton.jit
def next_run(mask, block, last_block, full_first, full_last, start_m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (begin, middle, end): the next blocks of keys for the tile of rows [start_m, start_m + BLOCK_M) of q.

    Blocks count BLOCK_N keys from the sequence's first one. Look at CHUNK of them from ``block`` on, below
    ``last_block``: none of [block, begin) is visible to any row, and the blocks [begin, end) are alike, either all in
    [begin, middle), with pairs to compare, or all in [middle, end), where every row sees every key. The latter only
    occur from ``full_first`` to before ``full_last``, which bound them by the other masks.
    """
    of_keys = mask.intervals
    count = tl.cdiv(of_keys.num_keys, BLOCK_N)
    index = block + tl.arange(0, CHUNK)
    exists = index < last_block
    bounds = of_keys.blocks_ptr + of_keys.batch * 4 * count + index
    first = tl.load(bounds, mask=exists, other=masks.NO_ROW)
    end = tl.load(bounds + count, mask=exists, other=0)
    all_first = tl.load(bounds + 2 * count, mask=exists, other=masks.NO_ROW)
    all_end = tl.load(bounds + 3 * count, mask=exists, other=0)
    last_m = tl.minimum(start_m + BLOCK_M, of_keys.num_rows)
    visible = (first < last_m) & (end > start_m)
    whole = (all_first <= start_m) & (all_end >= last_m) & (index >= full_first) & (index < full_last)
    kind = tl.where(whole, 2, tl.where(visible, 1, 0))
    limit = block + CHUNK
    begin = tl.min(tl.where(kind > 0, index, limit), 0)
    of_begin = tl.max(tl.where(index == begin, kind, 0), 0)
    stop = tl.min(tl.where((index > begin) & (kind != of_begin), index, limit), 0)
    return begin, tl.where(of_begin == 2, begin, stop), stop


@triton.jit
def fold_intervals(fold: tl.constexpr, sums, given, keys, start_m, bounds, BLOCK_M: tl.constexpr):
    """Return ``sums`` with the keys that the tile of rows [start_m, start_m + BLOCK_M) sees.

    Blocks of keys that no row sees are skipped. ``fold(sums, given, keys, first, last, APPLY_MASK)`` adds the keys
    [first, last). bounds: ``key_range``'s.
    """
    BLOCK_N: tl.constexpr = keys.BLOCK_N
    first, full_first, full_last, last = bounds
    block, last_block = first // BLOCK_N, tl.cdiv(last, BLOCK_N)
    full_first, full_last = full_first // BLOCK_N, full_last // BLOCK_N
    while block < last_block:
        begin, middle, block = next_run(keys.mask, block, last_block, full_first, full_last, start_m, BLOCK_M, BLOCK_N)
        sums = fold(sums, given, keys, begin * BLOCK_N, middle * BLOCK_N, APPLY_MASK=True)
        sums = fold(sums, given, keys, middle * BLOCK_N, block * BLOCK_N, APPLY_MASK=False)
    return sums
