"""Calls on tensors without memory, for tests of planning on each machine."""

import torch

from fused_rope_attn.attention import configs
from tests.support.dtypes import BF16

HOPPER = (configs.HopperForwardConfig, configs.HopperBackwardConfig)
PORTABLE = (configs.ForwardConfig, configs.BackwardConfig)
# A length of each bucket of the tables.
LENGTHS = {"tiny": 512, "short": 1024, "medium": 4096, "long": 4097}


def call(len_q=4096, len_k=None, head_dim=128, dtype=BF16, heads=(8, 8), batch=2, where="meta", **changes):
    """Arguments of `plan` and `rope_attention`, (B, N, H, D) views as models have them."""
    len_k = len_q if len_k is None else len_k

    def tensor(h, n):
        return torch.empty(batch, n, h, head_dim, dtype=dtype, device=where).transpose(1, 2)

    table = torch.empty(len_k, head_dim // 2, device=where)
    q, k, v = tensor(heads[0], len_q), tensor(heads[1], len_k), tensor(heads[1], len_k)
    return {"q": q, "k": k, "v": v, "cos": table, "sin": table, "causal": True} | changes


def kinds(chosen):
    """The types of the configurations of both passes: which kernels run."""
    return type(chosen.forward), type(chosen.backward)
