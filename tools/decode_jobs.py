"""What `compile_kernels` compiles of the generation step: each row of its table, features spread over the jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fused_rope_attn.generation import configs
from tools import aot


@dataclass(frozen=True)
class DecodeJob:
    """One call of the launcher. masked: window, softcap, sinks and kv_starts at once; append: with new tokens;
    page_size: rows of a page, or None of contiguous caches; float8: the caches, with a scale for each key head."""

    arch: str
    config: configs.DecodeConfig
    dtype: torch.dtype
    head_dim: int
    rotated: bool
    rotary_dim: int | None = None
    interleaved: bool = False
    len_q: int = 1
    masked: bool = False
    append: bool = True
    page_size: int | None = None
    norms: bool = False  # of q and of the new keys
    float8: bool = False

    direction = "decode"

    @property
    def label(self) -> str:
        words = ["decode", str(self.dtype).removeprefix("torch."), f"D{self.head_dim}"]
        words += [] if self.rotary_dim is None else [f"R{self.rotary_dim}"]
        words += [] if self.rotated else ["raw"]
        words += ["interleaved"] if self.interleaved else []
        words += [f"NQ{self.len_q}"] if self.len_q > 1 else []
        words += ["masked"] if self.masked else []
        words += [] if self.append else ["read-only"]
        words += ["float8"] if self.float8 else []
        words += ["norms"] if self.norms else []
        words += [] if self.page_size is None else [f"pages-of-{self.page_size}"]
        return " ".join([*words, f"{self.config.block_n}w{self.config.num_warps}s{self.config.num_stages}"])

    def launch(self) -> None:
        """Call the launcher on tensors without memory."""
        from fused_rope_attn.generation.launch import StepCall
        from fused_rope_attn.generation.problem import StepTensors, describe_step

        def tensor(heads: int, length: int) -> torch.Tensor:
            return torch.empty(2, length, heads, self.head_dim, dtype=self.dtype, device="meta").transpose(1, 2)

        def int32(*shape: int) -> torch.Tensor:
            return torch.empty(shape or (2,), dtype=torch.int32, device="meta")

        def cache() -> torch.Tensor:
            pages, rows = (2, 1000) if self.page_size is None else (300, self.page_size)
            dtype = torch.float8_e4m3fn if self.float8 else self.dtype
            return torch.empty(pages, rows, 2, self.head_dim, dtype=dtype, device="meta").transpose(1, 2)

        rotary_dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        cos = sin = torch.empty(1000, rotary_dim // 2, device="meta")
        new = (tensor(2, self.len_q), tensor(2, self.len_q)) if self.append else (None, None)
        scales = [torch.empty(2, device="meta") if self.float8 else None for _ in range(2)]
        weights = ("q_norm", "k_norm") if self.norms else ()
        tensors = StepTensors(
            tensor(8, self.len_q),
            cache(),
            cache(),
            cos,
            sin,
            *new,
            int32(),
            kv_starts=int32() if self.masked else None,
            sinks=torch.empty(8, device="meta") if self.masked else None,
            block_table=None if self.page_size is None else int32(2, 1008 // self.page_size),
            k_scale=scales[0],
            v_scale=scales[1],
            **{name: torch.empty(self.head_dim, device="meta") for name in weights},
        )
        problem = describe_step(
            tensors,
            cache_is_rotated=self.rotated,
            causal=True,
            softmax_scale=0.1,
            rotary_dim=rotary_dim,
            interleaved=self.interleaved,
            window=(100, -1) if self.masked else None,
            softcap=30.0 if self.masked else 0.0,
            norm_eps=1e-6 if self.norms else None,
            norm_offset=0.0 if self.norms else None,
        )
        StepCall(problem.for_launch(), tensors, self.config)(tensors)


@dataclass(frozen=True)
class WriteJob:
    """One call that writes into a cache: packed tokens into pages, or padded ones into a contiguous cache."""

    arch: str
    dtype: torch.dtype
    head_dim: int
    paged: bool
    float8: bool = False
    rotated: bool = True

    direction = "write"

    @property
    def label(self) -> str:
        words = ["write", str(self.dtype).removeprefix("torch."), f"D{self.head_dim}"]
        words += [] if self.rotated else ["raw"]
        words += ["float8"] if self.float8 else []
        return " ".join([*words, "packed into pages-of-16" if self.paged else "padded"])

    def launch(self) -> None:
        """Call the launcher on tensors without memory."""
        from fused_rope_attn.generation.launch import WriteCall
        from fused_rope_attn.generation.problem import Written, describe_write

        def tensor(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        pages, rows = (300, 16) if self.paged else (2, 1000)
        caches = [
            tensor(pages, rows, 8, self.head_dim, dtype=torch.float8_e4m3fn if self.float8 else self.dtype)
            for _ in range(2)
        ]
        new = [tensor(1 if self.paged else 2, 500, 8, self.head_dim).transpose(1, 2) for _ in range(2)]
        table = tensor(1000, self.head_dim // 2, dtype=torch.float32)
        scales = [tensor(8, dtype=torch.float32) if self.float8 else None for _ in range(2)]
        tensors = Written(
            *new,
            *(x.transpose(1, 2) for x in caches),
            table,
            table,
            tensor(2, 62, dtype=torch.int32) if self.paged else None,
            tensor(2, dtype=torch.int32),
            None if self.paged else tensor(2, dtype=torch.int32),
            tensor(3, dtype=torch.int32) if self.paged else None,
            *scales,
        )
        problem = describe_write(tensors, cache_is_rotated=self.rotated, rotary_dim=self.head_dim, interleaved=False)
        WriteCall(problem, tensors)(tensors)


def write_jobs(arch: str, full: bool = False) -> list[WriteJob]:
    """Few, with ``full`` too, since the kernel takes no configuration."""
    jobs = [WriteJob(arch, torch.bfloat16, 128, paged) for paged in ((True, False) if full else (True,))]
    if arch in configs.FLOAT8 and (full or arch in aot.THOROUGH):
        jobs += [WriteJob(arch, torch.bfloat16, 128, False, True, rotated) for rotated in (True, False)[: 1 + full]]
    return jobs


def decode_jobs(arch: str, full: bool = False) -> list[DecodeJob]:
    """A job for each row of the table that serves ``arch``; in ``aot.THOROUGH`` also D 128 with masks, 16 tokens and
    raw keys, on sm_90 pages and a chunk of a prompt. ``full`` adds those everywhere, and layouts."""
    jobs = []
    for row in configs.DECODE:
        if arch not in row.arch:
            continue
        for rotated in (True, False):
            if row.rotated not in (None, rotated):
                continue
            featured = arch in aot.THOROUGH and row.head_dim == 128 and row.element_size == 2
            # Where both take the same row, rotating in the loop is compiled for few.
            if row.rotated is None and not rotated and not featured and not full:
                continue
            dtype = torch.float32 if row.element_size == 4 else torch.bfloat16
            config = configs.decode(arch, row.element_size, row.head_dim, rotated, row.most_page, row.small is True)
            page_size = None if row.most_page is None else 16
            job = DecodeJob(
                arch, config, dtype, row.head_dim, rotated, page_size=page_size, float8=row.element_size == 1
            )
            jobs.append(job)
            if arch == "sm_90" and row.element_size < 4 and row.head_dim == 128 and (rotated or full):
                # A page of 128 rows holds whole tiles, one of 16 does not.
                for rows in (16, 128):
                    if configs.decode(arch, row.element_size, 128, rotated, rows, row.small is True) == config:
                        jobs.append(replace(job, page_size=rows))
                        if rows == 16 or full:
                            jobs.append(replace(job, page_size=rows, norms=True))
                chunk = configs.chunk(arch, row.element_size, row.head_dim, rotated)
                if row.element_size == 2 or full:
                    jobs.append(replace(job, config=chunk, page_size=16, len_q=300))
            if featured and (rotated or arch == "sm_90"):
                jobs.append(replace(job, masked=True, interleaved=True, rotary_dim=64, head_dim=120, len_q=16))
            if full:
                jobs.append(replace(job, len_q=16))
                jobs.append(replace(job, append=False))
                jobs.append(replace(job, masked=True, rotary_dim=row.head_dim // 2, head_dim=row.head_dim - 8))
                jobs.append(replace(job, interleaved=True))
                if row.element_size == 2:
                    jobs.append(replace(job, dtype=torch.float16))
    return list(dict.fromkeys(jobs))
