# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="attr-defined, arg-type"
"""Launches of the sm_90 backward pass."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import triton

from fused_rope_attn.attention import arguments as call_arguments, configs, prepass
from fused_rope_attn.attention.hopper import (
    backward_block,
    backward_kernel,
    channels,
    columns as column_parts,
    forward_tiles,
    intervals,
    latent_kernels,
    postprocess_kernel,
)
from fused_rope_attn.attention.portable import backward_kernels
from fused_rope_attn.attention.problem import Gradients, Problem, Tensors, split_outputs
from fused_rope_attn.kernels import schedule
from fused_rope_attn.kernels.tiles import RowFormat
from fused_rope_attn.runtime import device, launch, layouts
from fused_rope_attn.runtime.triton_compat import gl

# Bytes of a row of Q, dO and float32 dQ in the query heads of a program. Programs with tiles of different lengths are
# soon at different heads, and together use about as many rows as they have keys, in all their heads: 69 MB with 4096
# bytes, four heads of 128 columns. With twice that an H100 (an L2 of 50 MB) takes 1.1 to 1.5 times as long. 3.6.0 and
# 3.9.0, 2026-11-28.
MOST_ROW_BYTES = 4096
# Keys of the narrowest window with which programs drift apart so. Narrower ones are untimed.
LEAST_WINDOW = 4096
# Keys of a block of the kernel that makes dQ, and blocks of K and V in flight there.
DQ_BLOCK_N, DQ_K_STAGES, DQ_V_STAGES = 64, 3, 3
# Keys of a program of the sum over heads. 8 take 23 us instead of 17 at 1K, and the same from 4K on. H100, 3.9.0.
SUM_ROWS = 2


def parts_of_group(problem: Problem, tiles: int, row_bytes: int) -> int:
    """Return how many programs divide the query heads that share a tile of keys.

    A program reads at most MOST_ROW_BYTES of a row, or has one head, if a mask makes tiles unequal. With fewer programs
    than multiprocessors there are more parts. Calls with intervals or a fixed order of dQ have one. tiles: of keys, in
    all key heads of all batch entries. row_bytes: of a row of Q, dO and float32 dQ in all heads of a group.
    """
    if problem.has_intervals or problem.is_deterministic:
        return 1
    bounds = [x for x in (problem.window_left, problem.window_right) if x is not None]
    is_uneven = sum(bounds) >= LEAST_WINDOW if len(bounds) == 2 else len(bounds) == 1
    parts = triton.cdiv(row_bytes, MOST_ROW_BYTES) if is_uneven else 1
    if problem.group_size % parts:
        parts *= 2  # as heads would be divided unequally
    parts = min(parts, problem.group_size)
    while parts < problem.group_size and tiles * parts < device.num_sms(problem.device):
        parts = min(2 * parts, problem.group_size)
    return parts


def masks_of(problem: Problem, tensors: Tensors, rows: dict[str, torch.Tensor]) -> Any:
    """Return the ``BackwardMasks``. rows: of ``VisibleRows``; empty without intervals."""
    left = problem.window_left
    return backward_kernel.BackwardMasks.host(
        starts_ptr=None if rows else tensors.kv_starts,
        lens_ptr=tensors.kv_lens,
        cu_q_ptr=tensors.cu_seqlens_q,
        cu_k_ptr=tensors.cu_seqlens_k,
        key_rows_ptr=rows.get("key_rows_ptr"),
        blocks_ptr=rows.get("blocks_ptr"),
        blind_ptr=rows.get("blind_ptr"),
        READS_LENGTHS=0 if rows else problem.reads_lengths,
        HAS_KEYS_BEFORE_WINDOW=left is not None and problem.len_k - problem.len_q > left and not rows,
    )


def allocate(layouts: Iterable[tuple], where: torch.device, outputs: Iterable = itertools.repeat(None)) -> list:
    """Return the caller's output buffers, or new tensors of these (shape, strides, dtype) where they are None."""
    # With known strides, because otherwise an allocation takes the host twice as long.
    return [
        torch.empty_strided(shape, strides, dtype=dtype, device=where) if out is None else out
        for (shape, strides, dtype), out in zip(layouts, outputs)
    ]


