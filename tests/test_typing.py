"""User code has the types that it needs, by mypy and by pyright."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

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


def calls() -> str:
    """Write user code that calls every public function with return_lse."""
    code = []
    for module in (fused_rope_attn, distributed):
        for name in module.__all__:
            function = getattr(module, name)
            parameters = inspect.signature(function).parameters if inspect.isfunction(function) else {}
            if "return_lse" not in parameters or name.startswith("plan"):
                continue
            typed = ", ".join(f"{parameter}: {parameters[parameter].annotation}" for parameter in parameters)
            asked = ("return_lse", "return_max_logit")
            arguments = ", ".join(f"{parameter}={parameter}" for parameter in parameters if parameter not in asked)
            word = next(word for word in ("layout", "backend", "method") if word in parameters)
            mistaken = arguments.replace(f"{word}={word}", f'{word}="bnhd"')
            call = f"{module.__name__}.{name}"
            lines = CALLS + MAX_LOGIT if "return_max_logit" in parameters else CALLS
            code.append(lines.format(name=name, call=call, parameters=typed, arguments=arguments, mistaken=mistaken))
    assert len(code) >= 5
    return "".join(code)


def check(folder: Path, *command: str, **variables: str) -> str:
    """Return the standard output of a type checker that ran in a folder."""
    environment = os.environ | variables
    command = (sys.executable, "-m", *command)
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return result.stdout


def errors_of_mypy(folder: Path, cache: Path) -> dict[tuple[str, int], str]:
    options = ["--config-file=", f"--cache-dir={cache}", "--follow-imports=silent", "--no-error-summary"]
    files = sorted(path.name for path in folder.glob("*.py"))
    output = check(folder, "mypy", *options, "--hide-error-context", *files, MYPYPATH=str(ROOT))
    found = re.findall(r"^(\w+\.py):(\d+): error: (.*)$", output, re.MULTILINE)
    return {(file, int(line)): message for file, line, message in found}


def errors_of_pyright(folder: Path, cache: Path) -> dict[tuple[str, int], str]:
    """Run basedpyright with pyright's rules, because the package `pyright` downloads its checker when it first runs."""
    pytest.importorskip("basedpyright", reason="basedpyright is not installed: pip install '.[test]'")
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    output = check(folder, "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder))
    report = json.loads(output)
    assert report["summary"]["filesAnalyzed"] == len(list(folder.glob("*.py")))
    return {
        (Path(found["file"]).name, found["range"]["start"]["line"] + 1): found["message"]
        for found in report["generalDiagnostics"]
        if found["severity"] == "error"
    }


@pytest.mark.parametrize("errors_of", [errors_of_mypy, errors_of_pyright])
def test_types_that_users_see(errors_of, tmp_path, pytestconfig):
    """README's examples have no error; the other program has those that it should: a wrong word, an unknown name."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert examples
    files = {f"readme{number}.py": example for number, example in enumerate(examples)}
    files["calls.py"] = PROGRAM + calls()
    expected = set()
    for name, code in files.items():
        (tmp_path / name).write_text(code)
        lines = enumerate(code.split("\n"), 1)
        expected |= {(name, number) for number, line in lines if line.endswith("  # error")}
    found = errors_of(tmp_path, pytestconfig.cache.mkdir("mypy"))
    wrong = [f"{file}:{line}: {message}" for (file, line), message in found.items() if (file, line) not in expected]
    assert not wrong, "\n".join(wrong)
    assert set(found) == expected
