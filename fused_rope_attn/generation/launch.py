# mypy: disable-error-code="attr-defined, arg-type"
"""Launches of the generation step, and of writes into a cache."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from fused_rope_attn.attention import arguments
from fused_rope_attn.attention.problem import Problem
from fused_rope_attn.generation.configs import DECODE_ROWS, DecodeConfig
from fused_rope_attn.generation.float8 import HeadScales
from fused_rope_attn.generation.inputs import CacheInputs, StepInputs, StepOutputs
from fused_rope_attn.generation.kernel import combine_kernel, decode_kernel
from fused_rope_attn.generation.pages import BlockTable
from fused_rope_attn.generation.problem import StepTensors, Written, cache_of
from fused_rope_attn.generation.shares import Caches
from fused_rope_attn.generation.write_kernel import WriteInputs, write_kernel
from fused_rope_attn.kernels.schedule import tile_count
from fused_rope_attn.kernels.tiles import RowFormat
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.layouts import block_d, is_long, output_strides


def row_block(rows: int, most: int = DECODE_ROWS) -> int:
    """Return BLOCK_M for a head's query rows: at least a tensor core's 16, at most as many as registers hold."""
    return min(most, max(16, 1 << (rows - 1).bit_length()))


def common_unit(x: torch.Tensor) -> int:
    """Return the elements of 16 bytes if every row of x begins at a multiple of 16 bytes, else 1."""
    unit = 16 // x.element_size()
    return unit if x.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in x.stride()[:3]) else 1


def scale_stride(scale: torch.Tensor | None) -> int | None:
    """Return the stride from one key head's scale to the next; 0 for one scale of all heads, None without scales."""
    return None if scale is None else 0 if scale.numel() == 1 else scale.stride(0)


def cache_inputs(problem: Problem, tensors: StepTensors | Written, pad_d: int, is_wide: bool) -> Any:
    """Return the ``CacheInputs`` of a call. is_wide: offsets within a tile need 64 bits."""
    k_cache, v_cache, table = tensors.k_cache, tensors.v_cache, tensors.block_table
    product_dtype = tl.float32 if problem.dtype is torch.float32 else tl.float16
    is_aligned = min(common_unit(k_cache), common_unit(v_cache)) > 1
    return CacheInputs.host(
        k=arguments.view(k_cache),
        v=arguments.view(v_cache),
        table=None if table is None else BlockTable.host(table, table.stride(), PAGE_SIZE=k_cache.shape[2]),
        k_scales=HeadScales.host(tensors.k_scale, scale_stride(tensors.k_scale)),
        v_scales=HeadScales.host(tensors.v_scale, scale_stride(tensors.v_scale)),
        IS_ROTATED=cache_of(problem).is_rotated,
        FLOAT8_DTYPE=product_dtype if cache_of(problem).is_float8 else None,
        IS_ALIGNED=is_aligned and k_cache.stride(3) == 1 and v_cache.stride(3) == 1,
        format=RowFormat.host(problem.head_dim, pad_d, is_wide, ALIGNED=is_aligned),
    )


def tile_alignment(page_size: int | None, block_n: int, by_page: bool) -> int:
    """Return ALIGNMENT of tiles of ``block_n`` keys in pages: 1 if a tile may begin within a page and end outside."""
    if page_size is None:
        return 1
    if page_size % block_n == 0:
        return block_n
    return page_size if by_page and block_n % page_size == 0 else 1


def step_inputs(problem: Problem, tensors: StepTensors, lengths: dict[str, Any], columns: tuple[int, bool]) -> Any:
    """Return the ``StepInputs`` of a call. lengths: compile-time fields of ``Caches``; columns as ``cache_inputs``."""
    return StepInputs.host(
        q=arguments.view(tensors.q),
        k=arguments.view(tensors.k),
        v=arguments.view(tensors.v),
        cache=cache_inputs(problem, tensors, *columns),
        lengths=Caches.host(tensors.cache_seqlens, tensors.kv_starts, **lengths),
        rotations=arguments.rotation_of(problem, tensors, inline=True),
        scale=arguments.scale_of(problem),
        format=RowFormat.host(problem.head_dim, *columns),
    )


