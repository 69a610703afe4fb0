"""What `compile_kernels` compiles of Co-RoPE: its tiles for sm_90, the card that they are made for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CoRopeJob:
    """One call of one launcher."""

    arch: str
    direction: str  # "forward" or "backward"
    dtype: torch.dtype
    head_dim: int
    group_size: int

    @property
    def label(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"corope {self.direction} {dtype} D{self.head_dim} G{self.group_size}"

    def launch(self) -> None:
        """Call the launcher on tensors without memory."""
        from fused_rope_attn.experimental.corope.launch import corope_backward, corope_forward

        def tensor(heads: int) -> torch.Tensor:
            return torch.empty(2, 1000, heads, self.head_dim, dtype=self.dtype, device="meta").transpose(1, 2)

        q, k, v, options = tensor(2 * self.group_size), tensor(2), tensor(2), {"base": 1e4, "softmax_scale": 0.1}
        if self.direction == "forward":
            corope_forward(q, k, v, **options)
        else:
            lse = torch.empty(q.shape[:3], device="meta")
            mileage = torch.empty(k.shape[:3], dtype=torch.int64, device="meta")
            corope_backward(torch.empty_like(q), q, k, v, torch.empty_like(q), lse, mileage, **options)


def corope_jobs(arch: str, full: bool = False) -> list[CoRopeJob]:
    """Jobs for ``arch``; ``full`` adds the other groups and head dimensions."""
    if arch != "sm_90":
        return []
    cases = [(torch.bfloat16, 128, 4), (torch.bfloat16, 128, 16), (torch.float32, 128, 4)]
    if full:
        cases += [(torch.bfloat16, 128, 1), (torch.bfloat16, 64, 8), (torch.float16, 96, 3), (torch.float32, 64, 16)]
    return [CoRopeJob(arch, direction, *case) for case in cases for direction in ("forward", "backward")]
