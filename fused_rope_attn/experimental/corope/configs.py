"""Tiles of the Co-RoPE kernels: data with a reason.

Chosen by what the compiler says (sm_90, triton 3.6, 2026-11-21): the largest tiles that hardly spill, of equal size in
both passes, which then find the same angles to the last bit. Timed on an H200 (docs/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Head dimensions that the kernels serve, from the first to the last.
HEAD_DIMS = (32, 128)
# How cos and sin of an angle in revolutions are evaluated; distances.cosine_sine has them.
METHODS = ("poly", "approx", "libdevice", "table")


@dataclass(frozen=True)
class CoRopeConfig:
    """One kernel: query rows and keys of a tile (keys at most 128, so that a tile's distances fit into 31 bits), most
    heads of one group in a program, warps, pipeline stages, and the evaluation of cos and sin."""

    block_m: int
    block_n: int
    heads: int
    num_warps: int
    num_stages: int = 1
    method: str = "poly"

    @property
    def launch_options(self) -> dict:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def forward_config(dtype: torch.dtype, group_size: int) -> CoRopeConfig:
    """Nothing spills with up to 8 heads and in float32; 96 bytes with 16.

    A program holds all heads of a group where it can, so that what they share is computed once.
    """
    if dtype is torch.float32:  # products in float32 are unrolled into registers: small tiles
        return CoRopeConfig(16, 16, heads=_heads(group_size, 4), num_warps=8)
    # Never one head: triton 3.6's product of three dimensions is wrong on sm_90 where the last has one column (dq).
    return CoRopeConfig(16, 32 if group_size <= 8 else 16, heads=max(2, _heads(group_size, 16)), num_warps=8)


def backward_config(dtype: torch.dtype, group_size: int) -> CoRopeConfig:
    """As forward: 80 to 190 bytes spilled in 16 bits; 64 in float32, where triton 3.9 spills 520 with 4 heads."""
    if dtype is torch.float32:
        return CoRopeConfig(16, 16, heads=_heads(group_size, 2), num_warps=8)
    return forward_config(dtype, group_size)


def _heads(group_size: int, most: int) -> int:
    return min(most, 1 << (group_size - 1).bit_length())