def row_source(x: torch.Tensor, rows: int, columns: int) -> launch.Source:
    """Return the ``Source`` of tiles of a 16-bit tensor (B, H, N, D)."""
    element = gl.bfloat16 if x.dtype is torch.bfloat16 else gl.float16
    tile = [1, 1, rows, columns]
    return launch.Source(x, tile, gl.NVMMASharedLayout.get_default_for(tile, element))


def statistics_source(size: int, where: torch.device) -> launch.Source:
    """Return the ``Source`` of the ``size`` row statistics of the pre-process."""
    stats = torch.empty(size, dtype=torch.float32, device=where)
    return launch.Source(stats, [channels.BACKWARD_BLOCK_M.value], gl.NVMMASharedLayout(0, 32, rank=1))


def main_launch(problem: Problem, programs: int, stats_size: int, section: int, options: dict) -> launch.Launch:
    """Return the launch of ``backward_kernel``. section: heads that are scheduled together."""
    numbers = call_arguments.numbers_of(problem)
    if problem.has_intervals:
        numbers |= {"window_left": None, "window_right": None}
    if problem.nope_dim is not None:
        numbers["GROUP_SIZE"] = 1
    return launch.Launch(
        backward_kernel.backward_kernel,
        programs,
        options,
        numbers,
        pitch=call_arguments.padded_rows(problem.len_q, problem.sequences),
        stats_size=stats_size // 2,
        heads_per_section=section,
    )


