"""Tensors of other kinds: those without data are served, nested and distributed ones are refused by name."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fused_rope_attn import (
    apply_rope,
    apply_rope_qk,
    plan,
    rope_attention,
    rope_attention_mla,
    rope_attention_varlen,
    rope_attention_with_kvcache,
)
from fused_rope_attn.experimental import corope_attention
from tests.support.operators import SMALL
from verification.testing import make_inputs


def calls(q, k, v, cos, sin):
    """A call of every public function on such tensors, by name; each returns what has q's shape and dtype."""
    ends, heads = torch.tensor([0, 7, 14], dtype=torch.int32).to(q.device), v.repeat(1, 2, 1, 1)

    def packed():
        tokens = (x[:, :, :7].transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        o = rope_attention_varlen(*tokens, cos, sin, ends, ends, 7, 7, True)
        return o.unflatten(0, (2, 7)).transpose(1, 2)

    def bshd():
        return rope_attention(*(x.transpose(1, 2) for x in (q, k, v)), cos, sin, layout="bshd").transpose(1, 2)

    def step():
        with torch.no_grad():
            new = k[:, :, :7].clone(), v[:, :, :7].clone()
            return rope_attention_with_kvcache(q, k, v, cos, sin, *new, cache_seqlens=ends[:2])

    return {
        "rope_attention": lambda: rope_attention(q, k, v, cos, sin, True),
        "bshd": bshd,
        "rope_attention_varlen": packed,
        "rope_attention_mla": lambda: rope_attention_mla(q, q, heads, k, heads, cos, sin, True),
        "rope_attention_with_kvcache": step,
        "apply_rope": lambda: apply_rope(q, cos, sin),
        "apply_rope_qk": lambda: apply_rope_qk(q, k[:, :, :7], cos, sin)[0],
        "corope_attention": lambda: corope_attention(q, k[:, :, :7], v[:, :, :7]),
    }


@pytest.mark.parametrize("name", calls(*make_inputs(SMALL)[:5]))
@pytest.mark.parametrize("autocast", [False, True])
def test_tensors_without_data_give_shapes(name, autocast):
    """Shapes, dtypes and, where there are, gradients; a model can be run on the device meta before it has weights."""
    inputs = [x.to("meta") for x in make_inputs(SMALL)[:5]]
    has_gradient = name != "rope_attention_with_kvcache"
    inputs[0].requires_grad_(has_gradient)
    with torch.autocast("cpu", enabled=autocast):
        o = calls(*inputs)[name]()
    results = [o, *(torch.autograd.grad(o.sum(), inputs[0]) if has_gradient else ())]
    assert all(x.is_meta and x.shape == inputs[0].shape and x.dtype is torch.float32 for x in results)


def test_tensors_without_data_take_the_reference():
    inputs = [x.to("meta") for x in make_inputs(SMALL)[:5]]
    assert plan(*inputs, True).backend == "reference"
    with pytest.raises(RuntimeError, match="need a GPU.* but q is on meta"):
        rope_attention(*inputs, True, backend="triton")
    for device in ("cpu", "meta"):
        with FlopCounterMode(display=False) as counter:
            rope_attention(*(x.to(device) for x in make_inputs(SMALL)[:5]), True, backend="reference")
        assert counter.get_total_flops() == 2 * 2 * (2 * 2 * 7 * 9 * 16)  # two products


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_sent_to_packed_attention(layout):
    """And the advice for jagged tensors works."""
    sequences = [[torch.randn(n, heads, 16) for n in (3, 5)] for heads in (2, 1, 1)]
    q, k, v = (torch.nested.nested_tensor(x, layout=layout) for x in sequences)
    cos, sin = make_inputs(SMALL)[3:5]
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    for name, refused in (
        ("q", lambda: rope_attention(q, k, v, cos, sin, True, layout="bshd")),
        ("q", lambda: rope_attention_varlen(q, k, v, cos, sin, ends, ends, 5, 5, True)),
        ("q", lambda: rope_attention_with_kvcache(q, k, v, cos, sin, cache_seqlens=ends[:2])),
        ("q", lambda: apply_rope_qk(q, k, cos, sin, layout="bshd")),
        ("x", lambda: apply_rope(q, cos, sin, layout="bshd")),
    ):
        with pytest.raises(NotImplementedError, match=rf"^{name} must not be a nested tensor.*{name}\.offsets"):
            refused()
    if layout is torch.jagged:
        ends = q.offsets().int()
        o = rope_attention_varlen(*(x.values() for x in (q, k, v)), cos, sin, ends, ends, 5, 5, True)
        alone = [rope_attention(*(x[None] for x in one), cos, sin, True, layout="bshd")[0] for one in zip(*sequences)]
        torch.testing.assert_close(o, torch.cat(alone))


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_distributed_tensors_are_refused(mesh):
    from torch.distributed.tensor import DTensor, Shard

    inputs = make_inputs(SMALL)[:5]
    shared = [DTensor.from_local(x, mesh, [Shard(0)]) for x in inputs]
    for name in ("rope_attention", "bshd", "rope_attention_with_kvcache", "apply_rope", "apply_rope_qk"):
        first = "x" if name == "apply_rope" else "q"
        with pytest.raises(NotImplementedError, match=rf"^{first} must be .* but is a DTensor: pass {first}.to_local"):
            calls(*shared)[name]()
    with pytest.raises(NotImplementedError, match="^k must be a tensor of this process"):
        rope_attention(inputs[0], shared[1], *inputs[2:])
    torch.testing.assert_close(rope_attention(*(x.to_local() for x in shared), True), rope_attention(*inputs, True))
