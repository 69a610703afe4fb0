"""examples/grpo_prefix.py: a tree of answers and a row for each have the same loss and gradients."""

import re

import pytest

from examples.grpo_prefix import main


def found(capsys, *arguments):
    """Return (the difference of the losses, of the gradients)."""
    assert main(list(arguments)) == 0
    out = capsys.readouterr().out
    differences = re.search(r"losses differ by (\S+), gradients by (\S+) of their norm", out).groups()
    assert re.search(r"the tree takes \S+ of", out)
    return tuple(map(float, differences))


def test_on_a_cpu(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    sizes = ("--prompt", "9", "--answer", "6", "--answers", "3", "--layers", "1", "--repeats", "1")
    loss, gradient = found(capsys, *sizes, "--device", "cpu", "--plot", str(tmp_path / "mask.png"))
    assert loss < 1e-5 and gradient < 1e-4 and (tmp_path / "mask.png").stat().st_size > 1000


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    loss, gradient = found(capsys)
    assert loss < 0.01 and gradient < 0.05
