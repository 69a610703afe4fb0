# mypy: ignore-errors
"""Masks: which queries and keys see each other, and so which blocks a kernel visits.

Every mask is an interval of keys for each query, and of queries for each key. A causal mask is the interval that ends
at the query's own position: its ``right`` is 0. The compiler knows this 0, so that adding it costs nothing.

A kernel collects a sequence's mask in one record (``sequence_mask``), asks for the blocks first (``key_range``,
``query_range``), and for the pairs in those that are not wholly visible (``visible``). Positions are counted in keys:
``q_offset`` is the position of the first query row.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.intervals import NO_ROW, Intervals, row_interval
from fused_rope_attn.kernels.records import record


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
class Mask:
    """The keys of one sequence that its queries see; None: no such bound."""

    num_keys: tl.tensor  # keys from this one on do not exist
    first_key: tl.tensor | None  # no query sees a key before this one, 0 <= first_key <= num_keys
    window: Window
    READS_LENGTHS: tl.constexpr  # the device reads lengths: queries at negative positions see no key
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
    return reads_lengths and not is_causal(right)


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
    if mask.first_key is not None:
        if mask.window.right is not None:
            row = tl.maximum(row, mask.first_key - mask.window.right - q_offset)
        row = tl.where(mask.first_key < mask.num_keys, row, NO_ROW)
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
