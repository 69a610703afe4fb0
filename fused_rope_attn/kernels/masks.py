"""Masks: which queries and keys see each other, and so which blocks a kernel visits.

Every mask is an interval of keys for each query, and of queries for each key. A kernel asks for the blocks first
(``key_range``, ``query_range``), and for the pairs in those that are not wholly visible (``visible``).
"""

import triton
import triton.language as tl


@triton.jit
def visible(positions_q, positions_k, NK, IS_CAUSAL: tl.constexpr, start=None, left=None, right=None,
            BOUNDED: tl.constexpr = False):  # fmt: skip
    """Which (query, key) pairs exist, broadcast over the two position tensors.

    Keys lie in [start, NK) and at most ``left`` before and ``right`` after the query; None: no such bound. BOUNDED: NK
    is read on the device, so that a query may lie before position 0, where it sees nothing.
    """
    exists = positions_k < NK
    if IS_CAUSAL:
        exists = exists & (positions_k <= positions_q)
    if right is not None:
        exists = exists & (positions_k <= positions_q + right)
    if left is not None:
        exists = exists & (positions_k >= positions_q - left)
    if start is not None:
        exists = exists & (positions_k >= start)
    if BOUNDED and not IS_CAUSAL:
        exists = exists & (positions_q >= 0)
    return exists


@triton.jit
def first_key(starts_ptr, batch, q_offset, NK, left):
    """The first key that any query of a sequence sees: keys before it do not exist. 0 <= first_key <= NK."""
    start = 0
    if starts_ptr is not None:
        start = tl.maximum(start, tl.load(starts_ptr + batch))
    if left is not None:
        start = tl.maximum(start, q_offset - left)
    return tl.minimum(start, NK)


@triton.jit
def first_query(q_offset, start, right, IS_CAUSAL: tl.constexpr):
    """The first query row that sees a key: the rows before it, and no others, see nothing (start < NK)."""
    row = tl.maximum(0, -q_offset)
    if start is not None:
        if IS_CAUSAL:
            row = tl.maximum(row, start - q_offset)
        if right is not None:
            row = tl.maximum(row, start - right - q_offset)
    return row


@triton.jit
def key_range(start_m, q_offset, NK, start, left, right, IS_CAUSAL: tl.constexpr, BOUNDED: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Keys that the query rows [start_m, start_m + BLOCK_M) visit: (first, full_first, full_last, last).

    [first, last) holds every visible pair, [full_first, full_last) is visible to every row; all but ``last`` are
    multiples of BLOCK_N, and first <= full_first <= full_last. ``visible`` says the same for single pairs.
    """
    first = 0
    full_first = 0
    last = NK
    full_last = NK
    if IS_CAUSAL:
        last = tl.minimum(NK, tl.maximum(0, start_m + BLOCK_M + q_offset))
        full_last = tl.minimum(NK, tl.maximum(0, start_m + q_offset + 1))
    if right is not None:
        last = tl.minimum(NK, tl.maximum(0, start_m + BLOCK_M + q_offset + right))
        full_last = tl.minimum(NK, tl.maximum(0, start_m + q_offset + right + 1))
    if BOUNDED and not IS_CAUSAL:
        last = tl.where(start_m + BLOCK_M + q_offset > 0, last, 0)
        full_last = tl.where(start_m + q_offset >= 0, full_last, 0)
    if start is not None:
        first = start
        full_first = start
        if left is not None:
            first = tl.maximum(first, start_m + q_offset - left)
            full_first = tl.maximum(full_first, start_m + BLOCK_M - 1 + q_offset - left)
        first = first // BLOCK_N * BLOCK_N
        full_first = tl.cdiv(full_first, BLOCK_N) * BLOCK_N
        full_first = tl.maximum(first, tl.minimum(full_first, tl.cdiv(last, BLOCK_N) * BLOCK_N))
    full_last = full_last // BLOCK_N * BLOCK_N
    if start is not None:
        full_last = tl.maximum(full_first, full_last)
    return first, full_first, full_last, last


@triton.jit
def query_range(start_n, q_offset, NQ, NK, start, left, right, IS_CAUSAL: tl.constexpr, BOUNDED: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Mirror of ``key_range`` for the keys [start_n, start_n + BLOCK_N), in query *blocks*.

    (first, full_first, full_last, last), ascending: blocks of [full_first, full_last) are whole and see every key.
    """
    blocks = tl.cdiv(NQ, BLOCK_M)
    first = 0
    full_first = 0
    full_last = NQ // BLOCK_M
    last = blocks
    if IS_CAUSAL:
        first = tl.minimum(blocks, tl.maximum(0, start_n - q_offset) // BLOCK_M)
        full_first = tl.minimum(blocks, tl.cdiv(tl.maximum(0, start_n + BLOCK_N - 1 - q_offset), BLOCK_M))
    if right is not None:
        first = tl.minimum(blocks, tl.maximum(0, start_n - right - q_offset) // BLOCK_M)
        full_first = tl.minimum(blocks, tl.cdiv(tl.maximum(0, start_n + BLOCK_N - 1 - right - q_offset), BLOCK_M))
    if BOUNDED and not IS_CAUSAL:
        first = tl.maximum(first, tl.minimum(blocks, tl.maximum(0, -q_offset) // BLOCK_M))
        full_first = tl.maximum(full_first, tl.minimum(blocks, tl.cdiv(tl.maximum(0, -q_offset), BLOCK_M)))
    if left is not None:
        last = tl.minimum(blocks, tl.cdiv(tl.maximum(0, start_n + BLOCK_N + left - q_offset), BLOCK_M))
        full_last = tl.minimum(full_last, tl.maximum(0, start_n + left + 1 - q_offset) // BLOCK_M)
    if BOUNDED:
        last = tl.where(start_n < NK, last, 0)
    if start is not None:
        last = tl.where(start_n + BLOCK_N > start, last, 0)
    if BOUNDED or start is not None:
        first = tl.minimum(first, last)
        full_first = tl.maximum(first, tl.minimum(full_first, last))
        full_last = tl.minimum(full_last, last)
    return first, full_first, tl.maximum(full_first, full_last), last