class StepCall:
    """The launches of one signature: every program's share of all key tiles, then the sums over shared blocks."""

    def __init__(self, problem: Problem, tensors: tuple, config: DecodeConfig):
        given = StepTensors(*tensors)
        q, k_cache, v_cache = given.q, given.k_cache, given.v_cache
        appends = cache_of(problem).appends
        group_rows = problem.len_q * problem.group_size
        block_m, block_n = row_block(group_rows, config.block_m or DECODE_ROWS), config.block_n
        # Products have half the columns of float8 caches at a time, and at least 16.
        pad_d = max(32 if cache_of(problem).is_float8 else 16, block_d(problem.head_dim))
        is_chunk = config.block_m is not None
        many_rows = block_m == DECODE_ROWS and not is_chunk  # their sums leave fewer registers for scores
        if many_rows:
            block_n = min(block_n, 64)
        options = {**config.launch_options}
        if many_rows:  # so many rows of sums take the registers of twice as many threads
            options["num_warps"] = max(8, config.num_warps)
        all_rows = problem.batch * problem.heads_kv * group_rows
        new_with_parts = appends and not is_chunk and all_rows <= config.rows_apart
        if new_with_parts and config.registers_apart is not None and not many_rows:
            options["maxnreg"] = config.registers_apart
        at_once = max(1, config.programs_per_sm * config.num_warps // options["num_warps"])
        heads = problem.batch * problem.heads_kv * -(-group_rows // block_m)
        # No more programs than there can be shares.
        most = heads * max(1, -(-problem.len_k // block_n))
        programs = min(at_once * device.num_sms(q.device), most)
        self.problem = problem
        self.o_strides = output_strides(q)
        whole_parts = heads if new_with_parts else 0
        self.workspace = (2 * programs + whole_parts) * block_m * (problem.head_dim + 2)
        page_size = cache_of(problem).page_size
        self.tiles = {
            "HAS_NEW_KEYS": appends,
            "BLOCK_N": block_n,
            "BLOCK_B": 32 if problem.batch <= 32 else 256,
            "ALIGNMENT": tile_alignment(page_size, block_n, config.by_page),
            "ONE_PASS": problem.batch <= 32,
        }
        new_strides = [x.stride() for x in (given.k, given.v)] if appends else []
        is_wide = is_long(q.stride(), k_cache.stride(), v_cache.stride(), self.o_strides, *new_strides)
        self.columns = pad_d, is_wide
        # Only the assertion that a page is in the pool is kept, and no others.
        asserts = {} if page_size is None else {"debug": True}
        shared = arguments.numbers_of(problem) | {
            "programs": programs,
            "B": problem.batch,
            "S": problem.len_k,
            "num_pages": None if page_size is None else k_cache.shape[0],
            "position_limit": given.cos.shape[-2],
            "BLOCK_M": block_m,
            "BLOCK_NEW": min(64, block_n) if is_chunk else 16,
            "NEW_WITH_PARTS": new_with_parts,
            "PDL": config.pdl,
        }
        self.attend = Launch(decode_kernel, programs, options | asserts, shared, IS_CHUNK=is_chunk)
        overlaps = {"launch_pdl": True} if config.pdl else {}
        combine_options = {"num_warps": 4, **overlaps, **asserts}
        self.combine = Launch(combine_kernel, all_rows, combine_options, shared, BLOCK_PARTS=config.combine_parts)

    def __call__(self, flat: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        tensors, problem = StepTensors(*flat), self.problem
        q = tensors.q
        o = torch.empty_strided(q.shape, self.o_strides, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        given = {
            "inputs": step_inputs(problem, tensors, self.tiles, self.columns),
            "outputs": StepOutputs.host(arguments.view(o), lse, tensors.sinks),
            "parts_ptr": torch.empty(self.workspace, dtype=torch.float32, device=q.device),
        }
        stream = device.current_stream(q.device)
        self.attend(stream, given)
        self.combine(stream, given)
        return o, lse


class WriteCall:
    """The launch of one signature that puts new keys and values into a cache."""

    def __init__(self, problem: Problem, tensors: tuple, pdl: bool = False):
        """pdl: the next launch may begin early, and waits for this one."""
        given = Written(*tensors)
        block_t, heads = 16 if device.is_interpreted() else 32, min(4, problem.heads_kv)
        tiles = tile_count(problem.len_q, problem.sequences, block_t)
        is_wide = is_long(*[x.stride() for x in (given.k, given.v, given.k_cache, given.v_cache)])
        self.problem, self.columns = problem, (block_d(problem.head_dim), is_wide)
        self.launch = Launch(
            write_kernel,
            -(-problem.heads_kv // heads) * tiles * given.k.shape[0],
            {"num_warps": 4, **({} if given.block_table is None else {"debug": True})},
            arguments.numbers_of(problem),
            N=problem.len_q,
            S=problem.len_k,
            num_pages=None if given.block_table is None else given.k_cache.shape[0],
            position_limit=given.cos.shape[-2],
            num_tiles=tiles,
            BLOCK_T=block_t,
            HEADS=heads,
            PDL=pdl,
        )

    def __call__(self, flat: tuple, k_norm: torch.Tensor | None = None, sums: torch.Tensor | None = None) -> None:
        """k_norm (D,): the weights of a norm of k, if the problem has one; sums as ``write_kernel`` writes them."""
        tensors, problem = Written(*flat), self.problem
        inputs = WriteInputs.host(
            k=arguments.view(tensors.k),
            v=arguments.view(tensors.v),
            cache=cache_inputs(problem, tensors, *self.columns),
            tables=arguments.tables_of(problem, tensors),
            k_norm=arguments.norm_of(problem, k_norm),
            seqlens_ptr=tensors.cache_seqlens,
            new_lens_ptr=tensors.new_lens,
            cu_seqlens_ptr=tensors.cu_seqlens,
            sums_ptr=sums,
            format=RowFormat.host(problem.head_dim, *self.columns),
        )
        self.launch(device.current_stream(tensors.k.device), inputs=inputs)
