"""Launches of the portable forward pass."""

from __future__ import annotations

import torch

from fused_rope_attn.attention.arguments import (
    PADDED_TILE_ROWS,
    nope_strides,
    of_shared_head,
    result_strides,
    rotated_shape,
    rows_of,
    shared_arguments,
    shared_tensors,
)
from fused_rope_attn.attention.configs import ForwardConfig
from fused_rope_attn.attention.intervals import IntervalBlocks, interval_strides
from fused_rope_attn.attention.portable.forward_kernel import forward_kernel
from fused_rope_attn.attention.prepass import Rotate
from fused_rope_attn.attention.problem import Outputs, Problem, Saving, split_outputs
from fused_rope_attn.kernels.arguments import heads_per_section, tile_count
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
        self.o_strides = result_strides(outputs, [output_strides(q, problem.value_dim)])[0]
        self.lse_layout = layout_of_rows(q.shape)
        self.max_logit_shape = problem.max_logit_shape if problem.return_max_logit else None
        self.empty = problem.batch * problem.len_q == 0
        shared = shared_arguments(problem, given.cos, given.sin) | {"interval_strides": interval_strides(given)}
        self.rotate_keys = None
        k_like = k
        if config.strategy == "prepass" and not keys_are_ready and problem.batch * problem.len_k > 0:
            self.rotate_keys = Rotate("k", given, problem, shared, config, max_logit=problem.return_max_logit)
            k_like = k.new_empty(k.shape)
        inline = self.rotate_keys is None and not keys_are_ready
        tile, pad_d = config.tile, block_d(problem.head_dim)
        padding = PADDED_TILE_ROWS if saving is Saving.TILES else 0
        # Smaller tiles would not write all of the padding.
        self.saves_rotated = saving is not Saving.NOTHING and not inline and tile.block_m >= padding
        shape = rotated_shape(problem, in_tiles=padding > 0)
        self.q_rot_layout = shape, contiguous_strides(shape)
        tma = config.tma and not inline and has_descriptor(v) and has_descriptor(k_like)
        block = [1, 1, tile.block_n, pad_d] if tma else None
        self.k_source, self.v_source = Source(k_like, block), Source(v, block)
        # Without a pre-pass there is no launch of this call to overlap with.
        pdl = config.pdl and not inline
        self.find_blocks = IntervalBlocks(problem, shared, tile.block_n) if problem.has_intervals else None
        num_heads = problem.batch * problem.heads_q
        columns = (problem.nope_dim or problem.head_dim) + problem.value_dim
        kv_bytes = problem.longest(problem.len_k) * columns * k.element_size()
        self.launch = Launch(
            forward_kernel,
            tile_count(problem.len_q, problem.sequences, tile.block_m) * num_heads,
            {**tile.launch_options, "launch_pdl": True} if pdl else tile.launch_options,
            shared,
            q_strides=q.stride(),
            **nope_strides(given),
            k_strides=k_like.stride() if problem.nope_dim is None else of_shared_head(k_like.stride()),
            v_strides=v.stride(),
            o_strides=self.o_strides,
            q_rot_strides=self.q_rot_layout[1] if self.saves_rotated else None,
            # Only such calls have queries past the last row of the tables.
            position_limit=given.cos.shape[-2] if keys_are_ready else None,
            num_heads=num_heads,
            heads_per_section=heads_per_section(num_heads, problem.group_size, kv_bytes, config.section_bytes),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_D=pad_d,
            ROTATE_INLINE=inline,
            USE_TMA=tma,
            USE_INT64_OFFSETS=is_long(self.o_strides, *(x.stride() for x in rows_of(given))),
            PREFETCH_ROWS=0 if tma or not pdl else config.prefetch_rows,
            PAD_TO=padding,
            PDL=pdl,
        )

    def __call__(self, given: tuple) -> Outputs:
        """Launch the call. given: ``Tensors``, and then o if the call was prepared for an output buffer."""
        tensors, (o,) = split_outputs(given, 1)
        q, k = tensors.q, tensors.k
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
        self.launch(
            stream,
            shared_tensors(
                tensors, q_ptr=q, q_rot_ptr=q_rot, o_ptr=o, lse_ptr=lse, blocks_ptr=blocks, max_logit_ptr=max_logit
            ),
            k_ptr=self.k_source(k),
            v_ptr=self.v_source(tensors.v),
        )
        return Outputs(o, lse, q_rot, k if self.saves_rotated else None, max_logit)
