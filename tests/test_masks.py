"""``fused_rope_attn.masks``: every function against a dense mask that is written down pair by pair."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses import FakeTensorMode

from fused_rope_attn import masks
from tests.support.export import Module
from tests.support.paths import python


def dense(starts, ends, rows):
    assert starts.dtype == ends.dtype == torch.int32 and starts.shape == ends.shape
    row = torch.arange(rows)[:, None]
    return (row >= starts[:, None]) & (row < ends[:, None])


def assert_sees(intervals, length, *sees):
    rows = [[[bool(one(i, j)) for j in range(length)] for i in range(length)] for one in sees]
    expected = torch.tensor(rows, dtype=torch.bool).reshape(len(sees), length, length)
    assert torch.equal(dense(*intervals, length), expected)
    return expected


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 3), st.sampled_from((torch.int32, torch.int64))
)
def test_documents(lengths, padding, dtype):
    cu_seqlens, total = torch.tensor([0, *lengths]).cumsum(0).to(dtype), sum(lengths)
    owner = [document for document, length in enumerate(lengths) for _ in range(length)] + [None] * padding
    found = masks.documents(cu_seqlens, total + padding)
    assert_sees(found, total + padding, lambda i, j: owner[i] is not None and owner[i] == owner[j] and j <= i)
    assert all(torch.equal(x, y[:, :total]) for x, y in zip(masks.documents(cu_seqlens), found))


@st.composite
def trees(draw):
    """Draw (parents, lengths) in depth-first order: each node follows a node of the last node's path, or is a root."""
    parents, path = [], []
    for node in range(draw(st.integers(1, 8))):
        path = path[: draw(st.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents, [draw(st.integers(0, 3)) for _ in parents]


@given(trees(), st.booleans())
def test_prefix_tree(tree, as_tensors):
    parents, lengths = tree
    nodes = [node for node, length in enumerate(lengths) for _ in range(length)]

    def above(node):
        return [] if node == -1 else [node, *above(parents[node])]

    *found, positions = masks.prefix_tree(*(map(torch.tensor, tree) if as_tensors else tree))
    expected = assert_sees(found, len(nodes), lambda i, j: nodes[j] in above(nodes[i]) and j <= i)
    # A token's position is the number of tokens that it sees in addition to itself.
    assert positions.dtype == torch.int64 and torch.equal(positions, expected.sum(-1) - 1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(0, 8))
def test_prefix_lm(prefix_lens, length):
    prefix_lens = [min(prefix, length) for prefix in prefix_lens]
    sees = [lambda i, j, prefix=prefix: j <= i or j < prefix for prefix in prefix_lens]
    assert_sees(masks.prefix_lm(torch.tensor(prefix_lens), length), length, *sees)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=6))
def test_bidirectional_blocks(runs):
    ids = [number if is_block else -1 for number, (is_block, length) in enumerate(runs) for _ in range(length)]
    block_ids = torch.tensor([ids, [-1] * len(ids)], dtype=torch.int32).reshape(2, len(ids))
    sees = (lambda i, j: j <= i or (ids[i] == ids[j] >= 0)), (lambda i, j: j <= i)
    assert_sees(masks.bidirectional_blocks(block_ids), len(ids), *sees)


