"""Compile every kernel configuration for every target without a GPU, and hold each to its card's limits.

    python -m tools.compile_kernels                              every row of the tables, features where they differ
    python -m tools.compile_kernels --arch sm_90 --filter backward
    python -m tools.compile_kernels --full                       every feature for every card, float16, all masks
    python -m tools.compile_kernels --arch sm_90 --filter hopper         one backend; "decode": the generation step
    python -m tools.compile_kernels --arch sm_90 --filter "forward inline float32" --tile 32x32w8s1 --tile 64x32w8s2

Fails, with exit status 1, where a kernel does not compile, needs more shared memory than the card gives a block,
spills more than SPILL_LIMIT, takes parameters of its binary that the own launcher does not understand (NVIDIA), reads
a register that nothing has written (a fault of ptxas, see ``tools.uninitialised``), or, in the sm_90 backend, has wgmma
products that ptxas made wait for one another.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from tqdm import tqdm

from fused_rope_attn.attention import configs
from fused_rope_attn.attention.arguments import rotated_shape
from fused_rope_attn.attention.hopper import configs as hopper_configs
from fused_rope_attn.attention.portable import configs as portable_configs
from fused_rope_attn.attention.problem import Saving, Tensors, describe
from tools import aot
from tools.corope_jobs import corope_jobs
from tools.decode_jobs import decode_jobs, write_jobs
from tools.jobs import LaunchJob, feature_options, int32, meta
from tools.rotation_jobs import rotation_jobs
from verification.table import format_table

# Bytes of stack that a thread may use. Some registers spilled around the inner loop cost little (tiles that spill were
# the fastest measured in places); beyond this the tile is too large for the card.
SPILL_LIMIT = 512
BF16 = {"dtype": torch.bfloat16}
ROPE_DIM = 64  # columns of multi-head latent attention that are rotated
MASKS = ("window", "softcap", "sinks", "kv_starts", "kv_lens", "packed", "intervals")
COLUMNS = ("arch", "job", "kernel", "warps", "stages", "registers", "spill", "shared", "limit", "seconds", "verdict")


@dataclass(frozen=True, kw_only=True)
class Job(LaunchJob):
    """A call of attention: a row of a configuration table with the features that change the code."""

    direction: str  # "forward" or "backward"
    config: configs.ForwardConfig | configs.BackwardConfig | configs.HopperForwardConfig | configs.HopperBackwardConfig
    causal: bool = True
    gqa: bool = False
    interleaved: bool = False
    rotary_dim: int | None = None  # 0: no tables
    masks: tuple[str, ...] = ()  # of MASKS
    rotated: bool = False  # forward saves rotated q and k, backward takes them
    norms: bool = False  # of q and k, before their rotation
    sums: bool = False  # dk and dv in float32, as context parallelism adds them up
    deterministic: bool = False  # the sm_90 backward adds dQ in a fixed order
    latent: bool = False  # multi-head latent attention, with 64 of the head_dim columns rotated

    @property
    def is_hopper(self) -> bool:
        return isinstance(self.config, (configs.HopperForwardConfig, configs.HopperBackwardConfig))

    @property
    def title(self) -> str:
        if self.is_hopper:
            return f"hopper {self.direction} mla" if self.latent else f"hopper {self.direction}"
        strategy = self.config.strategy if self.direction == "forward" else "prepass"
        return f"{self.direction} mla" if self.latent else f"{self.direction} {strategy}"

    def launch(self) -> None:
        if self.is_hopper:
            from fused_rope_attn.attention.hopper import backward, forward
        else:
            from fused_rope_attn.attention.portable import backward, forward

        packed = "packed" in self.masks
        batch, length, heads_q, heads_kv = 1 if packed else 2, 800, 8, 1 if self.gqa else 8
        rotary_dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        nope = {}
        if self.latent:
            rotary_dim, columns = ROPE_DIM, self.head_dim - ROPE_DIM
            q, k, v, q_nope, k_nope = (
                meta(batch, length, heads, width, dtype=self.dtype).transpose(1, 2)
                for heads, width in ((8, ROPE_DIM), (1, ROPE_DIM), (8, columns), (8, columns), (8, columns))
            )
            nope = {"q_nope": q_nope, "k_nope": k_nope}
        else:
            q, k, v = (self.heads(batch, length, heads) for heads in (heads_q, heads_kv, heads_kv))
        # Full-width tables where they are read at another stride than half-width ones.
        cos = sin = meta(length, rotary_dim if self.interleaved else rotary_dim // 2) if rotary_dim else None
        sinks = meta(heads_q) if "sinks" in self.masks else None
        bounds = (int32(batch) if name in self.masks else None for name in ("kv_starts", "kv_lens"))
        ends, weight = int32(9) if packed else None, meta(self.head_dim) if self.norms else None
        intervals = (int32(batch, length) if "intervals" in self.masks else None for _ in range(2))
        tensors = Tensors(q, k, v, cos, sin, sinks, *bounds, ends, ends, weight, weight, *intervals, **nope)
        problem = describe(
            tensors,
            causal=self.causal,
            rotary_dim=rotary_dim,
            interleaved=self.interleaved,
            max_seqlen=500 if packed else 0,
            return_max_logit="softcap" in self.masks,
            deterministic=self.deterministic,
            **feature_options("window" in self.masks, "softcap" in self.masks, self.norms),
        ).for_launch()
        problem = problem._replace(sums_keys=self.sums)
        if self.direction == "forward":
            kept = Saving.TILES if packed else Saving.ROWS
            forward.ForwardCall(problem, tensors, self.config, kept if self.rotated else Saving.NOTHING)(tensors)
        else:
            like_o = v if self.latent else q
            do, o, lse = torch.empty_like(like_o), torch.empty_like(like_o), meta(batch, heads_q, length)
            if self.rotated:
                shape = rotated_shape(problem)
                raw = {"raw_q": q, "raw_k": k} if self.norms else {}
                tensors = tensors._replace(q=q.new_empty(shape), k=k.new_empty(k.shape), **raw)
            if "softcap" in self.masks:  # such calls have a gradient of lse, too
                tensors = tensors._replace(dlse=lse)
            given = (do, o, lse, *tensors)
            prepare = backward.backward_call if self.is_hopper else backward.BackwardCall
            prepare(problem, given, self.config, self.rotated)(given)


DIRECTIONS = ("forward", "backward")


def find_config(direction: str, arch: str, element_size: int, head_dim: int, strategy: str, *shape: Any) -> Any:
    """Return the portable configuration of a pass. strategy: of the forward pass."""
    if direction == "forward":
        return portable_configs.forward_config(arch, element_size, head_dim, strategy, *shape)
    return portable_configs.backward_config(arch, element_size, head_dim, *shape)


def table_jobs(arch: str, full: bool = False) -> list[Job]:
    """A job for each configuration that calls without masks get on ``arch``, at the largest head dimension of its row.

    Causal (the masked and the unmasked loop are both in it), bfloat16 for the 2-byte rows, halves: the other variants
    differ by a few instructions. Both strategies on sm_90 in 2 bytes; otherwise the pre-pass where inline has other
    tiles, because inline takes more registers and shared memory in the same ones.
    ``full`` compiles all that too, and a head dimension that is no power of two.
    """
    jobs = []
    for direction in DIRECTIONS:
        for element_size, head_dim, bucket in itertools.product((2, 4), (64, 128, 256), configs.BUCKETS):
            # An order of the blocks is no other code: rows that differ in it alone are one job.
            inline, prepass = (
                replace(find_config(direction, arch, element_size, head_dim, strategy, bucket), section_bytes=0)
                for strategy in configs.STRATEGIES
            )
            job = Job(
                arch=arch,
                direction=direction,
                dtype=torch.bfloat16 if element_size == 2 else torch.float32,
                head_dim=head_dim,
                config=inline,
            )
            jobs.append(job)
            if direction == "forward":
                is_other = replace(prepass, strategy="inline", tma=False) != inline
                if is_other or (arch == "sm_90" and element_size == 2) or full:
                    jobs.append(replace(job, config=prepass, rotated=True))  # a store more than without
    if full:
        jobs = [other for job in jobs for other in (job, *_variants(job), replace(job, causal=False))]
    return list(dict.fromkeys(jobs))


def _variants(job: Job) -> list[Job]:
    """Return the job with interleaved pairs, without tables, with a head dimension that is no power of two, and in
    float16."""
    found = [replace(job, interleaved=True, rotary_dim=job.head_dim // 2), replace(job, rotary_dim=0)]
    found.append(replace(job, head_dim=job.head_dim - 8))
    return found + ([replace(job, dtype=torch.float16)] if job.dtype == torch.bfloat16 else [])


# The pairs that models combine, and the most that one kernel can hold.
_WINDOW, _PADDED, _MOST = ("window",), ("kv_starts", "kv_lens"), ("window", "softcap", "sinks", "packed")
_INTERVALS = ("intervals", "window", "softcap", "sinks", *_PADDED)
_MANY = ("window", "softcap", "sinks", *_PADDED)
_HOPPER_MASKED = (_WINDOW, _PADDED, _MANY, ("packed",), _MOST, _INTERVALS)
# For both passes. The forward with three warpgroups also has _MANY.
_HOPPER_CHOSEN = ((64, _MOST), (128, ("packed",)), (128, _MOST), (128, _INTERVALS), (256, _MOST))
_MASKED = (_INTERVALS, _WINDOW, ("window", "softcap"), ("window", "sinks"), _PADDED, ("packed",), _MOST)


def mask_jobs(arch: str, full: bool = False) -> list[Job]:
    """Jobs with masks, bfloat16 and causal, in the configurations of medium lengths.

    The masks that take most registers where a row is for masks alone (sm_90 and sm_100, D 64 and 256), and at D 128 on
    sm_90 (inline) and sm_86; intervals at D 128 on sm_90 and gfx942: the other cards have the instructions of one of
    them. Those of sm_86 have no tables, and norms in forward. ``full``: every combination, strategy and width, and the
    most masks without tables.
    """
    chosen = [("prepass", 64, _MOST), ("prepass", 256, _MOST)] if arch in ("sm_90", "sm_100") else []
    if arch in aot.THOROUGH:
        chosen.append(("inline" if arch == "sm_90" else "prepass", 128, _MOST))
    if arch in ("sm_90", "gfx942"):
        chosen.append(("prepass", 128, _INTERVALS))
    if full:
        chosen = itertools.product(configs.STRATEGIES, (64, 128, 256), _MASKED)
    jobs = []
    for (strategy, head_dim, masks), direction in itertools.product(chosen, DIRECTIONS):
        is_forward = direction == "forward"
        if is_forward or strategy == "prepass" or full:  # backward always rotates before
            config = replace(find_config(direction, arch, 2, head_dim, strategy, "medium", True), section_bytes=0)
            rotated = is_forward and strategy == "prepass" and not full
            call = {"direction": direction, "head_dim": head_dim, "config": config, "rotated": rotated, "masks": masks}
            job = Job(**BF16, **call, arch=arch, gqa=True)
            if full or arch != "sm_86":
                jobs.append(job)
            if masks == _MOST and (full or arch == "sm_86"):
                jobs.append(replace(job, rotary_dim=0, norms=is_forward))
    if arch == "sm_90":
        # Rows that are no multiple of 16 elements apart, which ptxas 12.8 has miscompiled (``tools.uninitialised``).
        config = portable_configs.forward_config(arch, 2, 24, "inline", "tiny", True)
        call = {"direction": "forward", "dtype": torch.float16, "head_dim": 24, "config": config}
        narrow = Job(**call, arch=arch, gqa=True, interleaved=True, masks=("kv_starts",), causal=False)
        jobs += [narrow, replace(narrow, causal=True)] if full else [narrow]
    return jobs


def latent_jobs(arch: str, full: bool = False) -> list[Job]:
    """Return a job for each row for multi-head latent attention, at the widths of DeepSeek, causal and interleaved.

    Packed instead of without masks on sm_90 in bfloat16; ``full``: each, on every card.
    The sm_90 backend's with these masks in forward and without masks in backward; ``full``: all of them in both.
    """
    jobs = []
    padded, packed = ("window", "kv_starts", "kv_lens"), ("packed",)
    for direction, row, chosen in (
        ("forward", hopper_configs.LATENT_FORWARD, padded),
        ("backward", hopper_configs.LATENT_BACKWARD, ()),
    ):
        if arch == "sm_90":
            call = {"direction": direction, "head_dim": row.head_dim, "interleaved": True}
            for masks in ((), padded, packed) if full else (chosen,):
                if masks == packed and direction == "forward":
                    row = hopper_configs.LATENT_PACKED_FORWARD
                config = replace(row.config, section_bytes=0)
                jobs.append(Job(**BF16, **call, config=config, arch=arch, latent=True, masks=masks))
    for direction, table in (("forward", portable_configs.FORWARD), ("backward", portable_configs.BACKWARD)):
        for row in table:
            if arch not in row.arch or not row.latent:
                continue
            dtype = torch.bfloat16 if row.element_size == 2 else torch.float32
            config = replace(row.config(arch, "prepass"), section_bytes=0)
            call = {"arch": arch, "direction": direction, "dtype": dtype, "head_dim": row.head_dim, "config": config}
            job = Job(**call, interleaved=True, latent=True)
            thorough = arch == "sm_90" and row.element_size == 2
            if full or not thorough:
                jobs.append(job)
            if full or thorough:
                jobs.append(replace(job, masks=packed))
            if full:
                jobs += [
                    replace(job, masks=padded),
                    replace(job, causal=False),
                    replace(job, interleaved=False),
                    replace(job, head_dim=112),
                ]
    return jobs


def hopper_jobs(arch: str, full: bool = False) -> list[Job]:
    """Return a job for each configuration that the sm_90 backend's tables give, in bfloat16, at the largest head
    dimension of each row and at the widths of a tile; not causal once at 128 columns and where causal calls have other
    configurations. Features take registers, so most are compiled together where registers are fewest:

    - the most masks at each width, with groups of query heads that are divided; intervals at 128 columns; bounds of the
      keys with three warpgroups, at 64;
    - norms at 128 columns, with packed sequences where a row serves them, backward also with keys' sums in float32;
    - rotated q and k without norms at 256 columns, in backward;
    - dQ added in a fixed order at 64 columns, where steps are shortest, and with the masks of 128 and 256, there alone;
    - without tables at 128 columns: no causal mask, intervals in backward, and intervals with norms in forward.

    ``full`` as in ``table_jobs``, and each feature alone at every width."""
    jobs: list[Job] = []
    dims = 64, hopper_configs.HEAD_DIM, hopper_configs.WIDE_HEAD_DIM
    for direction, table, find in (
        ("forward", hopper_configs.FORWARD, hopper_configs.forward_row),
        ("backward", hopper_configs.BACKWARD, hopper_configs.backward_row),
    ):
        narrow = hopper_configs.NARROW_HEAD_DIM
        widths = {64, narrow, hopper_configs.HEAD_DIM, *(row.head_dim for row in table)}
        head_dims = sorted(widths if arch == "sm_90" else ())
        for key in itertools.product(head_dims, (True, False), configs.BUCKETS, (False, True)):
            row = find(*key)
            # Other rows are those of 128 columns, and not causal those of 64, by the same code.
            if key[0] == narrow and row.head_dim != narrow and not full:
                continue
            config = replace(row.config, section_bytes=0)
            job = Job(**BF16, arch=arch, direction=direction, head_dim=key[0], config=config, causal=key[1])
            # One at 128 columns has the rows of causal calls too.
            others = [x for x in jobs if (x.direction, x.head_dim, x.causal) == (direction, *key[:2])]
            is_first = key[:2] == (hopper_configs.HEAD_DIM, False) and not others
            if is_first or full or replace(job, causal=True) not in jobs:
                jobs += [job, *_variants(job)] if full else [replace(job, rotary_dim=0) if is_first else job]
        chosen = _HOPPER_CHOSEN + (((64, _MANY),) if direction == "forward" else ())
        for head_dim, causal, masks in itertools.product(head_dims, (True, False), _HOPPER_MASKED):
            if head_dim in dims and (full or causal and (head_dim, masks) in chosen):
                config = replace(find(head_dim, causal, "long", False, "packed" in masks).config, section_bytes=0)
                call = {"head_dim": head_dim, "config": config, "causal": causal, "masks": masks}
                dtypes = (torch.bfloat16, torch.float16) if full else (torch.bfloat16,)
                gqa = masks == _MOST and not full
                found = [Job(arch=arch, direction=direction, dtype=dtype, gqa=gqa, **call) for dtype in dtypes]
                jobs += found
                if masks == _INTERVALS:
                    jobs += [replace(job, rotary_dim=0, norms=direction == "forward") for job in found]
    # Calls of a training step; narrower heads leave more registers in the same code.
    trained = [job for job in jobs if job.masks in ((), ("packed",)) and (job.causal or full)]
    if not full:
        trained = list({_as_in_main_kernel(job): job for job in reversed(trained)}.values())[::-1]
    for job in trained:
        has_norms = job.head_dim == hopper_configs.HEAD_DIM
        if full or has_norms:
            jobs.append(replace(job, rotated=True, norms=True, sums=job.direction == "backward" and not full))
        if full or (job.head_dim, job.direction) == (hopper_configs.WIDE_HEAD_DIM, "backward"):
            jobs.append(replace(job, rotated=True))
    ordered = [job for job in jobs if job.direction == "backward" and not job.rotated and job.dtype == torch.bfloat16]
    if not full:
        kinds = (64, ()), (128, _INTERVALS), (256, _MOST)
        ordered = list(
            {(job.head_dim, job.masks): job for job in reversed(ordered) if (job.head_dim, job.masks) in kinds}.values()
        )
        jobs = [job for job in jobs if job not in ordered or job.head_dim == 64]
    jobs += [replace(job, deterministic=True) for job in ordered]
    if full:
        backward = [job for job in trained if job.direction == "backward"]
        grouped = {(job.head_dim, job.masks): job for job in jobs if job in backward and job.head_dim in dims}
        jobs += [replace(job, sums=True) for job in backward] + [replace(job, gqa=True) for job in grouped.values()]
        return list(dict.fromkeys(jobs))
    # Packed sequences without norms are in those with norms.
    return [job for job in dict.fromkeys(jobs) if job.masks != ("packed",) or job.norms]


def _as_in_main_kernel(job: Job) -> Job:
    """Return the job without the fields that its main kernel does not read: the same job, the same kernel."""
    if job.direction == "forward":
        return job
    default = configs.HopperBackwardConfig()
    return replace(job, config=replace(job.config, post_rows=default.post_rows, post_heads=default.post_heads))


def find_jobs(archs: Sequence[str], full: bool = False) -> list[LaunchJob]:
    """Return the jobs of all tables for ``archs``.

    Unless ``full`` is set, leave out a job that repeats another card's (``repeated_job``) and is not the first of its
    class and direction: for example sm_89's rows are compiled for sm_86, or for sm_89 where that is the only card. Also
    leave out a job if another job of the same row has all of its features and more (``_features``).
    """
    tables = (table_jobs, mask_jobs, latent_jobs, hopper_jobs, rotation_jobs, corope_jobs, decode_jobs, write_jobs)
    jobs: list[LaunchJob] = [job for arch in archs for find in tables for job in find(arch, full)]
    if full:
        return list(dict.fromkeys(jobs))
    kinds = {job: (job.arch, type(job), getattr(job, "direction", "")) for job in jobs}
    first = set({kind: job for job, kind in reversed(kinds.items())}.values())
    rows: dict[LaunchJob, list[set[str]]] = {}
    for job in kinds:
        rows.setdefault(_row_of(job), []).append(_features(job))
    repeated = {job: other for job in kinds for other in [repeated_job(job)] if other in kinds and job not in first}
    is_needed = set(repeated.values())
    return [
        job
        for job in kinds
        if job not in repeated and (job in is_needed or not any(_features(job) < other for other in rows[_row_of(job)]))
    ]


_FLAGS = ("gqa", "rotated", "norms", "sums")


def _row_of(job: LaunchJob) -> LaunchJob:
    """Return the job without those features: jobs of one row of a table return the same."""
    return replace(job, masks=(), **dict.fromkeys(_FLAGS, False)) if isinstance(job, Job) else job


def _features(job: LaunchJob) -> set[str]:
    """Return the masks and the other features that attention's kernels can have at once."""
    return {*job.masks, *(flag for flag in _FLAGS if getattr(job, flag))} if isinstance(job, Job) else set()


