"""This rank's part of a case of context parallelism, and the judge of all parts."""

import functools

import torch

from fused_rope_attn.distributed import cp_shard, rope_attention_cp, rope_attention_varlen_cp
from verification import testing
from verification.context_parallel import compared
from verification.ranks import group_of


def judge(case, found, total=None, device="cpu"):
    """Hold all tensors to the contract's tolerance, every row."""
    for comparison in compared(case, found, total, device):
        assert comparison.ok, f"{case.name}: {comparison.tensor}: {comparison.detail}"


def with_group(ranks, function, arguments, options):
    return function(*arguments, group=group_of(ranks), **options)


class Shard:
    """This rank's rows of a case's inputs, and calls of ``rope_attention_cp`` with them."""

    def __init__(self, case, ranks, device="cpu", sharding="zigzag"):
        self.case, self.inputs, self.group = case, testing.make_inputs(case, device), group_of(ranks)
        self.cut = functools.partial(cp_shard, dim=2, group=self.group, sharding=sharding)
        self.options = {"group": self.group, "sharding": sharding, "window": case.window}
        self.qkv = [self.cut(x).requires_grad_() for x in self.inputs[:3]]
        self.do = self.cut(self.inputs.do)

    def __call__(self, q, k, v, **options):
        tables = self.inputs.cos, self.inputs.sin
        return rope_attention_cp(q, k, v, *tables, self.case.causal, **{**self.options, **options})

    def packed(self, plan, q, k, v):
        """Attend to the same rows as documents."""
        flat = (x[0].transpose(0, 1) for x in (q, k, v))
        o = rope_attention_varlen_cp(*flat, self.inputs.cos, self.inputs.sin, plan, deterministic=True)
        return o.transpose(0, 1).unsqueeze(0)

    def both(self, call=None, qkv=None, **options):
        """Return (o, dq, dk, dv) of a call, of this one by default."""
        qkv = self.qkv if qkv is None else qkv
        o = (call or self)(*qkv, **options)
        return (o.detach(), *torch.autograd.grad(o, qkv, self.do))
