"""An eager forward pass saves q and k rotated if its kernels make and backward's take them so, otherwise as given.

The portable kernels run in the interpreter; launchers that compute nothing of their own replace those of sm_90.
"""

from types import SimpleNamespace

import pytest
import torch

from fused_rope_attn import rope_attention
from fused_rope_attn.attention.arguments import padded_rows
from fused_rope_attn.attention.configs import BUCKETS
from fused_rope_attn.attention.ops import attention
from fused_rope_attn.attention.problem import Saving, Tensors, describe
from fused_rope_attn.runtime.layouts import has_descriptor
from tests.support.attention import assert_equal, packed_case, sequences_of
from tests.support.dtypes import F16
from tests.support.internals import (
    go_through_the_dispatcher,
    plan_of,
    replace_portable_launchers,
    replace_sm_90_launchers,
    run_operators,
    saved_by_portable_forward,
)
from tests.support.marks import cases, ignore_overflow, interpreted
from tests.support.planning import HOPPER, PORTABLE, call
from verification.testing import Case, make_inputs, run_op, run_reference

CASE = Case(1, 4, 2, 20, 20, 16, dtype=F16)


@pytest.fixture
def sm_90(arch, monkeypatch):
    """Launchers of sm_90 that return the reference's results and write down what they were given."""
    inputs = make_inputs(CASE)
    expected = run_reference(inputs, CASE)
    seen = SimpleNamespace(inputs=inputs, expected=expected, forward=[], backward=[])

    def forward(problem, tensors, config, saving):
        seen.forward.append(saving)
        o, lse = expected.o.clone(), expected.lse.clone()
        return (o, lse) if saving is Saving.NOTHING else (o, lse, tensors.q + 1, tensors.k + 2)

    def backward(problem, tensors, config, is_rotated):
        seen.backward.append((is_rotated, tensors))
        return tuple(x.clone() for x in expected[2:])

    replace_sm_90_launchers(monkeypatch, forward, backward)
    return seen


def run(seen, *, needs=(True, True, True), **options):
    """(the leaves, o) of a call in which those of q, k and v that ``needs`` names take a gradient."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(seen.inputs[:3], needs)]
    return leaves, rope_attention(*leaves, seen.inputs.cos, seen.inputs.sin, True, backend="hopper", **options)


def assert_gradients(seen, gradients):
    assert all(torch.equal(x, y) for x, y in zip(gradients, seen.expected[2:], strict=True))


def test_the_rotated_are_saved_and_the_others_are_not(sm_90):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        leaves, o = run(sm_90)
    q, k, v = leaves
    storages = {x.untyped_storage().data_ptr() for x in saved}
    assert {v.untyped_storage().data_ptr(), o.untyped_storage().data_ptr()} <= storages
    assert not {q.untyped_storage().data_ptr(), k.untyped_storage().data_ptr()} & storages
    assert_gradients(sm_90, torch.autograd.grad(o, leaves, sm_90.inputs.do))
    is_rotated, tensors = sm_90.backward.pop()
    assert sm_90.forward == [Saving.ROWS] and is_rotated
    assert torch.equal(tensors.q, q + 1) and torch.equal(tensors.k, k + 2) and torch.equal(tensors.v, v)


def test_nothing_is_saved_without_a_gradient(sm_90):
    run(sm_90, needs=(False, False, False))
    with torch.no_grad():
        run(sm_90)
    assert sm_90.forward == [Saving.NOTHING, Saving.NOTHING]


def test_an_input_may_change_after_the_call(sm_90):
    """Only v and the tables are still the caller's."""
    leaves, _ = run(sm_90)
    q, k, v = (x * 1 for x in leaves)
    o = rope_attention(q, k, v, sm_90.inputs.cos, sm_90.inputs.sin, True, backend="hopper")
    before = q.detach() + 1, k.detach() + 2
    q.data.zero_()
    with torch.no_grad():
        k.zero_()
    assert_gradients(sm_90, torch.autograd.grad(o, leaves, sm_90.inputs.do))
    _, tensors = sm_90.backward.pop()
    assert torch.equal(tensors.q, before[0]) and torch.equal(tensors.k, before[1])


