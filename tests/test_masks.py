"""``fused_rope_attn.masks``: every function against a dense mask that is written down pair by pair."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses import FakeTensorMode

from fused_rope_attn import masks
from tests.support.export import Module

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def dense(starts, ends, rows):
    """Return the mask (B, rows, NK) of intervals (B, NK)."""
    assert starts.dtype == ends.dtype == torch.int32 and starts.shape == ends.shape
    row = torch.arange(rows)[:, None]
    return (row >= starts[:, None]) & (row < ends[:, None])


def pairs(length, sees):
    """Return the mask (1, length, length) of ``sees(i, j)``."""
    rows = [[bool(sees(i, j)) for j in range(length)] for i in range(length)]
    return torch.tensor(rows, dtype=torch.bool).reshape(1, length, length)


@given(LENGTHS, st.integers(0, 3), st.booleans())
def test_documents(lengths, padding, wide):
    total = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int64 if wide else torch.int32)
    owner = [document for document, length in enumerate(lengths) for _ in range(length)] + [None] * padding

    def sees(i, j):
        return owner[i] is not None and owner[i] == owner[j] and j <= i

    found = masks.documents(cu_seqlens, total + padding)
    assert torch.equal(dense(*found, total + padding), pairs(total + padding, sees))
    assert all(torch.equal(x, y[:, :total]) for x, y in zip(masks.documents(cu_seqlens), found))


@st.composite
def trees(draw):
    """Draw (parents, lengths) in depth-first order: each node follows a node of the last node's path, or is a root."""
    parents, path = [], []
    for node in range(draw(st.integers(1, 8))):
        kept = draw(st.integers(0, len(path)))
        path = path[:kept]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents, [draw(st.integers(0, 3)) for _ in parents]


@given(trees(), st.booleans())
def test_prefix_tree(tree, as_tensors):
    parents, lengths = tree
    nodes = [node for node, length in enumerate(lengths) for _ in range(length)]

    def above(node):
        return [] if node == -1 else [node, *above(parents[node])]

    def sees(i, j):
        return nodes[j] in above(nodes[i]) and j <= i

    starts, ends, positions = masks.prefix_tree(*(map(torch.tensor, tree) if as_tensors else tree))
    expected = pairs(len(nodes), sees)
    assert torch.equal(dense(starts, ends, len(nodes)), expected)
    # A token's position is the number of tokens that it sees in addition to itself.
    assert positions.dtype == torch.int64 and torch.equal(positions, expected.sum(-1) - 1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(0, 8))
def test_prefix_lm(prefix_lens, length):
    prefix_lens = [min(prefix, length) for prefix in prefix_lens]
    found = dense(*masks.prefix_lm(torch.tensor(prefix_lens), length), length)
    for b, prefix in enumerate(prefix_lens):
        expected = pairs(length, lambda i, j: j <= i or j < prefix)  # noqa: B023
        assert torch.equal(found[b : b + 1], expected)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=6))
def test_bidirectional_blocks(runs):
    ids = [number if is_block else -1 for number, (is_block, length) in enumerate(runs) for _ in range(length)]
    block_ids = torch.tensor([ids, [-1] * len(ids)], dtype=torch.int32).reshape(2, len(ids))
    found = dense(*masks.bidirectional_blocks(block_ids), len(ids))
    assert torch.equal(found[:1], pairs(len(ids), lambda i, j: j <= i or (ids[i] == ids[j] >= 0)))
    assert torch.equal(found[1:], pairs(len(ids), lambda i, j: j <= i))


