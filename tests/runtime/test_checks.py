"""Checks that several rooms share, asked directly."""

import contextlib

import numpy as np
import pytest
import torch

from fused_rope_attn import (
    RotaryEmbedding,
    apply_rope,
    cu_seqlens_from_position_ids,
    permute_rope_layout,
    rope_attention,
    rope_attention_varlen,
    rope_tables,
    rope_tables_2d,
)
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
    "max_sequences": (lambda n: cu_seqlens_from_position_ids(torch.arange(5), n)[0], 3),
    "seq_len": (lambda n: rope_tables(n, 16)[0], 5),
    "rotary_dim of tables": (lambda n: rope_tables(5, n)[0], 16),
    "height": (lambda n: rope_tables_2d(n, 3, 16)[0], 2),
    "rotary_dim of a module": (lambda n: RotaryEmbedding(n)(X), 16),
    "max_seq_len": (lambda n: RotaryEmbedding(16, n)(X), 5),
    "head_dim": (lambda n: permute_rope_layout(X, n), 16),
}


@pytest.mark.parametrize("through_the_dispatcher", [False, True])
@pytest.mark.parametrize("name", TAKE_AN_INT)
def test_integers_of_numpy_are_ints(name, through_the_dispatcher):
    """Operators know no integers of NumPy: they are converted before."""
    run, value = TAKE_AN_INT[name]
    expected = run(value)
    with Record() if through_the_dispatcher else contextlib.nullcontext():
        for kind in (np.int64, np.int32, np.uint8):
            assert torch.equal(run(kind(value)), expected)


@pytest.mark.parametrize("wrong", [True, np.bool_(True), 2.0, "2", torch.tensor(2)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("name", TAKE_AN_INT)
def test_nothing_else_is_an_int(name, wrong):
    with pytest.raises(TypeError, match=f"^{'(rotary_)?dim' if 'module' in name else name.partition(' ')[0]} must "):
        TAKE_AN_INT[name][0](wrong)
