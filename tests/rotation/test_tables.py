"""Tables of cos and sin; `RotaryEmbedding`: its tables grow and survive casts and copies; `permute_rope_layout`."""

import copy
import pickle

import pytest
import torch

from fused_rope_attn import RotaryEmbedding, apply_rope, permute_rope_layout, rope_tables, rope_tables_2d
from tests.support.dtypes import F16, F32, F64
from tests.support.marks import ignore_overflow, interpreted
from tests.support.rotation import assert_close, normal

pytestmark = ignore_overflow


def test_rope_tables_2d():
    cos, sin = rope_tables_2d(3, 5, 12, base=100.0)
    line, rows, columns = rope_tables(5, 6, base=100.0), torch.arange(15) // 5, torch.arange(15) % 5
    for found, one in zip((cos, sin), line):
        assert found.dtype == F32 and torch.equal(found, torch.cat((one[rows], one[columns]), -1))
    assert rope_tables_2d(0, 5, 4)[0].shape == (0, 2)
    # Interleaved, it is what two ids for every token give.
    x, ids = normal(1, 2, 15, 12).float(), torch.stack((rows, columns))[None]
    two = apply_rope(x, *line, rotary_dim=12, interleaved=True, position_ids=ids)
    assert_close(apply_rope(x, cos, sin, interleaved=True), two.double(), 1e-6)


def test_rope_tables():
    cos, sin = rope_tables(7, 6)
    assert cos.shape == sin.shape == (7, 3) and cos.dtype == sin.dtype == F32
    angle = torch.tensor([[position / 10000.0 ** (2 * i / 6) for i in range(3)] for position in range(7)], dtype=F64)
    torch.testing.assert_close((cos, sin), (angle.cos().float(), angle.sin().float()), rtol=0, atol=1e-7)
    far, _ = rope_tables(1, 2, positions=torch.tensor([131071]))
    torch.testing.assert_close(far[0, 0], torch.tensor(131071.0, dtype=F64).cos().float())
    assert torch.equal(rope_tables(7, 6, positions=torch.arange(7), device="cpu")[0], cos)
    assert not torch.equal(rope_tables(7, 6, base=1e6)[0], cos)
    assert rope_tables(0, 4)[0].shape == (0, 2)


def test_module():
    module = RotaryEmbedding(12, max_seq_len=4)
    q, k = normal(2, 3, 9, 16).float(), normal(2, 1, 9, 16, seed=1).float()
    cos, sin = rope_tables(9, 12)
    assert torch.equal(module(q), apply_rope(q, cos, sin, rotary_dim=12))  # grown beyond max_seq_len
    both = module(q, k)
    assert torch.equal(both[0], module(q)) and torch.equal(both[1], apply_rope(k, cos, sin, rotary_dim=12))
    far = module(q, position_ids=torch.arange(100, 109), seq_len=109)
    assert torch.equal(far, apply_rope(q, *rope_tables(109, 12), rotary_dim=12, position_ids=torch.arange(100, 109)))
    rows = module.tables(1)[0].shape[0]
    assert module.tables(rows + 1)[0].shape[0] == 2 * rows and "max_seq_len=4" in repr(module)
    packed = q[0].transpose(0, 1)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    assert torch.equal(
        module(packed, layout="thd", cu_seqlens=ends),
        apply_rope(packed, cos, sin, rotary_dim=12, layout="thd", cu_seqlens=ends),
    )
    assert torch.equal(module(module(q), inverse=True), apply_rope(module(q), cos, sin, rotary_dim=12, inverse=True))


def test_module_survives_casts_copies_and_inference_mode():
    x = normal(1, 2, 9, 8).float()
    module = RotaryEmbedding(8)
    with torch.inference_mode():
        expected = module(x).clone()
    y = x.clone().requires_grad_()
    module(y).sum().backward()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), RotaryEmbedding(8).half(), module.to(F16)):
        assert torch.equal(other(x), expected)
        assert other.tables(1)[0].dtype == F32 and not other.state_dict() and not list(other.buffers())
    assert module.to("meta")(x.to("meta")).device.type == "meta"
    assert torch.equal(module(x), expected)


