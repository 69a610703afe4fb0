"""Checks that several rooms share, asked directly."""

import contextlib

import numpy as np
import pytest
import torch

import fused_rope_attn as package
from fused_rope_attn import apply_rope, rope_attention, rope_attention_varlen, rope_tables
from fused_rope_attn.runtime.checks import Form, Forms
from tests.support.dtypes import F16, F32
from tests.support.operators import Record

X = torch.randn(1, 2, 5, 16)
COS, SIN = rope_tables(5, 16)
ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)
PACKED = [x[0].transpose(0, 1) for x in (X, X, X)]
# Public functions by the argument that is an int there, each a function of that int.
TAKE_AN_INT = {
    "rotary_dim": (lambda n: rope_attention(X, X, X, COS, SIN, rotary_dim=n), 16),
    "rotary_dim of a rotation": (lambda n: apply_rope(X, COS, SIN, rotary_dim=n), 16),
    "window": (lambda n: rope_attention(X, X, X, COS, SIN, True, window=(n, n)), 2),
    "max_seqlen_q": (lambda n: rope_attention_varlen(*PACKED, COS, SIN, ENDS, ENDS, n, 3), 3),
    "max_seqlen_k": (lambda n: rope_attention_varlen(*PACKED, COS, SIN, ENDS, ENDS, 3, n), 3),
    "max_sequences": (lambda n: package.cu_seqlens_from_position_ids(torch.arange(5), n)[0], 3),
    "seq_len": (lambda n: rope_tables(n, 16)[0], 5),
    "rotary_dim of tables": (lambda n: rope_tables(5, n)[0], 16),
    "height": (lambda n: package.rope_tables_2d(n, 3, 16)[0], 2),
    "rotary_dim of a module": (lambda n: package.RotaryEmbedding(n)(X), 16),
    "max_seq_len": (lambda n: package.RotaryEmbedding(16, n)(X), 5),
    "head_dim": (lambda n: package.permute_rope_layout(X, n), 16),
}


@pytest.mark.parametrize("name", TAKE_AN_INT)
def test_integers_of_numpy_are_ints_and_nothing_else_is(name):
    """Operators know no integers of NumPy: they are converted before."""
    run, value = TAKE_AN_INT[name]
    expected = run(value)
    for through_the_dispatcher in (False, True):
        with Record() if through_the_dispatcher else contextlib.nullcontext():
            assert torch.equal(run(np.int64(value)), expected) and torch.equal(run(np.uint8(value)), expected)
    argument = "(rotary_)?dim" if "module" in name else name.partition(" ")[0]
    for wrong in (True, np.bool_(True), 2.0, "2", torch.tensor(2)):
        with pytest.raises(TypeError, match=f"^{argument} must "):
            run(wrong)


TABLE = Forms(q="B HQ NQ D", k="B 1 NK D", v="B HKV NK D")
Q, K, V = torch.zeros(2, 4, 5, 8), torch.zeros(2, 1, 7, 8), torch.zeros(2, 3, 7, 8)


@pytest.mark.parametrize(("index", "axis"), [(0, 0), (0, 3), *((1, i) for i in range(4)), (2, 0), (2, 2), (2, 3)])
def test_each_size_is_compared(index, axis):
    given = [Q, K, V]
    given[index] = torch.cat((given[index], given[index]), axis)
    with pytest.raises(ValueError, match=r"^[qkv] must have shape \(B, .*, but has \("):
        TABLE.check("bhsd", tuple(given))


X3 = torch.zeros(1, 1, 1)
ALSO_F16 = Forms({"k": F16}, q="B HQ NQ D", k="B 1 NK D")
FAULTS = [
    (TABLE, (Q, K, [1.0]), TypeError, "v must be a torch.Tensor, but is list"),
    (TABLE, (Q.int(), K, V), TypeError, "q must be float16, bfloat16 or float32, but is int32"),
    (TABLE, (Q, K, V.to("meta")), ValueError, "v must be on q's device cpu, but is on meta"),
    (TABLE, (Q, K.to_sparse(), V), TypeError, "k must be a dense tensor"),
    (TABLE, (Q, K, torch.nested.nested_tensor([*V])), NotImplementedError, "v must not be a nested tensor"),
    (TABLE, (Q, K[..., 0], V), ValueError, "k must have shape (B, 1, NK, D), but has 3 dimensions: (2, 1, 7)"),
    # Twelve sizes that are equal, but not four a tensor.
    (TABLE, (X3, X3[None, None], X3[None]), ValueError, "q must have shape (B, HQ, NQ, D), but has 3 dimensions: (1,"),
    (ALSO_F16, (Q, K.double()), TypeError, "k must have q's dtype float32 or float16, but is float64"),
]


@pytest.mark.parametrize(("table", "given", "error", "message"), FAULTS, ids=[row[-1] for row in FAULTS])
def test_faults_of_tensors(table, given, error, message):
    assert ALSO_F16.check("bhsd", (Q, K.half())) == ALSO_F16.check("bhsd", (Q, K)) == (2, 4, 5, 8, 7)
    with pytest.raises(error) as caught:
        table.check("bhsd", given)
    assert str(caught.value).startswith(message)


def test_forms_of_one_tensor():
    form = Form("N | B 2 N", F16, None)
    for shape in ((5,), (3, 2, 5)):
        for dtype in (F16, F32):
            form.check("x", torch.zeros(shape, dtype=dtype), "q", Q, {"B": 3, "N": 5})
        form.check("x", torch.zeros(shape), "q", Q, {})  # any sizes
    for x, error, message in (
        (torch.zeros(4), ValueError, "x must have shape (N,) or (B, 2, N) with N = 5, B = 3, but has (4,)"),
        (torch.zeros(3, 1, 5), ValueError, "x must have shape (N,) or (B, 2, N) with N = 5, B = 3, but has (3, 1, 5)"),
        (torch.zeros(5).double(), TypeError, "x must be float16 or float32, but is float64"),
        (torch.zeros(5, device="meta"), ValueError, "x must be on q's device cpu, but is on meta"),
        ([0.0], TypeError, "x must be a torch.Tensor, but is list"),
    ):
        with pytest.raises(error) as caught:
            form.check("x", x, "q", Q, {"B": 3, "N": 5})
        assert str(caught.value) == message
