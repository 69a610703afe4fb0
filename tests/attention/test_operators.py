"""The attention operators as PyTorch's dispatcher sees them: schemas, fake tensors, what is saved and what runs."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_rope_attn import rope_attention
from tests.support.attention import leaves
from tests.support.internals import ARGUMENT_OF_MAX_LOGIT, ARGUMENT_OF_SINKS, OPERATORS, operator_arguments
from tests.support.marks import both_strategies, interpreted
from tests.support.operators import MASKS, SMALL, Record
from verification.testing import Case, make_inputs, run_op


@interpreted
@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    ("full_width", "layout", "strategy"),
    [(False, "bnhd", "inline"), (True, "bhnd", "prepass")],
)
def test_opcheck(layout, full_width, strategy):
    case = Case(1, 2, 1, 5, 7, 16, layout=layout, full_width=full_width, dtype=torch.float32)
    inputs = make_inputs(case)
    arguments = operator_arguments(inputs, case, strategy=strategy)
    forward, backward = OPERATORS.attention_forward.default, OPERATORS.attention_backward.default
    o, lse, _ = forward(*arguments)
    torch.library.opcheck(forward, arguments)
    torch.library.opcheck(forward, (*leaves(inputs), *arguments[3:]), test_utils="test_aot_dispatch_dynamic")
    torch.library.opcheck(backward, (inputs.do, o, lse, False, *arguments))


@interpreted
@pytest.mark.unpoisoned
@both_strategies
def test_fake_tensors_match_the_real_ones(strategy):
    """Shapes, dtypes and strides, for layouts and empties that opcheck above does not see."""
    for case in (
        Case(2, 4, 2, 5, 7, 24, layout="odd"),
        Case(2, 4, 2, 5, 7, 24, layout="expanded"),
        Case(2, 1, 1, 5, 7, 16),
        Case(0, 2, 1, 5, 7, 16),
        Case(2, 2, 1, 0, 7, 16),
        Case(2, 2, 1, 5, 0, 16),
    ):
        inputs = make_inputs(case)
        real = run_op(inputs, case, backend="triton", strategy=strategy)
        with FakeTensorMode() as mode:
            fake_inputs = type(inputs)(*(mode.from_tensor(x) for x in inputs))
            fake = run_op(fake_inputs, case, backend="triton", strategy=strategy)
        for name, x, y in zip(real._fields, real, fake):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride()), (case.name, name)


@interpreted
@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    ("names", "strategy"),
    [(("sinks",), "prepass"), (tuple(MASKS), "inline")],
    ids=lambda x: x if isinstance(x, str) else ",".join(x),
)
def test_opcheck_with_masks(names, strategy):
    """The gradient of the sinks passes through autograd, the dispatcher and a traced graph too."""
    masks = {"window": (3, 0), "softcap": 20.0, "sinks": True, "kv_starts": (0, 2), "kv_lens": (9, 5)}
    case = replace(SMALL, **{name: masks[name] for name in names})
    inputs = make_inputs(case)
    arguments = operator_arguments(inputs, case, strategy=strategy)
    arguments[ARGUMENT_OF_MAX_LOGIT] = True
    forward, backward = OPERATORS.attention_forward.default, OPERATORS.attention_backward.default
    o, lse, max_logit = forward(*arguments)
    assert max_logit.shape == (2, 2)
    torch.library.opcheck(forward, arguments)
    torch.library.opcheck(backward, (inputs.do, o, lse, False, *arguments))
    if case.sinks:
        arguments[ARGUMENT_OF_SINKS].requires_grad_()
    torch.library.opcheck(forward, (*leaves(inputs), *arguments[3:]), test_utils="test_aot_dispatch_dynamic")


@interpreted
def test_nothing_is_computed_for_an_unused_output():
    q, k, v = leaves(make_inputs(SMALL))
    inputs = make_inputs(SMALL)
    o, _ = rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend="triton", return_lse=True)
    (o * 0).sum().backward()
    assert bool((q.grad == 0).all())
    with Record() as record:
        rope_attention(*make_inputs(SMALL)[:3], inputs.cos, inputs.sin, True, backend="triton")
    assert not any("attention_backward" in operator for operator in record.operators)


@interpreted
def test_saved_tensors_are_the_inputs_and_no_copies():
    """K is rotated in the loop here; other kernels save rotated copies in place of q and k: test_saving.py."""
    q, k, v = leaves(make_inputs(SMALL))
    inputs = make_inputs(SMALL)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend="triton", strategy="inline")
    storages = {x.untyped_storage().data_ptr() for x in saved}
    given = {x.untyped_storage().data_ptr() for x in (q, k, v, o, inputs.cos, inputs.sin)}
    assert given <= storages and len(storages - given) == 1  # lse
