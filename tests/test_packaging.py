"""`pip install .` gives a pure-Python wheel of the package with its metadata; CI runs what a contributor runs."""

import re
import shutil
import zipfile
from email import message_from_string

import pytest
import yaml

import fused_rope_attn
from tests.support.paths import ROOT, python
from tools import release_check

WORKFLOWS = ROOT / ".github" / "workflows"
NAME = r"[A-Za-z0-9_-]+"


def test_wheel(tmp_path):
    """Build from a copy, so that the checkout stays clean, and without isolation, which would need a network."""
    source, out = tmp_path / "project", tmp_path / "wheel"
    for name in ("fused_rope_attn", "bench", "baselines", "verification", "tools", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    result = python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source))
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = out.glob("*-py3-none-any.whl")
    wheel = zipfile.ZipFile(file)
    texts = {name.split(".dist-info/")[-1]: wheel.read(name).decode() for name in wheel.namelist()}
    assert "Root-Is-Purelib: true" in texts["WHEEL"]
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fused_rope_attn"}
    assert "fused_rope_attn/py.typed" in texts
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "fused_rope_attn").rglob("*.py")}
    assert {name for name in wheel.namelist() if name.endswith(".py")} == sources

    metadata = message_from_string(texts["METADATA"])
    assert metadata["Name"] == "fused-rope-attn" and metadata["Version"] == fused_rope_attn.__version__
    assert metadata["License-Expression"] == "MIT" and metadata["Requires-Python"] == ">=3.10"
    required = {}  # by extra
    for line in metadata.get_all("Requires-Dist"):
        extra = re.search(rf"extra == ['\"]({NAME})['\"]", line)
        required.setdefault(extra and extra[1], set()).add(re.match(NAME, line).group())
    assert required[None] == {"torch", "triton", "einops", "numpy"}
    assert {"transformers"} <= required["hf"] and {"matplotlib"} <= required["bench"] and required["test"]
    assert {"flash-attn", "fused-rope-attn"} <= required["baselines"]


def test_citation_names_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fused_rope_attn.__version__ == release_check.version_of(ROOT)
    assert citation["title"] == "fused_rope_attn" and citation["license"] == "MIT"


def test_a_tag_names_a_version_that_the_changelog_has():
    release_check.check_tag("v1.2.3", "1.2.3", "## 1.2.3 - 2026-11-26")
    with pytest.raises(SystemExit, match="the tag is v1.2.4, but the version is 1.2.3"):
        release_check.check_tag("v1.2.4", "1.2.3", "## 1.2.3 - 2026-11-26")
    with pytest.raises(SystemExit, match="CHANGELOG.md has no section of 1.2.3"):
        release_check.check_tag("v1.2.3", "1.2.3", "## Unreleased\n## 1.2.30")


def test_the_quickstart_of_a_release_check_is_all_of_its_code():
    code = release_check.quickstart(ROOT)
    assert code.count("import torch\n") == (ROOT / "docs" / "quickstart.md").read_text().count("\nimport torch\n") > 1


def test_workflows_run_what_a_contributor_runs():
    """Every step is a make target that the Makefile has, and the checks of a commit are among them."""
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = {file.stem: yaml.safe_load(file.read_text())["jobs"] for file in WORKFLOWS.glob("*.yml")}
    steps = [step["run"] for each in jobs.values() for job in each.values() for step in job["steps"] if "run" in step]
    called = {step: re.fullmatch(r"make ([a-z0-9-]+) PYTHON=python", step) for step in steps}
    assert all(match and match[1] in targets for match in called.values()), f"some of {steps} are no make targets"
    assert {"lint", "test", "docs", "wheel", "test-latest"} <= {match[1] for match in called.values()}
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert jobs["ci"]["test"]["strategy"]["matrix"]["python-version"] == classifiers


def test_hooks_call_the_tools_of_make_lint():
    """They are tools of the environment, because a hook that downloads does not run without a network."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for hook in repository["hooks"]:
        python, flag, tool = hook["entry"].split()[:3]
        assert (python, flag, hook["language"]) == (".venv/bin/python", "-m", "system")
        assert f"$(PY) -m {tool}" in lint, f"{hook['id']} is not part of make lint"
