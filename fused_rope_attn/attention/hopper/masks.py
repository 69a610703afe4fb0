# mypy: ignore-errors
"""Masks of the sm_90 kernels in registers, in the layout of a tensor core's results.

``kernels.masks`` says which blocks a kernel visits and which of them need a mask, as for the portable kernels.

A forward call has a ``PositionMask`` or an ``IntervalMask``. Warps that multiply ask both the same: ``visit`` for the
block in a slot of K, ``row_number`` for how the mask counts query rows, and ``hide`` for scores with -inf where a row
must not see a key.
"""

from fused_rope_attn.attention.hopper import channels
from fused_rope_attn.kernels.masks import Window, checks_positions
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.runtime.triton_compat import barrier, gl, jit


@jit
def hide_keys(scores, limit, columns, UPPER: gl.constexpr, SEEN: gl.constexpr = 0):
    """Return scores with -inf in columns past ``limit`` (rows,), or if not UPPER in columns before it.

    A score costs one comparison, because the limit is counted from the thread's first column, so that its other columns
    are constants. Columns before SEEN are past no limit and cost none.
    """
    thread = columns & 6
    others = (columns & ~6)[None, :]
    bound = limit[:, None] - thread[None, :]
    if UPPER:
        return gl.where((others < SEEN) | (others <= bound), scores, float("-inf"))
    else:
        return gl.where(others >= bound, scores, float("-inf"))


@record
class Visit:
    """A block of keys that a tile visits."""

    number: gl.tensor  # how many blocks the tile has visited before; with intervals a word of ``visits_kernel``
    num_blocks: gl.tensor | None  # with intervals: the blocks that the tile visits

    @jit
    def counted(self, tile):
        """Return the tile with the number of its blocks, which is not announced with intervals."""
        return tile if self.num_blocks is None else replace(tile, num_blocks=self.num_blocks)


@record
class PositionMask:
    """The masks that follow from positions, as ``kernels.masks.visible`` defines them.

    IS_ALIGNED: a causal mask where ``is_aligned`` holds, so that it crosses the first block of a tile, and all others
    are seen whole. The first warpgroup sees half of that block, and the second one the first half whole.
    """

    window: Window
    READS_LENGTHS: gl.constexpr  # as in ``kernels.masks.Mask``
    HAS_STARTS: gl.constexpr  # whether a tile's first key does not follow from the window alone
    IS_ALIGNED: gl.constexpr

    @jit
    def visit(self, cursor, step, exists):
        return Visit(step, num_blocks=None)

    @jit
    def row_number(self, tile, row):
        return tile.position(row)

    @jit
    def hide(self, scores, rows, columns, visit, tile, SEEN: gl.constexpr = None):
        """Mask a block. scores (rows, BLOCK_N) float32; rows (rows,) int32: positions; columns: 0 .. BLOCK_N.

        The narrowest bound on each side of a row is found first, so that a score meets one comparison a side. A block
        that is whole on one side skips that side. SEEN: the keys of an aligned tile's first block that all rows see;
        None: another block. Its diagonal also hides the keys that do not exist, because they follow all queries.
        """
        if self.IS_ALIGNED:
            if SEEN is not None:
                last = rows - tile.last_key_block() * (2 * channels.ROWS)
                scores = hide_keys(scores, last, columns, UPPER=True, SEEN=SEEN)
        else:
            start_n = (tile.last_key_block() - visit.number) * scores.shape[1]
            if visit.number < tile.upper_masked:
                last = rows * 0 + (tile.num_keys - 1)
                if self.window.right is not None:
                    last = gl.minimum(last, rows + self.window.right)
                if checks_positions(self.READS_LENGTHS, self.window.right):
                    last = gl.where(rows >= 0, last, -1)
                scores = hide_keys(scores, last - start_n, columns, UPPER=True)
            if self.window.left is not None or self.HAS_STARTS:
                if visit.number >= tile.lower_masked_from:
                    if self.window.left is None:
                        least = rows * 0 + tile.first_key
                    else:
                        least = rows - self.window.left
                        if self.HAS_STARTS:
                            least = gl.maximum(least, tile.first_key)
                    scores = hide_keys(scores, least - start_n, columns, UPPER=False)
        return scores


