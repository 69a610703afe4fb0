# mypy: disable-error-code="attr-defined, arg-type"
"""Launches of the sm_90 backward pass of multi-head latent attention."""

from __future__ import annotations

import torch

from fused_rope_attn.attention import arguments as call_arguments
from fused_rope_attn.attention import configs, prepass
from fused_rope_attn.attention.hopper import backward_block, backward_kernel, latent_kernels, shapes
from fused_rope_attn.attention.portable import backward_kernels
from fused_rope_attn.attention.problem import Gradients, Problem, split_outputs
from fused_rope_attn.kernels import schedule
from fused_rope_attn.kernels.tiles import RowFormat
from fused_rope_attn.runtime import device, launch, layouts
from fused_rope_attn.runtime.triton_compat import gl

# Keys of a block of the kernel that makes dQ, and blocks of K and V in flight there.
DQ_BLOCK_N, DQ_K_STAGES, DQ_V_STAGES = 64, 3, 3
# Keys of a program of the sum over heads. 8 take 23 us instead of 17 at 1K, and the same from 4K on. H100, 3.9.0.
SUM_ROWS = 2


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
        self.problem = problem
        batch, heads, len_q, len_k = problem.batch, problem.heads_q, problem.len_q, problem.len_k
        sequences, rope, columns = problem.sequences, problem.head_dim, q_nope.shape[3]
        rows = (q, k, v, q_nope, k_nope)
        # A rotated q is contiguous: dq has the memory order of q_nope.
        own = [layouts.output_strides(q_nope, rope), *(layouts.output_strides(x) for x in rows[1:])]
        self.strides = call_arguments.result_strides((*outputs, None, None), own)
        dq_strides, dk_strides, dv_strides, dq_nope_strides, dk_nope_strides = self.strides
        self.empty = batch * len_q * len_k == 0
        if self.empty:
            return
        pitch = call_arguments.padded_rows(len_q, sequences)
        self.parts_shape = (batch, heads, len_k, rope)
        parts_strides = layouts.contiguous_strides(self.parts_shape)
        is_wide = layouts.is_long(*(x.stride() for x in (*rows, o, do)), *self.strides, parts_strides)
        pdl = {"launch_pdl": True} if config.pdl else {}
        block_m = shapes.CONSUMERS.value * shapes.ROWS.value
        self.rotate_queries = None if is_rotated else prepass.Rotate("q", given, problem, config)
        self.rotate_keys = prepass.Rotate("k", given, problem, config, tile_rows=block_m, overlaps=True)
        self.preprocess = prepass.Preprocess(
            problem, given, do, o, config, rotates=False, in_tiles=True, pdl=config.pdl
        )
        stats_size = self.preprocess.stats_size
        element = gl.bfloat16 if q.dtype is torch.bfloat16 else gl.float16

        def source(x: torch.Tensor, length: int) -> launch.Source:
            tile = [1, 1, length, x.shape[3]]
            return launch.Source(x, tile, gl.NVMMASharedLayout.get_default_for(tile, element))

        q_rot, k_rot = (x.new_empty(x.shape) for x in (q, k))
        # All tiles of queries have 64 rows.
        self.query_sources = [source(x, shapes.BACKWARD_BLOCK_M.value) for x in (q_nope, q_rot, do)]
        self.key_sources = [
            [source(x, length) for x in (k_nope, k_rot, v)] for length in (shapes.BACKWARD_BLOCK_N.value, DQ_BLOCK_N)
        ]
        stats = torch.empty(stats_size, dtype=torch.float32, device=v.device)
        self.stats_source = launch.Source(stats, [shapes.BACKWARD_BLOCK_M.value], gl.NVMMASharedLayout(0, 32, rank=1))
        num_heads, row_bytes = batch * heads, q.element_size() * (problem.score_dim + problem.value_dim)
        numbers = call_arguments.numbers_of(problem)
        left = problem.window_left
        self.has_keys_before_window = left is not None and len_k - len_q > left
        self.keys = launch.Launch(
            backward_kernel.backward_kernel,
            schedule.tile_count(len_k, sequences, shapes.BACKWARD_BLOCK_N.value) * num_heads,
            {"num_warps": 4, **pdl},
            GROUP_SIZE=1,
            pitch=pitch,
            stats_size=stats_size // 2,
            num_sequences=sequences,
            heads_per_section=schedule.heads_per_section(
                num_heads, 1, row_bytes * problem.longest(len_q), config.section_bytes
            ),
            window_left=numbers["window_left"],
            window_right=numbers["window_right"],
            stages=backward_kernel.BackwardStages.host(config.q_stages, config.do_stages, config.pdl),
        )
        self.format = RowFormat.host(columns, layouts.block_d(columns), is_wide)
        tiles = schedule.tile_count(len_q, sequences, block_m)
        self.rope_format = RowFormat.host(rope, rope, is_wide)
        self.queries = launch.Launch(
            latent_kernels.latent_dq_kernel,
            min(tiles * num_heads, device.num_sms(q.device)),
            {"num_warps": 4, **pdl},
            num_tiles=tiles * num_heads,
            NQ=len_q,
            NK=len_k,
            pitch=pitch,
            stats_size=stats_size // 2,
            tiles_per_head=tiles if problem.is_packed else None,
            heads_per_section=schedule.heads_per_section(
                num_heads, 1, row_bytes * problem.longest(len_k), config.section_bytes
            ),
            window_left=numbers["window_left"],
            window_right=numbers["window_right"],
            sizes=latent_kernels.QueryGradientSizes.host(
                DQ_BLOCK_N, DQ_K_STAGES, DQ_V_STAGES, problem.reads_lengths, config.pdl
            ),
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
        rows = (tensors.q, tensors.k, tensors.v, tensors.q_nope, tensors.k_nope)
        dtype, where = tensors.v.dtype, tensors.v.device
        dq, dk, dv, dq_nope, dk_nope = (
            torch.empty_strided(x.shape, strides, dtype=dtype, device=where) if out is None else out
            for x, strides, out in zip(rows, self.strides, (*outputs, None, None))
        )
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
            call_masks=backward_kernel.BackwardMasks.host(
                tensors.kv_starts,
                tensors.kv_lens,
                tensors.cu_seqlens_q,
                tensors.cu_seqlens_k,
                None,
                None,
                None,
                READS_LENGTHS=problem.reads_lengths,
                HAS_KEYS_BEFORE_WINDOW=self.has_keys_before_window,
            ),
            gradients=backward_block.KeyGradients.host(
                dk=call_arguments.view(dk_nope),
                dv=call_arguments.view(dv),
                dk_parts=call_arguments.view(parts),
                tables=tables,
                key_norm=None,
                format=self.format,
                TOKEN_TABLES=problem.token_tables,
            ),
            programs=backward_kernel.Programs.host(None, None, None),
            scale=scale,
        )
        self.queries(
            stream,
            **of_queries,
            **of_key_blocks,
            counter_ptr=counter,
            starts_ptr=tensors.kv_starts,
            lens_ptr=tensors.kv_lens,
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
