# mypy: disable-error-code="attr-defined"
"""Launches of the sm_90 forward pass."""

import dataclasses
import math

import torch

from fused_rope_attn.attention import arguments, prepass
from fused_rope_attn.attention.configs import HopperForwardConfig
from fused_rope_attn.attention.hopper import channels, forward_kernel, forward_producers, forward_tiles, intervals
from fused_rope_attn.attention.hopper.channels import ROWS
from fused_rope_attn.attention.prepass_kernel import TILE_WORDS
from fused_rope_attn.attention.problem import Outputs, Problem, Saving, split_outputs
from fused_rope_attn.kernels import schedule, tiles
from fused_rope_attn.runtime import device, layouts
from fused_rope_attn.runtime.launch import Launch, Source
from fused_rope_attn.runtime.triton_compat import gl

# int32 words of the counter of a call without packed sequences.
COUNTER_WORDS = TILE_WORDS.value


def is_aligned(problem: Problem, block_m: int, block_n: int) -> bool:
    """Return whether the diagonal of each tile is that of one key block, and nothing but causality hides keys.

    The first of two warpgroups then sees half of that block, the second one sees the first half whole, and all other
    blocks are seen whole. Calls with more queries than keys are excluded, because some of their tiles see nothing.
    """
    is_masked = problem.window is not None or problem.is_packed or problem.has_kv_starts or problem.has_kv_lens
    is_masked = is_masked or problem.has_intervals
    keys_before = problem.len_k - problem.len_q
    same_rows = block_m == block_n == 2 * ROWS.value and keys_before >= 0 and keys_before % block_n == 0
    return problem.causal and same_rows and not is_masked


VARIANT: dict = {}  # an experiment's switches, read when a call is prepared


