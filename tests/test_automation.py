"""CI and the hooks call commands that exist, and those that a contributor runs."""

import re

import yaml

from tests.support.paths import ROOT

WORKFLOWS = ROOT / ".github" / "workflows"


def test_workflows_run_what_a_contributor_runs():
    """Every step is a make target that the Makefile has, and the checks of a commit are among them."""
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called, wrong = set(), []
    for workflow in sorted(WORKFLOWS.glob("*.yml")):
        jobs = yaml.safe_load(workflow.read_text())["jobs"]
        for command in (step["run"] for job in jobs.values() for step in job["steps"] if "run" in step):
            match = re.fullmatch(r"make ([a-z0-9-]+) PYTHON=python", command)
            if match and match[1] in targets:
                called.add(match[1])
            else:
                wrong.append(f"{workflow.name} runs {command!r}")
    assert not wrong, f"these are no make targets: {wrong}"
    assert {"lint", "test", "docs", "wheel", "test-latest"} <= called


def test_workflows_test_every_python_that_the_package_names():
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    jobs = yaml.safe_load((WORKFLOWS / "ci.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python-version"] == classifiers


def test_hooks_call_the_tools_of_make_lint():
    """They are tools of the environment, because a hook that downloads does not run without a network."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for hook in repository["hooks"]:
        python, flag, tool = hook["entry"].split()[:3]
        assert (python, flag, hook["language"]) == (".venv/bin/python", "-m", "system")
        assert f"$(PY) -m {tool}" in lint, f"{hook['id']} is not part of make lint"
