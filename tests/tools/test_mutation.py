"""``python -m tools.mutation``: which mutants there are, and what becomes of them."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tools.mutation.__main__ import mirrors_of, table
from tools.mutation.mutants import equivalents, mutants_of

MODULE = '''
import warnings

__all__ = ["a" + "b"]


@record
class Pair:
    first: int | None = 1


@triton.jit
def least(a, b: int | None, *, mode="fast") -> int | None:
    """1 + 1"""
    if mode == "fast" and a.dtype == b.dtype:
        warnings.warn("slow", stacklevel=2)
    return a < b
'''


def test_mutants_are_changes_of_what_a_module_does():
    pytest.importorskip("cosmic_ray")
    found = mutants_of("pair.py", MODULE)
    lines = MODULE.splitlines()
    assert (
        {lines[mutant.line - 1].strip() for mutant in found}
        == {mutant.before for mutant in found}
        == {"first: int | None = 1", 'if mode == "fast" and a.dtype == b.dtype:', "return a < b"}
    )
    assert len({mutant.source for mutant in found}) == len(found)
    for mutant in found:
        assert [x.strip() for x in mutant.source.splitlines()] == [
            mutant.after if i == mutant.line else line.strip() for i, line in enumerate(lines, 1)
        ]
    changed = {mutant.after: (mutant.operator, mutant.definition) for mutant in found}
    assert changed["return a >= b"] == ("ReplaceComparisonOperator_Lt_GtE", "least")
    assert changed["first: int | None = 2"] == ("NumberReplacer", "Pair")
    conditions = {line for line in changed if line.startswith("if ")}
    assert 'if mode != "fast" and a.dtype == b.dtype:' in conditions
    assert 'if mode == "fast" or a.dtype == b.dtype:' in conditions
    assert 'if mode == "fast" and a.dtype < b.dtype:' in conditions
    # An order of names is no mistake that anyone makes, and equal dtypes are one object.
    assert not {'if mode < "fast" and a.dtype == b.dtype:', 'if mode == "fast" and a.dtype is b.dtype:'} & conditions


TOY = {
    "fused_rope_attn/__init__.py": "",
    "fused_rope_attn/toy.py": "def count(n):\n    i = 0\n    while i < n:\n        i += 1\n    return i\n",
    "tests/test_toy.py": "from fused_rope_attn.toy import count\n\n\ndef test_count():\n    assert count(3) == 3\n",
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
}
PROGRAM = """
import sys
from pathlib import Path
from tools.mutation import __main__ as command
from tools.mutation.mutants import Mutant
from tools.mutation.trials import copy_checkout
import pytest, pytest_timeout

command.LEAST_LIMIT = 0.2
CHANGES = ("i < n", "i <= n"), ("i < n", "i != n"), ("i += 1", "i += 0"), ("i += 1", "i += 3"), ("i = 0", "i = 0.0")
folder, source = Path(sys.argv[1]), Path(sys.argv[1], "fused_rope_attn/toy.py").read_text()
mutants = [
    Mutant("toy.py", "", 1, "count", before, after, source.replace(before, after))
    for before, after in CHANGES
]
command.equivalents = lambda: {("toy.py", "i < n", "i != n"): "n is never less than 0"}
trees = [copy_checkout(folder / name, folder) for name in ("one", "two")]
with open(folder / "rows.jsonl", "w") as out:
    command.try_mutants(mutants, ("tests/test_toy.py",), trees, float("inf"), out)
assert all((tree / "fused_rope_attn/toy.py").read_text() == source for tree in trees)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and forks")
def test_what_becomes_of_mutants(tmp_path):
    """One is killed, two survive, one does what the module does, one never ends."""
    for name, text in TOY.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    outcomes = {row["after"]: row["outcome"] for row in rows}
    assert outcomes == {"i <= n": "killed", "i = 0.0": "survived", "i += 0": "timed out", "i != n": "equivalent",
                        "i += 3": "survived"}  # fmt: skip
    assert [row["test"] for row in rows if row["outcome"] == "killed"] == ["tests/test_toy.py::test_count"]
    lines, percent = table(rows)
    assert lines[-1] == "| all | 1 | 1 | 1 | 2 | 50.0 |" and percent == 50


def test_the_tests_that_mirror_a_module():
    assert mirrors_of("kernels/masks.py") == ("tests/kernels/test_masks.py",)
    assert "tests/attention/test_planning_masks.py" in mirrors_of("attention/planning.py")
    assert mirrors_of("integrations/transformers/obstacles.py")[0].startswith("tests/integrations/transformers")


def test_what_is_said_to_make_no_difference_is_in_the_code():
    for (module, before, after), reason in equivalents().items():
        lines = (line.strip() for line in (ROOT / "fused_rope_attn" / module).read_text(encoding="utf-8").splitlines())
        assert before in " ".join(lines), (module, before)
        assert reason.endswith(".") and before != after, (module, after)
