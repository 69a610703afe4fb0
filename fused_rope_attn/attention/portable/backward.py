"""Launches of the portable backward pass."""

from __future__ import annotations

import math

import torch
import triton

from fused_rope_attn.attention.arguments import (
    gradient_strides,
    key_gradient_dtype,
    nope_strides,
    of_shared_head,
    result_strides,
    rows_of,
    shared_arguments,
    shared_tensors,
)
from fused_rope_attn.attention.configs import BackwardConfig
from fused_rope_attn.attention.intervals import IntervalBlocks, interval_strides
from fused_rope_attn.attention.norm_gradient import NormGradients
from fused_rope_attn.attention.portable.backward_kernels import (
    dkdv_kernel,
    dq_kernel,
    one_launch_kernel,
    sum_heads_kernel,
)
from fused_rope_attn.attention.preprocess_kernel import preprocess_kernel
from fused_rope_attn.attention.problem import Gradients, Problem, Tensors, split_outputs
from fused_rope_attn.kernels.arguments import heads_per_section, tile_count
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch, Source
from fused_rope_attn.runtime.layouts import block_d, contiguous_strides, has_descriptor, is_long, output_strides

# The most heads of multi-head latent attention that one program of dkdv takes: the float32 sums of the gradient of
# their shared key head take memory for every so many heads.
SHARED_HEADS = 4


