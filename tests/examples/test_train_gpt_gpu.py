"""examples/train_gpt.py with its kernels: 50 steps in bfloat16, and the losses are those of separate steps."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.gpu
def test_losses_of_fifty_steps():
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--small", "--steps", "50"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert float(re.search(r"differ by (\S+) at most", done.stdout)[1]) < 1e-2
