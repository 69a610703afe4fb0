# mypy: ignore-errors
"""Masks: which queries and keys see each other, and so which blocks a kernel visits.

Every mask is an interval of keys for each query, and of queries for each key. A causal mask is the interval that ends
at the query's own position: its ``right`` is 0. The compiler knows this 0, so that adding it costs nothing.

A kernel collects a sequence's mask in one record (``sequence_mask``), asks for the blocks first (``key_range``,
``query_range``), and for the pairs in those that are not wholly visible (``visible``). Positions are counted in keys:
``q_offset`` is the position of the first query row.

With ``Intervals`` each key is visible to one interval of query rows, the caller's and that of every other mask. For
each block of keys ``attention.intervals.interval_blocks_kernel`` writes the rows that see any of its keys and the rows
that see all of them. A tile of queries compares its rows with these bounds, so that it visits only blocks that it may
see and compares single pairs only where a bound crosses the tile (``next_run``). A tile of keys visits the blocks of
queries from its smallest start to its largest end (``narrowed_queries``).
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.records import record

# Past every query row, and far enough from 2**31 that tiles can be counted from it.
NO_ROW = tl.constexpr(2**30)
# The position of a query that sees nothing where queries at negative positions see keys.
NO_POSITION = tl.constexpr(-(2**30))
# Keys or rows of a bit mask's word.
WORD = tl.constexpr(32)


@record
class Window:
    """The keys that a query sees by its position; None: no such bound. Made by ``window_of``."""

    left: tl.tensor | None  # how many keys before its own position
    right: tl.tensor | None  # how many keys after its own position; ``is_causal`` if none
    HIDES_PAIRS: tl.constexpr  # whether it hides any pair


@triton.jit
def window_of(window):
    """Return the ``Window`` of the tuple that the host passes (``attention.arguments.numbers_of``)."""
    return Window(left=window[0], right=window[1], HIDES_PAIRS=window[0] is not None or window[1] is not None)


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
    if mask.READS_LENGTHS != 2:
        first = tl.maximum(first, 0)
    if mask.window.right is not None:
        first = tl.maximum(first, positions_k - mask.window.right)
    if mask.window.left is not None:
        end = tl.minimum(end, positions_k + mask.window.left + 1)
    return first, end


@record
class Mask:
    """The keys of one sequence that its queries see; None: no such bound."""

    num_keys: tl.tensor  # keys from this one on do not exist
    first_key: tl.tensor | None  # no query sees a key before this one, 0 <= first_key <= num_keys
    window: Window
    # 0: all queries have positions from 0 on and see a key. Otherwise the device reads lengths, or there are more
    # queries than keys. 1: queries at negative positions see no key. 2: they see the keys that the other bounds leave.
    READS_LENGTHS: tl.constexpr
    intervals: Intervals | None = None  # of query rows, of each key


@triton.constexpr_function
def is_causal(right):
    """Return whether ``right`` is the compile-time 0 that the host passes for causal calls."""
    return isinstance(right, int) and right == 0


@triton.constexpr_function
def checks_positions(reads_lengths, right):
    """Return whether a mask has to hide all keys from queries at negative positions.

    If causal it hides them anyway, because all keys are after such a query.
    """
    return reads_lengths == 1 and not is_causal(right)


@triton.jit
def sequence_mask(starts_ptr, batch, q_offset, num_keys, window, READS_LENGTHS: tl.constexpr, intervals=None):
    """Return the ``Mask`` of batch entry ``batch``. starts_ptr (B,) int32, or None; intervals: its ``Intervals``."""
    start = None
    if starts_ptr is not None or window.left is not None:
        start = first_key(starts_ptr, batch, q_offset, num_keys, window.left)
    return Mask(num_keys, start, window, READS_LENGTHS, intervals)


@triton.jit
def visible(mask, positions_q, positions_k, rows=None):
    """Return whether (query, key) pairs see each other, broadcast over the two position tensors.

    rows: ``row_interval`` of positions_k, if the caller has it; only with intervals.
    """
    if mask.intervals is not None:
        first, end = row_interval(mask, positions_k) if rows is None else rows
        return (positions_q >= first) & (positions_q < end)
    sees = positions_k < mask.num_keys
    if mask.window.right is not None:
        sees = sees & (positions_k <= positions_q + mask.window.right)
    if mask.window.left is not None:
        sees = sees & (positions_k >= positions_q - mask.window.left)
    if mask.first_key is not None:
        sees = sees & (positions_k >= mask.first_key)
    if checks_positions(mask.READS_LENGTHS, mask.window.right):
        sees = sees & (positions_q >= 0)
    elif mask.READS_LENGTHS == 2:
        sees = sees & (positions_q > NO_POSITION)
    return sees


@triton.jit
def first_key(starts_ptr, batch, q_offset, num_keys, left):
    """Return the first key that any query sees: keys before it do not exist. 0 <= first_key <= num_keys."""
    start = 0
    if starts_ptr is not None:
        start = tl.maximum(start, tl.load(starts_ptr + batch))
    if left is not None:
        start = tl.maximum(start, q_offset - left)
    return tl.minimum(start, num_keys)


@triton.jit
def first_query(mask, q_offset):
    """Return the first query row that sees a key: the rows before it, and no others, see nothing. NO_ROW where none
    sees one because there are no keys from first_key on."""
    row = tl.maximum(0, -q_offset)
    first_key = mask.first_key
    if mask.READS_LENGTHS == 2:
        row = 0
        if first_key is None:
            first_key = 0
    if first_key is not None:
        if mask.window.right is not None:
            row = tl.maximum(row, first_key - mask.window.right - q_offset)
        row = tl.where(first_key < mask.num_keys, row, NO_ROW)
    return row


@triton.jit
def key_range(mask, start_m, q_offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys that the query rows [start_m, start_m + BLOCK_M) visit: (first, full_first, full_last, last).

    [first, last) holds every visible pair, [full_first, full_last) is visible to every row; all but ``last`` are
    multiples of BLOCK_N, and first <= full_first <= full_last. ``visible`` says the same for single pairs.
    """
    first = 0
    full_first = 0
    last = mask.num_keys
    full_last = mask.num_keys
    if mask.window.right is not None:
        last = tl.minimum(mask.num_keys, tl.maximum(0, start_m + BLOCK_M + q_offset + mask.window.right))
        full_last = tl.minimum(mask.num_keys, tl.maximum(0, start_m + q_offset + mask.window.right + 1))
    if checks_positions(mask.READS_LENGTHS, mask.window.right):
        last = tl.where(start_m + BLOCK_M + q_offset > 0, last, 0)
        full_last = tl.where(start_m + q_offset >= 0, full_last, 0)
    if mask.first_key is not None:
        first = mask.first_key
        full_first = mask.first_key
        if mask.window.left is not None:
            first = tl.maximum(first, start_m + q_offset - mask.window.left)
            full_first = tl.maximum(full_first, start_m + BLOCK_M - 1 + q_offset - mask.window.left)
        first = first // BLOCK_N * BLOCK_N
        full_first = tl.cdiv(full_first, BLOCK_N) * BLOCK_N
        full_first = tl.maximum(first, tl.minimum(full_first, tl.cdiv(last, BLOCK_N) * BLOCK_N))
    full_last = full_last // BLOCK_N * BLOCK_N
    if mask.first_key is not None:
        full_last = tl.maximum(full_first, full_last)
    return first, full_first, full_last, last


