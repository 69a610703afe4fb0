"""In which calls of the sm_90 kernels the diagonal crosses one block of keys in each tile, along that block's own."""

from __future__ import annotations

from fused_rope_attn.attention.hopper.shapes import ROWS
from fused_rope_attn.attention.problem import Problem


def is_aligned(problem: Problem, block_m: int, block_n: int) -> bool:
    """Whether the diagonal of every tile is that of one key block, and nothing but causality hides keys.

    Of two warpgroups the first then sees half of that block and the second the first half whole, and all other blocks
    are seen whole. With more queries than keys there are tiles that see nothing.
    """
    is_masked = problem.window is not None or problem.is_packed or problem.has_kv_starts or problem.has_kv_lens
    keys_before = problem.len_k - problem.len_q
    same_rows = block_m == block_n == 2 * ROWS.value and keys_before >= 0 and keys_before % block_n == 0
    return problem.causal and same_rows and not is_masked
