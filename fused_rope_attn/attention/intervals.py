"""Launcher of the kernel that finds the query rows of every block of keys, for calls with intervals."""

from __future__ import annotations

from typing import Any

import torch
import triton

from fused_rope_attn.attention.arguments import shared_tensors
from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.kernels.intervals import BLOCKS, interval_blocks_kernel
from fused_rope_attn.runtime.launch import Launch


def interval_strides(tensors: Tensors) -> tuple[int, int] | None:
    """Return the strides of query_starts and query_ends between batch entries, as kernels take them.

    A stride of 0 is that of one row for all entries, or of a tensor that is not given. None without intervals.
    """
    given = tensors.query_starts, tensors.query_ends
    if given == (None, None):
        return None
    first, end = (0 if x is None or x.shape[0] == 1 else x.stride(0) for x in given)
    return first, end


class IntervalBlocks:
    """The bounds of blocks of ``block_n`` keys, as ``interval_blocks_kernel`` writes them.

    shared: the arguments that the kernels of the call have in common, ``interval_strides`` included.
    """

    def __init__(self, problem: Problem, shared: dict[str, Any], block_n: int):
        blocks = triton.cdiv(problem.len_k, block_n)
        self.shape = (problem.batch, 4, blocks)
        programs = problem.batch * triton.cdiv(blocks, BLOCKS.value)
        self.launch = Launch(interval_blocks_kernel, programs, {"num_warps": 4}, shared, BLOCK_N=block_n)

    def __call__(self, stream: int, tensors: Tensors) -> torch.Tensor:
        """Launch, and return the bounds ``(B, 4, blocks)`` int32."""
        found = torch.empty(self.shape, dtype=torch.int32, device=tensors.q.device)
        if found.numel():
            self.launch(stream, shared_tensors(tensors, blocks_ptr=found))
        return found
