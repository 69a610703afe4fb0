"""More queries than keys are served, and said once, since tensors in a mistaken layout look like it."""

import warnings

import pytest
import torch

from fused_rope_attn import plan, rope_attention, rope_attention_varlen
from tests.support.internals import forget_warnings
from verification.testing import Case, make_inputs, run_op

CASE = Case(2, 5, 5, 8, 2, 16, dtype=torch.float32)  # what (B, N, H, D) of 5 tokens, 8 heads and 2 key heads looks like


@pytest.fixture
def heard():
    """The warnings of a test, in a process that has given none."""
    forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    forget_warnings()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_it_is_said_once_with_the_callers_shapes_and_where(heard, layout):
    q, k, v, cos, sin, _ = make_inputs(CASE)
    q, k, v = (x if layout == "bhsd" else x.transpose(1, 2) for x in (q, k, v))
    for _ in range(3):
        plan(q, k, v, cos, sin, True, layout=layout)
    (warning,) = heard
    assert warning.category is UserWarning and warning.filename == __file__
    assert str(warning.message) == (
        f"q {tuple(q.shape)} has 8 positions and k {tuple(k.shape)} has 2 in layout '{layout}': queries are aligned "
        "with the end of the keys, so that the first 6 rows see no key and give zeros; did you mean layout="
        f"'{'bshd' if layout == 'bhsd' else 'bhsd'}'?"
    )


@pytest.mark.unpoisoned
def test_nothing_is_said_where_it_is_meant(heard):
    """With lengths on the device, of packed sequences, in a compiled function, and of as many keys as queries."""
    torch._dynamo.reset()
    q, k, v, cos, sin, _ = inputs = make_inputs(CASE)
    rope_attention(q, k, v, cos, sin, True, kv_lens=torch.tensor([2, 1], dtype=torch.int32))
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    ends = (torch.tensor([0, n], dtype=torch.int32) for n in (8, 2))
    rope_attention_varlen(*packed, cos, sin, *ends, 8, 2, True)
    rope_attention(q[:, :, :2], k, v, cos, sin, True)
    torch.compile(rope_attention, fullgraph=True, backend="eager")(q, k, v, cos, sin, True)
    run_op(inputs, CASE, backend="reference")  # how verification and the benchmark's gate call
    assert [x for x in heard if "positions and k" in str(x.message)] == []
