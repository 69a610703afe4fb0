"""Check a release as a user gets it: ``python -m tools.release_check``, or ``make release-check``.

Build the source distribution, and the wheel from it, into ``dist/``. Install the wheel into an empty environment, run
the code of the quickstart there with warnings as errors, and verify random calls for half a minute. On a tag of GitHub
Actions, also check that the tag, the version and the changelog agree. Needs a network, or a local index, for torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VERIFICATION = ("-m", "verification", "--random", "100000", "--minutes", "0.5", "--seed", "0", "--json", "")


def main() -> None:
    """Run all steps; a step that fails ends the check."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("requirements", nargs="*", help="installed before the wheel, for example a build of torch")
    given = parser.parse_args()
    version = version_of(ROOT)
    if os.environ.get("GITHUB_REF_TYPE") == "tag":
        check_tag(os.environ["GITHUB_REF_NAME"], version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT)
    (wheel,) = dist.glob(f"fused_rope_attn-{version}-*.whl")
    with tempfile.TemporaryDirectory() as folder:
        # Nothing of the checkout is importable from here but verification, which is not in the wheel.
        shutil.copytree(ROOT / "verification", Path(folder) / "verification")
        python = Path(folder) / "venv" / "bin" / "python"
        run(sys.executable, "-m", "venv", python.parents[1])
        for requirement in (*given.requirements, wheel):
            run(python, "-m", "pip", "install", "--quiet", requirement)
        run(python, "-W", "error", "-c", quickstart(ROOT), cwd=folder)
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[verify]")
        run(python, *VERIFICATION, cwd=folder)
    print(f"{wheel.name} is ready")


def version_of(root: Path) -> str:
    """Return the version that ``fused_rope_attn/__init__.py`` of a checkout says, without importing it."""
    text = (root / "fused_rope_attn" / "__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def check_tag(tag: str, version: str, changelog: str) -> None:
    """End the check if a tag is not ``v`` and the version, or if the changelog has no section of the version."""
    if tag != f"v{version}":
        sys.exit(f"the tag is {tag}, but the version is {version}")
    if not re.search(rf"^## {re.escape(version)}\b", changelog, re.MULTILINE):
        sys.exit(f"CHANGELOG.md has no section of {version}")


def quickstart(root: Path) -> str:
    """Return the Python code of the quickstart's fences."""
    return "\n".join(FENCE.findall((root / "docs" / "quickstart.md").read_text(encoding="utf-8")))


def run(*command: object, cwd: str | None = None) -> None:
    words = [str(word) for word in command]
    print("$", *(word if "\n" not in word else "QUICKSTART" for word in words), flush=True)
    subprocess.run(words, cwd=cwd, check=True)


if __name__ == "__main__":
    main()
