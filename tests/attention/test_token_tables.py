"""``rope_attention_varlen(token_tables=True)``: row t of the tables belongs to packed token t."""

import math

import pytest
import torch

from fused_rope_attn import plan_varlen, rope_attention, rope_attention_varlen
from tests.support.marks import ignore_overflow, interpreted
from tests.support.operators import kernel_or_reference

LENGTHS = (37, 0, 70, 1)
ENDS = torch.tensor([0, 37, 37, 107, 108], dtype=torch.int32)
TOKENS = 113  # the last five belong to no sequence


def drawn(rows=TOKENS, rotary_dim=12, dtype=torch.float32):
    """Return q, k, v (T, H, D), do, random tables that are no rotation, and the weights of norms."""
    torch.manual_seed(3)
    q, do = (torch.randn(TOKENS, 4, 16, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(TOKENS, 2, 16, dtype=dtype) for _ in range(2))
    cos, sin = (torch.rand(rows, rotary_dim // 2) + 0.3 for _ in range(2))
    return (q, k, v), do, (cos, sin), {"q_norm": torch.rand(16) + 0.5, "k_norm": torch.rand(16) + 0.5}


def run(function, tensors, do, weights):
    """Return o, lse, and the gradients of q, k, v and the weights."""
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors, *weights.values())]
    o, lse = function(*leaves[:3], dict(zip(weights, leaves[3:])))
    return o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)


def each_alone(tensors, do, tables, weights, causal, **options):
    """The same of each sequence by itself, with its rows of the tables, by the reference."""
    (q, k, v), (cos, sin) = tensors, tables
    found = [torch.zeros_like(q), torch.full((4, TOKENS), -math.inf), *(torch.zeros_like(x) for x in tensors)]
    found += [torch.zeros_like(x) for x in weights.values()]
    for first, length in zip(ENDS.tolist(), LENGTHS):
        if not length:
            continue
        rows = slice(first, first + length)

        def attend(q, k, v, weights, rows=rows):
            qkv = (x.transpose(0, 1)[None] for x in (q, k, v))
            given = options | weights | {"return_lse": True, "backend": "reference"}
            o, lse = rope_attention(*qkv, cos[rows], sin[rows], causal, **given)
            return o[0].transpose(0, 1), lse[0]

        o, lse, dq, dk, dv, *dweights = run(attend, [x[rows] for x in (q, k, v)], do[rows], weights)
        found[1][:, rows] = lse
        for whole, part in zip((found[0], *found[2:5]), (o, dq, dk, dv)):
            whole[rows] = part
        for whole, part in zip(found[5:], dweights):
            whole += part
    return found


@ignore_overflow
@kernel_or_reference("triton", "reference")
@pytest.mark.parametrize(
    ("causal", "norms", "strategy", "options"),
    [
        (True, False, "inline", {}),
        (True, False, "prepass", {"window": (20, -1)}),
        (False, True, "prepass", {"interleaved": True}),
        (True, True, "inline", {"interleaved": True, "sinks": torch.tensor([0.1, 0.2, -3.0, 2.0])}),
    ],
)
def test_tokens_take_their_own_rows(backend, causal, norms, strategy, options):
    tensors, do, tables, weights = drawn()
    weights = weights if norms else {}
    options = options | {"rotary_dim": 12}

    def attend(q, k, v, weights):
        given = options | weights | {"return_lse": True, "backend": backend, "token_tables": True}
        given |= {"strategy": strategy} if backend == "triton" else {}
        return rope_attention_varlen(q, k, v, *tables, ENDS, ENDS, 70, 70, causal, **given)

    found = run(attend, tensors, do, weights)
    expected = each_alone(tensors, do, tables, weights, causal, **options)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


@interpreted
@ignore_overflow
def test_equal_rows_give_the_bits_of_positions_that_restart():
    (q, k, v), _, (cos, sin), _ = drawn(rows=70)
    options = {"rotary_dim": 12, "backend": "triton", "return_lse": True}
    expected = rope_attention_varlen(q, k, v, cos, sin, ENDS, ENDS, 70, 70, True, **options)
    index = torch.cat([torch.arange(length) for length in (*LENGTHS, 5)])
    found = rope_attention_varlen(
        q, k, v, cos[index], sin[index], ENDS, ENDS, 70, 70, True, token_tables=True, **options
    )
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_errors():
    (q, k, v), _, (cos, sin), _ = drawn()
    call = {"rotary_dim": 12, "token_tables": True}
    with pytest.raises(TypeError, match="token_tables must be a bool, but is int 1"):
        rope_attention_varlen(q, k, v, cos, sin, ENDS, ENDS, 70, 70, rotary_dim=12, token_tables=1)
    for rows in (cos[:-1], torch.cat((cos, cos))):
        with pytest.raises(
            ValueError, match=f"cos must have a row for each of 113 tokens .*, but has {len(rows)} rows"
        ):
            rope_attention_varlen(q, k, v, rows, rows, ENDS, ENDS, 70, 70, **call)
    with pytest.raises(ValueError, match="k must have q's 112 tokens with token_tables=True, but has 113"):
        rope_attention_varlen(q[:-1], k, v, cos, sin, ENDS, ENDS, 70, 70, **call)
    other = torch.tensor([0, 37, 40, 107, 108], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens_k must equal cu_seqlens_q with token_tables=True"):
        rope_attention_varlen(q, k, v, cos, sin, ENDS, other, 70, 70, **call)
    assert plan_varlen(q, k, v, cos, sin, ENDS, ENDS, 70, 70, **call).backend == "reference"


@pytest.mark.unpoisoned
@kernel_or_reference("triton", "reference")
def test_compile(backend):
    torch._dynamo.reset()
    (q, k, v), _, (cos, sin), _ = drawn()
    compiled = torch.compile(rope_attention_varlen, fullgraph=True, backend="aot_eager")
    arguments = (q, k, v, cos, sin, ENDS, ENDS, 70, 70, True)
    options = {"rotary_dim": 12, "token_tables": True, "backend": backend}
    torch.testing.assert_close(compiled(*arguments, **options), rope_attention_varlen(*arguments, **options))
