"""The sizes that the sm_90 kernels share: warpgroups and the rows that they own. Nothing here varies with a call.

Each warpgroup that multiplies owns as many rows as one wgmma has (its M): of queries in the forward, which has two or
three of them, of keys in the backward, which has two.
"""

from fused_rope_attn.attention.arguments import PADDED_TILE_ROWS
from fused_rope_attn.runtime.triton_compat import gl

# Warps of a warpgroup: all warps but the loading one come in fours.
WARPGROUP_WARPS = gl.constexpr(4)
WARPGROUP_THREADS = gl.constexpr(128)
# Warpgroups of a block of the backward that multiply, and so consume what the loading warp brings.
CONSUMERS = gl.constexpr(2)
# Rows of one wgmma: the query rows of a warpgroup in the forward, its key rows in the backward.
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)

# Query rows that the backward takes at a time, and key rows of its tile: those of both warpgroups.
BACKWARD_BLOCK_M = gl.constexpr(PADDED_TILE_ROWS)
BACKWARD_BLOCK_N = gl.constexpr(128)