def repeated_job(job: LaunchJob) -> LaunchJob | None:
    """Return the same call on the other card that ``aot.REPEATS`` gives, or None.

    Attention in 16 bits multiplies tiles of 64 rows and more; a step has 16 rows, and rotations have no products.
    """
    is_small = job.dtype == torch.float32 or not isinstance(job, Job)
    cards = aot.REPEATS_SMALL if is_small else aot.REPEATS
    if job.arch not in cards:
        return None
    arch, config = cards[job.arch], getattr(job, "config", None)
    if hasattr(config, "pdl"):  # a wait at the beginning of the same code
        return replace(job, arch=arch, config=replace(config, pdl=arch in configs.PDL))  # type: ignore[call-arg]
    return replace(job, arch=arch)


def tile_of(text: str) -> configs.Tile:
    """Read a tile as the labels write it, such as ``128x64w8s3``."""
    match = re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)", text)
    if match is None:
        expected = "block_m x block_n, warps, stages, as in 128x64w8s3"
        raise argparse.ArgumentTypeError(f"a tile is {expected}, not {text!r}")
    return configs.Tile(*(int(group) for group in match.groups()))


def with_tile(job: Job, tile: configs.Tile) -> Job:
    """Return the same job with every tile replaced."""
    tiles = {"tile": tile} if job.direction == "forward" else {"dkdv": tile, "dq": tile}
    return replace(job, config=replace(job.config, **tiles))


