"""What `compile_kernels` compiles of the rotation alone: each tile for each target, features spread over the jobs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from fused_rope_attn.rotation.configs import TABLE, RotationConfig
from tools import aot

SHAPES = {"bhsd": (2, 0, 1000), "bshd": (2, 1000, 0), "sbhd": (1000, 2, 0), "thd": (1000, 0)}  # 0: the heads


@dataclass(frozen=True)
class RotationJob:
    """One call of a launcher. positions: ``index``, ``ids``, ``two ids`` or ``packed``. norm: "" for none, "forward" or
    "backward", of the first two tensors."""

    arch: str
    config: RotationConfig
    dtype: torch.dtype
    interleaved: bool
    layout: str
    heads: tuple[int, ...]
    positions: str = "index"
    head_dim: int = 128
    rotary_dim: int = 128
    wide: bool = False
    inverse: bool = False
    norm: str = ""

    direction = "rotation"

    @property
    def label(self) -> str:
        config = self.config
        words = ["rotation", str(self.dtype).removeprefix("torch."), f"D{self.head_dim}", self.layout]
        words += [f"R{self.rotary_dim}"] if self.rotary_dim != self.head_dim else []
        words += ["interleaved"] if self.interleaved else []
        words += [self.positions] if self.positions != "index" else []
        words += ["wide"] if self.wide else []
        words += ["inverse"] if self.inverse else []
        words += [f"norm {self.norm}"] if self.norm else []
        words += [f"x{len(self.heads)}", f"{config.tile_bytes >> 10}K/{config.run_bytes >> 10}Kw{config.num_warps}"]
        return " ".join(words)

    def launch(self) -> None:
        """Call the launcher on tensors without memory."""
        from fused_rope_attn.rotation.launch import launch_norm_gradient, launch_rotation
        from fused_rope_attn.rotation.problem import RotationOptions, RotationTensors

        shapes = [[size or heads for size in SHAPES[self.layout]] for heads in self.heads]
        xs = [torch.empty(*shape, self.head_dim, dtype=self.dtype, device="meta") for shape in shapes]
        outs = [torch.empty_like(x) for x in xs]
        sections = 2 if self.positions == "two ids" else 1
        cos = torch.empty(1000, self.rotary_dim // sections // (1 if self.wide else 2), device="meta")
        ids = ends = None
        if "ids" in self.positions:
            ids = torch.empty(2, sections, 1000, dtype=torch.int64, device="meta")
        elif self.positions == "packed":
            ends = torch.empty(9, dtype=torch.int32, device="meta")
        options = RotationOptions(self.rotary_dim, self.interleaved, self.inverse, self.layout)
        tensors = RotationTensors(xs, outs, cos, cos, ids, ends)
        if not self.norm:
            launch_rotation(options, tensors, self.config)
            return
        tensors = tensors._replace(weights=[torch.empty(self.head_dim, device="meta") for _ in xs[:2]])
        if self.norm == "forward":
            launch_rotation(options, tensors, self.config)
        else:
            launch_norm_gradient(options, tensors, xs[:2], (True, True)[: len(xs)], self.config)


def rotation_jobs(arch: str, full: bool = False) -> list[RotationJob]:
    """Jobs for the rows of the table that serve ``arch``: every row once, in ``aot.THOROUGH`` and for AMD the features
    too, which are the same code elsewhere. ``full`` crosses dtypes, styles and layouts."""
    rows = [row for row in TABLE if row.arch is None or arch in row.arch]
    configs = list(dict.fromkeys(row.config for row in rows if not row.norms))
    norm_configs = list(dict.fromkeys(row.config for row in rows if row.norms is not False))
    bf16, fp32 = torch.bfloat16, torch.float32
    jobs = []
    for config in configs:
        jobs.append(RotationJob(arch, config, bf16, False, "bshd", (32, 8)))
        jobs.append(RotationJob(arch, config, fp32, True, "bhsd", (96,), inverse=True))
    config = configs[0]
    featured = full or arch in (*aot.THOROUGH, "gfx942")
    if featured:
        jobs.append(RotationJob(arch, config, bf16, True, "thd", (8, 8, 1), "packed", 80, 48, wide=True))
        jobs.append(RotationJob(arch, config, fp32, False, "sbhd", (8,), "two ids", 128, 96))
    for norm, turned in (("forward", False), ("backward", True)):
        jobs += [
            RotationJob(arch, tile, bf16, False, "bshd", (32, 8), "index", d, d, inverse=turned, norm=norm)
            for tile in norm_configs[:1]
            for d in ((64, 128, 256) if featured else (128,))
        ]
        if not featured:
            continue
        jobs.append(RotationJob(arch, config, bf16, True, "thd", (8, 8, 1), "packed", 80, 48, True, turned, norm))
        jobs.append(RotationJob(arch, config, fp32, False, "sbhd", (8,), "two ids", 128, 96, False, turned, norm))
    if full:
        for config, dtype, interleaved, layout in itertools.product(configs, (bf16, fp32), (False, True), SHAPES):
            positions = "packed" if layout == "thd" else "ids"
            jobs.append(RotationJob(arch, config, dtype, interleaved, layout, (32, 8), positions, 96, 64))
    return jobs
