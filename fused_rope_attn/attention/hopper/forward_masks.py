"""Masks of the sm_90 forward, in the registers of a tensor core's results.

Which blocks are visited, and which of them need this, says ``kernels.masks`` as for the portable kernels.
"""

from fused_rope_attn.attention.hopper.tiles import tile_bounds
from fused_rope_attn.kernels.masks import checks_positions
from fused_rope_attn.kernels.records import record
from fused_rope_attn.runtime.triton_compat import gl, jit


@record
class MaskOptions:
    """The masks of a call, of which each tile has a part."""

    left: gl.tensor | None  # how many keys before its own position a query sees; None: all
    right: gl.tensor | None  # how many keys after its own position a query sees; None: all; ``is_causal``: none
    READS_LENGTHS: gl.constexpr  # lengths come from device tensors: queries at negative positions see no key
    HAS_STARTS: gl.constexpr  # whether there are kv_starts
    # Whether the diagonal of every tile is that of its first key block, and nothing but causality hides keys.
    IS_ALIGNED: gl.constexpr


@jit
def hide_keys(scores, limit, columns, UPPER: gl.constexpr, SEEN: gl.constexpr = 0):
    """-inf for the columns past ``limit`` (rows,), or without UPPER for those before it.

    Relative to the thread's first column, so that the others are constants: one comparison for each score. Columns
    before SEEN are past no limit, and take none.
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
    """As ``mask_scores``, of the first block of an aligned tile, or its first half; every row sees its first SEEN keys.

    A query that exists lies before every key that does not.
    """
    start_n = tile_bounds(tile, NK).last_block * BLOCK_N
    return hide_keys(scores, positions - start_n, columns, UPPER=True, SEEN=SEEN)


@jit
def mask_scores(scores, positions, columns, visit, tile, masks, NK):
    """-inf where a query must not see a key, as ``kernels.masks.visible`` says.

    scores (rows, BLOCK_N) float32 of the ``visit``-th key block that the tile visits; positions (rows,) int32 of the
    queries; columns: 0 .. BLOCK_N.

    Of the conditions on each side of a row the narrowest is found first. A block that is whole on one side does not
    pay for it. Without HAS_STARTS the tile's first key is what ``left`` gives the first query, and says nothing more.
    """
    bounds = tile_bounds(tile, NK)
    start_n = (bounds.last_block - visit) * scores.shape[1]
    if visit < tile.upper_masked:
        last = positions * 0 + (bounds.num_keys - 1)
        if masks.right is not None:
            last = gl.minimum(last, positions + masks.right)
        if checks_positions(masks.READS_LENGTHS, masks.right):
            last = gl.where(positions >= 0, last, -1)
        scores = hide_keys(scores, last - start_n, columns, UPPER=True)
    if masks.left is not None or masks.HAS_STARTS:
        if visit >= bounds.lower_masked_from:
            if masks.left is None:
                least = positions * 0 + bounds.first_key
            else:
                least = positions - masks.left
                if masks.HAS_STARTS:
                    least = gl.maximum(least, bounds.first_key)
            scores = hide_keys(scores, least - start_n, columns, UPPER=False)
    return scores