def _begin() -> None:
    """Prepare a process. Compiling makes many objects and few cycles: an eighth of the time went into finding those."""
    torch.set_num_threads(1)
    gc.freeze()
    atexit.register(gc.unfreeze)  # else nanobind reports what modules hold as leaked
    gc.set_threshold(1_000_000)


def compile_job(job: LaunchJob) -> list[dict]:
    """Run the launcher of ``job`` under the compile-only driver; one dict for each kernel that it compiled."""
    start, row = time.perf_counter(), {"job": job.label, "arch": job.arch}
    try:
        with aot.compiling_for(job.arch) as compiled:
            job.launch()
    except Exception as error:  # any failure to compile is a row of the report
        reason = f"{type(error).__name__}: {error}".strip().splitlines()
        return [row | {"verdict": f"FAIL {reason[0][:200]}", "seconds": time.perf_counter() - start}]
    return [row | kernel | {"verdict": _verdict(job, kernel)} for kernel in compiled]


def _verdict(job: LaunchJob, kernel: dict[str, Any]) -> str:
    if kernel["shared"] > kernel["limit"]:
        return "FAIL shared memory"
    is_gluon = job.title == "ordered step" or (isinstance(job, Job) and job.is_hopper)
    if kernel["serialised"] and is_gluon:  # the portable kernels take what they get
        return "FAIL wgmma serialised"
    if kernel["unwritten"]:
        return f"FAIL reads a register that nothing has written: {kernel['unwritten']}"
    if kernel["refusal"]:
        return f"FAIL launch: {kernel['refusal']}"
    if kernel["spill"] > SPILL_LIMIT:
        return f"FAIL spills more than {SPILL_LIMIT} bytes"
    return "spills" if kernel["spill"] else "ok"


