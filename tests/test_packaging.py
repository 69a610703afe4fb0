"""`pip install .` gives a pure-Python wheel of the package alone, with its metadata."""

import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string

import pytest
import yaml

import fused_rope_attn
from tests.support.paths import ROOT
from tools import release_check


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Build from a copy, so that the checkout stays clean, and without isolation, which would need a network."""
    source = tmp_path_factory.mktemp("source") / "project"
    copied = ("fused_rope_attn", "bench", "baselines", "verification", "tools", "tests")
    for name in copied:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = out.glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_string(wheel.read(name).decode())


def test_wheel_is_pure_python(wheel):
    assert wheel.filename.endswith("-py3-none-any.whl")
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
    assert "Root-Is-Purelib: true" in wheel.read(name).decode()


def test_wheel_holds_the_package_alone(wheel):
    files = set(wheel.namelist())
    tops = {name.split("/")[0] for name in files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fused_rope_attn"}
    assert "fused_rope_attn/py.typed" in files
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "fused_rope_attn").rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == sources


def test_metadata(metadata):
    assert metadata["Name"] == "fused-rope-attn"
    assert metadata["Version"] == fused_rope_attn.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.10"
    extras = set(metadata.get_all("Provides-Extra"))
    assert {"hf", "baselines", "bench", "test"} <= extras


def test_core_dependencies_are_four(metadata):
    core = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[A-Za-z0-9_-]+", line).group() for line in core} == {"torch", "triton", "einops", "numpy"}


def test_citation_names_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fused_rope_attn.__version__ == release_check.version_of(ROOT)
    assert citation["title"] == "fused_rope_attn" and citation["license"] == "MIT"


@pytest.mark.parametrize(
    ("tag", "changelog", "message"),
    [
        ("v1.2.3", "## 1.2.3 - 2026-11-26", None),
        ("v1.2.4", "## 1.2.3 - 2026-11-26", "the tag is v1.2.4, but the version is 1.2.3"),
        ("v1.2.3", "## Unreleased\n## 1.2.30", "CHANGELOG.md has no section of 1.2.3"),
    ],
)
def test_a_tag_names_a_version_that_the_changelog_has(tag, changelog, message):
    if message is None:
        release_check.check_tag(tag, "1.2.3", changelog)
        return
    with pytest.raises(SystemExit, match=re.escape(message)):
        release_check.check_tag(tag, "1.2.3", changelog)


def test_the_quickstart_of_a_release_check_is_all_of_its_code():
    code = release_check.quickstart(ROOT)
    assert code.count("import torch\n") == (ROOT / "docs" / "quickstart.md").read_text().count("\nimport torch\n") > 1


@pytest.mark.parametrize(
    ("extra", "names"),
    [("hf", {"transformers"}), ("baselines", {"flash-attn", "fused-rope-attn"}), ("bench", {"matplotlib"})],
)
def test_extras(metadata, extra, names):
    lines = [line for line in metadata.get_all("Requires-Dist") if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    assert names <= {re.match(r"[A-Za-z0-9_-]+", line).group() for line in lines}