class BackwardCall:
    """The launches of one backward signature: pre-process, main kernel, post-process, norms.

    is_rotated: q and k are the ``Outputs.q_rot`` and ``k_rot`` of the forward pass, so that nothing is left to rotate.
    """

    def __init__(
        self, problem: Problem, tensors: tuple, config: configs.HopperBackwardConfig, is_rotated: bool = False
    ):
        do, o, _, *of_forward = tensors
        given, outputs = split_outputs(of_forward, 3)
        q, k, v = given.q, given.k, given.v
        batch, heads_q, len_q, len_k = problem.batch, problem.heads_q, problem.len_q, problem.len_k
        sequences, self.problem = problem.sequences, problem
        self.stages = config.q_stages, config.do_stages, config.pdl
        all_strides = call_arguments.result_strides(outputs, call_arguments.gradient_strides(given, o, is_rotated))
        key_dtype = call_arguments.key_gradient_dtype(problem)
        self.gradients = list(zip((o.shape, k.shape, v.shape), all_strides, (q.dtype, key_dtype, key_dtype)))
        self.empty = batch * len_q * len_k == 0
        if self.empty:
            return
        pad_d = max(64, layouts.block_d(problem.head_dim))
        self.wide = pad_d > 128
        block_m = channels.BACKWARD_BLOCK_M.value
        block_n = (channels.KEYS if self.wide else channels.BACKWARD_BLOCK_N).value
        heads = batch * problem.heads_kv
        row_bytes = (2 * problem.head_dim * q.element_size() + 4 * pad_d) * problem.group_size
        key_programs = schedule.tile_count(len_k, sequences, block_n) * heads
        parts = parts_of_group(problem, key_programs, row_bytes)
        part_bytes = row_bytes * problem.longest(len_q) // parts
        section = schedule.heads_per_section(heads * parts, 1, part_bytes, config.section_bytes)
        pitch = call_arguments.padded_rows(len_q, sequences)
        columns = column_parts.needed_columns(problem.head_dim, pad_d)
        ordered = problem.is_deterministic
        # In a fixed order the first key block of a query block stores its dQ, if the order says which one that is.
        self.clears = not ordered or self.wide or problem.has_intervals
        is_wide = layouts.is_long(*(x.stride() for x in (q, k, v, o, do)), *all_strides)
        row_blocks = batch * schedule.tile_count(len_q, sequences, config.post_rows)
        own_columns = pad_d // 2 if self.wide else pad_d
        num_slots = (parts - 1) * key_programs
        # The slots' counters first, and then those of the norms.
        num_counters, self.norms = num_slots * channels.CONSUMERS.value, None
        if problem.has_norms:
            self.norms = prepass.NormGradients(problem, given, all_strides, is_rotated, config.pdl, num_counters)
            num_counters = self.norms.num_counters
        shapes: dict[str, tuple] = {"accumulator": ((batch, heads_q, pitch, columns), torch.float32)}
        if not is_rotated and (problem.is_packed or not problem.is_plain):
            # In a plain call too, because packed queries are read in whole tiles.
            shapes["q_rot"] = call_arguments.rotated_shape(problem), q.dtype
        if not is_rotated and not problem.is_plain:
            shapes["k_rot"] = k.shape, q.dtype
        if ordered:
            shapes["progress"] = (batch * heads_q * pitch // block_m,), torch.int32
        if num_counters:
            shapes["counters"] = (num_counters,), torch.int32
        if num_slots:
            shapes["slots"] = (num_slots, backward_block.slot_words(own_columns)), torch.float32
        if problem.has_sinks:
            shapes["dsinks"] = (row_blocks, heads_q), torch.float32
        self.workspaces = {
            name: (x, torch.empty(x, device="meta").stride(), dtype) for name, (x, dtype) in shapes.items()
        }
        options = {"num_warps": 4, **({"launch_pdl": True} if config.pdl else {})}
        written = {"rotates": "k_rot" in shapes, "columns": columns, "num_counters": num_counters or None}
        self.preprocess = prepass.Preprocess(problem, given, do, o, config, in_tiles=True, pdl=config.pdl, **written)
        stats_size = self.preprocess.stats_size
        # Descriptors, of workspaces that are only allocated for this.
        work = self.workspace(v.device)
        self.stats_source = statistics_source(stats_size, v.device)
        self.q_source, self.do_source = (row_source(x, block_m, pad_d) for x in (work.get("q_rot", q), do))
        self.k_source, self.v_source = (row_source(x, block_n, pad_d) for x in (work.get("k_rot", k), v))
        if not self.wide:
            part = [1, 1, block_m, pad_d // channels.CONSUMERS.value]
            layout = gl.NVMMASharedLayout.get_default_for(part, gl.float32)
            self.dq_source = launch.Source(work["accumulator"], part, layout)
        # A head's programs follow one another where dQ is added in a fixed order, so that few heads keep too few busy.
        if ordered and heads <= 2 * section:
            section = heads
        self.visible_rows = None
        main_programs = key_programs * parts
        if problem.has_intervals:
            # One or two for each key block, also if the last one has fewer keys.
            halves = block_n // channels.KEYS.value
            num_blocks = triton.cdiv(len_k, block_n) * halves
            self.visible_rows = intervals.VisibleRows(problem, num_blocks, halves, pitch, own_columns, section)
            if self.visible_rows.programs is not None:
                main_programs = self.visible_rows.programs
        self.main = main_launch(problem, main_programs, stats_size, section, options)
        self.format = RowFormat.host(problem.head_dim, pad_d, is_wide)
        self.group_parts = None if parts == 1 else parts
        # With more, the programs of a long sequence use more of Q, dO and dQ at once than the L2 holds.
        self.most_overlapping = device.num_sms(problem.device) // 2 if ordered else None
        self.postprocess = launch.Launch(
            postprocess_kernel.postprocess_kernel,
            row_blocks * triton.cdiv(heads_q, config.post_heads),
            options,
            call_arguments.numbers_of(problem),
            softmax_scale=problem.softmax_scale,
            pitch=pitch,
            stats_size=stats_size // 2,
            sizes=postprocess_kernel.PostprocessSizes.host(
                format=self.format,
                HEADS=config.post_heads,
                BLOCK_N=config.post_rows,
                COLUMNS=columns,
                IN_PANELS=self.wide,
                TOKEN_TABLES=problem.token_tables,
                PDL=config.pdl,
            ),
        )

    def workspace(self, where: torch.device) -> dict[str, torch.Tensor]:
        """Return uninitialised workspaces by name."""
        return dict(zip(self.workspaces, allocate(self.workspaces.values(), where)))

    def __call__(self, arguments: tuple) -> Gradients:
        """Launch the call. arguments: do, o, lse, ``Tensors``, and then output buffers dq, dk and dv if it has them."""
        do, o, lse, *of_forward = arguments
        tensors, outputs = split_outputs(of_forward, 3)
        q, k, v, sinks = tensors.q, tensors.k, tensors.v, tensors.sinks
        where = v.device
        dq, dk, dv = allocate(self.gradients, where, outputs)
        if self.empty:
            weights = (sinks, tensors.q_norm, tensors.k_norm)
            zeros = (None if weight is None else torch.zeros_like(weight) for weight in weights)
            return Gradients(dq.zero_(), dk.zero_(), dv.zero_(), *zeros)
        work = self.workspace(where)
        accumulator, counters, parts = work["accumulator"], work.get("counters"), work.get("dsinks")
        rotated = work.get("q_rot"), work.get("k_rot")
        stream = device.current_stream(where)
        # Before the pre-process: the main kernel reads these before it waits for that.
        rows = {} if self.visible_rows is None else self.visible_rows(stream, tensors, lse)
        cleared = accumulator if self.clears else None
        stats = self.preprocess(stream, tensors, do, o, lse, rotated, cleared, work.get("progress"), counters)
        tables = call_arguments.tables_of(self.problem, tensors)
        self.main(
            stream,
            q_desc=self.q_source(work.get("q_rot", q)),
            k_desc=self.k_source(work.get("k_rot", k)),
            v_desc=self.v_source(v),
            do_desc=self.do_source(do),
            stats_desc=self.stats_source(stats),
            dq_accumulator=accumulator if self.wide else self.dq_source(accumulator),
            q_rope_desc=None,
            k_rope_desc=None,
            call_masks=masks_of(self.problem, tensors, rows),
            gradients=backward_block.KeyGradients.host(
                dk=call_arguments.view(dk),
                dv=call_arguments.view(dv),
                tables=tables,
                format=self.format,
                TOKEN_TABLES=self.problem.token_tables,
                share_ptr=rows.get("shares_ptr"),
                slots_ptr=work.get("slots", rows.get("slots_ptr")),
                counters_ptr=counters if "slots" in work else rows.get("slot_counters_ptr"),
            ),
            programs=backward_kernel.Programs.host(
                self.group_parts, self.most_overlapping, work.get("progress"), *self.stages
            ),
            scale=call_arguments.scale_of(self.problem),
        )
        self.postprocess(
            stream,
            accumulator_ptr=accumulator,
            progress_ptr=None if self.wide else work.get("progress"),
            dq_out=call_arguments.view(dq),
            tables=tables,
            sinks=None if sinks is None else postprocess_kernel.SinkParts.host(sinks, parts, stats),
            lens_ptr=tensors.kv_lens,
            cu_q_ptr=tensors.cu_seqlens_q,
            cu_k_ptr=tensors.cu_seqlens_k,
        )
        dq_norm, dk_norm = (None, None) if self.norms is None else self.norms(stream, tensors, dq, dk, counters)
        dsinks = None if parts is None else parts.sum(0).to(sinks.dtype)
        return Gradients(dq, dk, dv, dsinks, dq_norm, dk_norm)


class LatentBackwardCall:
    """The launches of one backward signature: rotation of q and k, row statistics, dk and dv, dq, sum over heads.

    All sums are in a fixed order. is_rotated: q is the ``Outputs.q_rot`` of the forward pass. k is the caller's: the
    launch that rotates its one head also describes tiles, and runs concurrently with the row statistics.
    """

    def __init__(
        self, problem: Problem, tensors: tuple, config: configs.HopperBackwardConfig, is_rotated: bool = False
    ):
        do, o, _, *of_forward = tensors
        given, outputs = split_outputs(of_forward, 3)
        q, k, v, q_nope, k_nope = given.q, given.k, given.v, given.q_nope, given.k_nope
        self.problem, self.stages = problem, (config.q_stages, config.do_stages, config.pdl)
        batch, heads, len_q, len_k = problem.batch, problem.heads_q, problem.len_q, problem.len_k
        sequences, rope, columns = problem.sequences, problem.head_dim, q_nope.shape[3]
        rows = (q, k, v, q_nope, k_nope)
        # A rotated q is contiguous: dq has the memory order of q_nope.
        own = [layouts.output_strides(q_nope, rope), *(layouts.output_strides(x) for x in rows[1:])]
        all_strides = call_arguments.result_strides((*outputs, None, None), own)
        self.gradients = [(x.shape, strides, v.dtype) for x, strides in zip(rows, all_strides)]
        self.empty = batch * len_q * len_k == 0
        if self.empty:
            return
        self.parts_shape = (batch, heads, len_k, rope)
        parts_strides = layouts.contiguous_strides(self.parts_shape)
        is_wide = layouts.is_long(*(x.stride() for x in (*rows, o, do)), *all_strides, parts_strides)
        options = {"num_warps": 4, **({"launch_pdl": True} if config.pdl else {})}
        block_m = channels.CONSUMERS.value * channels.ROWS.value
        self.rotate_queries = None if is_rotated else prepass.Rotate("q", given, problem, config)
        self.rotate_keys = prepass.Rotate("k", given, problem, config, tile_rows=block_m, overlaps=True)
        self.preprocess = prepass.Preprocess(
            problem, given, do, o, config, rotates=False, in_tiles=True, pdl=config.pdl
        )
        stats_size = self.preprocess.stats_size
        q_rot, k_rot = (x.new_empty(x.shape) for x in (q, k))
        # All tiles of queries have 64 rows.
        self.query_sources = [row_source(x, channels.BACKWARD_BLOCK_M.value, x.shape[3]) for x in (q_nope, q_rot, do)]
        self.key_sources = [
            [row_source(x, length, x.shape[3]) for x in (k_nope, k_rot, v)]
            for length in (channels.BACKWARD_BLOCK_N.value, DQ_BLOCK_N)
        ]
        self.stats_source = statistics_source(stats_size, v.device)
        num_heads, row_bytes = batch * heads, q.element_size() * (problem.score_dim + problem.value_dim)
        sections = [
            schedule.heads_per_section(num_heads, 1, row_bytes * problem.longest(length), config.section_bytes)
            for length in (len_q, len_k)
        ]
        numbers = call_arguments.numbers_of(problem)
        programs = schedule.tile_count(len_k, sequences, channels.BACKWARD_BLOCK_N.value) * num_heads
        self.keys = main_launch(problem, programs, stats_size, sections[0], options)
        self.format = RowFormat.host(columns, layouts.block_d(columns), is_wide)
        tiles = schedule.tile_count(len_q, sequences, block_m)
        self.rope_format = RowFormat.host(rope, rope, is_wide)
        self.queries = launch.Launch(
            latent_kernels.latent_dq_kernel,
            min(tiles * num_heads, device.num_sms(q.device)),
            options,
            numbers,
            num_tiles=tiles * num_heads,
            pitch=call_arguments.padded_rows(len_q, sequences),
            stats_size=stats_size // 2,
            tiles_per_head=tiles if problem.is_packed else None,
            heads_per_section=sections[1],
            K_STAGES=DQ_K_STAGES,
            V_STAGES=DQ_V_STAGES,
            PDL=config.pdl,
        )
        self.sum_heads = launch.Launch(
            backward_kernels.sum_heads_kernel,
            schedule.tile_count(len_k, sequences, SUM_ROWS) * batch,
            {"num_warps": 4},
            numbers,
            num_heads=heads,
            num_batches=batch,
            row_format=self.rope_format,
            BLOCK_N=SUM_ROWS,
        )

    def __call__(self, arguments: tuple) -> Gradients:
        """Launch the call. arguments: do, o, lse, ``Tensors``, and then output buffers dq, dk and dv if it has them."""
        do, o, lse, *of_forward = arguments
        tensors, outputs = split_outputs(of_forward, 3)
        where = tensors.v.device
        dq, dk, dv, dq_nope, dk_nope = allocate(self.gradients, where, (*outputs, None, None))
        if self.empty:
            for x in (dq, dk, dv, dq_nope, dk_nope):
                x.zero_()
            return Gradients(dq, dk, dv, dq_nope=dq_nope, dk_nope=dk_nope)
        parts = torch.empty(self.parts_shape, dtype=torch.float32, device=where)
        counter = torch.empty(self.rotate_keys.counter_size, dtype=torch.int32, device=where)
        stream = device.current_stream(where)
        q_rot = tensors.q if self.rotate_queries is None else self.rotate_queries(stream, tensors)
        stats = self.preprocess(stream, tensors, do, o, lse)
        k_rot = self.rotate_keys(stream, tensors, counter)
        names = ("q_desc", "q_rope_desc", "do_desc"), ("k_desc", "k_rope_desc", "v_desc")
        of_queries = {name: make(x) for name, make, x in zip(names[0], self.query_sources, (tensors.q_nope, q_rot, do))}
        of_keys, of_key_blocks = (
            {name: make(x) for name, make, x in zip(names[1], sources, (tensors.k_nope, k_rot, tensors.v))}
            for sources in self.key_sources
        )
        problem = self.problem
        scale, tables = call_arguments.scale_of(problem), call_arguments.tables_of(problem, tensors)
        self.keys(
            stream,
            **of_queries,
            **of_keys,
            stats_desc=self.stats_source(stats),
            dq_accumulator=None,
            call_masks=masks_of(problem, tensors, {}),
            gradients=backward_block.KeyGradients.host(
                dk=call_arguments.view(dk_nope),
                dv=call_arguments.view(dv),
                dk_parts=call_arguments.view(parts),
                tables=tables,
                format=self.format,
                TOKEN_TABLES=problem.token_tables,
            ),
            programs=backward_kernel.Programs.host(None, None, None, *self.stages),
            scale=scale,
        )
        self.queries(
            stream,
            **of_queries,
            **of_key_blocks,
            tile_source=forward_tiles.TileSource.host(
                counter, tensors.kv_starts, tensors.kv_lens, READS_LENGTHS=problem.reads_lengths
            ),
            gradients=latent_kernels.QueryGradients.host(
                dq=call_arguments.view(dq),
                dq_nope=call_arguments.view(dq_nope),
                tables=tables,
                stats_ptr=stats,
                qk_scale=scale.qk_scale,
                softmax_scale=problem.softmax_scale,
                format=self.format,
                rope_format=self.rope_format,
            ),
        )
        self.sum_heads(
            stream,
            parts=call_arguments.view(parts),
            dk=call_arguments.view(dk),
            masks=call_arguments.masks_of(problem, tensors),
            tables=tables,
        )
        return Gradients(dq, dk, dv, dq_nope=dq_nope, dk_nope=dk_nope)


def backward_call(
    problem: Problem, tensors: tuple, config: configs.HopperBackwardConfig, is_rotated: bool = False
) -> BackwardCall | LatentBackwardCall:
    """Prepare a backward pass; multi-head latent attention has kernels of its own."""
    if problem.nope_dim is not None:
        return LatentBackwardCall(problem, tensors, config, is_rotated)
    return BackwardCall(problem, tensors, config, is_rotated)
