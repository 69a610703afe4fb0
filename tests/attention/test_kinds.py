"""Tensors of other kinds: those without data are served, nested, sparse and distributed ones are refused by name."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fused_rope_attn import (
    apply_rope,
    apply_rope_qk,
    cu_seqlens_from_position_ids,
    plan,
    rope_attention,
    rope_attention_varlen,
    rope_attention_with_kvcache,
)
from fused_rope_attn.experimental import corope_attention
from tests.support.operators import MASKS, SMALL
from verification.testing import make_inputs

HEADS = (2, 1, 1)


def calls(q, k, v, cos, sin):
    """A call of every public function on such tensors, by name; each returns what has q's shape and dtype."""
    ends = torch.tensor([0, 7, 14], dtype=torch.int32).to(q.device)

    def packed():
        tokens = (x[:, :, :7].transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        o = rope_attention_varlen(*tokens, cos, sin, ends, ends, 7, 7, True)
        return o.unflatten(0, (2, 7)).transpose(1, 2)

    def step():
        with torch.no_grad():
            new = k[:, :, :7].clone(), v[:, :, :7].clone()
            return rope_attention_with_kvcache(q, k, v, cos, sin, *new, cache_seqlens=ends[:2])

    return {
        "rope_attention": lambda: rope_attention(q, k, v, cos, sin, True),
        "bshd": lambda: rope_attention(*(x.transpose(1, 2) for x in (q, k, v)), cos, sin, layout="bshd").transpose(
            1, 2
        ),
        "rope_attention_varlen": packed,
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
    if name != "rope_attention_with_kvcache":
        inputs[0].requires_grad_()
    with torch.autocast("cpu", enabled=autocast):
        o = calls(*inputs)[name]()
    assert o.device.type == "meta" and o.shape == inputs[0].shape and o.dtype is torch.float32
    if o.requires_grad:
        (dq,) = torch.autograd.grad(o.sum(), inputs[0])
        assert dq.device.type == "meta" and dq.shape == inputs[0].shape
    assert o.requires_grad == (name != "rope_attention_with_kvcache")


def test_every_mask_is_served_without_data():
    masks = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in MASKS.items()}
    inputs = [x.to("meta") for x in make_inputs(SMALL)[:5]]
    o, lse = rope_attention(*inputs, True, return_lse=True, **masks)
    assert o.shape == (2, 2, 7, 16) and lse.shape == (2, 2, 7) and lse.dtype is torch.float32
    assert plan(*inputs, True).backend == "reference"
    with pytest.raises(RuntimeError, match="need a GPU.* but q is on meta"):
        rope_attention(*inputs, True, backend="triton")


def test_operations_are_counted_without_data():
    counts = []
    for device in ("cpu", "meta"):
        with FlopCounterMode(display=False) as counter:
            rope_attention(*(x.to(device) for x in make_inputs(SMALL)[:5]), True, backend="reference")
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 2 * 2 * (2 * 2 * 7 * 9 * 16)  # two products


def test_sequences_are_not_counted_without_data():
    ids = torch.zeros(2, 6, dtype=torch.int64, device="meta")
    with pytest.raises(NotImplementedError, match="max_sequences must be given for position_ids on the device meta"):
        cu_seqlens_from_position_ids(ids)
    cu_seqlens, longest = cu_seqlens_from_position_ids(ids, 4)
    assert cu_seqlens.shape == (5,) and longest == 6


def nested(heads, layout):
    sequences = [torch.ones(n, heads, 16) for n in (3, 5)]
    return torch.nested.nested_tensor(sequences, layout=layout)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_sent_to_packed_attention(layout):
    q, k, v = (nested(heads, layout) for heads in HEADS)
    cos, sin = torch.ones(5, 8), torch.zeros(5, 8)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    given = {
        "q": [
            lambda: rope_attention(q, k, v, cos, sin, True, layout="bshd"),
            lambda: rope_attention(q, k, v, cos, sin, True),
            lambda: rope_attention_varlen(q, k, v, cos, sin, ends, ends, 5, 5, True),
            lambda: rope_attention_with_kvcache(q, k, v, cos, sin, cache_seqlens=ends[:2]),
            lambda: apply_rope_qk(q, k, cos, sin, layout="bshd"),
        ],
        "x": [lambda: apply_rope(q, cos, sin, layout="bshd")],
    }
    for name, refused in given.items():
        for call in refused:
            with pytest.raises(NotImplementedError, match=rf"^{name} must not be a nested tensor.*{name}\.offsets"):
                call()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_the_advice_for_jagged_tensors_works():
    torch.manual_seed(0)
    sequences = [[torch.randn(n, heads, 16) for n in (3, 5)] for heads in HEADS]
    q, k, v = (torch.nested.nested_tensor(x, layout=torch.jagged) for x in sequences)
    _, _, _, cos, sin, _ = make_inputs(SMALL)
    ends = q.offsets().int()
    o = rope_attention_varlen(q.values(), k.values(), v.values(), cos, sin, ends, ends, 5, 5, True)
    alone = [rope_attention(*(x[None] for x in one), cos, sin, True, layout="bshd")[0] for one in zip(*sequences)]
    torch.testing.assert_close(o, torch.cat(alone))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_sparse_tensors_are_refused(name):
    given = dict(zip(("q", "k", "v", "cos", "sin"), make_inputs(SMALL)))
    given[name] = given[name].to_sparse()
    with pytest.raises(TypeError, match=f"^{name} must be a dense tensor, but has the layout sparse_coo"):
        rope_attention(**given, causal=True)


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_distributed_tensors_are_refused(mesh):
    from torch.distributed.tensor import DTensor, Shard

    inputs = make_inputs(SMALL)[:5]
    shared = [DTensor.from_local(x, mesh, [Shard(0)]) for x in inputs]
    for name, call in calls(*shared).items():
        if name in ("rope_attention_varlen", "corope_attention"):
            continue
        first = "x" if name == "apply_rope" else "q"
        with pytest.raises(NotImplementedError, match=rf"^{first} must be .* but is a DTensor: pass {first}.to_local"):
            call()
    with pytest.raises(NotImplementedError, match="^k must be a tensor of this process"):
        rope_attention(inputs[0], shared[1], *inputs[2:])
    torch.testing.assert_close(rope_attention(*(x.to_local() for x in shared), True), rope_attention(*inputs, True))
