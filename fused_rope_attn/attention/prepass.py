# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="attr-defined, arg-type"
"""Launcher of the pre-pass, which norms and rotates K (and for wide heads of sm_90 Q) once, in pair order."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from fused_rope_attn.attention import arguments
from fused_rope_attn.attention import prepass_kernel as kernels
from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.kernels.arguments import tile_count
from fused_rope_attn.kernels.tiles import RowFormat
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.layouts import block_d, contiguous_strides, is_long


class Rotate:
    """Rotated copy of q ``(B, HQ, NQ, D)`` or k ``(B, HKV, NK, D)``, contiguous, columns in pair order.

    Keys that do not exist are not rotated, key j uses table row j, and q is multiplied by the scale's sign. A call with
    a ``counter`` also zeroes its first int32 word, in which the next launch counts.

    Args:
        name: ``"q"`` or ``"k"``.
        in_tiles: store packed queries as ``Saving.TILES`` does, with zeros after each sequence.
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
        tile_rows: int = 0,
        max_logit: bool = False,
        overlaps: bool = False,
    ):
        self.name, self.problem, of_queries = name, problem, name == "q"
        self.sign = shared["q_sign"] if of_queries else None
        x = getattr(tensors, name)
        batch, heads, length, _ = x.shape
        self.describes_tiles = tile_rows > 0 and problem.is_packed
        self.tile_rows = tile_rows if self.describes_tiles else 0
        tiles = tile_count(problem.len_q, problem.sequences, tile_rows) if self.describes_tiles else 0
        self.counter_size = kernels.TILE_WORDS.value * (1 + tiles)
        self.shape = arguments.rotated_shape(problem, in_tiles=in_tiles) if of_queries else x.shape
        self.strides = contiguous_strides(self.shape)
        pad_to = arguments.PADDED_TILE_ROWS if in_tiles and problem.is_packed else 0
        block_n, chunk = config.rotate_rows, config.rotate_heads
        rows, overlaps = pad_to or block_n, overlaps and config.pdl
        self.launch = Launch(
            kernels.rotate_kernel,
            tile_count(length, problem.sequences, rows) * (rows // block_n) * triton.cdiv(heads, chunk) * batch,
            {"num_warps": 4, **({"launch_pdl": True} if overlaps else {})},
            H=heads,
            N=length,
            num_sequences=problem.sequences,
            position_limit=tensors.cos.shape[-2],
            NQ=problem.len_q if self.describes_tiles else None,
            NK=problem.len_k if of_queries else None,
            num_maxima=math.prod(problem.max_logit_shape) if max_logit else None,
            HEADS=chunk,
            BLOCK_N=block_n,
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
        problem, (lens, cu_q, cu_k) = self.problem, (tensors.kv_lens, tensors.cu_seqlens_q, tensors.cu_seqlens_k)
        inputs = kernels.PrepassInputs.host(
            x=arguments.view(x),
            out=arguments.view(out),
            tables=arguments.tables_of(problem, tensors),
            norm=arguments.norm_of(problem, getattr(tensors, f"{self.name}_norm")),
            sign=self.sign,
            lens_ptr=lens,
            cu_ptr=cu_q if self.name == "q" else cu_k,
            cu_k_ptr=cu_k if self.name == "q" else None,
            format=RowFormat.host(problem.head_dim, block_d(problem.head_dim), is_long(x.stride())),
            TOKEN_TABLES=problem.token_tables,
        )
        cu_q = cu_q if self.describes_tiles else None
        following = kernels.NextLaunch.host(counter, cu_q, max_logit, self.tile_rows)
        self.launch(stream, inputs=inputs, following=following)
        return out
