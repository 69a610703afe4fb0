"""examples/corope_counting.py asks what it says."""

import importlib.util

import torch

from tests.support.paths import ROOT


def test_the_example_asks_what_it_says():
    spec = importlib.util.spec_from_file_location("corope_counting", ROOT / "examples" / "corope_counting.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    tokens, answers = example.batch(50, 12, torch.Generator().manual_seed(0))
    for row, answer in zip(tokens.tolist(), answers.tolist()):
        n = row[-1] - 2 * example.LETTERS + 1
        marked = [token - example.LETTERS for token in row[:-1] if token >= example.LETTERS]
        assert 1 <= n <= example.MOST and marked[-n] == answer
    for kind in ("RoPE", "Co-RoPE"):
        assert example.Model(kind)(tokens[:2]).shape == (2, example.LETTERS)
