# mypy: disable-error-code="attr-defined, arg-type"
"""Launches of the portable forward pass."""

from __future__ import annotations

import torch

from fused_rope_attn.attention import arguments
from fused_rope_attn.attention.configs import ForwardConfig
from fused_rope_attn.attention.intervals import IntervalBlocks
from fused_rope_attn.attention.portable.forward_kernel import ForwardInputs, ForwardOutputs, forward_kernel
from fused_rope_attn.attention.portable.parts import NopeViews
from fused_rope_attn.attention.prepass import Rotate
from fused_rope_attn.attention.problem import Outputs, Problem, Saving, split_outputs
from fused_rope_attn.kernels.schedule import heads_per_section, tile_count
from fused_rope_attn.kernels.tiles import RowFormat
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch, Source
from fused_rope_attn.runtime.layouts import (
    block_d,
    contiguous_strides,
    has_descriptor,
    is_long,
    layout_of_rows,
    output_strides,
)


class ForwardCall:
    """The launches of one forward signature: with a pre-pass, or without.

    keys_are_ready: k is rotated and in pair order when the call begins.
    """

    def __init__(
        self,
        problem: Problem,
        tensors: tuple,
        config: ForwardConfig,
        saving: Saving = Saving.NOTHING,
        keys_are_ready: bool = False,
    ):
        given, outputs = split_outputs(tensors, 1)
        q, k, v = given.q, given.k, given.v
        self.o_shape = (*q.shape[:3], problem.value_dim)
        self.o_strides = arguments.result_strides(outputs, [output_strides(q, problem.value_dim)])[0]
        self.lse_layout = layout_of_rows(q.shape)
        self.max_logit_shape = problem.max_logit_shape if problem.return_max_logit else None
        self.empty = problem.batch * problem.len_q == 0
        self.problem = problem
        self.rotate_keys = None
        k_like = k
        if config.strategy == "prepass" and not keys_are_ready and problem.batch * problem.len_k > 0:
            self.rotate_keys = Rotate("k", given, problem, config, max_logit=problem.return_max_logit)
            k_like = k.new_empty(k.shape)
        inline = self.rotate_keys is None and not keys_are_ready
        tile, pad_d = config.tile, block_d(problem.head_dim)
        padding = arguments.PADDED_TILE_ROWS if saving is Saving.TILES else 0
        # Smaller tiles would not write all of the padding.
        self.saves_rotated = saving is not Saving.NOTHING and not inline and tile.block_m >= padding
        shape = arguments.rotated_shape(problem, in_tiles=padding > 0)
        self.q_rot_layout = shape, contiguous_strides(shape)
        tma = config.tma and not inline and has_descriptor(v) and has_descriptor(k_like)
        block = [1, 1, tile.block_n, pad_d] if tma else None
        self.k_source, self.v_source = Source(k_like, block), Source(v, block)
        # Without a pre-pass there is no launch of this call to overlap with.
        pdl = config.pdl and not inline
        self.find_blocks = IntervalBlocks(problem, tile.block_n) if problem.has_intervals else None
        is_wide = is_long(self.o_strides, *(x.stride() for x in arguments.rows_of(given)))
        self.formats = [
            None if columns is None else RowFormat.host(columns, block_d(columns), is_wide, ALIGNED=True)
            for columns in (problem.head_dim, problem.value_dim, problem.nope_dim)
        ]
        self.inline, self.tma, self.padding = inline, tma, padding
        self.prefetch_rows = 0 if tma or not pdl else config.prefetch_rows
        num_heads = problem.batch * problem.heads_q
        columns = (problem.nope_dim or problem.head_dim) + problem.value_dim
        kv_bytes = problem.longest(problem.len_k) * columns * k.element_size()
        self.launch = Launch(
            forward_kernel,
            tile_count(problem.len_q, problem.sequences, tile.block_m) * num_heads,
            {**tile.launch_options, "launch_pdl": True} if pdl else tile.launch_options,
            arguments.numbers_of(problem),
            # Only such calls have queries past the last row of the tables.
            position_limit=given.cos.shape[-2] if keys_are_ready else None,
            num_heads=num_heads,
            heads_per_section=heads_per_section(num_heads, problem.group_size, kv_bytes, config.section_bytes),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PDL=pdl,
        )

    def __call__(self, given: tuple) -> Outputs:
        """Launch the call. given: ``Tensors``, and then o if the call was prepared for an output buffer."""
        tensors, (o,) = split_outputs(given, 1)
        problem, q, k = self.problem, tensors.q, tensors.k
        if o is None:
            o = torch.empty_strided(self.o_shape, self.o_strides, dtype=q.dtype, device=q.device)
        lse = torch.empty_strided(*self.lse_layout, dtype=torch.float32, device=q.device)
        max_logit = None
        if self.max_logit_shape is not None:
            max_logit = torch.empty(self.max_logit_shape, dtype=torch.float32, device=q.device)
            if self.empty or self.rotate_keys is None:
                # No pre-pass fills it. A call that PyTorch fills is not replayed.
                max_logit.fill_(float("-inf"))
        if self.empty:
            return Outputs(o, lse, max_logit=max_logit)
        stream = device.current_stream(q.device)
        # Before the pre-pass: the kernel reads the bounds before it waits for that.
        blocks = None if self.find_blocks is None else self.find_blocks(stream, tensors)
        if self.rotate_keys is not None:
            k = self.rotate_keys(stream, tensors, max_logit=max_logit)
        q_rot = None
        if self.saves_rotated:
            q_rot = torch.empty_strided(*self.q_rot_layout, dtype=q.dtype, device=q.device)
        nope, k_strides = None, None
        if problem.nope_dim is not None:
            views = arguments.view(tensors.q_nope), arguments.view(tensors.k_nope)
            nope = NopeViews.host(*views, None, None, arguments.nope_sign_of(problem), self.formats[2])
            k_strides = arguments.of_shared_head(k.stride())
        self.launch(
            stream,
            inputs=ForwardInputs.host(
                q=arguments.view(q),
                k=arguments.view(k, k_strides),
                v=arguments.view(tensors.v),
                sinks_ptr=tensors.sinks,
                format=self.formats[0],
                value_format=self.formats[1],
                nope=nope,
                scale=arguments.scale_of(problem),
                USE_TMA=self.tma,
                PREFETCH_ROWS=self.prefetch_rows,
            ),
            k_desc=self.k_source(k),
            v_desc=self.v_source(tensors.v),
            masks=arguments.masks_of(problem, tensors, blocks),
            rotations=arguments.rotation_of(problem, tensors, self.inline),
            outputs=ForwardOutputs.host(arguments.view(o), lse, max_logit, arguments.view(q_rot), PAD_TO=self.padding),
        )
        return Outputs(o, lse, q_rot, k if self.saves_rotated else None, max_logit)