def run(jobs: list[LaunchJob], processes: int) -> list[dict]:
    """Compile in ``processes`` processes with an empty cache of their own; rows in the order of ``jobs``.

    Empty each kernel's artefacts in that cache, because they take 0.8 GB together.
    """
    if processes <= 1:
        return [_emptied(row) for job in jobs for row in compile_job(job)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin) as pool:
        # The slow ones first: the last process to finish should have little left. Before them one of each kernel and
        # shape, because two processes that begin similar jobs together both compile the kernels that the jobs share.
        similar, ranks = Counter[tuple](), dict[LaunchJob, int]()
        for job in jobs:
            kind = job.arch, job.title, job.dtype, job.head_dim
            ranks[job] = similar[kind]
            similar[kind] += 1
        order = sorted(jobs, key=lambda job: (ranks[job], "forward" in job.title, -job.head_dim))
        pending = {pool.submit(compile_job, job): job for job in order}
        rows = {
            pending[future]: [_emptied(row) for row in future.result()]
            for future in tqdm(as_completed(pending), total=len(jobs))
        }
    return [row for job in jobs for row in rows[job]]


def _emptied(row: dict) -> dict:
    """Empty the files of a row of ``compile_job``; return the row without them.

    The metadata stay, so that another process finds the kernel and does not compile it again.
    """
    for suffix, path in row.pop("files", {}).items():
        if suffix != "json":
            Path(path).write_bytes(b"")
    return row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.compile_kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", action="append", choices=configs.ARCHS, help="may be repeated; all by default")
    parser.add_argument("--filter", default="", help="only jobs whose label contains this, such as 'backward prepass'")
    parser.add_argument("--full", action="store_true", help="also what the default spares")
    parser.add_argument(
        "--tile", action="append", type=tile_of, help="try this one instead of the table's; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="name the jobs and compile nothing")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set: the interpreter takes the compiler's place; unset it")

    jobs = [job for job in find_jobs(options.arch or configs.ARCHS, options.full) if options.filter in job.label]
    if options.tile:
        # The tiles of a rotation are bytes, and the sm_90 backend has more to a configuration than a tile.
        jobs = [job for job in jobs if isinstance(job, Job) and not job.is_hopper]
        jobs = list(dict.fromkeys(with_tile(job, tile) for job in jobs for tile in options.tile))
    if options.list:
        print("\n".join(f"{job.arch} {job.label}" for job in jobs))
        return 0
    if not jobs:
        parser.error("no job matches")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        rows = run(jobs, options.jobs)
    print(format_table(COLUMNS, rows))
    failures = [row for row in rows if row["verdict"].startswith("FAIL")]
    spilling = sum(row["verdict"] == "spills" for row in rows)
    print(
        f"\ntriton {triton.__version__}, torch {torch.__version__}: {len(rows)} kernels of {len(jobs)} launches "
        f"in {time.perf_counter() - start:.0f} s, {spilling} spill a little, {len(failures)} fail"
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"triton": triton.__version__, "torch": torch.__version__, "rows": rows}, file, indent=1)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
