"""Sizes that the sm_90 kernels share."""

from fused_rope_attn.kernels.sequences import PADDED_TILE_ROWS
from fused_rope_attn.runtime.triton_compat import gl

# All warps but the loading one are in warpgroups of four.
WARPGROUP_WARPS = gl.constexpr(4)
WARPGROUP_THREADS = gl.constexpr(128)
# Warpgroups of a block of the backward that multiply, and so consume the loading warp's tiles.
CONSUMERS = gl.constexpr(2)
# Rows of one wgmma (its M): the query rows of a warpgroup in the forward, its key rows in the backward. The forward has
# two or three such warpgroups, the backward two.
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)

# Query rows that the backward loads and multiplies at a time, and key rows of its tile, which both warpgroups share.
BACKWARD_BLOCK_M = gl.constexpr(PADDED_TILE_ROWS.value)
BACKWARD_BLOCK_N = gl.constexpr(128)
# Registers of a thread of the backward's two warpgroups that multiply, and of the warps that load or add in all
# kernels. A multiprocessor has 65,536: two warpgroups with 240 and one with 24 take 64,512.
MULTIPLY_REGISTERS = gl.constexpr(240)
LOAD_REGISTERS = gl.constexpr(24)
