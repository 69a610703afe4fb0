"""Count the scores that the kernels of a plan visit, by the rules with which they choose blocks."""

from __future__ import annotations

from typing import Any

from fused_rope_attn.attention.configs import HopperBackwardConfig, HopperForwardConfig
from fused_rope_attn.attention.hopper import shapes
from fused_rope_attn.testing import Case


def visited_scores(case: Case, block_m: int, block_n: int) -> int:
    """Return the scores of one head in the blocks that hold a visible one: causal, with or without a window.

    These are the blocks of ``kernels.masks.key_range`` for blocks of queries, and the same ones of ``query_range`` for
    blocks of keys.
    """
    left = case.len_k if case.window is None else case.window[0]
    offset = case.len_k - case.len_q
    total = 0
    for start in range(0, case.len_q, block_m):
        first, last = max(0, start + offset - left) // block_n, min(case.len_k, max(0, start + block_m + offset))
        total += max(0, -(-last // block_n) - first)
    return total * block_m * block_n


def ran(plan: Any, part: str) -> str:
    """Return the backend of a pass, which ``Plan.backend`` says of the forward pass alone."""
    config = plan.forward if part == "fwd" else plan.backward
    if config is None:
        return "reference"
    return "hopper" if isinstance(config, (HopperForwardConfig, HopperBackwardConfig)) else "triton"


def visited(case: Case, part: str, plan: Any) -> int | None:
    """Return the visited scores of a pass in the tiles of its plan; None for the reference.

    The portable backward pass walks through the scores twice, that of sm_90 once.
    """
    tiles = {
        ("fwd", "hopper"): lambda: [(plan.forward.consumers * shapes.ROWS.value, plan.forward.block_n)],
        ("bwd", "hopper"): lambda: [(shapes.BACKWARD_BLOCK_M.value, shapes.BACKWARD_BLOCK_N.value)],
        ("fwd", "triton"): lambda: [(plan.forward.tile.block_m, plan.forward.tile.block_n)],
        ("bwd", "triton"): lambda: [(t.block_m, t.block_n) for t in (plan.backward.dkdv, plan.backward.dq)],
    }
    chosen = tiles.get((part, ran(plan, part)))
    return chosen and sum(visited_scores(case, *tile) for tile in chosen())
