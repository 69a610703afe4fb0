"""examples/train_gpt.py, on a CPU and small."""

import os
import re
import subprocess
import sys

from tests.support.paths import ROOT

SCRIPT = ROOT / "examples" / "train_gpt.py"


def test_the_example():
    command = [sys.executable, str(SCRIPT), "--small", "--steps", "10"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"differ by (\S+) at most", done.stdout)[1]) < 1e-4
    first, last = map(
        float, re.search(r"^fused_attention .* first loss (\S+), last (\S+)$", done.stdout, re.M).groups()
    )
    assert last < first - 0.1
