"""examples/train_llama.py, on a CPU and small."""

import os
import re
import subprocess
import sys

from tests.support.paths import ROOT


def test_the_example(tmp_path):
    script, out = ROOT / "examples" / "train_llama.py", tmp_path / "curves.png"
    command = [sys.executable, str(script), "--small", "--steps", "4", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert out.stat().st_size > 5000
    assert float(re.search(r"(\S+) at most", done.stdout).group(1)) < 1e-5
    patched, plain = (line.split(": ", 1)[1] for line in re.findall(r"^(?:un)?patch_model: .*$", done.stdout, re.M))
    assert patched == plain and patched.startswith("## 2026")
