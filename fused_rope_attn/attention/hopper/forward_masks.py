"""Masks of the sm_90 forward, in the registers of a tensor core's results.

Which blocks are visited, and which of them need this, says ``kernels.masks`` as for the portable kernels.
"""

from fused_rope_attn.attention.hopper.tiles import query_limit, tile_bounds
from fused_rope_attn.runtime.triton_compat import gl, jit


@jit
def first_position(start_m, blocks, bounds, NQ, NK, RANGED: gl.constexpr):
    """The position of the tile's first query."""
    _, _, _, len_k = tile_bounds(bounds, blocks, NK, RANGED)
    return start_m + len_k - query_limit(bounds, NQ, RANGED)


@jit
def hide_keys(scores, limit, columns, UPPER: gl.constexpr):
    """-inf for the columns past ``limit`` (rows,), or without UPPER for those before it.

    Relative to the thread's first column, so that the others are constants: one comparison for each score.
    """
    thread = columns & 6
    others = (columns & ~6)[None, :]
    bound = limit[:, None] - thread[None, :]
    if UPPER:
        return gl.where(others <= bound, scores, float("-inf"))
    else:
        return gl.where(others >= bound, scores, float("-inf"))


@jit
def mask_scores(scores, position, columns, i, blocks, masked, bounds, NK, left, right, IS_CAUSAL: gl.constexpr,
                BOUNDED: gl.constexpr, RANGED: gl.constexpr, STARTS: gl.constexpr):  # fmt: skip
    """-inf where a query at ``position`` (rows,) must not see a key of block ``i`` of the tile, as ``visible`` says.

    Of the conditions on each side of a row the narrowest is found first. A block that is whole on one side does not
    pay for it. Without STARTS the tile's first key is what ``left`` gives the first query, and says nothing more.
    """
    top, low, start, len_k = tile_bounds(bounds, blocks, NK, RANGED)
    first = (top - i) * scores.shape[1]
    if i < masked:
        last = position * 0 + (len_k - 1)
        if IS_CAUSAL:
            last = gl.minimum(last, position)
        if right is not None:
            last = gl.minimum(last, position + right)
        if BOUNDED and not IS_CAUSAL:
            last = gl.where(position >= 0, last, -1)
        scores = hide_keys(scores, last - first, columns, True)
    if left is not None or STARTS:
        if i >= low:
            if left is None:
                least = position * 0 + start
            else:
                least = position - left
                if STARTS:
                    least = gl.maximum(least, start)
            scores = hide_keys(scores, least - first, columns, False)
    return scores
