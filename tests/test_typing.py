"""mypy checks all host code but that of devices, and user code has the types that it needs, by mypy and by pyright."""

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

SPARED = "# mypy: ignore-errors"
DEVICE_CODE = re.compile(r"^\s*@(\w+\.)?(jit|record|aggregate)\b", re.MULTILINE)


def test_the_files_that_mypy_spares_are_those_with_device_code():
    files = sorted((ROOT / "fused_rope_attn").rglob("*.py"))
    device_code = {path.relative_to(ROOT) for path in files if DEVICE_CODE.search(path.read_text())}
    spared = {path.relative_to(ROOT) for path in files if path.read_text().startswith(f"{SPARED}\n")}
    missing, stale = (sorted(map(str, some)) for some in (device_code - spared, spared - device_code))
    assert not missing, f"begin these with {SPARED!r}, for they hold device code: {missing}"
    assert not stale, f"remove {SPARED!r} from these, for they hold none: {stale}"
    anywhere = [str(path) for path in files if "mypy: ignore-errors" in path.read_text().removeprefix(SPARED)]
    assert not anywhere, f"{SPARED!r} must be the first line: {anywhere}"


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
# overload which lacks one, or has another type for it, is an error.
CALLS = """
def of_{name}({parameters}) -> None:
    assert_type({call}({arguments}), torch.Tensor)
    assert_type({call}({arguments}, return_lse=False), torch.Tensor)
    assert_type({call}({arguments}, return_lse=True), tuple[torch.Tensor, torch.Tensor])
    assert_type({call}({arguments}, return_lse=return_lse), torch.Tensor | tuple[torch.Tensor, torch.Tensor])
    {call}({arguments}, unheard_of=True)  # error
    {call}({mistaken})  # error
"""


def calls() -> str:
    """User code with every public function that takes return_lse."""
    code = []
    for module in (fused_rope_attn, distributed):
        for name in module.__all__:
            function = getattr(module, name)
            parameters = inspect.signature(function).parameters if inspect.isfunction(function) else {}
            if "return_lse" not in parameters or name.startswith("plan"):
                continue
            given = [parameter for parameter in parameters if parameter != "return_lse"]
            typed = ", ".join(f"{parameter}: {parameters[parameter].annotation}" for parameter in parameters)
            arguments = ", ".join(f"{parameter}={parameter}" for parameter in given)
            wrong = next(word for word in ("layout", "backend", "method") if word in parameters)
            code.append(
                CALLS.format(
                    name=name, call=f"{module.__name__}.{name}", parameters=typed, arguments=arguments,
                    mistaken=arguments.replace(f"{wrong}={wrong}", f'{wrong}="bnhd"'),
                )
            )  # fmt: skip
    assert len(code) >= 5
    return "".join(code)


def errors_of_mypy(folder: Path, cache: Path) -> dict[tuple[str, int], str]:
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={cache}", "--follow-imports=silent",
         "--no-error-summary", "--hide-error-context", *sorted(path.name for path in folder.glob("*.py"))],
        cwd=folder, env=os.environ | {"MYPYPATH": str(ROOT)}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert result.returncode in (0, 1) and not result.stderr, result.stdout + result.stderr
    found = re.findall(r"^(\w+\.py):(\d+): error: (.*)$", result.stdout, re.MULTILINE)
    return {(file, int(line)): message for file, line, message in found}


def errors_of_pyright(folder: Path, cache: Path) -> dict[tuple[str, int], str]:
    """By basedpyright with pyright's rules, because the package `pyright` downloads its checker when it first runs."""
    pytest.importorskip("basedpyright", reason="basedpyright is not installed: pip install '.[test]'")
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    result = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)],
        cwd=folder, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert result.returncode in (0, 1), result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["summary"]["filesAnalyzed"] == len(list(folder.glob("*.py")))
    return {
        (Path(found["file"]).name, found["range"]["start"]["line"] + 1): found["message"]
        for found in report["generalDiagnostics"]
        if found["severity"] == "error"
    }


@pytest.mark.parametrize("errors_of", [errors_of_mypy, errors_of_pyright])
def test_types_that_users_see(errors_of, tmp_path, pytestconfig):
    """README's examples have no error; other code has those that it should: a wrong word, an unknown name."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert len(examples) >= 2
    files = {f"readme{number}.py": example for number, example in enumerate(examples)}
    files["calls.py"] = PROGRAM + calls()
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    expected = {
        (name, number)
        for name, code in files.items()
        for number, line in enumerate(code.split("\n"), 1)
        if line.endswith("  # error")
    }
    found = errors_of(tmp_path, pytestconfig.cache.mkdir("mypy"))
    wrong = [f"{file}:{line}: {message}" for (file, line), message in found.items() if (file, line) not in expected]
    assert not wrong, "\n".join(wrong)
    assert set(found) == expected
