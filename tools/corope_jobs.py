"""Jobs of Co-RoPE for `compile_kernels`: its tiles for sm_90, the card that they are made for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tools.jobs import LaunchJob, meta


@dataclass(frozen=True, kw_only=True)
class CoRopeJob(LaunchJob):
    """A call of ``direction`` "forward" or "backward"."""

    direction: str
    group_size: int

    @property
    def title(self) -> str:
        return f"corope {self.direction}"

    def launch(self) -> None:
        from fused_rope_attn.experimental.corope.launch import corope_backward, corope_forward

        q, k, v = (self.heads(2, 1000, heads) for heads in (2 * self.group_size, 2, 2))
        options = {"base": 1e4, "softmax_scale": 0.1}
        if self.direction == "forward":
            corope_forward(q, k, v, **options)
        else:
            mileage = meta(*k.shape[:3], dtype=torch.int64)
            corope_backward(torch.empty_like(q), q, k, v, torch.empty_like(q), meta(*q.shape[:3]), mileage, **options)


def corope_jobs(arch: str, full: bool = False) -> list[CoRopeJob]:
    """Jobs for ``arch``; ``full`` adds the other groups and head dimensions."""
    if arch != "sm_90":
        return []
    cases = [(torch.bfloat16, 128, 4), (torch.bfloat16, 128, 16), (torch.float32, 128, 4)]
    if full:
        cases += [(torch.bfloat16, 128, 1), (torch.bfloat16, 64, 8), (torch.float16, 96, 3), (torch.float32, 64, 16)]
    return [
        CoRopeJob(arch=arch, direction=direction, dtype=dtype, head_dim=head_dim, group_size=group_size)
        for dtype, head_dim, group_size in cases
        for direction in ("forward", "backward")
    ]