class ForwardCall:
    """The launches of one forward signature.

    Packed queries that the main kernel rotates (D up to 128) can be saved as ``Saving.TILES`` only. Those of
    latent attention are rotated by the pre-pass, and saved row by row.

    keys_are_ready: k is rotated and in pair order when the call begins, and an earlier launch zeroes the counter that
    the call is given. k may have fewer rows than NK if no query sees the keys past its end.
    """

    def __init__(
        self,
        problem: Problem,
        tensors: tuple,
        config: HopperForwardConfig,
        saving: Saving = Saving.NOTHING,
        keys_are_ready: bool = False,
    ):
        given, outputs = split_outputs(tensors, 1)
        if problem.is_plain and config.rotates_queries:  # no warps take registers to rotate
            registers = VARIANT.get("registers", channels.MULTIPLY_REGISTERS.value)
            config = dataclasses.replace(config, rotates_queries=False, attend_registers=registers)
        latent = problem.nope_dim is not None
        # The columns that are not rotated are those of the kernel's main tiles.
        q, k, v = (given.q_nope, given.k_nope, given.v) if latent else (given.q, given.k, given.v)
        columns = problem.nope_dim or problem.head_dim
        pad_d = max(64, layouts.block_d(columns))
        block_m = config.consumers * ROWS.value
        reads_rotated = not config.rotates_queries
        self.empty = problem.batch * problem.len_q == 0
        self.o_shape = q.shape
        self.o_strides = arguments.result_strides(outputs, [layouts.output_strides(q)])[0]
        self.packed = problem.is_packed
        self.max_logit_shape = problem.maxima_shape if problem.return_max_logit else None
        self.saves_rotated = saving is not Saving.NOTHING
        if self.empty:
            return
        block_n = config.block_n
        self.problem, self.config, self.is_long = problem, config, layouts.is_long(given.q.stride(), self.o_strides)
        numbers = arguments.numbers_of(problem)
        self.visits = intervals.Visits(problem, block_m, block_n, config.pdl) if problem.has_intervals else None
        # The TMA reads q_nope, which has no padding, and the rotated columns are read by the same rows.
        in_tiles = saving is Saving.TILES and not latent
        self.rotate_queries = None
        if reads_rotated and not problem.is_plain:
            overlaps = self.visits is not None
            if not VARIANT.get("joint"):
                self.rotate_queries = prepass.Rotate("q", given, problem, config, in_tiles=in_tiles, overlaps=overlaps, start_after=VARIANT.get("pdl_in", False))
        self.rotate_keys, self.joint = None, False
        self.is_static = VARIANT.get("static", False) and problem.is_plain and not problem.is_packed
        if not keys_are_ready and not self.is_static:
            overlaps = self.rotate_queries is not None or self.visits is not None
            name = "" if problem.is_plain else "k"
            self.joint = VARIANT.get("joint") and reads_rotated and not problem.is_plain
            if self.joint:
                name = "qk"
            self.rotate_keys = prepass.Rotate(name, given, problem, config, tile_rows=block_m, overlaps=overlaps, start_after=VARIANT.get("pdl_in", False))
        element = gl.bfloat16 if q.dtype is torch.bfloat16 else gl.float16

        def source(x: torch.Tensor, rows: int, columns: int) -> Source:
            block = [1, 1, rows, columns]
            return Source(x, block, gl.NVMMASharedLayout.get_default_for(block, element))

        # The rotated columns of latent attention have tiles of their own.
        rot_d = problem.head_dim if latent else pad_d
        q_shape = arguments.rotated_shape(problem, in_tiles=in_tiles)
        self.q_rot_layout = q_shape, layouts.contiguous_strides(q_shape)
        # A plain call reads q and k themselves.
        self.q_rot = source(q if problem.is_plain else q.new_empty(q_shape), ROWS.value, rot_d)
        self.k_rot = source(k if problem.is_plain else given.k.new_empty(given.k.shape), block_n, rot_d)
        self.v = source(v, block_n, pad_d)
        o_like = torch.empty_strided(q.shape, self.o_strides, dtype=q.dtype, device=q.device)
        # The buffers of wide heads and latent attention leave shared memory for half of O's columns.
        self.o = source(o_like, ROWS.value, pad_d if pad_d <= 128 and not latent else pad_d // 2)
        self.nope = (source(q, ROWS.value, pad_d), source(k, block_n, pad_d)) if latent else None
        num_heads = problem.batch * problem.heads_q
        tiles_per_head = schedule.tile_count(problem.len_q, problem.sequences, block_m)
        num_tiles = tiles_per_head * num_heads
        kv_bytes = 2 * problem.longest(problem.len_k) * columns * k.element_size()
        self.launch = Launch(
            forward_kernel.forward_kernel,
            min(num_tiles, device.num_sms(q.device)),
            {"num_warps": 4, **({"launch_pdl": True} if config.pdl else {}), **VARIANT.get("options", {})},
            NQ=problem.len_q,
            NK=problem.len_k,
            GROUP_SIZE=problem.group_size,
            num_tiles=num_tiles,
            heads_per_section=schedule.heads_per_section(num_heads, problem.group_size, kv_bytes, config.section_bytes),
            tiles_per_head=tiles_per_head if self.packed else None,
            window_left=None if problem.has_intervals else numbers["window_left"],
            window_right=None if problem.has_intervals else numbers["window_right"],
            # Only such calls have queries past the last row of the tables.
            position_limit=arguments.table_rows(given) if keys_are_ready else None,
            sizes=forward_kernel.ForwardSizes.host(
                D=columns,
                STAGES=config.stages,
                CONSUMERS=config.consumers,
                ATTEND_REGISTERS=config.attend_registers,
                ROTATE_REGISTERS=config.rotate_registers,
                QUERIES_IN_TILES=in_tiles and self.packed,
                USE_INT64_OFFSETS=self.is_long,
                PDL=config.pdl,
                QUERY_SLOTS=VARIANT.get("slots", 1),
                EARLY=VARIANT.get("early", False) and problem.is_plain and not self.packed,
                LOOKUP=VARIANT.get("lookup", "last"),
                KEEPS_QUERIES=VARIANT.get("keep", False),
                IS_STATIC=self.is_static,
                OPAQUE=VARIANT.get("opaque", False),
            ),
        )
        self.is_aligned = is_aligned(problem, block_m, block_n)
        self.maximum = None
        if self.max_logit_shape is not None and 0 not in self.max_logit_shape:  # there may be no sequence
            self.maximum = Launch(
                forward_kernel.max_logit_kernel,
                math.prod(self.max_logit_shape),
                {"num_warps": 8},
                H=problem.heads_q,
                NQ=problem.len_q,
                BLOCK=4096,
            )

    def __call__(self, given: tuple, counter: torch.Tensor | None = None) -> Outputs:
        """Launch the call.

        given: ``Tensors``, and then o if the call was prepared for an output buffer. counter: given if and only if keys
        are ready.
        """
        tensors, (o,) = split_outputs(given, 1)
        q = tensors.q
        if o is None:
            o = torch.empty_strided(self.o_shape, self.o_strides, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        max_logit = highest = None
        if self.max_logit_shape is not None:
            max_logit = torch.empty(self.max_logit_shape, dtype=torch.float32, device=q.device)
            highest = torch.empty_like(lse)
        if self.empty:
            return Outputs(o, lse, max_logit=None if max_logit is None else max_logit.fill_(float("-inf")))
        problem, stream = self.problem, device.current_stream(q.device)
        # Before the pre-pass, which overlaps with it.
        lists = {} if self.visits is None else self.visits(stream, tensors)
        if self.rotate_keys is not None:
            counter = torch.empty(self.rotate_keys.counter_size, dtype=torch.int32, device=q.device)
        q_rot = query_source = None
        if self.rotate_queries is not None:
            q_rot = self.rotate_queries(stream, tensors)
        elif problem.is_plain:
            q_rot = q
        elif self.joint:
            q_rot = None
        else:
            block_d = max(64, layouts.block_d(problem.head_dim))
            query_source = forward_producers.QuerySource.host(
                view=arguments.view(tensors.q),
                tables=arguments.tables_of(problem, tensors),
                norm=arguments.norm_of(problem, tensors.q_norm),
                sign=arguments.scale_and_sign(problem.softmax_scale)[1],
                TOKEN_TABLES=problem.token_tables,
                format=tiles.RowFormat.host(problem.head_dim, block_d, self.is_long),
            )
            if self.saves_rotated:
                q_rot = torch.empty_strided(*self.q_rot_layout, dtype=q.dtype, device=q.device)
        k_rot = None if self.rotate_keys is None else self.rotate_keys(stream, tensors, counter)
        if self.rotate_keys is not None and self.joint:
            q_rot, k_rot = k_rot
        k = tensors.k if k_rot is None else k_rot
        self.launch(
            stream,
            q_rot_desc=None if q_rot is None else self.q_rot(q_rot),
            q_nope_desc=None if self.nope is None else self.nope[0](tensors.q_nope),
            k_rot_desc=self.k_rot(k),
            k_nope_desc=None if self.nope is None else self.nope[1](tensors.k_nope),
            v_desc=self.v(tensors.v),
            o_desc=self.o(o),
            query_source=query_source,
            tile_source=forward_tiles.TileSource.host(
                counter,
                tensors.kv_starts,
                tensors.kv_lens,
                READS_LENGTHS=0 if lists else problem.reads_lengths,
                FROM_START=problem.batch_invariant and problem.has_kv_starts,
                IS_ALIGNED=self.is_aligned,
                **lists,
            ),
            weighing=forward_kernel.Weighing.host(
                arguments.scale_of(problem),
                tensors.sinks,
                # Pinning takes registers. With a window a tile has few blocks, so they cost more than they save. Packed
                # calls have no spare registers, and would spill 168 bytes.
                PIN_SUMS=self.config.pin and problem.window_left is None and not self.packed,
                VALUES=self.config.values,
            ),
            output=forward_kernel.ForwardOutput.host(
                arguments.view(o, self.o_strides) if self.packed else None, lse, highest
            ),
        )
        if self.maximum is not None:
            self.maximum(stream, highest_ptr=highest, max_logit_ptr=max_logit, cu_q_ptr=tensors.cu_seqlens_q)
        if not self.saves_rotated:
            q_rot = k = None
        elif self.nope is not None:
            k = tensors.k  # backward reads the caller's, see ``LatentBackwardCall``
        return Outputs(o, lse, q_rot, k, max_logit)