@triton.jit
def query_range(mask, start_n, q_offset, NQ, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Mirror of ``key_range`` for the keys [start_n, start_n + BLOCK_N), in query *blocks* of NQ rows.

    (first, full_first, full_last, last), ascending: blocks of [full_first, full_last) are whole and see every key.
    """
    blocks = tl.cdiv(NQ, BLOCK_M)
    first = 0
    full_first = 0
    full_last = NQ // BLOCK_M
    last = blocks
    if mask.window.right is not None:
        right = mask.window.right
        first = tl.minimum(blocks, tl.maximum(0, start_n - right - q_offset) // BLOCK_M)
        full_first = tl.minimum(blocks, tl.cdiv(tl.maximum(0, start_n + BLOCK_N - 1 - right - q_offset), BLOCK_M))
    if checks_positions(mask.READS_LENGTHS, mask.window.right):
        first = tl.maximum(first, tl.minimum(blocks, tl.maximum(0, -q_offset) // BLOCK_M))
        full_first = tl.maximum(full_first, tl.minimum(blocks, tl.cdiv(tl.maximum(0, -q_offset), BLOCK_M)))
    if mask.window.left is not None:
        last = tl.minimum(blocks, tl.cdiv(tl.maximum(0, start_n + BLOCK_N + mask.window.left - q_offset), BLOCK_M))
        full_last = tl.minimum(full_last, tl.maximum(0, start_n + mask.window.left + 1 - q_offset) // BLOCK_M)
    if mask.READS_LENGTHS:
        last = tl.where(start_n < mask.num_keys, last, 0)
    if mask.first_key is not None:
        last = tl.where(start_n + BLOCK_N > mask.first_key, last, 0)
    if mask.READS_LENGTHS or mask.first_key is not None:
        first = tl.minimum(first, last)
        full_first = tl.maximum(first, tl.minimum(full_first, last))
        full_last = tl.minimum(full_last, last)
    return first, full_first, tl.maximum(full_first, full_last), last
