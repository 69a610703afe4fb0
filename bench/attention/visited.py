"""Count the scores that the kernels of a plan visit, by the rules with which they choose blocks."""

from __future__ import annotations

from typing import Any

from fused_rope_attn.attention.configs import HopperBackwardConfig, HopperForwardConfig
from fused_rope_attn.attention.hopper import shapes
from fused_rope_attn.testing import Case


def visited_scores(case: Case, block_m: int, block_n: int) -> int:
    """Scores of one head in the blocks that ``kernels.masks.key_range`` visits: causal, with or without a window."""
    left = case.len_k if case.window is None else case.window[0]
    offset = case.len_k - case.len_q
    total = 0
    for start in range(0, case.len_q, block_m):
        first, last = max(0, start + offset - left) // block_n, min(case.len_k, max(0, start + block_m + offset))
        total += max(0, -(-last // block_n) - first)
    return total * block_m * block_n


def visited_by_keys(case: Case, block_m: int, block_n: int) -> int:
    """The same for key blocks that visit query blocks, as ``kernels.masks.query_range`` has it."""
    left = case.len_k + case.len_q if case.window is None else case.window[0]
    offset = case.len_k - case.len_q
    # No query sees the keys before the window of the first one.
    least = max(0, offset - left)
    blocks, total = -(-case.len_q // block_m), 0
    for start in range(max(0, least // block_n * block_n), case.len_k, block_n):
        first = min(blocks, max(0, start - offset) // block_m)
        last = min(blocks, -(-max(0, start + block_n + left - offset) // block_m))
        total += max(0, last - first)
    return total * block_m * block_n


def ran(plan: Any, part: str) -> str:
    """The backend of a pass, which ``Plan.backend`` says of the forward pass alone."""
    config = plan.forward if part == "fwd" else plan.backward
    if config is None:
        return "reference"
    return "hopper" if isinstance(config, (HopperForwardConfig, HopperBackwardConfig)) else "triton"


def visited(case: Case, part: str, plan: Any) -> int | None:
    """Visited scores of a pass in the tiles of its plan, as its kernels visit them; None for the reference.

    The portable backward pass walks through the scores twice, that of sm_90 once.
    """
    backend = ran(plan, part)
    if backend == "reference":
        return None
    if part == "fwd":
        if backend == "hopper":
            return visited_scores(case, plan.forward.consumers * shapes.ROWS.value, plan.forward.block_n)
        return visited_scores(case, plan.forward.tile.block_m, plan.forward.tile.block_n)
    if backend == "hopper":
        return visited_by_keys(case, shapes.BACKWARD_BLOCK_M.value, shapes.BACKWARD_BLOCK_N.value)
    dkdv, dq = plan.backward.dkdv, plan.backward.dq
    return visited_by_keys(case, dkdv.block_m, dkdv.block_n) + visited_scores(case, dq.block_m, dq.block_n)