class _Results:
    """The result buffers of a backward signature, and the steps that follow the kernels of attention."""

    def __init__(
        self, problem: Problem, given: Tensors, strides: tuple, tiles: int, shared: dict, is_rotated: bool, pdl: bool
    ):
        self.strides, self.key_dtype = strides, key_gradient_dtype(problem)
        self.nope_strides = [output_strides(x) for x in (given.q_nope, given.k_nope) if x is not None]
        # Tiles of keys begin with the sequence then, and none writes the rows before it.
        self.clears_keys = shared["FROM_START"]
        # Of the parts of the sinks' gradient, one for each of the ``tiles`` of queries and each head.
        self.dsinks_shape = (tiles * problem.batch, problem.heads_q) if problem.has_sinks else None
        self.norms = NormGradients(problem, given, shared, strides, is_rotated, pdl) if problem.has_norms else None

    def allocate(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, outputs: tuple) -> list[torch.Tensor]:
        """Return dq, dk and dv: the caller's output buffers, or new ones. q: a tensor of dq's shape."""
        written = [
            torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device) if out is None else out
            for x, strides, dtype, out in zip(
                (q, k, v), self.strides, (q.dtype, self.key_dtype, self.key_dtype), outputs
            )
        ]
        if self.clears_keys:
            written[1].zero_()
            written[2].zero_()
        return written

    def allocate_nope(self, tensors: Tensors) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return dq_nope and dk_nope; (None, None) if the call has neither."""
        if not self.nope_strides:
            return None, None
        q, k = (
            torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
            for x, strides in zip((tensors.q_nope, tensors.k_nope), self.nope_strides)
        )
        return q, k

    def sink_parts(self, q: torch.Tensor) -> torch.Tensor | None:
        """Return a zeroed buffer, because tiles past the end of a packed sequence write nothing; None without sinks."""
        return None if self.dsinks_shape is None else q.new_zeros(self.dsinks_shape, dtype=torch.float32)

    def gradients(
        self,
        stream: int,
        tensors: Tensors,
        written: list[torch.Tensor],
        parts: torch.Tensor | None,
        of_nope: tuple = (None, None),
    ) -> Gradients:
        """Return all gradients of a call, after the kernels of attention.

        written, of_nope: what ``allocate`` and ``allocate_nope`` gave.
        """
        dq, dk, dv = written
        dsinks = dq_norm = dk_norm = None
        if parts is not None:
            dsinks = parts.sum(0).to(tensors.sinks.dtype)
        if self.norms is not None:
            dq_norm, dk_norm = self.norms(stream, tensors, dq, dk)
        return Gradients(dq, dk, dv, dsinks, dq_norm, dk_norm, *of_nope)


class BackwardCall:
    """The launches of one backward signature: pre-process, dkdv, dq, norms; each None if it has nothing to do.

    is_rotated: q and k are the ``Outputs.q_rot`` and ``k_rot`` of the forward pass, so that nothing is left to rotate.

    In multi-head latent attention dkdv writes ``dk_parts``, one sum for every few heads, and one more launch adds them.
    """

    def __init__(self, problem: Problem, tensors: tuple, config: BackwardConfig, is_rotated: bool = False):
        do, o, _, *of_forward = tensors
        given, outputs = split_outputs(of_forward, 3)
        q, k, v = given.q, given.k, given.v
        batch, sequences = problem.batch, problem.sequences
        inline = config.strategy == "inline" and not is_rotated
        self.preprocess = self.dkdv = self.dq = self.sum_heads = None
        self.latent = problem.nope_dim is not None
        # Key heads as dkdv sees them, and the query heads of each.
        key_heads, group_size = problem.heads_kv, problem.group_size
        if self.latent:
            group_size = math.gcd(problem.heads_q, SHARED_HEADS)
            key_heads = problem.heads_q // group_size
        self.parts_shape = (batch, key_heads, problem.len_k, problem.head_dim)
        query_tiles = tile_count(problem.len_q, sequences, config.dq.block_m)
        strides = dq_strides, dk_strides, dv_strides = result_strides(outputs, gradient_strides(given, o, is_rotated))
        # The products read q and k themselves, because they are rotated in the loops or are rotated already.
        self.takes_given = inline or is_rotated
        q_rot, k_rot = self._rotated(q, k)
        tma = config.tma and not inline and all(map(has_descriptor, (q_rot, k_rot, v, do)))
        chunk, block = config.rotate_heads, config.rotate_rows
        programs = tile_count(problem.len_q, sequences, block) * triton.cdiv(problem.heads_q, chunk) * batch
        if not self.takes_given:
            programs += tile_count(problem.len_k, sequences, block) * triton.cdiv(k.shape[1], chunk) * batch
        # dq_kernel may only skip its wait when dkdv_kernel, which does wait, runs between it and the pre-process.
        pdl = config.pdl and programs > 0 and batch * problem.len_k > 0
        launch_options = {"launch_pdl": True} if pdl else {}
        pad_d = block_d(problem.head_dim)
        shared = shared_arguments(problem, given.cos, given.sin) | {
            "interval_strides": interval_strides(given),
            "do_strides": do.stride(),
            "BLOCK_D": pad_d,
            "ROTATE_INLINE": inline,
            "USE_TMA": tma,
            "USE_INT64_OFFSETS": is_long(*(x.stride() for x in (*rows_of(given), o, do)), *strides),
            "PDL": pdl,
        }
        if programs:
            self.preprocess = Launch(
                preprocess_kernel,
                programs,
                {"num_warps": 4},
                shared,
                o_strides=o.stride(),
                q_strides=q.stride(),
                q_rot_strides=q_rot.stride(),
                k_strides=k.stride(),
                k_rot_strides=k_rot.stride(),
                B=batch,
                HKV=k.shape[1],
                pitch=problem.len_q,
                HEADS=chunk,
                BLOCK_N=block,
                ROTATE=not self.takes_given,
                PROGRESS_ROWS=0,
                COLUMNS=0,
                PAD_TO=0,
                num_counters=None,
            )
        self.results = _Results(problem, given, strides, query_tiles, shared, is_rotated, pdl)
        k_strides = of_shared_head(k_rot.stride()) if self.latent else k_rot.stride()
        shared |= {"q_strides": q_rot.stride(), "k_strides": k_strides, "v_strides": v.stride(), **nope_strides(given)}
        dq_nope_strides, dk_nope_strides = self.results.nope_strides or (None, None)
        head_bytes = (problem.score_dim + problem.value_dim) * q.element_size()
        if batch * problem.len_k:
            tile, heads = config.dkdv, batch * key_heads
            rows = [1, 1, tile.block_m, pad_d] if tma else None
            self.q_source, self.do_source = Source(q_rot, rows), Source(do, rows)
            query_bytes = head_bytes * group_size * problem.longest(problem.len_q)
            self.dkdv = Launch(
                dkdv_kernel,
                tile_count(problem.len_k, sequences, tile.block_n) * heads,
                {**tile.launch_options, **launch_options},
                shared,
                HKV=key_heads,
                GROUP_SIZE=group_size,
                dk_strides=contiguous_strides(self.parts_shape) if self.latent else dk_strides,
                dk_nope_strides=dk_nope_strides,
                dv_strides=dv_strides,
                num_heads=heads,
                heads_per_section=heads_per_section(heads, 1, query_bytes, config.section_bytes),
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
            )
        if batch * problem.len_q:
            tile, heads = config.dq, batch * problem.heads_q
            rows = [1, 1, tile.block_n, pad_d] if tma else None
            self.k_source, self.v_source = Source(k_rot, rows), Source(v, rows)
            key_bytes = head_bytes * problem.longest(problem.len_k)
            self.dq = Launch(
                dq_kernel,
                query_tiles * heads,
                {**tile.launch_options, **launch_options},
                shared,
                dq_strides=dq_strides,
                dq_nope_strides=dq_nope_strides,
                num_heads=heads,
                heads_per_section=heads_per_section(heads, problem.group_size, key_bytes, config.section_bytes),
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
            )
        self.find_blocks = IntervalBlocks(problem, shared, config.dq.block_n) if problem.has_intervals else None
        if self.latent and batch * problem.len_k:
            self.sum_heads = Launch(
                sum_heads_kernel,
                tile_count(problem.len_k, sequences, block) * batch,
                {"num_warps": 4},
                shared,
                parts_strides=contiguous_strides(self.parts_shape),
                dk_strides=dk_strides,
                num_heads=key_heads,
                num_batches=batch,
                BLOCK_N=block,
            )

    def _rotated(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the rotated q and k, or q and k if they are rotated inline or already."""
        if self.takes_given:
            return q, k
        return q.new_empty(q.shape), k.new_empty(k.shape)

    def __call__(self, arguments: tuple) -> Gradients:
        """Launch the call. arguments: do, o, lse, ``Tensors``, and then output buffers dq, dk and dv if it has them."""
        do, o, lse, *of_forward = arguments
        tensors, outputs = split_outputs(of_forward, 3)
        q, k, v = tensors.q, tensors.k, tensors.v
        dq, dk, dv = written = self.results.allocate(q if self.latent else o, k, v, outputs)
        dq_nope, dk_nope = of_nope = self.results.allocate_nope(tensors)
        dk_parts = dk
        if self.latent:
            dk_parts = torch.empty(self.parts_shape, dtype=torch.float32, device=q.device)
        stats = torch.empty((2, *q.shape[:3]), dtype=torch.float32, device=q.device)
        q_rot, k_rot = self._rotated(q, k)
        stream = device.current_stream(q.device)
        parts = self.results.sink_parts(q)
        blocks = None if self.find_blocks is None else self.find_blocks(stream, tensors)
        given = shared_tensors(
            tensors,
            q_ptr=q_rot,
            k_ptr=k_rot,
            v_ptr=v,
            do_ptr=do,
            stats_ptr=stats,
            dq_ptr=dq,
            dq_nope_ptr=dq_nope,
            dk_ptr=dk_parts,
            dk_nope_ptr=dk_nope,
            dv_ptr=dv,
        )
        if self.preprocess is not None:
            rotated = {"q_ptr": q, "q_rot_ptr": q_rot, "k_ptr": k, "k_rot_ptr": k_rot}
            unused = dict.fromkeys(("accumulator_ptr", "progress_ptr", "counters_ptr"))
            self.preprocess(stream, given, o_ptr=o, lse_ptr=lse, **rotated, **unused)
        if self.dkdv is not None:
            self.dkdv(stream, given, q_ptr=self.q_source(q_rot), do_ptr=self.do_source(do))
        if self.dq is not None:
            self.dq(
                stream, given, k_ptr=self.k_source(k_rot), v_ptr=self.v_source(v), dsinks_ptr=parts, blocks_ptr=blocks
            )
        if self.sum_heads is not None:
            self.sum_heads(stream, given, parts_ptr=dk_parts, dk_ptr=dk)
        return self.results.gradients(stream, tensors, written, parts, of_nope)