@record
class IntervalMask:
    """The interval of query rows of each key, and how warps that multiply learn which block of keys they have."""

    ptr: gl.tensor  # (B, 2, num_keys) int32: the first row of each key, and the row after its last
    num_keys: gl.tensor  # whole blocks of keys
    # (2 * STAGES, 1) int32: the visit (``visits_kernel``) of each slot of K, and how many visits the tile has.
    words: gl.shared_memory_descriptor
    IS_ALIGNED: gl.constexpr = False

    @jit
    def announce(self, cursor, visit, num_blocks):
        """Announce the block that the loading warp is about to load into a slot of K, which is empty."""
        ONE_WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        STAGES: gl.constexpr = self.words.shape[0] // 2
        self.words.index(cursor.slot).store(gl.full([1], visit, gl.int32, ONE_WARP))
        self.words.index(STAGES + cursor.slot).store(gl.full([1], num_blocks, gl.int32, ONE_WARP))
        barrier()

    @jit
    def visit(self, cursor, step, exists):
        """Return the ``Visit`` of the block in a slot of K that is full; zeros unless it ``exists``."""
        ONE_WARPGROUP: gl.constexpr = gl.BlockedLayout([1], [32], [channels.WARPGROUP_WARPS], [0])
        STAGES: gl.constexpr = self.words.shape[0] // 2
        word = gl.max(self.words.index(cursor.slot).load(ONE_WARPGROUP), 0)
        num_blocks = gl.max(self.words.index(STAGES + cursor.slot).load(ONE_WARPGROUP), 0)
        return Visit(gl.where(exists, word, 0), gl.where(exists, num_blocks, 0))

    @jit
    def row_number(self, tile, row):
        return row

    @jit
    def hide(self, scores, rows, columns, visit, tile, SEEN: gl.constexpr = None):
        """Mask a block on the sides that the visit names, one comparison a score and side. rows (rows,) int32: of q."""
        if (visit.number & 3) != 0:
            ptr = self.ptr + tile.batch.to(gl.int64) * 2 * self.num_keys + (visit.number >> 3) * scores.shape[1]
            if (visit.number & 1) != 0:
                scores = gl.where(rows[:, None] >= gl.load(ptr + columns)[None, :], scores, float("-inf"))
            if (visit.number & 2) != 0:
                end = gl.load(ptr + self.num_keys + columns)
                scores = gl.where(rows[:, None] < end[None, :], scores, float("-inf"))
        return scores


@record
class KeyIntervals:
    """The results of ``key_rows_kernel`` for a batch entry, in blocks of KEYS keys."""

    rows_ptr: gl.tensor
    blocks_ptr: gl.tensor
    num_blocks: gl.tensor


@record
class OwnKeys:
    """The intervals of KEYS keys of the backward, which a warpgroup or a block owns, in rows of q."""

    rows_ptr: gl.tensor  # the first row of each key; the row after its last is stored num_keys further on
    num_keys: gl.tensor
    all_first: gl.tensor  # the rows [all_first, all_end) see all of the keys; all_end is 0 if no row sees one of them
    all_end: gl.tensor


@jit
def with_own_keys(mask, block):
    """Return ``mask`` with the ``OwnKeys`` of a block of KEYS keys in place of its ``KeyIntervals``, if it has any."""
    if mask.intervals is None:
        return mask
    else:
        intervals = mask.intervals
        bounds = intervals.blocks_ptr + block
        all_first = gl.load(bounds + 2 * intervals.num_blocks)
        all_end = gl.load(bounds + 3 * intervals.num_blocks)
        own = OwnKeys(
            intervals.rows_ptr + block * channels.KEYS, intervals.num_blocks * channels.KEYS, all_first, all_end
        )
        return replace(mask, intervals=own)


@jit
def mask_offset(mask, sizes, keys, start_m):
    """Return the number by which ``hide_pairs`` and ``needs_mask`` know the first query, row start_m.

    It is how far the query's position is past that of the first key of ``keys``, or with intervals the row.
    """
    if mask.intervals is None:
        return start_m + mask.num_keys - sizes.NQ - keys.start_n
    else:
        return start_m


@jit
def hide_pairs(mask, x, value, keys, columns, diagonal):
    """Return x (keys, queries) of the backward with ``value`` in pairs that the mask hides.

    keys, columns: the tile's keys and queries, counted from its first ones. diagonal: as ``mask_offset`` gives it.
    Bounds are counted from the thread's first key and column, so that its others are constants and take no registers.
    """
    if mask.intervals is not None:
        own = mask.intervals
        first, end = gl.load(own.rows_ptr + keys) - diagonal, gl.load(own.rows_ptr + own.num_keys + keys) - diagonal
        thread, others = (columns & 6)[None, :], (columns & ~6)[None, :]
        sees = (others >= first[:, None] - thread) & (others < end[:, None] - thread)
        x = gl.where(sees, x, value)
    elif mask.window.left is not None or mask.window.right is not None:
        # A query is past a key by diagonal + (others - thread).
        thread = (keys & ~8)[:, None] - (columns & 6)[None, :]
        others = (columns & ~6)[None, :] - (keys & 8)[:, None]
        if mask.window.right is not None:
            x = gl.where(others >= thread - (diagonal + mask.window.right), x, value)
        if mask.window.left is not None:
            x = gl.where(others <= thread - (diagonal - mask.window.left), x, value)
    return x


@jit
def needs_mask(mask, diagonal, block, queries):
    """Return whether KEYS keys need a mask against query block number ``block`` of ``queries``, a ``QueryBlocks``.

    diagonal: as in ``hide_pairs``.
    """
    if mask.intervals is not None:
        return (diagonal < mask.intervals.all_first) | (diagonal + channels.BACKWARD_BLOCK_M > mask.intervals.all_end)
    elif mask.window.left is None:
        return block < queries.num_masked
    else:
        # With a window few blocks are whole, and each block's position says what these keys need.
        upper = channels.KEYS - 1
        if mask.window.right is not None:
            upper -= mask.window.right
        lower = mask.window.left - (channels.BACKWARD_BLOCK_M - 1)
        needed = (diagonal > lower) | ((mask.window.right is not None) & (diagonal < upper))
        if queries.num_masked is not None:
            needed = needed | (queries.num_masked >= queries.count)
        return needed
