"""Calls without tables: the results of tables of angle 0, and neither launches nor copies for a rotation."""

import pytest
import torch

from fused_rope_attn import rope_attention
from fused_rope_attn.runtime.launch import Launch
from tests.support.gpu import peak_bytes
from tests.support.marks import interpreted
from tests.support.places import ON_SM_90, each_backend

NORMS = {"q_norm": torch.linspace(-1, 2, 32), "k_norm": torch.linspace(2, 1, 32)}
OPTIONS = [
    {"causal": True, "softcap": 0.5, "sinks": torch.ones(4)},
    {"causal": True, "window": (9, -1), "kv_lens": torch.tensor([20, 33], dtype=torch.int32)},
    {"softmax_scale": -0.2},
    NORMS,
]


def heads(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return [torch.randn(2, heads, n, 32, generator=generator) for heads, n in shape]


def results(arguments, tables, **options):
    leaves = [x.clone().requires_grad_() for x in arguments]
    o, lse = rope_attention(*leaves, *tables, return_lse=True, **options)
    return o, lse, *torch.autograd.grad(o.square().sum() + lse.sum(), leaves)


@pytest.mark.parametrize("options", OPTIONS)
def test_angle_zero(options):
    given, options = heads((4, 33), (2, 33), (2, 33)), options | {"backend": "reference"}
    expected = results(given, (torch.ones(33, 16), torch.zeros(33, 16)), **options)
    torch.testing.assert_close(results(given, (None, None), **options), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, (-1, 4)])
def test_more_queries_than_keys(window):
    q, k, v = heads((4, 60), (2, 33), (2, 33))
    distance = torch.arange(33) - (torch.arange(60)[:, None] - 27)
    visible = distance <= (60 if window is None else window[1])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True).nan_to_num()
    o = rope_attention(q, k, v, None, None, window=window, backend="reference")
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)


@interpreted
def test_launches(monkeypatch):
    """A forward pass is one launch, and a backward pass rotates nothing before its statistics."""
    names, run = [], Launch._launch
    monkeypatch.setattr(
        Launch, "_launch", lambda self, *given: names.append(self.kernel.fn.__name__) or run(self, *given)
    )
    q, k, v = (x.requires_grad_() for x in heads((4, 33), (2, 33), (2, 33)))
    o = rope_attention(q, k, v, None, None, causal=True, backend="triton")
    assert names == ["forward_kernel"] and {x.data_ptr() for x in (q, k)} <= {
        x.data_ptr() for x in o.grad_fn.saved_tensors if x is not None
    }
    o.backward(torch.ones_like(o))
    assert names[1:] == ["prepass_kernel", "dkdv_kernel", "dq_kernel"]


@each_backend
def test_memory(chosen):
    """A forward pass allocates its results, and a backward pass no rotated rows: sums of 4 bytes, and statistics."""
    shape = (2, 8, 2048, 128)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(4))
    for _ in range(2):  # the first time compiles
        with peak_bytes() as forward:
            o = rope_attention(q, k, v, None, None, True, **chosen)
        with peak_bytes() as backward:
            torch.autograd.grad(o, (q, k, v), do)
    statistics, sums = 16 * q[..., 0].numel(), 2 * q.nbytes if chosen == ON_SM_90 else 0
    assert forward[0] <= o.nbytes + statistics
    assert backward[0] <= 3 * q.nbytes + sums + statistics
