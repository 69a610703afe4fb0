"""A wrong call raises on every rank and names the argument, also where only one rank is wrong."""

import pytest
import torch

from fused_rope_attn.distributed import cp_positions, plan_varlen_cp, rope_attention_cp, rope_attention_varlen_cp
from tests.support.context_parallel import Shard, with_group
from verification.ranks import group_of
from verification.testing import Case

SMALL = Case(1, 4, 2, 24, 24, 16, dtype=torch.float32)


def refused(ranks, wrong):
    group, wrong = group_of(ranks), dict(wrong)
    if not wrong.pop("all", False) and group.rank() != 1:
        wrong = {}
    length, heads_kv, rows = wrong.pop("length", 12), wrong.pop("heads_kv", 2), wrong.pop("rows", 36)
    length_k, grad = wrong.pop("length_k", length), wrong.pop("grad", True)
    q, k = torch.zeros(1, 4, length, 16, requires_grad=grad), torch.zeros(1, heads_kv, length_k, 16)
    rope_attention_cp(q, k, k, torch.ones(rows, 8), torch.zeros(rows, 8), **{"group": group, **wrong})


def refused_documents(ranks, ends, options):
    group = group_of(ranks)
    plan = plan_varlen_cp([0, ends[group.rank()], 12], group=group)
    x = torch.zeros(plan.local, 2, 16)
    rope_attention_varlen_cp(x, x, x, torch.ones(12, 8), torch.zeros(12, 8), plan, **options)


def double_backward(ranks):
    shard = Shard(SMALL, ranks)
    torch.autograd.grad(shard(*shard.qkv).sum(), shard.qkv[:1], create_graph=True)[0].sum().backward()


def forward_mode(ranks):
    shard = Shard(SMALL, ranks)
    q, k, v = (x.detach() for x in shard.qkv)
    with torch.autograd.forward_ad.dual_level():
        if shard.group.rank() == 0:
            k = torch.autograd.forward_ad.make_dual(k, torch.ones_like(k))
        shard(q, k, v)


# (what rank 1 of three passes otherwise, or all with "all", the error, what every rank's message says)
ROWS = [
    ({"length": 8}, ValueError, "the local length of q must be the same on all ranks"),
    ({"heads_kv": 4}, ValueError, "the heads of k must be the same"),
    ({"causal": False}, ValueError, "causal must be the same"),
    ({"window": (3, 0)}, ValueError, "window must be the same"),
    ({"total_len": 5}, ValueError, "total_len must be the same"),
    ({"grad": False}, ValueError, "whether gradients are wanted must be the same"),
    ({"rows": 13}, ValueError, "cos must have a row for each of k's 36 positions, but has 13"),
    ({"rows": 12}, ValueError, "whether the tables are of the local rows must be the same"),
    ({"softcap": -1.0}, ValueError, "softcap must be finite and positive"),
    ({"softcap": "1"}, TypeError, "softcap must be a float"),
    ({"batch_invariant": True}, ValueError, "batch_invariant must be the same"),
    ({"all": True, "method": "all_to_all"}, ValueError, "k has 2 heads"),
    ({"all": True, "length": 7}, ValueError, "q must have a multiple of 2 rows"),
    ({"all": True, "heads_kv": 3}, ValueError, "k has 3 heads, but q's 4 heads"),
    ({"all": True, "length_k": 6}, ValueError, "k must have shape (B, HKV, N/P, D) with N/P = 12 of q, but has"),
    ({"all": True, "sharding": "striped"}, ValueError, "sharding must be"),
    ({"all": True, "method": "ring"}, ValueError, "method must be"),
    ({"all": True, "total_len": 37}, ValueError, "total_len must be from 0 to the 36 rows"),
    ({"all": True, "total_len": 3.0}, TypeError, "total_len must be an int"),
    ({"all": True, "dropout_p": 0.1}, TypeError, "rope_attention_cp() does not take 'dropout_p'"),
    ({"all": True, "return_max_logit": True}, TypeError, "rope_attention_cp() does not take 'return_max_logit'"),
    ({"all": True, "batch_invariant": True, "causal": False}, NotImplementedError, "causal must be True with batch_"),
    ({"all": True, "backend": "hopper"}, NotImplementedError, "q must be float16 or bfloat16 for backend='hopper'"),
]
PLANS = [
    ([1, 8], {}, "cu_seqlens must begin with 0"),
    ([0, 8, 4], {}, "never fall"),
    ([0, 7], {}, "total_tokens must be a multiple of 4 for 2 ranks"),
    ([0, 8], {"total_tokens": 4}, "at least the 8 tokens"),
    ([0, 8], {"sharding": "ring"}, "sharding must be"),
    ([0, 8], {"sharding": "dealt:0,0,0,1"}, "each rank equally often"),
]
REFUSED = [(refused, (0, 1, 2), (wrong,), kind, message) for wrong, kind, message in ROWS]
REFUSED += [
    (with_group, (0, 1), (plan_varlen_cp, (ends,), options), ValueError, message) for ends, options, message in PLANS
]
PACKED = "rope_attention_varlen_cp() does not take"
REFUSED += [
    (refused_documents, (0, 1), ([5, 6], {}), ValueError, "the documents of plan must be the same on all"),
    (refused_documents, (0, 1), ([5, 5], {"return_max_logit": True}), TypeError, f"{PACKED} 'return_max_"),
    (refused_documents, (0, 1), ([5, 5], {"max_seqlen": 7}), TypeError, f"{PACKED} 'max_seqlen'"),
    (double_backward, (0, 1, 2), (), NotImplementedError, "double backward"),
    (forward_mode, (0, 1, 2), (), Exception, "rope_attention_cp: forward-mode differentiation"),
]


@pytest.mark.parametrize(("program", "members", "given", "kind", "message"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_all_ranks_raise(ranks, program, members, given, kind, message):
    for error in ranks.run(program, members, *given, ranks=members):
        assert isinstance(error, kind) and message in str(error), error


def test_groups(ranks):
    with pytest.raises(TypeError, match="group must be a ProcessGroup or a DeviceMesh"):
        cp_positions(8, group="cp")