@given(st.integers(1, 6), st.integers(0, 12))
def test_chunks(chunk, length):
    found = dense(*masks.chunks(chunk, length), length)
    assert torch.equal(found, pairs(length, lambda i, j: j <= i and i // chunk == j // chunk))


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


WHOLE = torch.zeros(3, dtype=torch.int32)
BLOCKS = torch.tensor([[0, 0, -1, 1, -1], [-1, 2, 7, 7, 2]])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: masks.documents(WHOLE.float(), 3), TypeError, "cu_seqlens must be int32 or int64, but is float32"),
        (lambda: masks.documents(WHOLE[None], 3), ValueError, "cu_seqlens must have shape"),
        (lambda: masks.documents(WHOLE[:0], 3), ValueError, "cu_seqlens must have shape"),
        (lambda: masks.documents(WHOLE, -1), ValueError, "length must be 0 or more, but is -1"),
        (lambda: masks.documents([0, 3], 3), TypeError, "cu_seqlens must be a torch.Tensor"),
        (lambda: masks.prefix_tree([-1, 0], [3]), ValueError, "lengths must have one number for each of 2 parents"),
        (lambda: masks.prefix_tree([-1, 0, 0, 1], [1] * 4), ValueError, r"depth-first order, but parents\[3\] is 1"),
        (lambda: masks.prefix_tree([0], [1]), ValueError, r"depth-first order, but parents\[0\] is 0"),
        (lambda: masks.prefix_tree([-1], [-1]), ValueError, r"lengths\[0\] is -1"),
        (lambda: masks.prefix_tree([-1.0], [1]), TypeError, r"parents\[0\] must be an int, but is float -1.0"),
        (lambda: masks.prefix_lm(3, 3), TypeError, "prefix_lens must be a torch.Tensor"),
        (lambda: masks.prefix_lm(WHOLE, 3.0), TypeError, "length must be an int, but is float 3.0"),
        (lambda: masks.bidirectional_blocks(WHOLE), ValueError, r"block_ids must have shape \(B, N\)"),
        (lambda: masks.bidirectional_blocks(torch.tensor([[0, 1, 0]])), ValueError, "next to one another, but row 0"),
        (lambda: masks.bidirectional_blocks(BLOCKS), ValueError, "next to one another, but row 1"),
        (
            lambda: masks.documents(torch.tensor([5, 4, 3])),
            ValueError,
            "cu_seqlens must begin with 0, but begins with 5",
        ),
        (
            lambda: masks.documents(torch.tensor([1, 3]), 3),
            ValueError,
            "cu_seqlens must begin with 0, but begins with 1",
        ),
        (
            lambda: masks.documents(torch.tensor([0, 4, 2]), 9),
            ValueError,
            "cu_seqlens must never fall, but 2 follows 4",
        ),
        (lambda: masks.documents(torch.tensor([0, -2])), ValueError, "cu_seqlens must never fall, but -2 follows 0"),
        (lambda: masks.documents(torch.tensor([0, 4]), 3), ValueError, "cu_seqlens must end at or before the row's 3"),
        (lambda: masks.prefix_tree([-1, -2], [1, 1]), ValueError, r"depth-first order, but parents\[1\] is -2"),
        (lambda: masks.prefix_lm(torch.tensor([3, -1]), 3), ValueError, r"between 0 and length = 3, but .*\[1\] is -1"),
        (lambda: masks.prefix_lm(torch.tensor([4, 1]), 3), ValueError, r"between 0 and length = 3, but .*\[0\] is 4"),
        (lambda: masks.chunks(0, 3), ValueError, "chunk must be 1 or more, but is 0"),
        (lambda: masks.from_dense(WHOLE), TypeError, "mask must be bool"),
        (lambda: masks.from_dense(WHOLE.bool()), ValueError, "mask must have shape"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


# A function, values that it takes, values that it does not, and the message.
VALUES = [
    (lambda x: masks.documents(x, 9), [0, 4, 9], [0, 4, 3], "cu_seqlens must begin with 0, never fall, and end"),
    (lambda x: masks.prefix_lm(x, 9), [0, 4, 9], [0, -4, 9], "prefix_lens must be between 0 and length"),
    (lambda x: masks.bidirectional_blocks(x[None]), [0, 0, -1], [0, 3, 0], "block_ids must have equal ids"),
]
by_values = pytest.mark.parametrize(("function", "right", "wrong", "message"), VALUES)


@pytest.mark.unpoisoned
@by_values
def test_wrong_values_in_graphs(function, right, wrong, message):
    """The host cannot read values while it traces: the graph asserts, on the device."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    right, wrong = torch.tensor(right), torch.tensor(wrong)
    assert all(map(torch.equal, compiled(right), function(right)))
    with pytest.raises(RuntimeError, match=message):
        compiled(wrong)
    program = torch.export.export(Module(function), (right,)).module()
    assert all(map(torch.equal, program(right), function(right)))
    with pytest.raises(RuntimeError, match=message):
        program(wrong)


@by_values
def test_wrong_values_without_data(function, right, wrong, message):
    """Tensors on meta and fake tensors have no values to check."""
    expected = function(torch.tensor(right))
    found = function(torch.tensor(wrong, device="meta"))
    with FakeTensorMode():
        fake = function(torch.empty(len(wrong), dtype=torch.int64))
    for x, *others in zip(expected, found, fake, strict=True):
        assert all(y.shape == x.shape and y.dtype == x.dtype for y in others)


def test_chunks_larger_than_int32():
    assert all(map(torch.equal, masks.chunks(2**40, 3), masks.chunks(3, 3)))
