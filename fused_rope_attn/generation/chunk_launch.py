# mypy: disable-error-code="attr-defined, arg-type"
"""Steps by the kernels of attention, on a contiguous copy of the cached keys that they see.

Chunks of prompts run so on sm_90, and all steps that are to give the bits of attention to the whole sequence. Attention
reads each block of keys once for every tile of query rows, and loads keys through the TMA, which follows no block
table. One launch writes the new tokens into the cache, one gathers the visible keys, in pair order, and the
visible values, and attention does the rest.
"""

from __future__ import annotations

from typing import Any

import torch

from fused_rope_attn.attention import arguments
from fused_rope_attn.attention.configs import ForwardConfig, HopperForwardConfig
from fused_rope_attn.attention.hopper.forward import COUNTER_WORDS
from fused_rope_attn.attention.hopper.forward import ForwardCall as HopperForwardCall
from fused_rope_attn.attention.portable.forward import ForwardCall as PortableForwardCall
from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.generation.gather_kernel import clear_kernel, gather_kernel
from fused_rope_attn.generation.launch import WriteCall, cache_inputs
from fused_rope_attn.generation.planning import attention_problem
from fused_rope_attn.generation.problem import StepTensors, Written, cache_of
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.entry import fill
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.layouts import block_d, contiguous_strides, has_descriptor, is_long


class GatheredCall:
    """The launches of one signature: write, gather, attend, and clear the rows of tokens past the end of the cache."""

    def __init__(self, problem: Problem, tensors: tuple, config: HopperForwardConfig | ForwardConfig):
        given = StepTensors(*tensors)
        q, k_cache, v_cache = given.q, given.k_cache, given.v_cache
        cache = cache_of(problem)
        self.appends = cache.appends
        self.is_hopper = isinstance(config, HopperForwardConfig)
        reads_cache = self.is_hopper and cache.page_size is None and not cache.is_float8 and has_descriptor(v_cache)
        self.gathers_values = not reads_cache
        # The portable kernels also read rows of new tokens past the end of the cache. The TMA has zeros there.
        self.capacity = problem.len_k
        attention = attention_problem(problem)
        rows = problem.len_k if self.is_hopper else attention.len_k
        self.shape = (problem.batch, problem.heads_kv, rows, problem.head_dim)
        self.batch = problem.batch
        self.write = WriteCall(problem, fill(Written, given._asdict())) if self.appends else None
        like = q.new_empty(self.shape, device="meta") if q.device.type == "meta" else q.new_empty(self.shape)
        seen = self._seen(given, like, like if self.gathers_values else v_cache, given.cache_seqlens)
        self.attend: Any
        if isinstance(config, HopperForwardConfig):
            self.attend = HopperForwardCall(attention, seen, config, keys_are_ready=True)
        else:
            self.attend = PortableForwardCall(attention, seen, config, keys_are_ready=True)
        block_t, heads = 32, min(4, problem.heads_kv)
        tiles = -(-problem.len_k // block_t)
        paged = given.block_table is not None
        is_wide = is_long(k_cache.stride(), v_cache.stride(), contiguous_strides(self.shape))
        self.problem, self.columns = problem, (block_d(problem.head_dim), is_wide)
        self.gather = Launch(
            gather_kernel,
            -(-problem.heads_kv // heads) * tiles * problem.batch,
            {"num_warps": 4, **({"debug": True} if paged else {})},
            arguments.numbers_of(attention),
            S=problem.len_k,
            num_pages=k_cache.shape[0] if paged else None,
            position_limit=given.cos.shape[-2],
            num_tiles=tiles,
            BLOCK_T=block_t,
            HEADS=heads,
            PDL=config.pdl,
        )
        self.clear = Launch(
            clear_kernel,
            problem.batch * problem.heads_q,
            {"num_warps": 1},
            arguments.numbers_of(problem),
            S=problem.len_k,
            D=problem.head_dim,
            BLOCK_D=block_d(problem.head_dim),
        )

    @staticmethod
    def _seen(given: StepTensors, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor) -> Tensors:
        weights = {"q_norm": given.q_norm, "k_norm": given.k_norm}
        return Tensors(given.q, k, v, given.cos, given.sin, given.sinks, given.kv_starts, lens, **weights)

    def __call__(self, flat: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = StepTensors(*flat)
        q = tensors.q
        stream = device.current_stream(q.device)
        lens = tensors.cache_seqlens
        if self.write is not None:
            lens = torch.empty(self.batch, dtype=torch.int32, device=q.device)
            self.write(fill(Written, tensors._asdict()), k_norm=tensors.k_norm, sums=lens)
        keys = torch.empty(self.shape, dtype=q.dtype, device=q.device)
        values = torch.empty(self.shape, dtype=q.dtype, device=q.device) if self.gathers_values else None
        if values is not None and self.capacity < self.shape[2]:
            values[:, :, self.capacity :].zero_()
        counter = torch.empty(COUNTER_WORDS, dtype=torch.int32, device=q.device)
        self.gather(
            stream,
            cache=cache_inputs(self.problem, tensors, *self.columns),
            k=arguments.view(keys),
            v=arguments.view(values),
            tables=arguments.tables_of(self.problem, tensors),
            lens_ptr=lens,
            kv_starts_ptr=tensors.kv_starts,
            counter_ptr=counter,
        )
        seen = self._seen(tensors, keys, tensors.v_cache if values is None else values, lens)
        o, lse, *_ = self.attend(seen, counter=counter) if self.is_hopper else self.attend(seen)
        if self.appends:
            self.clear(stream, lens_ptr=lens, o=arguments.view(o), lse_ptr=lse)
        return o, lse
