"""examples/same_bits.py: log-probabilities of sampled tokens, computed again in one pass."""

import re

import pytest

from examples.same_bits import main


def differences(capsys, *arguments):
    """Return (how many log-probabilities differ, of how many, the largest difference) without and with the option."""
    assert main(list(arguments)) == 0
    found = re.findall(r"(\d+) of (\d+) log-probabilities differ, by (\S+) at most", capsys.readouterr().out)
    return [(int(count), int(total), float(largest)) for count, total, largest in found]


def test_on_a_cpu(capsys):
    without, with_option = differences(capsys, "--tokens", "4", "--prompts", "5,17", "--device", "cpu")
    assert without[1] == with_option[1] == 8 and without[2] < 1e-4 and with_option[2] < 1e-4


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    without, with_option = differences(capsys)
    assert without[0] > 0 and with_option == (0, 5 * 64, 0.0)
