"""Sizes that the sm_90 kernels share, and in which calls the causal diagonal is aligned with them."""

from __future__ import annotations

from fused_rope_attn.attention.arguments import PADDED_TILE_ROWS
from fused_rope_attn.attention.problem import Problem
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
BACKWARD_BLOCK_M = gl.constexpr(PADDED_TILE_ROWS)
BACKWARD_BLOCK_N = gl.constexpr(128)
# Registers of a thread of the backward's two warpgroups that multiply, and of the warps that load or add in all
# kernels. A multiprocessor has 65,536: two warpgroups with 240 and one with 24 take 64,512.
MULTIPLY_REGISTERS = gl.constexpr(240)
LOAD_REGISTERS = gl.constexpr(24)


def is_aligned(problem: Problem, block_m: int, block_n: int) -> bool:
    """Return whether the diagonal of each tile is that of one key block, and nothing but causality hides keys.

    The first of two warpgroups then sees half of that block, the second one sees the first half whole, and all other
    blocks are seen whole. Calls with more queries than keys are excluded, because some of their tiles see nothing.
    """
    is_masked = problem.window is not None or problem.is_packed or problem.has_kv_starts or problem.has_kv_lens
    is_masked = is_masked or problem.has_intervals
    keys_before = problem.len_k - problem.len_q
    same_rows = block_m == block_n == 2 * ROWS.value and keys_before >= 0 and keys_before % block_n == 0
    return problem.causal and same_rows and not is_masked
