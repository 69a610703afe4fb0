"""Whole causal sequences with ``batch_invariant=True``, and what puts rows before them."""

import random
from dataclasses import dataclass, field

import torch

from fused_rope_attn import rope_attention


@dataclass
class Drawn:
    """Whole causal sequences q (B, HQ, N, D), k and v (B, HKV, N, D), with tables, options, and their o and lse."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    options: dict = field(default_factory=dict)

    @property
    def length(self):
        return self.q.shape[2]

    def attend(self, tensors, *tables, **masks):
        return rope_attention(*tensors, *tables, True, return_lse=True, batch_invariant=True, **masks, **self.options)

    def whole(self):
        return self.attend((self.q, self.k, self.v), self.cos, self.sin)


def drawn(seed, dtype, head_dim, longest):
    """Draw a call of the portable kernels on the CPU."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    group, heads_kv, batch = draw.choice([1, 2, 4]), draw.choice([1, 2]), draw.choice([1, 2, 3])
    length, rotary_dim = draw.randrange(2, longest), draw.choice([head_dim, head_dim // 2])

    def normal(*shape):
        return torch.randn(shape).to(dtype)

    options = {"backend": "triton", "interleaved": draw.random() < 0.5, "rotary_dim": rotary_dim}
    if draw.random() < 0.3:
        options["window"] = (draw.randrange(1, length), draw.choice([0, -1]))
    if draw.random() < 0.2:
        options["softcap"] = 20.0
    if draw.random() < 0.3:
        options["sinks"] = normal(group * heads_kv)
    if draw.random() < 0.4:
        options |= {"q_norm": normal(head_dim), "k_norm": normal(head_dim), "norm_offset": draw.choice([0.0, 1.0])}
    angles = torch.rand(length, rotary_dim // 2) * 6.3
    q = normal(batch, group * heads_kv, length, head_dim)
    k, v = (normal(batch, heads_kv, length, head_dim) for _ in range(2))
    return Drawn(q, k, v, angles.cos(), angles.sin(), options), draw


def padded(x, before):
    return torch.cat((torch.full_like(x[:, :, :1], torch.nan).expand(-1, -1, before, -1), x), 2)


def later_tables(call, before):
    """Tables with ``before`` other rows before those of the call."""
    return [torch.cat((torch.rand(before, x.shape[1]), x)) for x in (call.cos, call.sin)]


def starts(call, before):
    return torch.full((call.q.shape[0],), before, dtype=torch.int32)
