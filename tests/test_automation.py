"""What runs without a person looking, in CI and before a commit, calls commands that exist."""

import re
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z0-9-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(workflow: Path) -> list[str]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_make_targets(workflow):
    found = commands(workflow)
    assert found
    for command in found:
        match = re.fullmatch(r"make ([a-z0-9-]+) PYTHON=python", command)
        assert match, f"{workflow.name} runs {command!r}: give it a make target"
        assert match[1] in make_targets(), f"{workflow.name} calls make {match[1]}, which the Makefile lacks"


def test_workflows_run_what_a_contributor_runs():
    called = {command.split()[1] for workflow in WORKFLOWS for command in commands(workflow)}
    assert {"lint", "test", "docs", "wheel", "test-latest"} <= called


def test_workflows_test_every_python_that_the_package_names():
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python-version"] == classifiers


def test_hooks_call_the_tools_of_make_lint():
    """Tools of the environment alone: a hook that downloads would not run on a machine without a network."""
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for hook in repositories[0]["hooks"]:
        python, flag, tool = hook["entry"].split()[:3]
        assert (python, flag, hook["language"]) == (".venv/bin/python", "-m", "system")
        assert f"$(PY) -m {tool}" in lint, f"{hook['id']} is not part of make lint"


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_forms_ask_for_the_environment(form):
    content = yaml.safe_load(form.read_text())
    assert content["name"] and content["description"]
    labels = {part["id"]: part["attributes"]["label"] for part in content["body"]}
    assert "python -m fused_rope_attn.env" in labels["environment"]


def test_every_make_target_has_a_row_in_contributing():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for target in make_targets():
        assert f"`make {target}`" in text, f"CONTRIBUTING.md does not say what make {target} does"
