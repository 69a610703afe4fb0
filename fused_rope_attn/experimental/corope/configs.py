"""Tiles of the Co-RoPE kernels: the first row of a table that matches wins; its reason is above it.

Chosen by the compiler's figures (sm_90, triton 3.6, 2026-11-21): the largest tiles that hardly spill, of equal size in
both passes, which then find the same angles to the last bit. Timed on an H200 (docs/experiments/corope.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fused_rope_attn.runtime.rows import find_row

# Head dimensions that the kernels serve, from the first to the last.
HEAD_DIMS = (32, 128)


@dataclass(frozen=True)
class CoRopeConfig:
    """One kernel: query rows and keys of a tile (keys at most 128, so that a tile's distances fit into 31 bits), most
    heads of one group in a program, warps, and pipeline stages."""

    block_m: int
    block_n: int
    heads: int
    num_warps: int
    num_stages: int = 1

    @property
    def launch_options(self) -> dict:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True, kw_only=True)
class CoRopeRow:
    """Hold one row: tiles of block_m by block_n for groups of up to most_group heads (None: of any size).

    heads: the fewest and the most heads of one program, which holds all of a group where it can, so that they are
    computed with the same angles once.
    """

    element_size: int
    block_m: int
    block_n: int
    heads: tuple[int, int]
    most_group: int | None = None

    def config(self, group_size: int) -> CoRopeConfig:
        """Return the configuration for this group size."""
        fewest, most = self.heads
        heads = max(fewest, min(most, 1 << (group_size - 1).bit_length()))
        return CoRopeConfig(self.block_m, self.block_n, heads=heads, num_warps=8)


# fmt: off
FORWARD: tuple[CoRopeRow, ...] = (
    # Products in float32 are unrolled into registers, so that tiles are small. Nothing spills.
    CoRopeRow(element_size=4, block_m=16, block_n=16, heads=(1, 4)),
    # Never one head: triton 3.6's product of three dimensions is wrong on sm_90 where the last has one column (dq).
    # Nothing spills.
    CoRopeRow(element_size=2, block_m=16, block_n=32, heads=(2, 16), most_group=8),
    # 96 bytes spill with 16 heads.
    CoRopeRow(element_size=2, block_m=16, block_n=16, heads=(2, 16)),
)

BACKWARD: tuple[CoRopeRow, ...] = (
    # 64 bytes spill; triton 3.9 spills 520 with 4 heads.
    CoRopeRow(element_size=4, block_m=16, block_n=16, heads=(1, 2)),
    # The forward's tiles; 80 to 190 bytes spill.
    CoRopeRow(element_size=2, block_m=16, block_n=32, heads=(2, 16), most_group=8),
    CoRopeRow(element_size=2, block_m=16, block_n=16, heads=(2, 16)),
)
# fmt: on


def forward_config(dtype: torch.dtype, group_size: int) -> CoRopeConfig:
    """Return the configuration of the forward pass for groups of group_size heads."""
    return _find(FORWARD, dtype, group_size)


def backward_config(dtype: torch.dtype, group_size: int) -> CoRopeConfig:
    """Return the configuration of the backward pass for groups of group_size heads."""
    return _find(BACKWARD, dtype, group_size)


def _find(rows: tuple[CoRopeRow, ...], dtype: torch.dtype, group_size: int) -> CoRopeConfig:
    return find_row(rows, element_size=dtype.itemsize, most_group=group_size).config(group_size)
