"""Check what changed against main, in 90 seconds: ``python -m tools.quick``, or ``make quick``.

Lint, then the tests of the changed files, nearest first: the test files that changed, those of a changed module's
folder that have its name (``attention/validation.py``: ``tests/attention/test_validation.py``), and those that import
it. When the time is over the rest is left to ``make test``. Exit status: 0 nothing failed, 1 something did.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 85.0


def main() -> int:
    """Run lint and the tests, and say what had no time."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--since", default="main", help="a commit or branch (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="name the test files and run nothing")
    options = parser.parse_args()
    begin, files = time.monotonic(), changed(options.since)
    tests = tests_of(files)
    print("\n".join([f"{len(files)} files changed since {options.since}; their tests:", *tests]))
    if options.list:
        return 0
    python = [file for file in files if file.endswith(".py") and (ROOT / file).exists()]
    commands = [["ruff", "check", *python], ["ruff", "format", "--check", *python], ["mypy"]] if python else []
    failed = sum(subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode for command in commands)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--maxfail", "5", *tests]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as run:
        left = max(1.0, SECONDS - (time.monotonic() - begin))
        timer = threading.Timer(left, run.send_signal, [signal.SIGINT])  # pytest then says what has run
        timer.start()
        line = ""
        for line in run.stdout or ():
            print(line, end="", flush=True)
        timer.cancel()
    if run.returncode == 2:
        print("quick: the time is over; `make test` runs the rest")
    return int(failed > 0 or run.returncode not in (0, 2, 5) or "failed" in line or "error" in line)


def changed(since: str) -> list[str]:
    """Return the files that differ from the last common commit with ``since``, new ones among them."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()

    (base,) = git("merge-base", since, "HEAD")
    return sorted({*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")})


def tests_of(files: list[str]) -> list[str]:
    """Return the test files of changed files, nearest first, and always the test of imports."""
    every = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py"))
    every = [test for test in every if not test.endswith("_gpu.py")]
    found = [test for test in every if test in files]
    texts = {test: (ROOT / test).read_text(encoding="utf-8") for test in every}
    for file in map(Path, files):
        if file.suffix == ".md":
            found += [test for test in every if test.startswith("tests/docs/")]
        if file.suffix != ".py" or file.name.startswith("test_"):
            continue
        folder = Path("tests", *file.parent.parts[file.parts[0] == "fused_rope_attn" :])
        found += [test for test in every if Path(test).parent == folder and f"_{file.stem}" in Path(test).stem]
        imports = re.compile(rf"^(from|import) .*\b{file.stem}\b", re.MULTILINE)
        found += [test for test in every if file.stem != "__init__" and imports.search(texts[test])]
    return list(dict.fromkeys([*found, "tests/test_imports.py"]))


if __name__ == "__main__":
    sys.exit(main())
