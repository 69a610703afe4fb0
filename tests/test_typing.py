"""mypy checks all host code; only files with device code are spared, and only while they hold some."""

import importlib.util
import re

import pytest

from tests.support.paths import ROOT

DEVICE_CODE = re.compile(r"^\s*@(\w+\.)?(jit|record|aggregate)\b", re.MULTILINE)


def overrides(setting: str) -> list[str]:
    """The modules of the override of pyproject.toml that sets this. By hand: tomllib came with Python 3.11."""
    blocks = (ROOT / "pyproject.toml").read_text().split("\n[")
    (block,) = (block for block in blocks if f"\n{setting} = true" in block and "tool.mypy.overrides" in block)
    return re.findall(r'^    "([\w.*]+)",$', block, re.MULTILINE)


def test_the_files_that_mypy_spares_are_those_with_device_code():
    files = sorted((ROOT / "fused_rope_attn").rglob("*.py"))
    device_code = {path for path in files if DEVICE_CODE.search(path.read_text())}
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in device_code}
    spared = set(overrides("ignore_errors"))
    missing, stale = sorted(named - spared), sorted(spared - named)
    assert not missing, f"add these to mypy's ignore_errors in pyproject.toml, for they hold device code: {missing}"
    assert not stale, f"remove these from mypy's ignore_errors in pyproject.toml, for they hold none: {stale}"


@pytest.mark.parametrize("module", overrides("disallow_untyped_defs"))
def test_the_files_that_mypy_is_strict_with_exist(module):
    assert importlib.util.find_spec(module.removesuffix(".*")), f"{module} is not a module any more"
