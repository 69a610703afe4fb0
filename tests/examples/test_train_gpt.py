"""examples/train_gpt.py, on a CPU and small, and README's functions, which are the example's."""

import ast
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


def test_readme_shows_the_functions_of_the_example():
    """README's before and after are the functions that were measured."""
    fences = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    before, after = (_functions(fence) for fence in fences[:2])
    assert set(before) == {"rotate", "separate_attention"} and set(after) == {"fused_attention"}
    example = _functions(SCRIPT.read_text())
    for name, source in {**before, **after}.items():
        assert source == example[name], f"README's {name} is not that of the example"


def _functions(source):
    """Return the source of every function of a module by name."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return {node.name: ast.get_source_segment(source, node) for node in nodes}
