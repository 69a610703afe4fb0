"""Launcher of the kernel that finds the query rows of every block of keys, for calls with intervals."""

from __future__ import annotations

import torch
import triton

from fused_rope_attn.attention import arguments
from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.kernels.intervals import BLOCKS, interval_blocks_kernel
from fused_rope_attn.runtime.launch import Launch


class IntervalBlocks:
    """The bounds of blocks of ``block_n`` keys, as ``interval_blocks_kernel`` writes them."""

    def __init__(self, problem: Problem, block_n: int):
        blocks = triton.cdiv(problem.len_k, block_n)
        self.problem, self.shape = problem, (problem.batch, 4, blocks)
        programs = problem.batch * triton.cdiv(blocks, BLOCKS.value)
        sizes = {"NQ": problem.len_q, "NK": problem.len_k}
        self.launch = Launch(interval_blocks_kernel, programs, {"num_warps": 4}, sizes, BLOCK_N=block_n)

    def __call__(self, stream: int, tensors: Tensors) -> torch.Tensor:
        """Launch, and return the bounds ``(B, 4, blocks)`` int32."""
        found = torch.empty(self.shape, dtype=torch.int32, device=tensors.q.device)
        if found.numel():
            self.launch(stream, masks=arguments.masks_of(self.problem, tensors, found))
        return found
