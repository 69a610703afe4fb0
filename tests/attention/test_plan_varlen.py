"""`plan_varlen`: what packed calls run, said before they run."""

import pytest
import torch

from fused_rope_attn import plan_varlen, rope_attention_varlen
from tests.support.planning import HOPPER, kinds


def packed_call(device="meta", dtype=torch.bfloat16, tokens=8192, longest=4096):
    """Arguments of `rope_attention_varlen` for two sequences."""
    q, k, v = (torch.empty(tokens, heads, 128, device=device, dtype=dtype) for heads in (8, 2, 2))
    table = torch.empty(longest, 64, device=device)
    ends = torch.tensor([0, tokens - longest, tokens], dtype=torch.int32, device=device)
    return q, k, v, table, table, ends, ends, longest, longest, True


def test_it_names_the_kernels_and_why(arch):
    chosen = plan_varlen(*packed_call(tokens=1 << 16, longest=1 << 15), backend="hopper")
    assert kinds(chosen) == HOPPER and "asked for" in chosen.reason
    inline = plan_varlen(*packed_call(), strategy="inline")
    assert (inline.backend, inline.strategy) == ("triton", "inline") and "strategy" in inline.reason


def test_cpu_tensors_take_the_reference(arch):
    arch("cpu")
    chosen = plan_varlen(*packed_call("cpu", torch.float32, 12, 8))
    assert chosen.backend == "reference" and chosen.reason


@pytest.mark.parametrize("changes", [{"kv_lens": None}, {"softmax_scale": "1"}, {"window": 3}])
def test_it_refuses_what_the_call_refuses(changes):
    arguments = packed_call("cpu", torch.float32, 12, 8)
    messages = []
    for function in (plan_varlen, rope_attention_varlen):
        with pytest.raises((TypeError, ValueError)) as error:
            function(*arguments, **changes)
        messages.append((error.type, next(iter(changes)) in str(error.value)))
    assert messages[0] == messages[1] and messages[0][1]
