"""Masks of the sm_90 backward, in the registers of a tensor core's results.

Which blocks are visited, and which of them need this, says ``kernels.masks`` as for the portable kernels.
"""

from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M, KEYS
from fused_rope_attn.runtime.triton_compat import gl, jit


@jit
def hide_pairs(mask, x, value, keys, columns, diagonal):
    """x (keys, queries) with ``value`` where a query must not see a key because of the diagonal or the window.

    keys, columns: the tile's keys and queries, counted from its first ones. diagonal: how far the position of the first
    query is past that of the first key.
    """
    if mask.left is not None or mask.right is not None:
        # Relative to the thread's first key and column, so that the others are constants and not registers: a query is
        # past a key by diagonal + (others - thread).
        thread = (keys & ~8)[:, None] - (columns & 6)[None, :]
        others = (columns & ~6)[None, :] - (keys & 8)[:, None]
        if mask.right is not None:
            x = gl.where(others >= thread - (diagonal + mask.right), x, value)
        if mask.left is not None:
            x = gl.where(others <= thread - (diagonal - mask.left), x, value)
    return x


@jit
def needs_mask(mask, diagonal, block, queries):
    """Whether KEYS keys and query block number ``block`` of ``queries`` need a mask; diagonal as in ``hide_pairs``."""
    if queries.num_ahead is not None:
        return (diagonal < KEYS - 1) | (queries.num_masked >= queries.count)
    elif mask.left is None:
        return block < queries.num_masked
    else:
        # With a window few blocks need no mask, and a block's position says what these keys need.
        upper = KEYS - 1
        if mask.right is not None:
            upper -= mask.right
        lower = mask.left - (BACKWARD_BLOCK_M - 1)
        needed = (diagonal > lower) | ((mask.right is not None) & (diagonal < upper))
        if queries.num_masked is not None:
            needed = needed | (queries.num_masked >= queries.count)
        return needed