def test_the_dispatcher_saves_what_it_was_given(sm_90, monkeypatch):
    """The kernels are not known before a traced graph runs."""
    go_through_the_dispatcher(monkeypatch)
    leaves, o = run(sm_90)
    assert_gradients(sm_90, torch.autograd.grad(o, leaves, sm_90.inputs.do))
    is_rotated, tensors = sm_90.backward.pop()
    assert sm_90.forward == [Saving.NOTHING] and not is_rotated and torch.equal(tensors.q, leaves[0])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_double_backward_is_refused(sm_90, which):
    """Whichever tensor takes the gradient, and whether or not dO does, a second differentiation finds the node."""
    leaves, o = run(sm_90, needs=[i == which for i in range(3)])
    (gradient,) = torch.autograd.grad(o, leaves[which], sm_90.inputs.do, create_graph=True)
    assert torch.equal(gradient, sm_90.expected[2 + which]) and sm_90.backward[0][0]
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(gradient.sum(), leaves[which], retain_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradient.sum().backward()


def test_a_backward_pass_through_the_dispatcher(sm_90):
    """A mode that watches operators sees one, with the rotated tensors."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    leaves, o = run(sm_90)
    with Watch(), torch.enable_grad():
        gradients = torch.autograd.grad(o, leaves, sm_90.inputs.do, create_graph=True)
    assert_gradients(sm_90, gradients)
    assert any("attention_backward" in name for name in names)


def moved(x):
    """The same tensor at an address that is no multiple of 16 bytes."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype)
    return room[1:].view(x.shape).copy_(x)


def every_second_column(x):
    return x.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("unpack", [moved, every_second_column])
def test_what_hooks_have_moved(sm_90, unpack):
    """Saved tensors may return at another address: the TMA must be able to address them."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        leaves, o = run(sm_90)
    assert_gradients(sm_90, torch.autograd.grad(o, leaves, sm_90.inputs.do))
    is_rotated, tensors = sm_90.backward.pop()
    assert is_rotated
    for x, expected in zip(tensors, (leaves[0] + 1, leaves[1] + 2, leaves[2])):
        assert torch.equal(x, expected) and x.data_ptr() % 16 == 0 and x.stride(-1) == 1


@pytest.mark.parametrize("is_portable", [False, True])
def test_packed_queries_are_read_by_the_kernels_that_they_were_saved_for(arch, tables, monkeypatch, is_portable):
    """The sm_90 backward reads whole tiles, the portable one rows; hooks that move v do not change the choice."""
    tables(BUCKETS, () if is_portable else BUCKETS)
    tokens, lengths = 4096, torch.tensor([0, 4096], dtype=torch.int32)
    q, k, v = (torch.ones(tokens, heads, 256, dtype=torch.bfloat16) for heads in (2, 1, 1))
    seen = []

    def forward(problem, tensors, config, saving):
        q = tensors.q
        seen.append((type(config), saving))
        rows = tokens if saving is Saving.ROWS else padded_rows(tokens, 1)
        return q.clone(), q.new_zeros(q.shape[:3]).float(), q.new_zeros(1, 2, rows, 256), tensors.k.clone()

    def backward(problem, tensors, config, is_rotated):
        assert is_rotated and tensors.q.shape[2] == (tokens if seen[0][1] is Saving.ROWS else padded_rows(tokens, 1))
        seen.append((type(config), has_descriptor(tensors.v)))
        return tensors.q[:, :, :tokens].clone(), tensors.k.clone(), tensors.v.clone()

    replace_portable_launchers(monkeypatch, forward, backward)
    replace_sm_90_launchers(monkeypatch, forward, backward)
    leaves = [x.transpose(0, 1)[None].requires_grad_() for x in (q, k, moved(v))]
    table = torch.ones(tokens, 128)
    tensors = Tensors(*leaves, table, table, cu_seqlens_q=lengths, cu_seqlens_k=lengths)
    problem = describe(
        tensors,
        causal=True,
        softmax_scale=0.1,
        rotary_dim=256,
        interleaved=False,
        max_seqlen=tokens,
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, moved):
        o, _, _ = attention(problem, tensors, returns_lse=True)
    torch.autograd.grad(o, leaves, torch.ones_like(o))
    sm_90 = [(HOPPER[0], Saving.TILES), (HOPPER[1], True)]
    portable = [(HOPPER[0], Saving.ROWS), (PORTABLE[1], True)]
    assert seen == (portable if is_portable else sm_90)


@pytest.mark.parametrize(
    ("head_dim", "options", "packed", "expected"),
    [
        (128, {"backend": "hopper"}, False, True),
        (128, {"backend": "hopper"}, True, True),
        (128, {"backend": "hopper", "deterministic": True}, False, True),
        (128, {"backend": "hopper", "deterministic": True}, True, True),
        (256, {"backend": "hopper"}, True, True),
        (256, {"backend": "hopper", "deterministic": True}, True, True),
        (128, {"backend": "triton", "strategy": "prepass"}, True, True),
        (128, {"backend": "triton", "strategy": "inline"}, False, False),
    ],
)
def test_what_a_plan_says_of_it(arch, head_dim, options, packed, expected):
    """Up to 128 columns the sm_90 forward stores tiles, which the portable backward of packed sequences cannot read."""
    ends = {"cu_seqlens_q": torch.tensor([0, 2000]), "cu_seqlens_k": torch.tensor([0, 2000]), "max_seqlen": 2000}
    given = call(2000, head_dim=head_dim, batch=1, heads=(2, 1)) | options
    assert plan_of(given, **(ends if packed else {})).saves_rotated is expected


PORTABLE_CASES = (
    Case(2, 4, 2, 20, 37, 24, dtype=torch.float32, interleaved=True, rotary_dim=16),
    Case(1, 2, 1, 20, 37, 16, dtype=F16, causal=False, layout="odd", softmax_scale=-0.2),
    Case(2, 2, 2, 20, 37, 16, dtype=torch.float32, kv_lens=(30, 0), sinks=True),
    packed_case(Case(1, 4, 2, 20, 20, 16, dtype=torch.float32), (5, 0, 70, 33), behind=(7, 3)),
)


@interpreted
@ignore_overflow
@cases(*PORTABLE_CASES)
def test_the_portable_kernels_save_what_they_would_rotate(case):
    """The results have the bits of the operators, which rotate q and k in the backward pass."""
    inputs = make_inputs(case)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        eager = run_op(inputs, case, backend="triton", strategy="prepass")
    kept = {x.untyped_storage().data_ptr() for x in saved}
    assert inputs.v.untyped_storage().data_ptr() in kept
    assert not kept & {x.untyped_storage().data_ptr() for x in (inputs.q, inputs.k)}
    operators = run_operators(inputs, case, forward="triton", backward="triton", strategy="prepass")
    assert_equal(eager, operators)


@interpreted
@ignore_overflow
@pytest.mark.parametrize("block_m", [64, 128])
def test_the_portable_forward_saves_the_tiles_that_the_sm_90_backward_reads(block_m):
    """Each sequence begins at the row of its first whole tile, with zeros after its last query."""
    case = packed_case(Case(1, 4, 2, 20, 20, 24, dtype=torch.float32), (5, 0, 70, 33, 128), behind=(7, 3))
    inputs = make_inputs(case)
    rows = saved_by_portable_forward(inputs, case, block_m, Saving.ROWS).q_rot
    tiles = saved_by_portable_forward(inputs, case, block_m, Saving.TILES).q_rot
    sequences = [(first_q, len_q) for first_q, len_q, _, _ in sequences_of(case)]
    for s, (first, length) in enumerate(sequences):
        start, padded = (first // 64 + s) * 64, -(-length // 64) * 64
        assert torch.equal(tiles[:, :, start : start + length], rows[:, :, first : first + length])
        assert not tiles[:, :, start + length : start + padded].any()


@interpreted
def test_tiles_that_would_leave_padding_as_it_was_are_not_saved():
    case = packed_case(Case(1, 4, 2, 20, 20, 24, dtype=torch.float32), (5, 70))
    assert saved_by_portable_forward(make_inputs(case), case, 32, Saving.TILES).q_rot is None
