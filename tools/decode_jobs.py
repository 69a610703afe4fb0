"""Jobs of the generation step for `compile_kernels`: each row of its table, features spread over the jobs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from fused_rope_attn.attention.configs import HopperForwardConfig
from fused_rope_attn.attention.hopper import configs as hopper_configs
from fused_rope_attn.generation import configs
from tools import aot
from tools.jobs import LaunchJob, feature_options, int32, meta


@dataclass(frozen=True, kw_only=True)
class DecodeJob(LaunchJob):
    """A step. masked: window, softcap, sinks and kv_starts at once; append: with new tokens; of_rotated: the cache;
    page_size: rows of a page, None for contiguous caches; float8: the caches, with a scale for each key head."""

    # HopperForwardConfig: attention on a contiguous copy of the keys; OrderedConfig: with the bits of training.
    config: configs.DecodeConfig | HopperForwardConfig | configs.OrderedConfig
    rotary_dim: int | None = None  # 0: no tables
    of_rotated: bool = True
    interleaved: bool = False
    len_q: int = 1
    masked: bool = False
    append: bool = True
    float8: bool = False
    norms: bool = False  # of q and of the new keys
    page_size: int | None = None

    direction = "decode"

    @property
    def title(self) -> str:
        titles = {configs.DecodeConfig: "decode", configs.OrderedConfig: "ordered step"}
        return titles.get(type(self.config), "gathered chunk")

    def launch(self) -> None:
        from fused_rope_attn.generation.launch import gathered_call, ordered_call, step_call
        from fused_rope_attn.generation.problem import StepTensors, describe_step

        pages, rows = (2, 1000) if self.page_size is None else (300, self.page_size)
        cache_dtype = torch.float8_e4m3fn if self.float8 else self.dtype
        q, k, v = (self.heads(2, self.len_q, n) for n in (8, 2, 2))
        caches = (self.heads(pages, rows, 2, cache_dtype) for _ in range(2))
        rotary_dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        cos = sin = meta(1000, rotary_dim // 2) if rotary_dim else None
        tensors = StepTensors(
            q,
            *caches,
            cos,
            sin,
            *((k, v) if self.append else (None, None)),
            int32(2),
            kv_starts=int32(2) if self.masked else None,
            sinks=meta(8) if self.masked else None,
            block_table=None if self.page_size is None else int32(2, 1008 // self.page_size),
            **({"k_scale": meta(2), "v_scale": meta(2)} if self.float8 else {}),
            **({"q_norm": meta(self.head_dim), "k_norm": meta(self.head_dim)} if self.norms else {}),
        )
        problem = describe_step(
            tensors,
            cache_is_rotated=self.of_rotated,
            causal=True,
            rotary_dim=rotary_dim,
            interleaved=self.interleaved,
            **feature_options(self.masked, self.masked, self.norms),
        )
        calls = {configs.DecodeConfig: step_call, configs.OrderedConfig: ordered_call}
        call = calls.get(type(self.config), gathered_call)
        call(problem.for_launch(), tensors, self.config)(tensors)


@dataclass(frozen=True, kw_only=True)
class WriteJob(LaunchJob):
    """One call that writes into a cache: packed tokens into pages, or padded ones into a contiguous cache."""

    packed: bool = False
    float8: bool = False
    of_rotated: bool = True

    title = "write"

    def launch(self) -> None:
        from fused_rope_attn.generation.launch import write_call
        from fused_rope_attn.generation.problem import Written, describe_write

        pages, rows = (300, 16) if self.packed else (2, 1000)
        cache_dtype = torch.float8_e4m3fn if self.float8 else self.dtype
        new = [self.heads(2 - self.packed, 500, 8) for _ in range(2)]
        caches = [self.heads(pages, rows, 8, cache_dtype) for _ in range(2)]
        cos = sin = meta(1000, self.head_dim // 2)
        block_table, new_lens, cu_seqlens = (int32(2, 62), None, int32(3)) if self.packed else (None, int32(2), None)
        scales = [meta(8) if self.float8 else None for _ in range(2)]
        tensors = Written(*new, *caches, cos, sin, block_table, int32(2), new_lens, cu_seqlens, *scales)
        problem = describe_write(tensors, cache_is_rotated=self.of_rotated, rotary_dim=self.head_dim, interleaved=False)
        write_call(problem, tensors)(tensors)


def write_jobs(arch: str, full: bool = False) -> list[WriteJob]:
    """Few, with ``full`` too, since the kernel takes no configuration."""
    plain = {"arch": arch, "dtype": torch.bfloat16, "head_dim": 128}
    jobs = [WriteJob(**plain, packed=packed) for packed in ((True, False) if full else (True,))]
    if arch in configs.FLOAT8 and (full or arch in aot.THOROUGH):
        some = (True, False) if full else (True,)
        jobs += [WriteJob(**plain, packed=False, float8=True, of_rotated=rotated) for rotated in some]
    return jobs


def decode_jobs(arch: str, full: bool = False) -> list[DecodeJob]:
    """A job for each row of the table that serves ``arch``; in ``aot.THOROUGH`` also D 128 with masks, 16 tokens and
    raw keys, on sm_90 pages and chunks of a prompt, on sm_86 norms without tables. ``full`` adds those everywhere, and
    layouts."""
    jobs = []
    for row, size, rotated in itertools.product(configs.DECODE, (1, 2, 4), (True, False)):
        if arch not in row.arch or size not in row.element_size or (size == 1 and arch not in configs.FLOAT8):
            continue
        if row.chunk or row.rotated not in (None, rotated):
            continue
        featured = arch in aot.THOROUGH and row.head_dim == 128 and size == 2
        config = configs.decode(arch, size, row.head_dim, rotated, row.most_page)
        # If both take the same row, rotating in the loop is compiled for few.
        is_known = config == configs.decode(arch, size, row.head_dim, True, row.most_page)
        if not rotated and is_known and not featured and not full:
            continue
        page_size = None if row.most_page is None else 16
        job = DecodeJob(
            arch=arch,
            dtype=torch.float32 if size == 4 else torch.bfloat16,
            head_dim=row.head_dim,
            config=config,
            of_rotated=rotated,
            page_size=page_size,
            float8=size == 1,
        )
        jobs.append(job)
        if arch == "sm_90" and size < 4 and row.head_dim == 128 and (rotated or full):
            # A page of 128 rows holds whole tiles, one of 16 does not.
            for rows in (16, 128) if size == 2 or full else (16,):
                if configs.decode(arch, size, 128, rotated, rows, row.small is None) == config:
                    jobs.append(replace(job, page_size=rows))
                    if rows == 16 and size == 2 or full:
                        jobs.append(replace(job, page_size=rows, norms=True))
            chunk = configs.decode(arch, size, row.head_dim, rotated, chunk=True)
            if size == 2 or full:
                jobs.append(replace(job, config=chunk, page_size=16, len_q=300))
        if arch == "sm_90" and featured and not rotated and page_size is None:
            gathered = replace(hopper_configs.forward_row(128, True, "long", True).config, section_bytes=0)
            jobs.append(replace(job, config=gathered, page_size=16, len_q=300))
            ordered = replace(job, of_rotated=True)
            for least_units in (1, 1 << 30):  # one loop for each key head, or launches for scores and values
                config = configs.OrderedConfig(block_n=128, least_units=least_units)
                jobs.append(replace(ordered, config=config, page_size=16))
                wide = configs.OrderedConfig(block_n=64, least_units=least_units)
                of_one = replace(ordered, config=wide, head_dim=256, len_q=8, masked=True, norms=True)
                jobs.append(replace(of_one, rotary_dim=0) if least_units == 1 and not full else of_one)
        # On sm_90 raw keys have the fewest registers left.
        if featured and (rotated != (arch == "sm_90") or full):
            is_turned = arch == "sm_90" or full
            tables = {"rotary_dim": 64, "interleaved": True} if is_turned else {"rotary_dim": 0, "norms": True}
            jobs.append(replace(job, masked=True, head_dim=120, len_q=16, **tables))
        if full:
            jobs += [replace(job, len_q=16), replace(job, append=False), replace(job, interleaved=True)]
            jobs.append(replace(job, rotary_dim=0, norms=True))
            jobs.append(replace(job, masked=True, rotary_dim=row.head_dim // 2, head_dim=row.head_dim - 8))
            if size == 2:
                jobs.append(replace(job, dtype=torch.float16))
    return list(dict.fromkeys(jobs))
