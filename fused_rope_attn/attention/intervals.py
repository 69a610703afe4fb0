# mypy: allow-untyped-defs, allow-incomplete-defs
"""The kernel that finds the query rows of every block of keys, for calls with intervals, and its launcher."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fused_rope_attn.attention import arguments
from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.kernels.masks import NO_ROW, load_interval, sequence_intervals
from fused_rope_attn.kernels.records import unpack
from fused_rope_attn.kernels.sequences import existing_keys
from fused_rope_attn.runtime.launch import Launch

# Blocks of keys of a program.
BLOCKS = tl.constexpr(16)


@triton.jit(do_not_specialize=["NQ", "NK"])
def interval_blocks_kernel(masks, NQ, NK, BLOCK_N: tl.constexpr):
    """Write which rows of q see each block of BLOCK_N keys by their intervals. Grid: (blocks / BLOCKS * B).

    masks: ``MaskArguments``. Its blocks (B, 4, cdiv(NK, BLOCK_N)) int32 get the first row that sees any of a block's
    keys (NO_ROW if none does) and the row after the last one (0), then the same of the rows that see all of its keys;
    no row does if a key is hidden. Other masks do not count here. With FROM_START blocks begin at kv_starts.
    """
    masks = unpack(masks)
    count = tl.cdiv(NK, BLOCK_N)
    programs = tl.cdiv(count, BLOCKS)
    batch = (tl.program_id(0) // programs).to(tl.int64)
    block = tl.program_id(0) % programs * BLOCKS + tl.arange(0, BLOCKS)
    first_key = 0
    if masks.FROM_START:
        num_keys = existing_keys(masks.lens_ptr, batch, NK)
        first_key = tl.minimum(num_keys, tl.maximum(0, tl.load(masks.starts_ptr + batch)))
    intervals = sequence_intervals(masks.intervals, batch, first_key, NQ, NK, 0)
    keys = block[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    exists = keys < NK - first_key
    first, end = load_interval(intervals, keys, exists)
    seen = first < end
    hidden = exists & (first >= end)
    bounds = intervals.blocks_ptr + batch * 4 * count + block
    is_written = block < count
    tl.store(bounds, tl.min(tl.where(seen, first, NO_ROW), 1), mask=is_written)
    tl.store(bounds + count, tl.max(tl.where(seen, end, 0), 1), mask=is_written)
    tl.store(bounds + 2 * count, tl.max(tl.where(hidden, NO_ROW, first), 1), mask=is_written)
    tl.store(bounds + 3 * count, tl.min(tl.where(exists, end, NO_ROW), 1), mask=is_written)


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