class OneLaunchCall:
    """One launch for the whole pass, which rotates q and k in its loops unless they are rotated, and one for norms.

    There is no pre-process: the programs compute the row statistics themselves, again for every tile of keys.
    """

    def __init__(self, problem: Problem, tensors: tuple, config: BackwardConfig, is_rotated: bool = False):
        do, o, _, *of_forward = tensors
        given, outputs = split_outputs(of_forward, 3)
        q, k, v = given.q, given.k, given.v
        batch, sequences = problem.batch, problem.sequences
        strides = dq_strides, dk_strides, dv_strides = result_strides(outputs, gradient_strides(given, o, is_rotated))
        key_tiles = tile_count(problem.len_k, sequences, config.dkdv.block_n)
        query_tiles = tile_count(problem.len_q, sequences, config.dq.block_m)
        programs = batch * (key_tiles * problem.heads_kv + query_tiles * problem.heads_q)
        tma = config.tma and is_rotated and all(map(has_descriptor, (q, k, v, do, o)))
        pad_d = block_d(problem.head_dim)
        queries, keys = ([1, 1, rows, pad_d] if tma else None for rows in (config.dq.block_m, config.dq.block_n))
        self.query_source, self.do_source, self.o_source = (Source(x, queries) for x in (q, do, o))
        self.k_source, self.v_source = Source(k, keys), Source(v, keys)
        shared = shared_arguments(problem, given.cos, given.sin) | {
            "interval_strides": interval_strides(given),
            "q_strides": q.stride(),
            "k_strides": k.stride(),
            "BLOCK_D": pad_d,
            "ROTATE_INLINE": not is_rotated,
            "USE_TMA": tma,
            "USE_INT64_OFFSETS": is_long(*(x.stride() for x in (q, k, v, o, do)), *strides),
            "PDL": False,
        }
        self.launch = None
        if programs:
            self.launch = Launch(
                one_launch_kernel,
                programs,
                config.dkdv.launch_options,
                shared,
                v_strides=v.stride(),
                do_strides=do.stride(),
                o_strides=o.stride(),
                dq_strides=dq_strides,
                dk_strides=dk_strides,
                dv_strides=dv_strides,
                num_batches=batch,
                DKDV_BLOCK_M=config.dkdv.block_m,
                DKDV_BLOCK_N=config.dkdv.block_n,
                DQ_BLOCK_M=config.dq.block_m,
                DQ_BLOCK_N=config.dq.block_n,
            )
        self.find_blocks = IntervalBlocks(problem, shared, config.dq.block_n) if problem.has_intervals else None
        self.results = _Results(problem, given, strides, query_tiles, shared, is_rotated, pdl=False)

    def __call__(self, arguments: tuple) -> Gradients:
        """Launch the call, as ``BackwardCall`` does."""
        do, o, lse, *of_forward = arguments
        tensors, outputs = split_outputs(of_forward, 3)
        q, k, v = tensors.q, tensors.k, tensors.v
        dq, dk, dv = written = self.results.allocate(o, k, v, outputs)
        parts = self.results.sink_parts(q)
        stream = device.current_stream(q.device)
        blocks = None if self.find_blocks is None else self.find_blocks(stream, tensors)
        if self.launch is not None:
            own = {"lse_ptr": lse, "dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv, "dsinks_ptr": parts, "blocks_ptr": blocks}
            self.launch(
                stream,
                shared_tensors(tensors, **own),
                q_ptr=self.query_source(q),
                k_ptr=self.k_source(k),
                v_ptr=self.v_source(v),
                do_ptr=self.do_source(do),
                o_ptr=self.o_source(o),
            )
        return self.results.gradients(stream, tensors, written, parts)


def backward_call(
    problem: Problem, tensors: tuple, config: BackwardConfig, is_rotated: bool = False
) -> BackwardCall | OneLaunchCall:
    """Prepare a backward pass: one launch if the configuration says so and nothing must be rotated before it."""
    has_nothing_to_rotate_before = is_rotated or config.strategy == "inline"
    kind = OneLaunchCall if config.one_launch and has_nothing_to_rotate_before else BackwardCall
    return kind(problem, tensors, config, is_rotated)
