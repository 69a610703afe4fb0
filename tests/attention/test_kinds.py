"""Tensors of other kinds: those without data are served, nested and distributed ones are refused by name."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fused_rope_attn as package
from fused_rope_attn import rope_attention
from fused_rope_attn.experimental import corope_attention
from tests.support.operators import SMALL, public_calls
from verification.testing import make_inputs

INPUTS = make_inputs(SMALL)[:5]
OF_OTHER_ROOMS = {
    "apply_rope": lambda q, k, v, *tables: package.apply_rope(q, *tables),
    "apply_rope_qk": lambda q, k, v, *tables: package.apply_rope_qk(q, k[:, :, :7], *tables)[0],
    "corope_attention": lambda q, k, v, *_: corope_attention(q, k[:, :, :7], v[:, :, :7]),
}


def result_of(name, inputs):
    if name in OF_OTHER_ROOMS:
        return OF_OTHER_ROOMS[name](*inputs)
    positional, options = public_calls(*inputs)[name]
    return getattr(package, name)(*positional, **options)


@pytest.mark.parametrize("name", [*public_calls(*INPUTS), *OF_OTHER_ROOMS])
@pytest.mark.parametrize("autocast", [False, True])
def test_tensors_without_data_give_shapes(name, autocast):
    inputs, expected = [x.to("meta") for x in INPUTS], [result_of(name, INPUTS)]
    if name != "rope_attention_with_kvcache":
        expected.append(inputs[0].requires_grad_())
    with torch.autocast("cpu", enabled=autocast):
        o = result_of(name, inputs)
    results = [o, *(torch.autograd.grad(o.sum(), x)[0] for x in expected[1:])]
    for x, y in zip(results, expected, strict=True):
        assert x.is_meta and x.shape == y.shape and x.dtype is torch.float32


def test_tensors_without_data_take_the_reference():
    inputs = [x.to("meta") for x in INPUTS]
    assert package.plan(*inputs, True).backend == "reference"
    with pytest.raises(RuntimeError, match="need a GPU.* but q is on meta"):
        rope_attention(*inputs, True, backend="triton")
    for device in ("cpu", "meta"):
        with FlopCounterMode(display=False) as counter:
            rope_attention(*(x.to(device) for x in INPUTS), True, backend="reference")
        assert counter.get_total_flops() == 2 * 2 * (2 * 2 * 7 * 9 * 16)  # two products


def refused_calls(q, k, v, cos, sin):
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    yield "q", lambda: rope_attention(q, k, v, cos, sin, True, layout="bshd")
    yield "q", lambda: package.rope_attention_varlen(q, k, v, cos, sin, ends, ends, 5, 5, True)
    yield "q", lambda: package.rope_attention_with_kvcache(q, k, v, cos, sin, cache_seqlens=ends[:2])
    yield "q", lambda: package.apply_rope_qk(q, k, cos, sin, layout="bshd")
    yield "x", lambda: package.apply_rope(q, cos, sin, layout="bshd")


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_sent_to_packed_attention(layout):
    sequences = [[torch.randn(n, heads, 16) for n in (3, 5)] for heads in (2, 1, 1)]
    q, k, v = (torch.nested.nested_tensor(x, layout=layout) for x in sequences)
    cos, sin = INPUTS[3:]
    for name, refused in refused_calls(q, k, v, cos, sin):
        with pytest.raises(NotImplementedError, match=rf"^{name} must not be a nested tensor.*{name}\.offsets"):
            refused()
    if layout is torch.jagged:
        ends = q.offsets().int()
        o = package.rope_attention_varlen(*(x.values() for x in (q, k, v)), cos, sin, ends, ends, 5, 5, True)
        alone = [rope_attention(*(x[None] for x in one), cos, sin, True, layout="bshd")[0] for one in zip(*sequences)]
        torch.testing.assert_close(o, torch.cat(alone))


def test_distributed_tensors_are_refused(mesh):
    from torch.distributed.tensor import DTensor, Shard

    shared = [DTensor.from_local(x, mesh, [Shard(0)]) for x in INPUTS]
    for name, refused in refused_calls(*shared):
        with pytest.raises(NotImplementedError, match=rf"^{name} must be .* but is a DTensor: pass {name}.to_local"):
            refused()
    with pytest.raises(NotImplementedError, match="^k must be a tensor of this process"):
        rope_attention(INPUTS[0], shared[1], *INPUTS[2:])
    torch.testing.assert_close(rope_attention(*(x.to_local() for x in shared), True), rope_attention(*INPUTS, True))
