"""The repository's root, and processes in it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(*arguments: str, timeout: float = 600, **environment: str) -> subprocess.CompletedProcess:
    """Run Python in the root with more variables, without Triton's interpreter unless they ask for it."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command, options = [sys.executable, *arguments], {"capture_output": True, "text": True, "timeout": timeout}
    return subprocess.run(command, cwd=ROOT, env=inherited | environment, **options)
