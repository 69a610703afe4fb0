"""flash-attention for the CPU: what transformers' flash functions call, computed by matrix products.

transformers decides within these functions which tokens belong together, so that its unpatched models show it here.
"""

import sys
import types

import torch
from transformers import modeling_flash_attention_utils as flash

IMPLEMENTATION = "flash_attention_3"  # transformers imports its functions without a look at the GPU


def install(monkeypatch):
    """Let models of ``IMPLEMENTATION`` run on the CPU during a test."""
    module = types.SimpleNamespace(
        flash_attn_func=flash_attn_func,
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_func,
    )
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(flash, "is_flash_attn_3_available", lambda: True, raising=False)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn"):
        monkeypatch.setattr(flash, name, None, raising=False)


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, s_aux=None):
    """Attend within rows (B, N, H, D), aligned at the bottom right."""
    return torch.stack([_attend(*rows, softmax_scale, causal, window_size, softcap, s_aux) for rows in zip(q, k, v)])


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    s_aux=None,
):
    """Attend within sequences of rows (N, H, D)."""
    parts = (x.split(ends.diff().tolist()) for x, ends in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k)))
    return torch.cat([_attend(*rows, softmax_scale, causal, window_size, softcap, s_aux) for rows in zip(*parts)])


def _attend(q, k, v, scale, causal, window, softcap, sinks):
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    left, right = window[0], 0 if causal else window[1]
    hidden = (distance > left) & (left >= 0) | (distance < -right) & (right >= 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), 2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)
