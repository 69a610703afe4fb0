"""Addresses of the portable kernels in the interpreter: beyond 32 bits, none outside the tensors, and no copies."""

import sys
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention_mla
from tests.support.guard_pages import hold_within_bounds
from tests.support.marks import both_strategies, ignore_overflow, interpreted
from verification.testing import Case, LatentCase, make_inputs, make_latent_inputs, run_op

pytestmark = [interpreted, ignore_overflow]
FAR = 2**31 + 4096  # elements of a storage; only the touched pages are real
ROW = 2**31 // 320 + 1  # of 321 rows the last is beyond 2**31, but the distance within a tile of 64 rows fits 32 bits
ONE_HEAD = Case(1, 1, 1, 3, 3, 16)


@both_strategies
@pytest.mark.parametrize(
    ("case", "strides", "names"),
    [
        # Strides that fit 32 bits, but twice which does not: batches, heads, and rows inside one tile.
        (replace(ONE_HEAD, batch=3), (2**30, 64, 16, 1), ("q", "k", "v", "do")),
        (replace(ONE_HEAD, heads_q=3, heads_kv=3), (64, 2**30, 16, 1), ("q", "k", "v", "do")),
        (ONE_HEAD, (64, 64, 2**30, 1), ("q", "k", "v", "do")),
        (replace(ONE_HEAD, len_q=1, len_k=321), (64, 64, ROW, 1), ("k", "v")),
        (replace(ONE_HEAD, len_q=321, len_k=1), (64, 64, ROW, 1), ("q", "do")),
    ],
    ids=["batch", "head", "row", "tiles of keys", "tiles of queries"],
)
def test_offsets_pass_two_to_the_31(case, strides, names, strategy):
    """Results stay the same when one tensor at a time gets these strides."""
    inputs = make_inputs(case)
    expected = run_op(inputs, case, backend="triton", strategy=strategy)
    storage = torch.empty(FAR, dtype=case.dtype)
    for name in names:
        view = storage.as_strided(getattr(inputs, name).shape, strides)
        view.copy_(getattr(inputs, name))
        out = run_op(inputs._replace(**{name: view}), case, backend="triton", strategy=strategy)
        assert all(torch.equal(x, y) for x, y in zip(out, expected)), name


GUARD = """
import torch
from verification.testing import Case, make_inputs, run_op
from tests.support.guard_pages import abut

for strategy in ("inline", "prepass"):
    for case in (
        Case(1, 2, 1, 17, 37, 24, rotary_dim=10, layout="bhnd"),
        Case(1, 1, 1, 37, 17, 16, layout="bhnd", interleaved=True, full_width=True),
        Case(2, 1, 1, 9, 9, 40, layout="bhnd", causal=False, table_batch=True),
    ):
        inputs = make_inputs(case)
        expected = run_op(inputs, case, backend="triton", strategy=strategy)
        for at_end in (True, False):
            guarded = type(inputs)(*(abut(x, at_end) for x in inputs))
            out = run_op(guarded, case, backend="triton", strategy=strategy)
            assert all(torch.equal(x, y) for x, y in zip(out, expected)), case.name
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_nothing_outside_the_tensors_is_read():
    """In a process of its own: an access to a guard page ends it."""
    hold_within_bounds(GUARD)


@both_strategies
@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
def test_memory_order_of_outputs_follows_the_inputs(layout, strategy):
    case = Case(2, 4, 2, 9, 12, 16, layout=layout)
    inputs = make_inputs(case)
    out = run_op(inputs, case, backend="triton", strategy=strategy)
    for name, like in (("o", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        assert getattr(out, name).stride() == getattr(inputs, like).stride(), name


def test_views_of_latent_attention_run_without_a_copy():
    """A query's and a key's parts are read where the projections wrote them."""
    inputs = make_latent_inputs(LatentCase(1, 2, 2, 9, 12, 16, dtype=torch.float32))
    assert not inputs.q_rope.is_contiguous() and not inputs.v.is_contiguous()
    copies = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            copies.append(getattr(function, "__name__", "") in ("copy_", "contiguous", "clone", "cat", "expand"))
            return function(*args, **(kwargs or {}))

    with Watch(), torch.no_grad():
        rope_attention_mla(*inputs[:7], True, backend="triton")
    assert copies and not any(copies)
