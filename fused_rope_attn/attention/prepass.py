# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launcher of the pre-pass, which norms and rotates K (and for wide heads of sm_90 Q) once, in pair order."""

from __future__ import annotations

from typing import Any

import torch
import triton

from fused_rope_attn.attention.arguments import PADDED_TILE_ROWS, rotated_shape, shared_tensors
from fused_rope_attn.attention.prepass_kernel import TILE_WORDS, rotate_kernel
from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.kernels.arguments import tile_count
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.layouts import block_d, contiguous_strides, is_long


def _rotation(x: torch.Tensor, problem: Problem, shared: dict[str, Any], config, *, overlaps: bool = False, **own):
    """Return the launch of ``rotate_kernel`` over x ``(B, H, N, D)``. own: the arguments of one of its two uses."""
    batch, heads, length, _ = x.shape
    block_n, chunk = config.rotate_rows, config.rotate_heads
    rows = own["PAD_TO"] or block_n
    return Launch(
        rotate_kernel,
        tile_count(length, problem.sequences, rows) * (rows // block_n) * triton.cdiv(heads, chunk) * batch,
        {"num_warps": 4, **({"launch_pdl": True} if overlaps else {})},
        shared,
        x_strides=x.stride(),
        H=heads,
        N=length,
        HEADS=chunk,
        BLOCK_N=block_n,
        BLOCK_D=block_d(problem.head_dim),
        USE_INT64_OFFSETS=is_long(x.stride()),
        END_AFTER_PREVIOUS_LAUNCH=overlaps,
        PDL=config.pdl,
        **own,
    )


class RotateQueries:
    """Rotated copy of q ``(B, HQ, NQ, D)`` times the scale's sign, contiguous, columns in pair order.

    in_tiles: store packed queries as ``Saving.TILES`` does, with zeros after each sequence.
    """

    def __init__(self, tensors: Tensors, problem: Problem, shared: dict[str, Any], config, *, in_tiles: bool = False):
        self.shape = rotated_shape(problem, in_tiles=in_tiles)
        self.strides = contiguous_strides(self.shape)
        own = {
            "sign": shared["q_sign"],
            "NQ": None,
            "NK": problem.len_k,
            "ZERO_COUNTER": False,
            "TILE_ROWS": 0,
            "PAD_TO": PADDED_TILE_ROWS if in_tiles and problem.is_packed else 0,
            "out_strides": self.strides,
        }
        self.launch = _rotation(tensors.q, problem, shared, config, **own)

    def __call__(self, stream: int, tensors: Tensors) -> torch.Tensor:
        q = tensors.q
        out = torch.empty_strided(self.shape, self.strides, dtype=q.dtype, device=q.device)
        self.launch(
            stream,
            shared_tensors(tensors, x_ptr=q, out_ptr=out),
            norm_ptr=tensors.q_norm,
            counter_ptr=None,
            cu_ptr=tensors.cu_seqlens_q,
            cu_q_ptr=None,
        )
        return out


class RotateKeys:
    """Rotated copy of k ``(B, HKV, NK, D)``, contiguous, columns in pair order; key j uses table row j.

    Keys that do not exist are not rotated; packed sequences begin at row 0 each.

    Args:
        counter: the call also zeroes an int32 word, in which the next launch counts.
        tile_rows: rows of a tile of queries. If they are packed, the launch also describes each tile, in the words
            after the counter; counter and descriptions are ``counter_size`` words.
        overlaps: the launch may begin while the one before it still runs. That one must not write this one's inputs.
    """

    def __init__(
        self,
        tensors: Tensors,
        problem: Problem,
        shared: dict[str, Any],
        config,
        *,
        counter: bool = False,
        tile_rows: int = 0,
        overlaps: bool = False,
    ):
        self.describes_tiles = tile_rows > 0 and problem.is_packed
        tiles = tile_count(problem.len_q, problem.sequences, tile_rows) if self.describes_tiles else 0
        self.counter_size = TILE_WORDS.value * (1 + tiles)
        self.strides = contiguous_strides(tensors.k.shape)
        own = {
            "sign": None,
            "NQ": None,
            "NK": None,
            "ZERO_COUNTER": counter,
            "TILE_ROWS": 0,
            "PAD_TO": 0,
            "out_strides": self.strides,
        }
        if self.describes_tiles:
            own |= {"NQ": problem.len_q, "TILE_ROWS": tile_rows}
        self.launch = _rotation(tensors.k, problem, shared, config, overlaps=overlaps and config.pdl, **own)

    def __call__(self, stream: int, tensors: Tensors, counter: torch.Tensor | None = None) -> torch.Tensor:
        k = tensors.k
        out = torch.empty_strided(k.shape, self.strides, dtype=k.dtype, device=k.device)
        self.launch(
            stream,
            shared_tensors(tensors, x_ptr=k, out_ptr=out),
            norm_ptr=tensors.k_norm,
            counter_ptr=counter,
            cu_ptr=tensors.cu_seqlens_k,
            cu_q_ptr=tensors.cu_seqlens_q if self.describes_tiles else None,
            cu_k_ptr=None,
        )
        return out
