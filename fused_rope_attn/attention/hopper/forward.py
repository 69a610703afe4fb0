"""Launches of the sm_90 forward pass."""

from __future__ import annotations

import math

import torch

from fused_rope_attn.attention.arguments import result_strides, rotated_shape, shared_arguments, shared_tensors
from fused_rope_attn.attention.configs import HopperForwardConfig
from fused_rope_attn.attention.hopper.forward_kernel import forward_kernel
from fused_rope_attn.attention.hopper.intervals import NO_VISITS, Visits, without_masks
from fused_rope_attn.attention.hopper.max_logit_kernel import max_logit_kernel
from fused_rope_attn.attention.hopper.shapes import ROWS, is_aligned
from fused_rope_attn.attention.prepass import Rotate
from fused_rope_attn.attention.prepass_kernel import TILE_WORDS
from fused_rope_attn.attention.problem import Outputs, Problem, Saving, split_outputs
from fused_rope_attn.kernels.arguments import heads_per_section, tile_count
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch, Source
from fused_rope_attn.runtime.layouts import block_d, contiguous_strides, is_long, layout_of_rows, output_strides
from fused_rope_attn.runtime.triton_compat import gl

# int32 words of the counter of a call without packed sequences.
COUNTER_WORDS = TILE_WORDS.value


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
        latent = problem.nope_dim is not None
        # The columns that are not rotated are those of the kernel's main tiles.
        q, k, v = (given.q_nope, given.k_nope, given.v) if latent else (given.q, given.k, given.v)
        columns = problem.nope_dim or problem.head_dim
        pad_d = max(64, block_d(columns))
        block_m = config.consumers * ROWS.value
        reads_rotated = not config.rotates_queries
        self.empty = problem.batch * problem.len_q == 0
        self.o_shape = q.shape
        self.o_strides = result_strides(outputs, [output_strides(q)])[0]
        self.lse_layout = layout_of_rows(q.shape)
        self.packed = problem.is_packed
        self.max_logit_shape = problem.max_logit_shape if problem.return_max_logit else None
        self.saves_rotated = saving is not Saving.NOTHING
        if self.empty:
            return
        block_n = config.block_n
        shared = shared_arguments(problem, given.cos, given.sin)
        self.visits = None
        main_shared, num_blocks = shared, None
        if problem.has_intervals:
            self.visits = Visits(problem, given, shared, block_m, block_n, config.pdl)
            main_shared, num_blocks = without_masks(shared), self.visits.num_blocks
        # The TMA reads q_nope, which has no padding, and the rotated columns are read by the same rows.
        in_tiles = saving is Saving.TILES and not latent
        self.rotate_queries = None
        if reads_rotated:
            overlaps = self.visits is not None
            self.rotate_queries = Rotate("q", given, problem, shared, config, in_tiles=in_tiles, overlaps=overlaps)
        self.rotate_keys = None
        if not keys_are_ready:
            self.rotate_keys = Rotate(
                "k",
                given,
                problem,
                shared,
                config,
                counter=True,
                tile_rows=block_m,
                overlaps=reads_rotated or self.visits is not None,
            )
        element = gl.bfloat16 if q.dtype is torch.bfloat16 else gl.float16
        layout = gl.NVMMASharedLayout.get_default_for
        # Columns of O in one store.
        stored = pad_d if pad_d <= 128 and not latent else pad_d // 2
        keys, rows, store = [1, 1, block_n, pad_d], [1, 1, ROWS.value, pad_d], [1, 1, ROWS.value, stored]
        o_like = torch.empty_strided(q.shape, self.o_strides, dtype=q.dtype, device=q.device)
        k_like = k if latent else k.new_empty(k.shape)
        self.k_source, self.v_source = (Source(x, keys, layout(keys, element)) for x in (k_like, v))
        self.o_source = Source(o_like, store, layout(store, element))
        # rotated_source: the rotated queries. nope_source: the other columns of queries in latent attention.
        self.rotated_source: Source
        self.nope_source: Source | None = None
        if latent:
            blocks = ([1, 1, n, problem.head_dim] for n in (ROWS.value, block_n))
            self.rotated_source, self.k_rope_source = (
                Source(x.new_empty(x.shape), block, layout(block, element))
                for x, block in zip((given.q, given.k), blocks)
            )
            self.nope_source = Source(q, rows, layout(rows, element))
            self.q_rot_layout = given.q.shape, contiguous_strides(given.q.shape)
        elif reads_rotated or self.saves_rotated:
            shape = rotated_shape(problem, in_tiles=in_tiles)
            self.q_rot_layout = shape, contiguous_strides(shape)
            self.rotated_source = Source(q.new_empty(shape), rows, layout(rows, element))
        num_heads = problem.batch * problem.heads_q
        tiles_per_head = tile_count(problem.len_q, problem.sequences, block_m)
        num_tiles = tiles_per_head * num_heads
        kv_bytes = 2 * problem.longest(problem.len_k) * columns * k.element_size()
        self.launch = Launch(
            forward_kernel,
            min(num_tiles, device.num_sms(q.device)),
            {"num_warps": 4, **({"launch_pdl": True} if config.pdl else {})},
            main_shared,
            num_blocks=num_blocks,
            q_strides=given.q.stride(),
            o_strides=self.o_strides if self.packed else None,
            num_tiles=num_tiles,
            num_heads=num_heads,
            heads_per_section=heads_per_section(num_heads, problem.group_size, kv_bytes, config.section_bytes),
            tiles_per_head=tiles_per_head if self.packed else None,
            # Only such calls have queries past the last row of the tables.
            position_limit=given.cos.shape[-2] if keys_are_ready else None,
            D=columns,
            BLOCK_N=block_n,
            BLOCK_D=pad_d,
            STAGES=config.stages,
            CONSUMERS=config.consumers,
            USE_INT64_OFFSETS=is_long(given.q.stride(), self.o_strides),
            PDL=config.pdl,
            ATTEND_REGISTERS=config.attend_registers,
            ROTATE_REGISTERS=config.rotate_registers,
            # Pinning takes registers. With a window a tile has few blocks, so they cost more than they save. Packed
            # calls have no spare registers, and would spill 168 bytes.
            PIN_SUMS=config.pin and problem.window_left is None and not self.packed,
            QUERIES_IN_TILES=in_tiles and self.packed,
            IS_ALIGNED=is_aligned(problem, block_m, block_n),
            VALUES=config.values,
            Q_LAYOUT=layout([1, 1, ROWS.value, problem.head_dim] if latent else [ROWS.value, pad_d], element),
        )
        self.maximum = None
        if self.max_logit_shape is not None and 0 not in self.max_logit_shape:  # there may be no sequence
            self.maximum = Launch(
                max_logit_kernel,
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
        lse = torch.empty_strided(*self.lse_layout, dtype=torch.float32, device=q.device)
        max_logit = highest = None
        if self.max_logit_shape is not None:
            max_logit = torch.empty(self.max_logit_shape, dtype=torch.float32, device=q.device)
            highest = torch.empty_strided(*self.lse_layout, dtype=torch.float32, device=q.device)
        if self.empty:
            return Outputs(o, lse, max_logit=None if max_logit is None else max_logit.fill_(float("-inf")))
        stream = device.current_stream(q.device)
        # Before the pre-pass, which overlaps with it.
        masks = NO_VISITS if self.visits is None else self.visits(stream, tensors)
        if self.rotate_keys is not None:
            counter = torch.empty(self.rotate_keys.counter_size, dtype=torch.int32, device=q.device)
        q_rot = q_desc = q_rot_desc = q_rope_desc = k_rope_desc = None
        if self.rotate_queries is not None:
            q_rot, q = self.rotate_queries(stream, tensors), None
            q_desc = self.rotated_source(q_rot)
        elif self.saves_rotated:
            q_rot = torch.empty_strided(*self.q_rot_layout, dtype=q.dtype, device=q.device)
            q_rot_desc = self.rotated_source(q_rot)
        k = tensors.k if self.rotate_keys is None else self.rotate_keys(stream, tensors, counter)
        k_columns = k
        if self.nope_source is not None:
            q_rope_desc, k_rope_desc = q_desc, self.k_rope_source(k)
            q_desc, k_columns = self.nope_source(tensors.q_nope), tensors.k_nope
        self.launch(
            stream,
            shared_tensors(tensors, **masks),
            q_ptr=q,
            q_desc=q_desc,
            q_rot_desc=q_rot_desc,
            k_desc=self.k_source(k_columns),
            q_rope_desc=q_rope_desc,
            k_rope_desc=k_rope_desc,
            v_desc=self.v_source(tensors.v),
            o_desc=self.o_source(o),
            o_ptr=o if self.packed else None,
            lse_ptr=lse,
            counter_ptr=counter,
            highest_ptr=highest,
            q_norm_ptr=tensors.q_norm if self.rotate_queries is None else None,
        )
        if self.maximum is not None:
            self.maximum(stream, highest_ptr=highest, max_logit_ptr=max_logit, cu_q_ptr=tensors.cu_seqlens_q)
        if not self.saves_rotated:
            q_rot = k = None
        elif self.nope_source is not None:
            k = tensors.k  # backward reads the caller's, see ``LatentBackwardCall``
        return Outputs(o, lse, q_rot, k, max_logit)
