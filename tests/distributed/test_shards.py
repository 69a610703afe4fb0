"""Cutting and joining tensors along the sequence, positions and labels."""

import pytest
import torch

from tests.support.context_parallel import cut_and_join, labels_of, positions_of


@pytest.mark.parametrize("sharding", ["zigzag", "contiguous"])
@pytest.mark.parametrize("members", [(0, 1), (0, 1, 2), (0, 1, 2, 3), (1, 3)])
def test_cut_and_join(ranks, sharding, members):
    whole = torch.randn(3, 24, 2)
    weights = [torch.randn(3, 24, 2) for _ in members]
    found = ranks.results(cut_and_join, members, whole, weights, sharding, ranks=members)
    positions = ranks.results(positions_of, members, 24, sharding, ranks=members)
    assert sorted(torch.cat(positions).tolist()) == list(range(24))
    if sharding == "zigzag":  # as the contract has it
        chunk = 24 // (2 * len(members))
        assert positions[0].tolist() == [*range(chunk), *range(24 - chunk, 24)]
    else:
        assert positions[1].tolist() == list(range(24 // len(members), 2 * 24 // len(members)))
    total = sum(weights)
    for (shard, joined, gradient), rows in zip(found, positions):
        assert torch.equal(shard, whole[:, rows])
        assert torch.equal(joined, whole)
        # The gradient of the sum of all ranks' losses; each rank weighs the joined tensor in its own way.
        expected = torch.zeros_like(whole)
        expected[:, rows] = total[:, rows]
        torch.testing.assert_close(gradient, expected)


def test_labels(ranks):
    labels = torch.arange(16).reshape(1, 16)
    parts = ranks.results(labels_of, (0, 1), labels, None, ranks=(0, 1))
    assert parts[0].tolist() == [[1, 2, 3, 4, 13, 14, 15, -100]]
    assert parts[1].tolist() == [[5, 6, 7, 8, 9, 10, 11, 12]]
    parts = ranks.results(labels_of, (0, 1), labels, torch.tensor([0, 4, 4, 9, 16]), ranks=(0, 1))
    assert parts[0].tolist() == [[1, 2, 3, -100, 13, 14, 15, -100]]
    assert parts[1].tolist() == [[5, 6, 7, 8, -100, 10, 11, 12]]