@given(st.integers(1, 6) | st.just(2**40), st.integers(0, 12))
def test_chunks(chunk, length):
    assert_sees(masks.chunks(chunk, length), length, lambda i, j: j <= i and i // chunk == j // chunk)


@settings(deadline=None)
@given(st.data())
def test_from_dense(data):
    batch, heads, rows, keys = (data.draw(st.integers(1, n)) for n in (2, 3, 5, 5))
    bound = st.integers(0, rows)
    first, second = ([[data.draw(bound) for _ in range(keys)] for _ in range(batch)] for _ in range(2))
    mask = dense(*(torch.tensor(x, dtype=torch.int32) for x in (first, second)), rows)
    starts, ends = masks.from_dense(mask[:, None].expand(batch, heads, rows, keys))
    assert torch.equal(dense(starts, ends, rows), mask)
    assert ((starts == 0) & (ends == 0))[~mask.any(1)].all()
    changed = mask[:, None].repeat(1, heads, 1, 1)
    b, h, i, j = (data.draw(st.integers(0, n - 1)) for n in changed.shape)
    changed[b, h, i, j] ^= True
    column = changed[b, h, :, j].nonzero().flatten()
    adjacent = len(column) == 0 or int(column[-1] - column[0]) + 1 == len(column)
    if heads > 1 or not adjacent:
        assert masks.from_dense(changed) is None
    else:
        assert torch.equal(dense(*masks.from_dense(changed), rows), changed[:, 0])


def test_from_dense_of_nothing():
    starts, ends = masks.from_dense(torch.ones((2, 1, 0, 3), dtype=torch.bool))
    assert starts.shape == ends.shape == (2, 3) and not starts.any() and not ends.any()


def ids(*values):
    return torch.tensor(values)


WHOLE = torch.zeros(3, dtype=torch.int32)
ERRORS = [
    (masks.documents, (WHOLE.float(), 3), TypeError, "cu_seqlens must be int32 or int64, but is float32"),
    (masks.documents, (WHOLE[None], 3), ValueError, "cu_seqlens must have shape"),
    (masks.documents, (WHOLE[:0], 3), ValueError, "cu_seqlens must have shape"),
    (masks.documents, (WHOLE, -1), ValueError, "length must be 0 or more, but is -1"),
    (masks.documents, ([0, 3], 3), TypeError, "cu_seqlens must be a torch.Tensor"),
    (masks.documents, (ids(5, 4, 3),), ValueError, "cu_seqlens must begin with 0, but begins with 5"),
    (masks.prefix_tree, ([-1, 0], [3]), ValueError, "lengths must have one number for each of 2 parents"),
    (masks.prefix_tree, ([-1, 0, 0, 1], [1] * 4), ValueError, r"depth-first order, but parents\[3\] is 1"),
    (masks.prefix_tree, ([-1, -2], [1, 1]), ValueError, r"depth-first order, but parents\[1\] is -2"),
    (masks.prefix_tree, ([-1], [-1]), ValueError, r"lengths\[0\] is -1"),
    (masks.prefix_tree, ([-1.0], [1]), TypeError, r"parents\[0\] must be an int, but is float -1.0"),
    (masks.prefix_lm, (WHOLE, 3.0), TypeError, "length must be an int, but is float 3.0"),
    (masks.prefix_lm, (ids(3, -1), 3), ValueError, r"between 0 and length = 3, but .*\[1\] is -1"),
    (masks.prefix_lm, (ids(4, 1), 3), ValueError, r"between 0 and length = 3, but .*\[0\] is 4"),
    (masks.bidirectional_blocks, (WHOLE,), ValueError, r"block_ids must have shape \(B, N\)"),
    (masks.bidirectional_blocks, (ids([0, 1, 0]),), ValueError, "next to one another, but row 0"),
    (masks.bidirectional_blocks, (ids([0, -1, 1], [2, 7, 2]),), ValueError, "next to one another, but row 1"),
    (masks.chunks, (0, 3), ValueError, "chunk must be 1 or more, but is 0"),
    (masks.from_dense, (WHOLE,), TypeError, "mask must be bool"),
    (masks.from_dense, (WHOLE.bool(),), ValueError, "mask must have shape"),
]


@pytest.mark.parametrize(("function", "arguments", "error", "message"), ERRORS)
def test_errors(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(*arguments)


# A call, values that it takes, values that it does not, and the message.
VALUES = [
    ("documents(x, 9)", [0, 4, 9], [0, 4, 3], "cu_seqlens must begin with 0, never fall, and end"),
    ("prefix_lm(x, 9)", [0, 4, 9], [0, -4, 9], "prefix_lens must be between 0 and length"),
    ("bidirectional_blocks(x[None])", [0, 0, -1], [0, 3, 0], "block_ids must have equal ids"),
]
by_values = pytest.mark.parametrize(("call", "right", "wrong", "message"), VALUES)


@pytest.mark.unpoisoned
@by_values
def test_wrong_values_without_data(call, right, wrong, message):
    """A traced graph asserts on the device, because the host cannot read values. Meta and fake tensors hold none."""
    function, right, wrong = eval(f"lambda x: masks.{call}", {"masks": masks}), torch.tensor(right), torch.tensor(wrong)
    expected = function(right)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for graph in (compiled, torch.export.export(Module(function), (right,)).module()):
        assert all(map(torch.equal, graph(right), expected))
        with pytest.raises(RuntimeError, match=message):
            graph(wrong)
    with FakeTensorMode():
        fake = function(torch.empty(len(wrong), dtype=torch.int64))
    for x, *others in zip(expected, function(wrong.to("meta")), fake, strict=True):
        assert all(y.shape == x.shape and y.dtype == x.dtype for y in others)


PROGRAM = """
import torch
from fused_rope_attn import masks

x = torch.tensor({right}, device="cuda")
torch.cuda.set_sync_debug_mode("error")
masks.{call}
print("did not wait")
torch.cuda.set_sync_debug_mode(0)
x = torch.tensor({wrong}, device="cuda")
masks.{call}
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@by_values
def test_wrong_values_on_a_gpu(call, right, wrong, message):
    """They trip an assertion on the device, which ends the process's CUDA context."""
    done = python("-c", PROGRAM.format(call=call, right=right, wrong=wrong))
    assert "did not wait" in done.stdout and done.returncode != 0
    assert "device-side assert" in done.stderr
