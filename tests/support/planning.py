"""Calls on tensors without memory, for tests of planning on each machine."""

import torch

from fused_rope_attn.attention import configs
from tests.support.dtypes import BF16

HOPPER = (configs.HopperForwardConfig, configs.HopperBackwardConfig)
PORTABLE = (configs.ForwardConfig, configs.BackwardConfig)


def call(len_q=4096, len_k=None, head_dim=128, dtype=BF16, heads=(8, 8), batch=2, where="meta", **changes):
    """Arguments of `plan` and `rope_attention`, (B, N, H, D) views as models have them."""
    len_k = len_q if len_k is None else len_k

    def tensor(h, n):
        return torch.empty(batch, n, h, head_dim, dtype=dtype, device=where).transpose(1, 2)

    table = torch.empty(len_k, head_dim // 2, device=where)
    q, k, v = tensor(heads[0], len_q), tensor(heads[1], len_k), tensor(heads[1], len_k)
    return {"q": q, "k": k, "v": v, "cos": table, "sin": table, "causal": True} | changes


def packed_call(sequences, tokens, longest, tokens_k=None, heads=(32, 8), **changes):
    """Arguments of `plan_varlen` for so many sequences and tokens."""
    given = call(tokens, tokens_k, batch=1, heads=heads, **changes)
    given |= {name: given[name][0].transpose(0, 1) for name in "qkv"}
    ends = torch.empty(sequences + 1, dtype=torch.int32, device=given["q"].device)
    return given | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ends) | {
        "max_seqlen_q": longest, "max_seqlen_k": longest,
    }  # fmt: skip


def kinds(chosen):
    """Return a letter for each pass of a plan: "H" for sm_90 kernels, "P" for portable ones, "-" for none."""
    passes = zip((chosen.forward, chosen.backward), HOPPER, PORTABLE)
    return "".join("H" if type(x) is hopper else "P" if type(x) is portable else "-" for x, hopper, portable in passes)
