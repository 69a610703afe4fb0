"""Where tests stand: folders mirror what they test, helpers are no test modules, and no file has many subjects."""

import ast
import re

import pytest

from tests.support.paths import ROOT

TESTS = ROOT / "tests"
# What has tests beside the package, each in a folder of the same name.
BESIDE_THE_PACKAGE = {"baselines", "bench", "docs", "examples", "tools", "verification"}
LONGEST = 400  # lines: a longer file has more than one subject
FILES = sorted(TESTS.rglob("*.py"))


def name_of(path):
    return str(path.relative_to(TESTS))


def modules_imported_by(text):
    """Modules that a file, or a program in one of its strings, imports: for `from a import b` both "a" and "a.b"."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"^\s*(?:from|import) ([\w.]+)", node.value, re.MULTILINE))
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nobody_imports_a_test_module(path):
    """What several modules share is in tests/support, and fixtures of a folder in its conftest.py."""
    for module in modules_imported_by(path.read_text(encoding="utf-8")):
        names = module.split(".")
        assert not any(name.startswith("test_") or name == "conftest" for name in names), module
        assert names[0] != "tests" or names[1:2] == ["support"], module


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_one_subject_a_file(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_folders_mirror_what_they_test():
    folders = {path.parent.relative_to(TESTS) for path in FILES} - {TESTS.relative_to(TESTS)}
    for folder in folders:
        if folder.parts[0] == "support":
            continue
        place = ROOT if folder.parts[0] in BESIDE_THE_PACKAGE else ROOT / "fused_rope_attn"
        assert (place / folder).is_dir(), f"tests/{folder} is the mirror of nothing"
    package = ROOT / "fused_rope_attn"
    rooms = {path.parent.relative_to(package) for path in package.rglob("*.py") if path.name != "__init__.py"}
    for room in rooms - {package.relative_to(package)}:
        assert any(folder == room or room in folder.parents for folder in folders), f"tests/{room} is missing"


def test_the_name_says_whether_a_gpu_is_needed():
    """A module whose tests are all marked "gpu" is a *_gpu.py file beside its subject, and no other is."""
    for path in TESTS.rglob("test_*.py"):
        marked = re.search(r"^pytestmark = .*(mark\.gpu|needs_sm_90)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert bool(marked) == path.stem.endswith("_gpu"), name_of(path)
