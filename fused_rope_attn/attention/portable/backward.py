# mypy: disable-error-code="attr-defined, arg-type"
"""Launches of the portable backward pass."""

import math
from typing import Any

import torch

from fused_rope_attn.attention import arguments
from fused_rope_attn.attention.configs import BackwardConfig, Tile
from fused_rope_attn.attention.intervals import IntervalBlocks
from fused_rope_attn.attention.portable import backward_kernels as kernels
from fused_rope_attn.attention.portable.forward import nope_views
from fused_rope_attn.attention.prepass import NormGradients, Preprocess
from fused_rope_attn.attention.problem import Gradients, Problem, Tensors, split_outputs
from fused_rope_attn.kernels.schedule import heads_per_section, tile_count
from fused_rope_attn.kernels.tiles import RowFormat
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch, Source
from fused_rope_attn.runtime.layouts import block_d, has_descriptor, is_long, output_strides

# The most heads of multi-head latent attention that one program of dkdv takes: the float32 sums of the gradient of
# their shared key head take memory for every so many heads.
SHARED_HEADS = 4


class BackwardCall:
    """The launches of one backward signature: pre-process, dkdv, dq, norms; each None if it has nothing to do.

    is_rotated: q and k are the ``Outputs.q_rot`` and ``k_rot`` of the forward pass, so that nothing is left to rotate.
    A plain call has nothing to rotate either.

    In multi-head latent attention dkdv writes ``dk_parts``, one sum for every few heads, and one more launch adds them.
    """

    def __init__(self, problem: Problem, tensors: tuple, config: BackwardConfig, is_rotated: bool = False):
        do, o, _, *of_forward = tensors
        given, outputs = split_outputs(of_forward, 3)
        q, k, v = given.q, given.k, given.v
        batch, sequences = problem.batch, problem.sequences
        self.problem = problem
        self.dkdv = self.dq = self.sum_heads = self.norms = None
        self.latent = problem.nope_dim is not None
        # Key heads as dkdv sees them, and the query heads of each.
        key_heads, group_size = problem.heads_kv, problem.group_size
        if self.latent:
            group_size = math.gcd(problem.heads_q, SHARED_HEADS)
            key_heads = problem.heads_q // group_size
        self.parts_shape = (batch, key_heads, problem.len_k, problem.head_dim)
        query_tiles = tile_count(problem.len_q, sequences, config.dq.block_m)
        self.strides = arguments.result_strides(outputs, arguments.gradient_strides(given, o, is_rotated))
        self.key_dtype = arguments.key_gradient_dtype(problem)
        # Of the parts of the sinks' gradient, one for each tile of queries and each head.
        self.dsinks_shape = (query_tiles * batch, problem.heads_q) if problem.has_sinks else None
        self.is_rotated = is_rotated or problem.is_plain
        q_rot, k_rot = self._rotated(q, k)
        self.tma = config.tma and all(map(has_descriptor, (q_rot, k_rot, v, do)))
        # dq_kernel may only skip its wait when dkdv_kernel, which does wait, runs between it and the pre-process.
        pdl = config.pdl and batch * problem.len_k > 0
        if problem.has_norms:
            self.norms = NormGradients(problem, given, self.strides, is_rotated, pdl)
        counted = None if self.norms is None else self.norms.num_counters
        self.preprocess = Preprocess(
            problem, given, do, o, config, rotates=not self.is_rotated, in_tiles=False, pdl=pdl, num_counters=counted
        )
        pdl = pdl and self.preprocess.programs > 0
        pad_d = block_d(problem.head_dim)
        is_wide = is_long(*(x.stride() for x in (*arguments.rows_of(given), o, do)), *self.strides)
        self.formats = [
            None if columns is None else RowFormat.host(columns, block_d(columns), is_wide, ALIGNED=True)
            for columns in (problem.head_dim, problem.value_dim, problem.nope_dim)
        ]
        shared = arguments.numbers_of(problem) | {"PDL": pdl}
        self.find_blocks = IntervalBlocks(problem, config.dq.block_n) if problem.has_intervals else None
        row_bytes = (problem.score_dim + problem.value_dim) * q.element_size()

        def products(kernel: Any, programs: int, tile: Tile, heads: int, group: int, rows: int, **own: Any) -> Launch:
            """Prepare dkdv or dq. rows: read by the tiles of a head; ``group`` heads read the same."""
            own |= {"num_heads": heads, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
            own["heads_per_section"] = heads_per_section(heads, group, row_bytes * rows, config.section_bytes)
            options = {**tile.launch_options, **({"launch_pdl": True} if pdl else {})}
            return Launch(kernel, programs, options, shared, **own)

        if batch * problem.len_k:
            tile, heads = config.dkdv, batch * key_heads
            rows = [1, 1, tile.block_m, pad_d] if self.tma else None
            self.q_source, self.do_source = Source(q_rot, rows), Source(do, rows)
            programs = tile_count(problem.len_k, sequences, tile.block_n) * heads
            read_rows = group_size * problem.longest(problem.len_q)
            own = {"HKV": key_heads, "GROUP_SIZE": group_size}
            self.dkdv = products(kernels.dkdv_kernel, programs, tile, heads, 1, read_rows, **own)
        if batch * problem.len_q:
            tile, heads = config.dq, batch * problem.heads_q
            rows = [1, 1, tile.block_n, pad_d] if self.tma else None
            self.k_source, self.v_source = Source(k_rot, rows), Source(v, rows)
            read_rows = problem.longest(problem.len_k)
            self.dq = products(kernels.dq_kernel, query_tiles * heads, tile, heads, problem.group_size, read_rows)
        if self.latent and batch * problem.len_k:
            self.sum_heads = Launch(
                kernels.sum_heads_kernel,
                tile_count(problem.len_k, sequences, config.rotate_rows) * batch,
                {"num_warps": 4},
                shared,
                num_heads=key_heads,
                num_batches=batch,
                row_format=RowFormat.host(problem.head_dim, pad_d, is_wide),
                BLOCK_N=config.rotate_rows,
            )

    def _rotated(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the rotated q and k, or q and k if they are rotated already."""
        if self.is_rotated:
            return q, k
        return q.new_empty(q.shape), k.new_empty(k.shape)

    def _allocate(self, q: torch.Tensor, given: Tensors, outputs: tuple) -> list[torch.Tensor]:
        """Return dq, dk and dv: the caller's output buffers, or new ones. q: a tensor of dq's shape."""
        written = [
            torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device) if out is None else out
            for x, strides, dtype, out in zip(
                (q, given.k, given.v), self.strides, (q.dtype, self.key_dtype, self.key_dtype), outputs
            )
        ]
        if self.problem.batch_invariant and self.problem.has_kv_starts:
            # Tiles of keys begin with the sequence then, and none writes the rows before it.
            written[1].zero_()
            written[2].zero_()
        return written

    def __call__(self, given: tuple) -> Gradients:
        """Launch the call. given: do, o, lse, ``Tensors``, and then output buffers dq, dk and dv if it has them."""
        do, o, lse, *of_forward = given
        tensors, outputs = split_outputs(of_forward, 3)
        problem, q, k, v = self.problem, tensors.q, tensors.k, tensors.v
        dq, dk, dv = self._allocate(q if self.latent else o, tensors, outputs)
        dq_nope = dk_nope = dsinks = dsinks_parts = None
        of_heads = dk
        if self.latent:
            of_heads = torch.empty(self.parts_shape, dtype=torch.float32, device=q.device)
            dq_nope, dk_nope = (
                torch.empty_strided(x.shape, output_strides(x), dtype=x.dtype, device=x.device)
                for x in (tensors.q_nope, tensors.k_nope)
            )
        q_rot, k_rot = self._rotated(q, k)
        if self.dsinks_shape is not None:
            # Zeros, because tiles past the end of a packed sequence write nothing.
            dsinks_parts = q.new_zeros(self.dsinks_shape, dtype=torch.float32)
        stream = device.current_stream(q.device)
        blocks = None if self.find_blocks is None else self.find_blocks(stream, tensors)
        rotated = (None, None) if self.is_rotated else (q_rot, k_rot)
        counted = 0 if self.norms is None else self.norms.num_counters
        counters = torch.empty(counted, dtype=torch.int32, device=q.device) if counted else None
        stats = self.preprocess(stream, tensors, do, o, lse, rotated, counters=counters)
        read = {
            "inputs": kernels.BackwardInputs.host(
                q=arguments.view(q_rot),
                k=arguments.view_of_keys(problem, k_rot),
                v=arguments.view(v),
                do=arguments.view(do),
                stats_ptr=stats,
                format=self.formats[0],
                value_format=self.formats[1],
                nope=nope_views(problem, tensors, self.formats[2], dq_nope, dk_nope),
                scale=arguments.scale_of(problem),
                USE_TMA=self.tma,
            ),
            "tables": arguments.tables_of(problem, tensors),
            "masks": arguments.masks_of(problem, tensors, blocks),
        }
        if self.dkdv is not None:
            written = {"dk": arguments.view(of_heads), "dv": arguments.view(dv)}
            self.dkdv(stream, read | written, q_desc=self.q_source(q_rot), do_desc=self.do_source(do))
        if self.dq is not None:
            written = kernels.QueryOutputs.host(arguments.view(dq), problem.softmax_scale, dsinks_parts, tensors.sinks)
            self.dq(stream, read, k_desc=self.k_source(k_rot), v_desc=self.v_source(v), outputs=written)
        if self.sum_heads is not None:
            self.sum_heads(stream, read, parts=arguments.view(of_heads), dk=arguments.view(dk))
        if dsinks_parts is not None:
            dsinks = dsinks_parts.sum(0).to(tensors.sinks.dtype)
        dq_norm, dk_norm = (None, None) if self.norms is None else self.norms(stream, tensors, dq, dk, counters)
        return Gradients(dq, dk, dv, dsinks, dq_norm, dk_norm, dq_nope, dk_nope)
