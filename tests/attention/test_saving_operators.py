"""The forward operator's ``saving``: what it returns, and what autograd and graphs ask of it.

The portable kernels run in the interpreter; launchers that compute nothing of their own stand in for those of sm_90.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_rope_attn import rope_attention
from fused_rope_attn.attention.arguments import padded_rows
from fused_rope_attn.attention.problem import Saving, Tensors, describe, flatten
from fused_rope_attn.testing import Case, make_inputs
from tests.support.attention import assert_equal, leaves, packed_case
from tests.support.dtypes import BF16, F32
from tests.support.internals import (
    OPERATORS,
    go_through_the_dispatcher,
    operator_arguments,
    replace_portable_launchers,
    replace_sm_90_launchers,
)
from tests.support.marks import cases, interpreted
from tests.support.planning import HOPPER, PORTABLE, call

CASE = Case(1, 2, 1, 5, 7, 16, dtype=F32)
PACKED = packed_case(Case(1, 4, 2, 20, 20, 16, dtype=F32), (5, 0, 20, 13), behind=(3, 1))
FORWARD, BACKWARD = OPERATORS.attention_forward.default, OPERATORS.attention_rotated_backward.default
ROWS, TILES = Saving.ROWS.value, Saving.TILES.value


@interpreted
@pytest.mark.unpoisoned
@cases(CASE, PACKED)
def test_opcheck(case):
    inputs = make_inputs(case)
    arguments = operator_arguments(inputs, case, strategy="prepass")
    o, lse, q_rot, k_rot = FORWARD(*arguments, saving=ROWS)
    torch.library.opcheck(FORWARD, arguments, {"saving": ROWS})
    torch.library.opcheck(FORWARD, (*leaves(inputs), *arguments[3:]), {"saving": ROWS})
    torch.library.opcheck(FORWARD, (*leaves(inputs), *arguments[3:]))
    torch.library.opcheck(BACKWARD, (inputs.do, o, lse, q_rot, k_rot, *arguments[2:]))


@interpreted
def test_nothing_more_is_returned_unless_it_is_asked_for():
    inputs = make_inputs(CASE)
    arguments = operator_arguments(inputs, CASE, strategy="prepass")
    plain, saving = FORWARD(*arguments), FORWARD(*arguments, saving=ROWS)
    assert_equal(plain[:2], saving[:2])
    assert [x.numel() for x in plain[2:]] == [0, 0]
    assert [x.shape for x in saving[2:]] == [inputs.q.shape, inputs.k.shape]
    assert all(x.is_contiguous() for x in saving[2:])
    with_gradient = FORWARD(*leaves(inputs), *arguments[3:])
    assert [x.numel() for x in with_gradient[2:]] == [0, 0] and with_gradient[0].requires_grad


def test_shapes_of_fake_tensors():
    """Rotated queries of packed sequences have whole tiles where the sm_90 backward will read them."""
    arguments = operator_arguments(make_inputs(PACKED), PACKED)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        shapes = [[tuple(x.shape) for x in FORWARD(*fake, saving=form.value)[2:]] for form in Saving]
    q, k = (tuple(x.shape) for x in arguments[:2])
    assert shapes == [[(0,), (0,)], [q, k], [(1, 4, padded_rows(q[2], 4), 16), k]]


@interpreted
def test_a_graph_may_ask_for_rows_that_the_plan_does_not_save():
    """It was traced for another card, where the call is not launch-bound."""
    inputs = make_inputs(CASE)
    found = FORWARD(*operator_arguments(inputs, CASE), saving=ROWS)
    assert_equal(found, FORWARD(*operator_arguments(inputs, CASE, strategy="prepass"), saving=ROWS))
    with pytest.raises(RuntimeError, match="trace it again"):
        FORWARD(*operator_arguments(inputs, CASE), saving=TILES)


def stand_in(monkeypatch):
    """Launchers of both backends that write down who was called, how q and k are saved or come, and v's address."""
    seen = []

    def forward(problem, tensors, config, saving):
        q, k = tensors.q, tensors.k
        seen.append((type(config), saving, tensors.v.data_ptr() % 16))
        outputs = q.clone(), q.new_zeros(q.shape[:3], dtype=F32)
        if saving is Saving.NOTHING:
            return outputs
        rows = padded_rows(problem.len_q, problem.sequences) if saving is Saving.TILES else problem.len_q
        return *outputs, q.new_zeros(problem.batch, problem.heads_q, rows, problem.head_dim), k.clone()

    def backward(problem, tensors, config, is_rotated):
        seen.append((type(config), is_rotated, tensors.v.data_ptr() % 16))
        q = tensors.q[:, :, : problem.len_q]
        return torch.zeros_like(q, memory_format=torch.contiguous_format), tensors.k.clone(), tensors.v.clone()

    replace_portable_launchers(monkeypatch, forward, backward)
    replace_sm_90_launchers(monkeypatch, forward, backward)
    return seen


