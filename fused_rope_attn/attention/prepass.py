# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="attr-defined, arg-type"
"""Launches of the kernels over rows: the pre-pass, the pre-process of a backward pass, and the gradient of norms."""

from typing import Any

import torch
import triton

from fused_rope_attn.attention import arguments, norm_gradient_kernel as norms, prepass_kernel
from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.kernels.schedule import tile_count
from fused_rope_attn.kernels.tiles import RowFormat
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.layouts import block_d, contiguous_strides, is_long

# Rows by heads of one program of ``norm_gradient_kernel``, which writes one sum of its rows' weight gradients.
ROWS, HEADS = 32, 4
# Programs of a launch that describes tiles of packed queries, and does nothing else.
MOST_PROGRAMS = 256


def raw(tensors: Tensors, is_rotated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k as the caller gave them. is_rotated: ``tensors.q`` and ``k`` are the rotated ones."""
    return (tensors.raw_q, tensors.raw_k) if is_rotated else (tensors.q, tensors.k)


class _Prepass:
    """A launch of ``prepass_kernel`` for queries (their rotation, their statistics or both), keys, all, or neither.

    in_tiles: heads have ``arguments.padded_rows`` in the statistics, and in the rotated q if they are packed. overlaps:
    the launch may begin while the one before it still runs. numbers: ``num_counters`` and ``num_maxima``.
    """

    def __init__(
        self, problem: Problem, tensors: Tensors, config, *, queries, keys, in_tiles, pdl, overlaps=False, start_after=False, **numbers
    ):
        self.problem = problem
        heads_kv, chunk, block = tensors.k.shape[1], config.rotate_heads, config.rotate_rows
        is_padded = in_tiles and problem.is_packed
        pitch = arguments.padded_rows(problem.len_q, problem.sequences) if in_tiles else problem.len_q
        self.pitch, self.programs = pitch, 0
        if queries:
            blocks = pitch // block if is_padded else tile_count(pitch, problem.sequences, block)
            self.programs = problem.batch * blocks * triton.cdiv(problem.heads_q, chunk)
        if keys:
            blocks = tile_count(problem.len_k, problem.sequences, block)
            self.programs += problem.batch * blocks * triton.cdiv(heads_kv, chunk)
        if not queries and not keys:
            self.programs = min(MOST_PROGRAMS, pitch) if problem.is_packed else 1
        self.launch = Launch(
            prepass_kernel.prepass_kernel,
            self.programs,
            {"num_warps": 4, **({"launch_pdl": True} if overlaps or start_after else {})},
            arguments.numbers_of(problem) | {"num_counters": None, "num_maxima": None, **numbers},
            B=problem.batch,
            HKV=heads_kv,
            pitch=pitch,
            position_limit=arguments.table_rows(tensors),
            HEADS=chunk,
            BLOCK_N=block,
            PAD_TO=arguments.PADDED_TILE_ROWS if is_padded else 0,
            END_AFTER_PREVIOUS_LAUNCH=overlaps,
            PDL=pdl,
            START_AFTER=start_after,
        )

    def start(self, stream: int, tensors: Tensors, following: tuple, statistics=None, queries=None, keys=None) -> None:
        """Launch. following: the fields of ``NextLaunch``; queries, keys: where they are written rotated."""
        problem = self.problem

        def inputs(x: torch.Tensor, out: torch.Tensor | None, weight: torch.Tensor | None, sign: float | None) -> Any:
            if out is None:
                return None
            tables, norm = arguments.tables_of(problem, tensors), arguments.norm_of(problem, weight)
            row_format = RowFormat.host(problem.head_dim, block_d(problem.head_dim), is_long(x.stride()))
            return prepass_kernel.PrepassInputs.host(*map(arguments.view, (x, out)), tables, norm, sign, row_format)

        self.launch(
            stream,
            statistics=statistics,
            queries=inputs(tensors.q, queries, tensors.q_norm, arguments.scale_and_sign(problem.softmax_scale)[1]),
            keys=inputs(tensors.k, keys, tensors.k_norm, None),
            ends=prepass_kernel.SequenceEnds.host(
                tensors.kv_lens, tensors.cu_seqlens_q, tensors.cu_seqlens_k, problem.token_tables
            ),
            following=prepass_kernel.NextLaunch.host(*following),
        )


class Rotate(_Prepass):
    """Rotated copy of q ``(B, HQ, NQ, D)`` or k ``(B, HKV, NK, D)``, contiguous, columns in pair order.

    Keys that do not exist are not rotated, key j uses table row j, and q is multiplied by the scale's sign. A call with
    a ``counter`` also zeroes its first int32 word, in which the next launch counts, and sets ``maxima`` to -inf.

    Args:
        name: ``"q"`` or ``"k"``, or ``""`` in a plain call: nothing is copied, and the next launch is prepared.
        in_tiles: store packed queries as ``Saving.TILES`` does, with zeros after each sequence.
        tile_rows: rows of a tile of queries. If they are packed, the launch also describes each tile, in the words
            after the counter; both are ``counter_size`` words.
        overlaps: the launch may begin while the one before it still runs. That one must not write this one's inputs.
    """

    def __init__(self, name, tensors, problem, config, *, in_tiles=False, tile_rows=0, num_maxima=None, overlaps=False, start_after=False):
        options = {"pdl": config.pdl, "overlaps": overlaps and config.pdl, "num_maxima": num_maxima}
        in_tiles = in_tiles and problem.is_packed
        options["start_after"] = start_after and config.pdl and not overlaps
        super().__init__(problem, tensors, config, queries="q" in name, keys="k" in name, in_tiles=in_tiles, **options)
        self.name = name
        self.tile_rows = tile_rows if problem.is_packed else 0
        tiles = tile_count(problem.len_q, problem.sequences, tile_rows) if self.tile_rows else 0
        self.counter_size = prepass_kernel.TILE_WORDS.value * (1 + tiles)
        self.shape = arguments.rotated_shape(problem, in_tiles=in_tiles) if name == "q" else tensors.k.shape
        self.strides = contiguous_strides(self.shape)

    def __call__(self, stream: int, tensors: Tensors, counter=None, maxima=None) -> Any:
        out = None
        if self.name:
            out = torch.empty_strided(self.shape, self.strides, dtype=tensors.q.dtype, device=tensors.q.device)
        rotated = (out, None) if self.name == "q" else (None, out)
        if self.name == "qk":
            rotated = torch.empty_strided(tensors.q.shape, contiguous_strides(tensors.q.shape), dtype=out.dtype, device=out.device), out
            out = rotated
        self.start(stream, tensors, (counter, maxima, self.tile_rows), None, *rotated)
        return out


class Preprocess(_Prepass):
    """The pre-process of a backward pass: row statistics, and rotated copies of q and k.

    Args:
        do, o: in the layouts of all calls, as ``tensors`` are.
        rotates: whether it writes rotated copies.
        columns: of the float32 accumulator of dq that becomes zero.
        launch: ``in_tiles`` and ``pdl`` of ``_Prepass``, and ``num_counters``, int32 words that become zero.
    """

    def __init__(self, problem, tensors: Tensors, do, o, config, *, rotates: bool, columns: int = 0, **launch):
        super().__init__(problem, tensors, config, queries=True, keys=rotates, **launch)
        self.columns, self.stats_size = columns, 2 * problem.batch * problem.heads_q * self.pitch
        # Tiles have all columns of the accumulator, which are at least 64.
        block = max(64 if columns else 0, block_d(problem.value_dim))
        self.format = RowFormat.host(problem.value_dim, block, is_long(do.stride(), o.stride()))

    def __call__(
        self, stream, tensors: Tensors, do, o, lse, rotated=(None, None), accumulator=None, progress=None, counters=None
    ) -> torch.Tensor:
        """Launch, and return the statistics, (stats_size,) float32. rotated: where q and k are written rotated."""
        # With known strides, because otherwise an allocation takes the host twice as long.
        stats = torch.empty_strided((self.stats_size,), (1,), dtype=torch.float32, device=o.device)
        if self.programs:
            statistics = prepass_kernel.Statistics.host(
                o=arguments.view(o),
                do=arguments.view(do),
                lse_ptr=lse,
                dlse_ptr=tensors.dlse,
                stats_ptr=stats,
                accumulator_ptr=accumulator,
                progress_ptr=progress,
                format=self.format,
                PROGRESS_ROWS=arguments.PADDED_TILE_ROWS,
                COLUMNS=self.columns,
                READS_LENGTHS=self.problem.reads_lengths,
            )
            self.start(stream, tensors, (counters, None, 0), statistics, *rotated)
        return stats


class NormGradients:
    """The launch that turns dq and dk of normed rows into those of q and k, in place, after any backward pass.

    is_rotated: as for the backward passes. strides: of dq, dk and dv. Counters are int32, zeros from ``first_counter``
    on, ``num_counters`` with those before it.
    """

    def __init__(self, problem, tensors: Tensors, strides: tuple, is_rotated: bool, pdl: bool, first_counter: int = 0):
        rows = raw(tensors, is_rotated)
        self.blocks = [
            problem.batch * triton.cdiv(length, ROWS) * triton.cdiv(heads, HEADS)
            for length, heads in ((problem.len_q, problem.heads_q), (problem.len_k, problem.heads_kv))
        ]
        self.problem, self.is_rotated = problem, is_rotated
        self.num_counters = first_counter + sum(1 + triton.cdiv(blocks, norms.SUMS.value) for blocks in self.blocks)
        is_wide = is_long(*(x.stride() for x in rows), *strides[:2])
        self.format = RowFormat.host(problem.head_dim, block_d(problem.head_dim), is_wide)
        self.launch = None
        if all(self.blocks):
            options = {"num_warps": 4, **({"launch_pdl": True} if pdl else {})}
            own = {"first_counter": first_counter, "B": problem.batch, "HEADS": HEADS, "BLOCK_N": ROWS, "PDL": pdl}
            numbers = arguments.numbers_of(problem) | own
            self.launch = Launch(norms.norm_gradient_kernel, sum(self.blocks), options, numbers)

    def __call__(
        self, stream: int, tensors: Tensors, dq: torch.Tensor, dk: torch.Tensor, counters: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch, and return the gradients of both weights in the weights' dtypes."""
        if self.launch is None:  # no query meets a key
            return torch.zeros_like(tensors.q_norm), torch.zeros_like(tensors.k_norm)
        dq_norm, dk_norm = torch.empty_like(tensors.q_norm), torch.empty_like(tensors.k_norm)
        q, k = raw(tensors, self.is_rotated)

        def rows(x: torch.Tensor, dx: torch.Tensor, weight: torch.Tensor, blocks: int, gradient: torch.Tensor) -> Any:
            sums, parts = (
                torch.empty((count, self.problem.head_dim), dtype=torch.float32, device=dx.device)
                for count in (blocks, triton.cdiv(blocks, norms.SUMS.value))
            )
            views, norm = map(arguments.view, (x, dx)), arguments.norm_of(self.problem, weight)
            return norms.NormedRows.host(*views, norm, sums, parts, gradient, self.format)

        queries = rows(q, dq, tensors.q_norm, self.blocks[0], dq_norm)
        keys = rows(k, dk, tensors.k_norm, self.blocks[1], dk_norm)
        self.launch(stream, queries=queries, keys=keys, counters_ptr=counters)
        return dq_norm, dk_norm
