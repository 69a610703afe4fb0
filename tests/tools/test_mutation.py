"""``python -m tools.mutation``: which changes are tested, and what becomes of them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tools.mutation import CALLS, EQUIVALENTS, calls_for, equivalents, every_module, is_spared, keep_sample, mirrors_of

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


def test_changes_are_of_what_a_module_does():
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.commands.init import _operators
    from cosmic_ray.mutating import mutate_code

    changed = set()
    for name, _, operator in _operators({}):
        places = [place for node in ast_nodes(get_ast(MODULE)) for place in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(places):
            if not is_spared(MODULE, name, start, end):
                lines = mutate_code(MODULE, operator, occurrence).splitlines()
                changed |= {line.strip() for line in lines if line not in MODULE.splitlines()}
    assert {"return a >= b", "first: int | None = 2"} <= changed
    conditions = {line for line in changed if line.startswith("if ")}
    name, same = 'mode == "fast"', "a.dtype == b.dtype"
    assert {
        f'if mode != "fast" and {same}:',
        f"if {name} or {same}:",
        f"if {name} and a.dtype < b.dtype:",
    } <= conditions
    # An order of names is no mistake that anyone makes, and equal dtypes are one object.
    assert not {f'if mode < "fast" and {same}:', f"if {name} and a.dtype is b.dtype:"} & conditions
    others = changed - conditions
    assert all("return a" in line or "first: int | None =" in line or "mode=" in line for line in others), others


TOY = {
    "fused_rope_attn/__init__.py": "",
    "fused_rope_attn/toy.py": "def count(n):\n    i = 0\n    while i < n:\n        i += 1\n    return i\n",
    "tests/test_toy.py": "from fused_rope_attn.toy import count\n\n\ndef test_count():\n    assert count(3) == 3\n",
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
    "tools/__init__.py": "",
    "tools/equivalent_mutants.txt": "# Lists a killed one.\ntoy.py\n- while i < n:\n+ while i <= n:\n+ while i != n:\n",
}


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and limits the memory of a process")
def test_what_becomes_of_changes(tmp_path):
    for name, text in TOY.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    source = (ROOT / "tools/mutation.py").read_text(encoding="utf-8")
    source = source.replace("LEAST_LIMIT = 20.0", "LEAST_LIMIT = 3.0").replace("(PRELOADED)", '(["pytest"])')
    (tmp_path / "tools/mutation.py").write_text(source)
    command = [sys.executable, "-m", "tools.mutation", "toy.py", "--session", "toy.sqlite"]
    for _ in range(2):  # the second command takes all results from the session
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert result.returncode == 1, result.stdout + result.stderr
        *changes, counts = result.stdout.split("\n\n")
        found = {(change.partition(": toy.py:")[0], change.rpartition("\n+ ")[2]) for change in changes}
        listed = "killed, but listed as equivalent", "while i <= n:"
        assert found == {listed, ("survived", "i = 1"), ("survived", "i = -1")}
        # "i += 0" has no end, and others may be stopped where the machine is busy.
        shown = {outcome: int(count) for count, outcome in re.findall(r"^toy.py: (\d+) (.*)$", counts, re.MULTILINE)}
        assert shown["equivalent"] == 1 and shown["survived"] == 2 and shown["timed out"] > 0
        assert shown["killed"] + shown["timed out"] == 7
        assert (tmp_path / "fused_rope_attn/toy.py").read_text() == TOY["fused_rope_attn/toy.py"]
        shutil.rmtree(tmp_path / "tests", ignore_errors=True)


def test_a_sample_is_the_same_for_the_same_seed(tmp_path, monkeypatch):
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import use_db

    monkeypatch.chdir(ROOT)
    found = []
    for number, seed in enumerate((1, 1, 2)):
        with use_db(tmp_path / f"{number}.sqlite") as db:
            init([Path("fused_rope_attn/kernels/norm.py")], db, {})
            keep_sample(db, 7, seed)
            found.append({str(item.mutations) for item in db.work_items})
    assert found[0] == found[1] != found[2] and len(found[0]) == 7


def test_modules_and_the_tests_that_mirror_them():
    modules = every_module()
    assert "integrations/transformers/obstacles.py" in modules and "attention/hopper/configs.py" not in modules
    assert calls_for("rotation/tables.py") == [f"{CALLS}::test_calls[{name}-0]" for name in ("rope", "rope of several")]
    assert mirrors_of("kernels/masks.py") == ["tests/kernels/test_masks.py"]
    assert mirrors_of("integrations/transformers/obstacles.py")[0].startswith("tests/integrations/transformers")


def test_what_is_said_to_make_no_difference_is_in_the_code():
    for module, before, after in equivalents():
        lines = (line.strip() for line in (ROOT / "fused_rope_attn" / module).read_text(encoding="utf-8").splitlines())
        assert before in " ".join(lines) and before != after, (module, before, after)
    for block in EQUIVALENTS.read_text(encoding="utf-8").split("\n\n"):
        reasons = [line for line in block.splitlines() if line.startswith("# ")]
        assert reasons and reasons[-1].endswith("."), block
