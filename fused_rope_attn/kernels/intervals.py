# mypy: ignore-errors
"""Intervals of query rows: each key is visible to one interval of rows, the caller's and that of every other mask.

For each block of keys ``attention.intervals.interval_blocks_kernel`` writes the rows that see any of its keys and the
rows that see all of them. A tile of queries compares its rows with these bounds, so that it visits only blocks that it
may see and compares single pairs only where a bound crosses the tile (``next_run``). A tile of keys visits the blocks
of queries from its smallest start to its largest end (``narrowed_queries``).
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.records import record

# Past every query row, and far enough from 2**31 that tiles can be counted from it.
NO_ROW = tl.constexpr(2**30)
# Keys or rows of a bit mask's word.
WORD = tl.constexpr(32)
# Blocks of keys that ``next_run`` reads at once.
CHUNK = tl.constexpr(128)


@record
class Intervals:
    """The intervals of a call, and by ``sequence_intervals`` those of one of its sequences.

    Rows of a sequence's queries count from 0; a row's position is ``row + shift``.
    """

    starts_ptr: tl.tensor | None  # query_starts (1|B, NK) int32; None: 0
    ends_ptr: tl.tensor | None  # query_ends (1|B, NK) int32; None: NQ
    blocks_ptr: tl.tensor | None  # the results of ``interval_blocks_kernel``; None if the kernel does not need them
    strides: tl.tuple  # from one batch entry to the next, of starts and ends; 0: all have the same
    # Of a sequence, whose first key the first two pointers are then of:
    batch: tl.tensor | None = None  # int64
    num_rows: tl.tensor | None = None  # NQ
    num_keys: tl.tensor | None = None  # NK; some of these keys may not exist
    shift: tl.tensor | None = None


@triton.jit
def sequence_intervals(intervals, batch, first_key, num_rows, num_keys, shift):
    """Return the ``Intervals`` of batch entry ``batch`` (int64). The sequence begins with its key ``first_key``.

    num_rows, num_keys and shift as in ``Intervals``.
    """
    starts_ptr, ends_ptr, strides = intervals.starts_ptr, intervals.ends_ptr, intervals.strides
    if starts_ptr is not None:
        starts_ptr += batch * strides[0] + first_key
    if ends_ptr is not None:
        ends_ptr += batch * strides[1] + first_key
    return Intervals(starts_ptr, ends_ptr, intervals.blocks_ptr, strides, batch, num_rows, num_keys, shift)


@triton.jit
def load_interval(intervals, keys, exists):
    """Load the rows [first, end) of q that see ``keys`` by their intervals, both within [0, num_rows].

    keys: tensor of key numbers; both are 0 where not ``exists``.
    """
    first = tl.zeros(keys.shape, tl.int32)
    end = tl.where(exists, intervals.num_rows, 0)
    if intervals.starts_ptr is not None:
        first = tl.load(intervals.starts_ptr + keys, mask=exists, other=0)
        first = tl.minimum(tl.maximum(first, 0), intervals.num_rows)
    if intervals.ends_ptr is not None:
        end = tl.load(intervals.ends_ptr + keys, mask=exists, other=0)
        end = tl.minimum(tl.maximum(end, 0), intervals.num_rows)
    return first, end


@triton.jit
def row_interval(mask, positions_k):
    """Return the positions [first, end) of the queries that see each key under all masks of ``mask``, with intervals.

    It is empty, first >= end, for a key that no query sees.
    """
    exists = positions_k < mask.num_keys
    if mask.first_key is not None:
        exists = exists & (positions_k >= mask.first_key)
    first, end = load_interval(mask.intervals, positions_k, exists)
    first += mask.intervals.shift
    end += mask.intervals.shift
    # Queries at negative positions see no key.
    first = tl.maximum(first, 0)
    if mask.window.right is not None:
        first = tl.maximum(first, positions_k - mask.window.right)
    if mask.window.left is not None:
        end = tl.minimum(end, positions_k + mask.window.left + 1)
    return first, end


@triton.jit
def without_unseen(tile, mask, start_n, offs):
    """Return a tile (len(offs), columns) of the keys ``start_n + offs``, with zeros for keys that no query sees.

    Such keys may hold NaN, and their weight is 0, but 0 * NaN is NaN. Without intervals loads check the rows.
    """
    if mask.intervals is not None:
        first, end = row_interval(mask, start_n + offs)
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
    intervals = mask.intervals
    count = tl.cdiv(intervals.num_keys, BLOCK_N)
    index = block + tl.arange(0, CHUNK)
    exists = index < last_block
    bounds = intervals.blocks_ptr + intervals.batch * 4 * count + index
    first = tl.load(bounds, mask=exists, other=NO_ROW)
    end = tl.load(bounds + count, mask=exists, other=0)
    all_first = tl.load(bounds + 2 * count, mask=exists, other=NO_ROW)
    all_end = tl.load(bounds + 3 * count, mask=exists, other=0)
    last_m = tl.minimum(start_m + BLOCK_M, intervals.num_rows)
    visible = (first < last_m) & (end > start_m)
    whole = (all_first <= start_m) & (all_end >= last_m) & (index >= full_first) & (index < full_last)
    kind = tl.where(whole, 2, tl.where(visible, 1, 0))
    limit = block + CHUNK
    begin = tl.min(tl.where(kind > 0, index, limit), 0)
    of_begin = tl.max(tl.where(index == begin, kind, 0), 0)
    stop = tl.min(tl.where((index > begin) & (kind != of_begin), index, limit), 0)
    return begin, tl.where(of_begin == 2, begin, stop), stop


@triton.jit
def narrowed_queries(bounds, rows, q_offset, BLOCK_M: tl.constexpr):
    """Return the ``query_range`` ``bounds`` of some keys, narrowed by ``rows``, the ``row_interval`` of each key.

    Keys that no query sees count in neither direction, because their gradients are zero.
    """
    first_position, end_position = rows
    seen = first_position < end_position
    low = tl.min(tl.where(seen, first_position, NO_ROW), 0) - q_offset
    high = tl.max(tl.where(seen, end_position - q_offset, 0), 0)
    all_low = tl.max(tl.where(seen, first_position - q_offset, 0), 0)
    all_high = tl.maximum(0, tl.min(tl.where(seen, end_position, NO_ROW), 0) - q_offset)
    first, full_first, full_last, last = bounds
    last = tl.minimum(last, tl.cdiv(high, BLOCK_M))
    first = tl.minimum(last, tl.maximum(first, tl.maximum(low, 0) // BLOCK_M))
    full_first = tl.maximum(first, tl.minimum(last, tl.maximum(full_first, tl.cdiv(all_low, BLOCK_M))))
    full_last = tl.minimum(last, tl.minimum(full_last, all_high // BLOCK_M))
    return first, full_first, tl.maximum(full_first, full_last), last
