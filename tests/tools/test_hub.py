"""`python -m tools.hub`: the folder has the Hub's format, and its kernels give the package's results by themselves."""

import ast
import os
import re
import sys

import pytest
import torch

from fused_rope_attn import apply_rope_qk, rope_tables
from tests.support.paths import ROOT, python
from tools.hub.__main__ import build

# Runs in a process of its own. The package and einops cannot be imported there, unless they are asked for.
SCRIPT = """
import sys
alone = sys.argv[2] == "alone"
for name in ("fused_rope_attn", "einops", "transformers", "numpy.testing") if alone else ():
    sys.modules[name] = None
if not alone:
    import fused_rope_attn.rotation.ops
import torch
import fused_rope
for name, module in list(sys.modules.items()):
    if module is not None and name.partition(".")[0] == "fused_rope":
        assert "/torch-ext/fused_rope/" in module.__file__, module
case = torch.load(sys.argv[1] + "/case.pt")
q, k = (x.requires_grad_() for x in case["rows"])
layer = fused_rope.layers.apply_rotary_transformers()
results = []
for rotated in (
    fused_rope.apply_rope_qk(q, k, *case["half"], **case["norms"]),
    layer(q, k, *case["full"]),
    (x.transpose(1, 2) for x in layer(q.transpose(1, 2), k.transpose(1, 2), *case["full"], unsqueeze_dim=2)),
):
    rotated = list(rotated)
    results += rotated + list(torch.autograd.grad(rotated, (q, k), case["gradients"]))
torch.save([x.detach() for x in results], sys.argv[1] + "/results.pt")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub") / "kernel"
    assert build(out, "somebody/fused-rope") > 20
    return out


def test_files_are_what_the_hub_takes(folder):
    """Python 3.9, the standard library, torch and Triton, relative imports, and a namespace of their own."""
    allowed = {*sys.stdlib_module_names, "torch", "triton"}
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        evaluated = "from __future__ import annotations" not in path.read_text()
        for node in ast.walk(tree):
            annotations = (getattr(node, name, None) for name in ("annotation", "returns") if evaluated)
            for annotation in filter(None, annotations):  # X | Y of types needs Python 3.10
                assert not any(isinstance(part, ast.BitOr) for part in ast.walk(annotation)), path
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            assert {name.partition(".")[0] for name in names} <= allowed, path
            later = isinstance(node, ast.keyword) and node.arg in ("kw_only", "slots", "strict")
            assert not later, path  # later than Python 3.9
    settings = (folder / "build.toml").read_text()
    assert 'name = "fused-rope"\n' in settings and "edition = 5\n" in settings and "\n[torch-noarch]\n" in settings
    assert 'repo-id = "somebody/fused-rope"\n' in settings
    registration = (folder / "torch-ext/fused_rope/runtime/registration.py").read_text()
    assert re.search(r'^_NAMESPACE = "fused_rope_[0-9a-f]{8}"$', registration, re.MULTILINE)


@pytest.mark.parametrize("company", ["alone", "next to the package"])
def test_results_are_those_of_the_package(folder, tmp_path, company):
    torch.manual_seed(0)
    rows = [torch.randn(2, heads, 7, 16) for heads in (4, 2)]
    half, weights = rope_tables(7, 16), (torch.rand(16), torch.rand(16))
    full = [torch.cat((table, table), dim=-1).expand(2, -1, -1) for table in half]
    gradients = [torch.randn_like(x) for x in rows]
    norms = {"q_norm": weights[0], "k_norm": weights[1]}
    case = {"rows": rows, "half": half, "full": full, "norms": norms, "gradients": gradients}
    torch.save(case, tmp_path / "case.pt")
    path = os.pathsep.join([str(folder / "torch-ext"), *([str(ROOT)] if company != "alone" else [])])
    environment = {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = python("-c", SCRIPT, str(tmp_path), company, **environment)
    assert done.returncode == 0, done.stderr
    q, k = (x.requires_grad_() for x in rows)
    expected = []
    for options in (norms, {}, {}):
        rotated = apply_rope_qk(q, k, *half, **options)
        expected += [*rotated, *torch.autograd.grad(rotated, (q, k), gradients)]
    torch.testing.assert_close(torch.load(tmp_path / "results.pt"), [x.detach() for x in expected], rtol=0, atol=0)
