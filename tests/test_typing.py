"""User code has the types that it needs, by mypy and by pyright."""

import inspect
import json
import os
import re
import subprocess
import sys

import pytest

import fused_rope_attn
from fused_rope_attn import distributed
from tests.support.paths import ROOT

PROGRAM = """
import torch
import fused_rope_attn
from typing import Any
from typing_extensions import assert_type
from fused_rope_attn import Backend, Layout, RotationLayout, Strategy
from fused_rope_attn.distributed import CpMethod, DocumentPlan
from fused_rope_attn.integrations.transformers import patch_model, unpatch_model

class Model(torch.nn.Module): ...

def of_the_package(model: Model, x: torch.Tensor, layout: RotationLayout, text: str) -> None:
    assert_type(patch_model(model), Model)
    assert_type(unpatch_model(model), Model)
    assert_type(fused_rope_attn.experimental.corope_attention(x, x, x), torch.Tensor)
    fused_rope_attn.apply_rope(x, x, x, layout=layout)
    fused_rope_attn.apply_rope(x, x, x, layout=text)  # error
    fused_rope_attn.rope_atention  # error
"""
# One per public function that takes return_lse: every parameter is given by its name and with its own type, so that an
# overload that lacks one, or has another type for it, is an error.
CALLS = """
def of_{name}({parameters}) -> None:
    assert_type({call}({arguments}), torch.Tensor)
    assert_type({call}({arguments}, return_lse=False), torch.Tensor)
    assert_type({call}({arguments}, return_lse=True), tuple[torch.Tensor, torch.Tensor])
    assert_type({call}({arguments}, return_lse=return_lse), torch.Tensor | tuple[torch.Tensor, torch.Tensor])
    {call}({arguments}, unheard_of=True)  # error
    {call}({mistaken})  # error
"""
# Those that take return_max_logit as well.
MAX_LOGIT = """
    assert_type({call}({arguments}, return_max_logit=False), torch.Tensor)
    assert_type({call}({arguments}, return_max_logit=True), tuple[torch.Tensor, ...])
    assert_type({call}({arguments}, return_lse=return_lse, return_max_logit=True), tuple[torch.Tensor, ...])
    either = {call}({arguments}, return_lse=return_lse, return_max_logit=return_max_logit)
    assert_type(either, torch.Tensor | tuple[torch.Tensor, ...])
"""


def calls():
    modules = fused_rope_attn, distributed
    for call, function in {f"{m.__name__}.{name}": getattr(m, name) for m in modules for name in m.__all__}.items():
        name = call.rpartition(".")[2]
        parameters = inspect.signature(function).parameters if inspect.isfunction(function) else {}
        if "return_lse" not in parameters or name.startswith("plan"):
            continue
        typed = ", ".join(f"{parameter}: {parameters[parameter].annotation}" for parameter in parameters)
        arguments = ", ".join(f"{x}={x}" for x in parameters if x not in ("return_lse", "return_max_logit"))
        word = next(word for word in ("layout", "backend", "method") if word in parameters)
        yield (CALLS + MAX_LOGIT * ("return_max_logit" in parameters)).format(
            name=name,
            call=call,
            parameters=typed,
            arguments=arguments,
            mistaken=arguments.replace(f"{word}={word}", f'{word}="bnhd"'),
        )


def mypy(folder, cache):
    options = [f"--config-file={ROOT}/pyproject.toml", f"--cache-dir={cache}", "--follow-imports=silent"]
    command = [sys.executable, "-m", "mypy", *options, "--no-error-summary", *os.listdir(folder)]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 1, result.stdout + result.stderr
    found = re.findall(r"^(\w+\.py):(\d+): error: (.*)$", result.stdout, re.MULTILINE)
    return {(file, int(line)): message for file, line, message in found}


def pyright(folder, cache):
    """Run basedpyright with pyright's rules, because the package `pyright` downloads its checker when it first runs."""
    pytest.importorskip("basedpyright", reason="basedpyright is not installed: pip install '.[test]'")
    files = os.listdir(folder)
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    result = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=500)
    report = json.loads(result.stdout)
    assert report["summary"]["filesAnalyzed"] == len(files)
    errors = [found for found in report["generalDiagnostics"] if found["severity"] == "error"]
    return {(os.path.basename(x["file"]), x["range"]["start"]["line"] + 1): x["message"] for x in errors}


@pytest.mark.parametrize("errors_of", [mypy, pyright])
def test_types_that_users_see(errors_of, tmp_path, pytestconfig):
    """README's examples have no error; the other program has those that it should: a wrong word, an unknown name."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files = {f"readme{i}.py": code for i, code in enumerate(re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S))}
    written = [*calls()]
    assert files and len(written) >= 5
    files["calls.py"] = PROGRAM + "".join(written)
    expected = set()
    for name, code in files.items():
        (tmp_path / name).write_text(code)
        expected |= {(name, i) for i, line in enumerate(code.split("\n"), 1) if line.endswith("  # error")}
    found = errors_of(tmp_path, pytestconfig.cache.mkdir("mypy"))
    assert set(found) == expected, {where: found.get(where, "no error") for where in expected ^ set(found)}
