# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="attr-defined, arg-type"
"""Launches of the pre-pass, which norms and rotates K or Q once, in pair order, and of a backward's pre-process."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from fused_rope_attn.attention import arguments
from fused_rope_attn.attention import prepass_kernel as kernels
from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.kernels.schedule import tile_count
from fused_rope_attn.kernels.tiles import RowFormat
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.layouts import block_d, contiguous_strides, is_long


def prepass_inputs(problem: Problem, tensors: Tensors, name: str, out: torch.Tensor, row_format: Any) -> Any:
    """Return the ``PrepassInputs`` of ``"q"`` or ``"k"``, whose rotated rows are written to out."""
    of_queries, x = name == "q", getattr(tensors, name)
    return kernels.PrepassInputs.host(
        x=arguments.view(x),
        out=arguments.view(out),
        tables=arguments.tables_of(problem, tensors),
        norm=arguments.norm_of(problem, getattr(tensors, f"{name}_norm")),
        sign=arguments.scale_and_sign(problem.softmax_scale)[1] if of_queries else None,
        lens_ptr=tensors.kv_lens,
        cu_ptr=tensors.cu_seqlens_q if of_queries else tensors.cu_seqlens_k,
        cu_k_ptr=tensors.cu_seqlens_k if of_queries else None,
        format=row_format,
        TOKEN_TABLES=problem.token_tables,
    )


class Rotate:
    """Rotated copy of q ``(B, HQ, NQ, D)`` or k ``(B, HKV, NK, D)``, contiguous, columns in pair order.

    Keys that do not exist are not rotated, key j uses table row j, and q is multiplied by the scale's sign. A call with
    a ``counter`` also zeroes its first int32 word, in which the next launch counts.

    Args:
        name: ``"q"`` or ``"k"``.
        in_tiles: store packed queries as ``Saving.TILES`` does, with zeros after each sequence.
        tile_rows: rows of a tile of queries. If they are packed, the launch that rotates k also describes each tile, in
            the words after the counter; counter and descriptions are ``counter_size`` words.
        fills_maxima: the call also sets the numbers of ``maxima`` to -inf.
        overlaps: the launch may begin while the one before it still runs. That one must not write this one's inputs.
    """

    def __init__(
        self,
        name: str,
        tensors: Tensors,
        problem: Problem,
        config,
        *,
        in_tiles: bool = False,
        tile_rows: int = 0,
        fills_maxima: bool = False,
        overlaps: bool = False,
    ):
        self.name, self.problem, of_queries = name, problem, name == "q"
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
            num_maxima=math.prod(problem.maxima_shape) if fills_maxima else None,
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
        maxima: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = getattr(tensors, self.name)
        out = torch.empty_strided(self.shape, self.strides, dtype=x.dtype, device=x.device)
        problem = self.problem
        row_format = RowFormat.host(problem.head_dim, block_d(problem.head_dim), is_long(x.stride()))
        inputs = prepass_inputs(problem, tensors, self.name, out, row_format)
        cu_q = tensors.cu_seqlens_q if self.describes_tiles else None
        following = kernels.NextLaunch.host(counter, cu_q, maxima, self.tile_rows)
        self.launch(stream, inputs=inputs, following=following)
        return out


class Preprocess:
    """The pre-process of a backward pass: row statistics, and rotated copies of q and k.

    Args:
        do, o: in the layouts of all calls, as ``tensors`` are.
        rotates: whether it writes rotated copies.
        in_tiles: heads have ``arguments.padded_rows`` in the statistics, and in the rotated q if they are packed.
        least_columns: of tiles.
        columns: of the float32 accumulator of dq that becomes zero.
        num_counters: int32 words that become zero.
    """

    def __init__(
        self,
        problem: Problem,
        tensors: Tensors,
        do: torch.Tensor,
        o: torch.Tensor,
        config,
        *,
        rotates: bool,
        in_tiles: bool,
        pdl: bool,
        least_columns: int = 0,
        columns: int = 0,
        num_counters: int | None = None,
    ):
        self.problem, self.columns = problem, columns
        length, sequences, heads_kv = problem.len_q, problem.sequences, tensors.k.shape[1]
        pitch = arguments.padded_rows(length, sequences) if in_tiles else length
        self.stats_size = 2 * problem.batch * problem.heads_q * pitch
        is_wide = is_long(*(x.stride() for x in (tensors.q, tensors.k, do, o)))
        self.format, self.value_format = (
            RowFormat.host(x, max(least_columns, block_d(x)), is_wide) for x in (problem.head_dim, problem.value_dim)
        )
        chunk, block, is_padded = config.rotate_heads, config.rotate_rows, in_tiles and problem.is_packed
        blocks = pitch // block if is_padded else tile_count(pitch, sequences, block)
        programs = blocks * triton.cdiv(problem.heads_q, chunk)
        if rotates:
            programs += tile_count(problem.len_k, sequences, block) * triton.cdiv(heads_kv, chunk)
        self.programs = problem.batch * programs
        self.launch = Launch(
            kernels.preprocess_kernel,
            self.programs,
            {"num_warps": 4},
            num_counters=num_counters,
            B=problem.batch,
            HQ=problem.heads_q,
            HKV=heads_kv,
            NQ=length,
            pitch=pitch,
            NK=problem.len_k,
            num_sequences=sequences,
            position_limit=tensors.cos.shape[-2],
            HEADS=chunk,
            BLOCK_N=block,
            PAD_TO=arguments.PADDED_TILE_ROWS if is_padded else 0,
            PDL=pdl,
        )

    def __call__(
        self,
        stream: int,
        tensors: Tensors,
        do: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        rotated: tuple[torch.Tensor, torch.Tensor] | None = None,
        accumulator: torch.Tensor | None = None,
        progress: torch.Tensor | None = None,
        counters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Launch, and return the statistics, (stats_size,) float32. rotated: where q and k are written rotated."""
        # With known strides, because otherwise an allocation takes the host twice as long.
        stats = torch.empty_strided((self.stats_size,), (1,), dtype=torch.float32, device=o.device)
        if self.programs:
            statistics = kernels.Statistics.host(
                o=arguments.view(o),
                do=arguments.view(do),
                lse_ptr=lse,
                dlse_ptr=tensors.dlse,
                cu_q_ptr=tensors.cu_seqlens_q,
                cu_k_ptr=tensors.cu_seqlens_k,
                stats_ptr=stats,
                accumulator_ptr=accumulator,
                progress_ptr=progress,
                counters_ptr=counters,
                format=self.value_format,
                PROGRESS_ROWS=arguments.PADDED_TILE_ROWS,
                COLUMNS=self.columns,
                READS_LENGTHS=self.problem.reads_lengths,
            )
            queries = keys = None
            if rotated is not None:
                queries, keys = (
                    prepass_inputs(self.problem, tensors, *given, self.format) for given in zip("qk", rotated)
                )
            self.launch(stream, statistics=statistics, queries=queries, keys=keys)
        return stats
