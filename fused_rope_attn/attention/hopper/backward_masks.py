"""Masks of the sm_90 backward, in the registers of a tensor core's results.

Which blocks are visited, and which of them need this, says ``kernels.masks`` as for the portable kernels.
"""

from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M, KEYS
from fused_rope_attn.runtime.triton_compat import gl, jit


@jit
def hide_pairs(x, value, keys, columns, diagonal, left, right, IS_CAUSAL: gl.constexpr):
    """x (keys, queries) with ``value`` where a query must not see a key; left and right as in ``visible``.

    diagonal: how far the position of the first query is past that of the first key.
    """
    if IS_CAUSAL or left is not None or right is not None:
        # Relative to the thread's first key and column, so that the others are constants and not registers: a query is
        # past a key by diagonal + (others - thread).
        thread = (keys & ~8)[:, None] - (columns & 6)[None, :]
        others = (columns & ~6)[None, :] - (keys & 8)[:, None]
        if IS_CAUSAL:
            x = gl.where(others >= thread - diagonal, x, value)
        if right is not None:
            x = gl.where(others >= thread - (diagonal + right), x, value)
        if left is not None:
            x = gl.where(others <= thread - (diagonal - left), x, value)
    return x


@jit
def needs_mask(diagonal, block, masked, count, left, right, IS_CAUSAL: gl.constexpr):
    """Whether KEYS keys and a query block, number ``block`` of ``count``, need a mask; the rest as ``fold_queries``."""
    if left is None:
        return block < masked
    else:
        # With a window few blocks need no mask, and a block's place says what these keys need.
        upper = KEYS - 1
        if right is not None:
            upper -= right
        lower = left - (BACKWARD_BLOCK_M - 1)
        needed = (diagonal > lower) | ((IS_CAUSAL or right is not None) & (diagonal < upper))
        if masked is not None:
            needed = needed | (masked >= count)
        return needed
