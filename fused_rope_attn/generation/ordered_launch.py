# mypy: disable-error-code="attr-defined, arg-type"
"""Launches of a generation step that gives the bits of the sm_90 forward; the kernels say how."""

from __future__ import annotations

import torch

from fused_rope_attn.attention import arguments
from fused_rope_attn.attention.problem import Problem
from fused_rope_attn.generation.configs import DECODE_ROWS, OrderedConfig
from fused_rope_attn.generation.inputs import StepOutputs
from fused_rope_attn.generation.launch import WriteCall, common_unit, step_inputs
from fused_rope_attn.generation.ordered_attend import attend_kernel
from fused_rope_attn.generation.ordered_scores import score_kernel
from fused_rope_attn.generation.ordered_units import Workspaces, query_kernel
from fused_rope_attn.generation.ordered_values import value_kernel
from fused_rope_attn.generation.problem import StepTensors, Written, cache_of
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.entry import fill
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.layouts import block_d, is_long, output_strides


def can_copy(given: StepTensors) -> bool:
    """Return whether the caches' rows can be copied 16 bytes at a time."""
    return all(x.stride(3) == 1 and common_unit(x) > 1 for x in (given.k_cache, given.v_cache))


class OrderedCall:
    """The launches of one signature: new tokens, queries, and either one loop over the tiles for each unit, or scores
    and values."""

    def __init__(self, problem: Problem, tensors: tuple, config: OrderedConfig):
        given = StepTensors(*tensors)
        q, v_cache = given.q, given.v_cache
        cache = cache_of(problem)
        rows, block_n = problem.len_q * problem.group_size, config.block_n
        block_r = min(DECODE_ROWS, max(8, 1 << (rows - 1).bit_length()))
        units = problem.batch * problem.heads_kv * -(-rows // block_r)
        seen = problem.len_k
        if problem.window_left is not None:  # a window begins and ends within a tile
            seen = min(seen, problem.window_left + problem.len_q + block_n)
        most_tiles = max(1, -(-seen // block_n))
        stored = min(rows, block_r)
        pad_d = max(64, block_d(problem.head_dim))
        self.o_strides = output_strides(q)
        self.rotated_shape = (units, block_r, pad_d)
        self.tiles_shape = (units, most_tiles, stored)
        self.block_n = block_n
        self.write = WriteCall(problem, fill(Written, given._asdict()), pdl=True) if cache.appends else None
        # With more rows the sums of wide heads take more registers than a thread has.
        self.is_whole = units >= config.least_units and block_r <= 32
        self.problem = problem
        self.lengths = {"HAS_NEW_KEYS": cache.appends, "BLOCK_N": block_n, "IN_ORDER": True}
        is_wide = is_long(q.stride(), given.k_cache.stride(), v_cache.stride(), self.o_strides)
        self.columns = pad_d, is_wide
        # Those of a unit's scores, and as many of its values if there are enough columns.
        self.most_programs = config.programs
        programs = min(max(1, config.programs // units), config.programs_of_head, most_tiles)
        shared = arguments.numbers_of(problem) | {
            "B": problem.batch,
            "S": problem.len_k,
            "num_pages": None if given.block_table is None else given.k_cache.shape[0],
            "position_limit": given.cos.shape[-2],
            "most_tiles": most_tiles,
            "programs": programs,
            "BLOCK_R": block_r,
            "PDL": True,
        }
        asserts = {} if given.block_table is None else {"debug": True}
        overlaps = {"launch_pdl": True}
        # It may overlap with the write alone: other launches before it may have made its inputs.
        options = {"num_warps": 4, **asserts, **(overlaps if cache.appends else {})}
        queries = Launch(query_kernel, units, options, shared)
        if self.is_whole:
            stage = 2 * block_n * pad_d * q.element_size()
            stages = min(config.most_stages, (220 * 1024 - 12 * block_r * block_n - 2 * block_r * pad_d) // stage)
            # Products of two warpgroups have 128 rows at least.
            warps = 8 if min(block_n, pad_d) >= 128 else 4
            options = {"num_warps": warps, **overlaps}
            attend = Launch(attend_kernel, units, options, shared, STAGES=stages, WARPS=warps)
            self.launches: tuple[Launch, ...] = (queries, attend)
            return
        score_stages = min(config.most_stages, (220 * 1024 - 2 * block_r * pad_d) // (2 * block_n * pad_d))
        options = {"num_warps": 4, **overlaps}
        score = Launch(score_kernel, units * programs, options, shared, STAGES=score_stages)
        columns = max(config.least_columns, min(pad_d, 128) // (1 << (programs.bit_length() - 1)))
        step = max(1, min(config.step_rows // block_r, 1 << (programs.bit_length() - 1)))
        stage = 2 * block_n * max(64, columns)
        slots = 3 if step * block_r <= 32 else 2
        room = 222 * 1024 - step * block_r * (slots * 4 * block_n + 2 * 2 * block_n + 64)
        add = Launch(
            value_kernel,
            units * -(-problem.head_dim // columns),
            options,
            shared,
            COLUMNS=columns,
            STEP=step,
            SCORE_SLOTS=slots,
            STAGES=min(config.value_stages, room // stage),
        )
        self.launches = (queries, score, add)

    def __call__(self, flat: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        tensors, problem = StepTensors(*flat), self.problem
        q = tensors.q
        stream = device.current_stream(q.device)
        if self.write is not None:
            self.write(fill(Written, tensors._asdict()), k_norm=tensors.k_norm)
        o = torch.empty_strided(q.shape, self.o_strides, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)

        def workspace(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=q.device)

        rotated, scores, maxima, progress = workspace(*self.rotated_shape, dtype=q.dtype), None, None, None
        if not self.is_whole:
            scores, maxima = workspace(*self.tiles_shape, self.block_n), workspace(*self.tiles_shape)
            progress = workspace(self.tiles_shape[0], self.most_programs, dtype=torch.int32)
        given = {
            "inputs": step_inputs(problem, tensors, self.lengths, self.columns),
            "outputs": StepOutputs.host(arguments.view(o), lse, tensors.sinks),
            "workspaces": Workspaces.host(rotated, scores, maxima, progress, MOST_PROGRAMS=self.most_programs),
        }
        for launch in self.launches:
            launch(stream, given)
        return o, lse
