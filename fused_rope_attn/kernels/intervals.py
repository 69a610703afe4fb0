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


@record
class Intervals:
    """The intervals of a call, and by ``sequence_intervals`` those of one of its sequences.

    Rows of a sequence's queries count from 0; a row's position is ``row + shift``.
    """

    starts_ptr: tl.tensor | None  # query_starts (1|B, NK) int32; None: 0
    ends_ptr: tl.tensor | None  # query_ends (1|B, NK) int32; None: NQ
    blocks_ptr: tl.tensor | None  # the results of ``interval_blocks_kernel``; None if the kernel does not need them
    strides: tl.tuple  # from one batch entry to the next, of starts and ends; 0: all have the same
    # For the intervals of one sequence. starts_ptr and ends_ptr then point to the sequence's first key.
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
