"""`RotaryEmbedding`: its tables grow, and neither casts nor copies touch them."""

import copy
import pickle

import pytest
import torch

from fused_rope_attn import RotaryEmbedding, apply_rope, rope_tables
from tests.support.dtypes import F16, F32, F64
from tests.support.marks import ignore_overflow, interpreted
from tests.support.rotation import assert_close, normal

pytestmark = ignore_overflow


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


@pytest.mark.unpoisoned
@pytest.mark.parametrize("dtype", [pytest.param(F32, marks=interpreted), F64])
def test_module_compiles_and_grows(dtype):
    torch._dynamo.reset()
    module = RotaryEmbedding(8, max_seq_len=4)
    compiled = torch.compile(lambda x: 2 * module(x), fullgraph=True, backend="aot_eager")
    for n in (3, 4, 9, 40, 7):
        x = normal(1, 2, n, 8).to(dtype)
        assert_close(compiled(x), (2 * apply_rope(x, *rope_tables(n, 8))).double(), 1e-6)
    assert module.tables(1)[0].shape[0] >= 40
