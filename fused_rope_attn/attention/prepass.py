# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launcher of the pre-pass, which norms and rotates K (and for wide heads of sm_90 Q) once, in pair order."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from fused_rope_attn.attention.arguments import PADDED_TILE_ROWS, rotated_shape, shared_tensors
from fused_rope_attn.attention.prepass_kernel import TILE_WORDS, rotate_kernel
from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.kernels.arguments import tile_count
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.layouts import block_d, contiguous_strides, is_long


class Rotate:
    """Rotated copy of q ``(B, HQ, NQ, D)`` or k ``(B, HKV, NK, D)``, contiguous, columns in pair order.

    Keys that do not exist are not rotated, key j uses table row j, and q is multiplied by the scale's sign.

    Args:
        name: ``"q"`` or ``"k"``.
        in_tiles: store packed queries as ``Saving.TILES`` does, with zeros after each sequence.
        counter: the call also zeroes an int32 word, in which the next launch counts.
        tile_rows: rows of a tile of queries. If they are packed, the launch that rotates k also describes each tile, in
            the words after the counter; counter and descriptions are ``counter_size`` words.
        max_logit: the call also sets the numbers of max_logit to -inf.
        overlaps: the launch may begin while the one before it still runs. That one must not write this one's inputs.
    """

    def __init__(
        self,
        name: str,
        tensors: Tensors,
        problem: Problem,
        shared: dict[str, Any],
        config,
        *,
        in_tiles: bool = False,
        counter: bool = False,
        tile_rows: int = 0,
        max_logit: bool = False,
        overlaps: bool = False,
    ):
        self.name, of_queries = name, name == "q"
        x = getattr(tensors, name)
        batch, heads, length, _ = x.shape
        self.describes_tiles = tile_rows > 0 and problem.is_packed
        tiles = tile_count(problem.len_q, problem.sequences, tile_rows) if self.describes_tiles else 0
        self.counter_size = TILE_WORDS.value * (1 + tiles)
        self.shape = rotated_shape(problem, in_tiles=in_tiles) if of_queries else x.shape
        self.strides = contiguous_strides(self.shape)
        pad_to = PADDED_TILE_ROWS if in_tiles and problem.is_packed else 0
        block_n, chunk = config.rotate_rows, config.rotate_heads
        rows, overlaps = pad_to or block_n, overlaps and config.pdl
        self.launch = Launch(
            rotate_kernel,
            tile_count(length, problem.sequences, rows) * (rows // block_n) * triton.cdiv(heads, chunk) * batch,
            {"num_warps": 4, **({"launch_pdl": True} if overlaps else {})},
            shared,
            x_strides=x.stride(),
            out_strides=self.strides,
            sign=shared["q_sign"] if of_queries else None,
            H=heads,
            N=length,
            NQ=problem.len_q if self.describes_tiles else None,
            NK=problem.len_k if of_queries else None,
            num_maxima=math.prod(problem.max_logit_shape) if max_logit else None,
            ZERO_COUNTER=counter,
            TILE_ROWS=tile_rows if self.describes_tiles else 0,
            HEADS=chunk,
            BLOCK_N=block_n,
            BLOCK_D=block_d(problem.head_dim),
            USE_INT64_OFFSETS=is_long(x.stride()),
            END_AFTER_PREVIOUS_LAUNCH=overlaps,
            PAD_TO=pad_to,
            PDL=config.pdl,
        )

    def __call__(
        self,
        stream: int,
        tensors: Tensors,
        counter: torch.Tensor | None = None,
        max_logit: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = getattr(tensors, self.name)
        out = torch.empty_strided(self.shape, self.strides, dtype=x.dtype, device=x.device)
        norm = getattr(tensors, f"{self.name}_norm")
        given = shared_tensors(tensors, x_ptr=x, out_ptr=out, norm_ptr=norm, max_logit_ptr=max_logit)
        cu_q, cu_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
        if self.name == "q":
            self.launch(stream, given, counter_ptr=None, cu_ptr=cu_q, cu_q_ptr=None)
        else:
            cu_q = cu_q if self.describes_tiles else None
            self.launch(stream, given, counter_ptr=counter, cu_ptr=cu_k, cu_q_ptr=cu_q, cu_k_ptr=None)
        return out