@pytest.mark.unpoisoned
@pytest.mark.parametrize(("backend", "graphs"), [("hopper", 1), ("triton", 2)])
def test_one_graph_serves_all_lengths_that_are_not_launch_bound(arch, monkeypatch, backend, graphs):
    """The others, whose K is rotated in the loop, have another graph; the sm_90 kernels have no such loop."""
    seen = stand_in(monkeypatch)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(q, k, v, cos, sin):
        return rope_attention(q, k, v, cos, sin, True, backend=backend) + 1

    for length in (300, 200, 700, 1100, 3000, 5000, 400):
        given = call(length, head_dim=16, batch=1, heads=(8, 4), where="cpu")
        q, k, v, cos, sin = (given[name].fill_(1) for name in ("q", "k", "v", "cos", "sin"))
        given = [x.requires_grad_() for x in (q, k, v)]
        compiled(*given, cos, sin).sum().backward()
    saved = [saving for _, saving, _ in seen if isinstance(saving, Saving)]
    rotated = [is_rotated for _, is_rotated, _ in seen if not isinstance(is_rotated, Saving)]
    assert [x is not Saving.NOTHING for x in saved] == rotated and Saving.ROWS in saved
    assert sum("attention_forward" in graph.code for graph in counter.graphs) == graphs, saved


@pytest.mark.unpoisoned
@pytest.mark.parametrize("moved", [False, True])
def test_tiles_of_packed_queries(arch, monkeypatch, moved):
    """Through the dispatcher v's address is not asked for; a v that the TMA cannot address is copied."""
    go_through_the_dispatcher(monkeypatch)
    seen, tokens = stand_in(monkeypatch), 4096
    q, k, v = (torch.ones(1, heads, tokens, 128, dtype=BF16) for heads in (2, 1, 1))
    if moved:
        v = torch.empty(v.numel() + 1, dtype=BF16)[1:].view(v.shape).copy_(v)
    given = [x.requires_grad_() for x in (q, k, v)]
    ends, table = torch.tensor([0, tokens], dtype=torch.int32), torch.ones(tokens, 64)
    tensors = Tensors(*given, table, table, cu_seqlens_q=ends, cu_seqlens_k=ends)
    problem = describe(
        tensors, causal=True, softmax_scale=0.1, rotary_dim=128, interleaved=False, max_seqlen=tokens
    )  # fmt: skip
    o, *_ = FORWARD(*flatten(problem, tensors))
    gradients = torch.autograd.grad(o, given, torch.ones_like(o))
    assert [x.shape for x in gradients] == [x.shape for x in given]
    assert seen == [(PORTABLE[0], Saving.TILES, 0), (HOPPER[1], True, 0)]


def test_values_with_strides_that_the_tma_cannot_read_choose_rows(arch, monkeypatch):
    seen, tokens = stand_in(monkeypatch), 4096
    q, k, v = (torch.ones(1, heads, tokens, 128, dtype=BF16) for heads in (2, 1, 1))
    given = [x.requires_grad_() for x in (q, k, v.repeat_interleave(2, -1)[..., ::2])]
    ends, table = torch.tensor([0, tokens], dtype=torch.int32), torch.ones(tokens, 64)
    tensors = Tensors(*given, table, table, cu_seqlens_q=ends, cu_seqlens_k=ends)
    problem = describe(
        tensors, causal=True, softmax_scale=0.1, rotary_dim=128, interleaved=False, max_seqlen=tokens
    )  # fmt: skip
    o, *_ = FORWARD(*flatten(problem, tensors))
    torch.autograd.grad(o, given, torch.ones_like(o))
    assert [x[:2] for x in seen] == [(PORTABLE[0], Saving.ROWS), (PORTABLE[1], True)]
