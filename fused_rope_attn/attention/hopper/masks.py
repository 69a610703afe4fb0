# mypy: ignore-errors
"""Masks of the sm_90 kernels in registers, in the layout of a tensor core's results.

``kernels.masks`` says which blocks a kernel visits and which of them need a mask, as for the portable kernels.
"""

from fused_rope_attn.attention.hopper.forward_tiles import tile_bounds
from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M, KEYS
from fused_rope_attn.kernels.masks import Window, checks_positions
from fused_rope_attn.kernels.records import record
from fused_rope_attn.runtime.triton_compat import gl, jit


@record
class MaskOptions:
    """The masks of a forward call, from which the mask of each tile follows."""

    window: Window
    READS_LENGTHS: gl.constexpr  # as in ``kernels.masks.Mask``
    HAS_STARTS: gl.constexpr  # whether there are kv_starts
    IS_ALIGNED: gl.constexpr  # as ``shapes.is_aligned``, for a tile and its first key block


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


@jit
def mask_diagonal(scores, positions, columns, tile, NK, BLOCK_N: gl.constexpr, SEEN: gl.constexpr):
    """Mask as ``mask_scores`` does the first block of an aligned tile, or its first half.

    Every row sees its first SEEN keys. The diagonal also hides the keys that do not exist, because they follow all
    queries.
    """
    start_n = tile_bounds(tile, NK).last_block * BLOCK_N
    return hide_keys(scores, positions - start_n, columns, UPPER=True, SEEN=SEEN)


@jit
def mask_scores(scores, positions, columns, visit, tile, masks, NK):
    """Return scores with -inf where a query must not see a key, as ``kernels.masks.visible`` defines it.

    scores (rows, BLOCK_N) float32 of the key block that the tile visits in step ``visit``; positions (rows,) int32 of
    the queries; columns: 0 .. BLOCK_N.

    The narrowest bound on each side of a row is found first, so that a score meets one comparison a side. A block that
    is whole on one side skips that side. Without HAS_STARTS the tile's first key follows from ``left`` and need not be
    compared.
    """
    bounds = tile_bounds(tile, NK)
    start_n = (bounds.last_block - visit) * scores.shape[1]
    if visit < tile.upper_masked:
        last = positions * 0 + (bounds.num_keys - 1)
        if masks.window.right is not None:
            last = gl.minimum(last, positions + masks.window.right)
        if checks_positions(masks.READS_LENGTHS, masks.window.right):
            last = gl.where(positions >= 0, last, -1)
        scores = hide_keys(scores, last - start_n, columns, UPPER=True)
    if masks.window.left is not None or masks.HAS_STARTS:
        if visit >= bounds.lower_masked_from:
            if masks.window.left is None:
                least = positions * 0 + bounds.first_key
            else:
                least = positions - masks.window.left
                if masks.HAS_STARTS:
                    least = gl.maximum(least, bounds.first_key)
            scores = hide_keys(scores, least - start_n, columns, UPPER=False)
    return scores


@jit
def hide_pairs(mask, x, value, keys, columns, diagonal):
    """Return x (keys, queries) of the backward with ``value`` in pairs that the diagonal or the window hides.

    keys, columns: the tile's keys and queries, counted from its first ones. diagonal: how far the position of the first
    query is past that of the first key.
    """
    if mask.window.left is not None or mask.window.right is not None:
        # Counted from the thread's first key and column, so that its others are constants and take no registers: a
        # query is past a key by diagonal + (others - thread).
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
    if queries.num_hidden is not None:
        return (diagonal < KEYS - 1) | (queries.num_masked >= queries.count)
    elif mask.window.left is None:
        return block < queries.num_masked
    else:
        # With a window few blocks are whole, and each block's position says what these keys need.
        upper = KEYS - 1
        if mask.window.right is not None:
            upper -= mask.window.right
        lower = mask.window.left - (BACKWARD_BLOCK_M - 1)
        needed = (diagonal > lower) | ((mask.window.right is not None) & (diagonal < upper))
        if queries.num_masked is not None:
            needed = needed | (queries.num_masked >= queries.count)
        return needed
