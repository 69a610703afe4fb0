"""Jobs of the rotation alone for `compile_kernels`: each tile for each target, features spread over the jobs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from fused_rope_attn.rotation.ops import TABLE, RotationConfig
from tools.jobs import LaunchJob, int32, meta

SHAPES = {"bhsd": (2, 0, 1000), "bshd": (2, 1000, 0), "sbhd": (1000, 2, 0), "thd": (1000, 0)}  # 0: the heads


@dataclass(frozen=True, kw_only=True)
class RotationJob(LaunchJob):
    """positions: ``index``, ``ids``, ``two ids`` or ``packed``. norm: that of the first two tensors, "forward" or
    "backward", "" for none."""

    config: RotationConfig
    layout: str
    heads: tuple[int, ...]
    head_dim: int = 128
    rotary_dim: int | None = None
    interleaved: bool = False
    positions: str = "index"
    wide: bool = False
    inverse: bool = False
    norm: str = ""

    title = "rotation"

    def launch(self) -> None:
        from fused_rope_attn.rotation.ops import launch_rotation
        from fused_rope_attn.rotation.problem import RotationOptions, RotationTensors

        shapes = [[size or heads for size in SHAPES[self.layout]] for heads in self.heads]
        xs = [meta(*shape, self.head_dim, dtype=self.dtype) for shape in shapes]
        rotary_dim, sections = self.rotary_dim or self.head_dim, 2 if self.positions == "two ids" else 1
        cos = meta(1000, rotary_dim // sections // (1 if self.wide else 2))
        ids = meta(2, sections, 1000, dtype=torch.int64) if "ids" in self.positions else None
        ends = int32(9) if self.positions == "packed" else None
        options = RotationOptions(rotary_dim, self.interleaved, self.inverse, self.layout)
        tensors = RotationTensors(xs, [torch.empty_like(x) for x in xs], cos, cos, ids, ends)
        if self.norm:
            tensors = tensors._replace(weights=[meta(self.head_dim) for _ in xs[:2]])
        normed = xs[:2] if self.norm == "backward" else ()
        launch_rotation(options, tensors, normed, config=(self.config,))


def rotation_jobs(arch: str, full: bool = False) -> list[RotationJob]:
    """Jobs for the rows of the table that serve ``arch``: every row once, for sm_90 and gfx942 the features too,
    which are the same code elsewhere, and norms with them on sm_90. ``full`` crosses dtypes, styles and layouts."""
    rows = [row for row in TABLE if row.arch is None or arch in row.arch]
    configs, of_norms = [row for row in rows if not row.norms], rows[0]
    bf16, fp32 = torch.bfloat16, torch.float32
    pairs = {"layout": "bshd", "heads": (32, 8), "dtype": bf16}
    packed = {"layout": "thd", "heads": (8, 8, 1), "dtype": bf16, "positions": "packed", "head_dim": 80}
    packed |= {"rotary_dim": 48, "interleaved": True, "wide": True}
    two_ids = {"layout": "sbhd", "heads": (8,), "dtype": fp32, "positions": "two ids", "rotary_dim": 96}
    jobs = []

    def add(config: RotationConfig, features: dict[str, Any], **others: Any) -> None:
        jobs.append(RotationJob(**{"arch": arch, "config": config, **features, **others}))

    for config in configs:
        add(config, pairs)
        add(config, {"layout": "bhsd", "heads": (96,), "dtype": fp32}, interleaved=True, inverse=True)
    config = configs[0]
    featured = full or arch == "sm_90"
    if featured or arch == "gfx942":
        add(config, packed)
        add(config, two_ids)
    for norm, turned in (("forward", False), ("backward", True)):
        for d in (64, 128, 256) if full else (128,):
            add(of_norms, pairs, head_dim=d, inverse=turned, norm=norm)
        if featured:
            add(config, packed, inverse=turned, norm=norm)
            add(config, two_ids, inverse=turned, norm=norm)
    if full:
        for config, dtype, interleaved, layout in itertools.product(configs, (bf16, fp32), (False, True), SHAPES):
            positions = "packed" if layout == "thd" else "ids"
            features = pairs | {"dtype": dtype, "interleaved": interleaved, "layout": layout, "positions": positions}
            add(config, features, head_dim=96, rotary_dim=64)
    return jobs