@interpreted
@pytest.mark.unpoisoned
def test_module_compiles_and_grows():
    torch._dynamo.reset()
    module = RotaryEmbedding(8, max_seq_len=4)
    compiled = torch.compile(lambda x: 2 * module(x), fullgraph=True, backend="aot_eager")
    for n in (3, 4, 9, 40, 7):
        x = normal(1, 2, n, 8).float()
        assert_close(compiled(x), (2 * apply_rope(x, *rope_tables(n, 8))).double(), 1e-6)
    assert module.tables(1)[0].shape[0] >= 40


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, None), (16, 12), (6, 2)])
def test_permute_rope_layout(head_dim, rotary_dim):
    x, weight = normal(2, 3, 5, head_dim), normal(3 * head_dim, 7)
    order = {"rotary_dim": rotary_dim}
    there = permute_rope_layout(x, **order)
    assert torch.equal(permute_rope_layout(there, inverse=True, **order), x)
    columns = rotary_dim or head_dim
    assert torch.equal(there[..., 1], x[..., columns // 2]) and torch.equal(there[..., columns:], x[..., columns:])
    cos, sin = rope_tables(5, columns)
    rotated = apply_rope(x, cos, sin, **order)
    assert_close(apply_rope(there, cos, sin, interleaved=True, **order), permute_rope_layout(rotated, **order), 1e-12)
    full = [torch.cat((t, t), -1) for t in (cos, sin)]
    wide = apply_rope(there, *(permute_rope_layout(t) for t in full), interleaved=True, rotary_dim=columns)
    assert_close(wide, permute_rope_layout(rotated, **order), 1e-12)
    # Weights: permuting the rows of a projection permutes its outputs.
    hidden = normal(4, 7)
    outputs = (hidden @ permute_rope_layout(weight, head_dim, dim=0, **order).T).view(4, 3, head_dim)
    assert_close(outputs, permute_rope_layout((hidden @ weight.T).view(4, 3, head_dim), **order), 1e-12)


REFUSALS = [
    (ValueError, "rotary_dim must be even and positive, but is 0", lambda: rope_tables(7, 0)),
    (ValueError, r"positions must have shape \(7,\), but has", lambda: rope_tables(7, 6, positions=torch.zeros(6))),
    (ValueError, "width must be at least 0, but is -1", lambda: rope_tables_2d(3, -1, 4)),
    (ValueError, "rotary_dim must be a multiple of 4 and positive, but is 6", lambda: rope_tables_2d(3, 5, 6)),
    (ValueError, "base must be finite and positive, but is -1.0", lambda: rope_tables_2d(3, 5, 4, base=-1.0)),
    (TypeError, "base must be a float, but is str '1e4'", lambda: RotaryEmbedding(32, base="1e4")),
    (TypeError, "interleaved must be a bool, but is int", lambda: RotaryEmbedding(8, interleaved=1)),
    (TypeError, "seq_len must be an int", lambda: RotaryEmbedding(8)(torch.zeros(1, 1, 4, 8), seq_len=4.0)),
    (TypeError, "x must be a torch.Tensor", lambda: permute_rope_layout([1.0])),
    (ValueError, "head_dim", lambda: permute_rope_layout(torch.zeros(8), 3)),
    (ValueError, "rotary_dim", lambda: permute_rope_layout(torch.zeros(8), 4, rotary_dim=6)),
    (ValueError, "rotary_dim", lambda: permute_rope_layout(torch.zeros(8), 4, rotary_dim=3)),
    (ValueError, "dim", lambda: permute_rope_layout(torch.zeros(8), dim=1)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), REFUSALS)
def test_refusals(error, message, call):
    with pytest.raises(error, match=f"^{message}"):
        call()
