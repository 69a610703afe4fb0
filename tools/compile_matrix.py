"""Compile every kernel configuration with several Triton releases, without a GPU: ``make compile-matrix``.

    python -m tools.compile_matrix 3.6.0 3.7.1                     every feature for every card: an hour each
    python -m tools.compile_matrix --only "--arch sm_90" 3.9.0

Each release is installed alone (no dependencies) into .triton/VERSION, once, and put before the environment's own on
the path: torch is neither reinstalled nor asked whether it agrees.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ROOT / ".triton"


def install(version: str) -> Path:
    """Folder that holds this release of Triton."""
    folder = RELEASES / version
    if not (folder / "triton" / "__init__.py").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--target", str(folder), f"triton=={version}"], check=True)
    return folder


def compile_with(version: str, arguments: list[str]) -> bool:
    """Return whether every kernel compiled with this release and fits."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(install(version)), str(ROOT)])
    # The default that 3.10 will drop; 3.9 warns until it is said.
    environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    seen = subprocess.run(
        [sys.executable, "-c", "import torch, triton, triton.language; print(triton.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
    )
    if seen.returncode != 0 or seen.stdout.strip() != version:
        print(f"triton {version} does not import beside torch:\n{seen.stdout}{seen.stderr}")
        return False
    command = [sys.executable, "-m", "tools.compile_kernels", *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT).returncode == 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.compile_matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="Triton releases")
    parser.add_argument(
        "--only", default="--full", metavar="OPTIONS", help="for tools.compile_kernels (default %(default)s)"
    )
    options = parser.parse_args(argv)
    results = {}
    for version in options.versions:
        print(f"== triton {version}", flush=True)
        results[version] = compile_with(version, shlex.split(options.only))
    print()
    for version, fine in results.items():
        print(f"triton {version}: {'every kernel compiles and fits' if fine else 'FAIL, see above'}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
