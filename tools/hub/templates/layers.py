"""Layers without state, for ``kernelize`` of the package ``kernels``."""

import torch
from torch import nn

from .rotation.api import apply_rope_qk


class apply_rotary_transformers(nn.Module):
    """The function ``apply_rotary_pos_emb`` of transformers' models that rotate halves."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Rotate q and k by tables (B, N, R) with each angle twice.

        q, k: (B, H, N, D), or (B, N, H, D) with unsqueeze_dim=2.
        """
        layout = "bhsd" if unsqueeze_dim == 1 else "bshd"
        return apply_rope_qk(q, k, cos, sin, rotary_dim=cos.shape[-1], layout=layout)
