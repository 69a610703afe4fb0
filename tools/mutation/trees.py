"""Copies of the checkout in which a module is mutated and tests run; the checkout itself is never written to."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "fused_rope_attn"
# What the tests import or read.
COPIED = (PACKAGE, "baselines", "bench", "tests", "tools", "verification", "pyproject.toml")


def copy_checkout(folder: Path, root: Path = ROOT) -> Path:
    """A folder with what the tests need of the checkout."""
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        elif (root / name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    return folder


def write_module(tree: Path, module: str, source: str) -> None:
    """Make ``source`` what is imported as a module of the copy, and what ``inspect`` reads of it.

    Its compiled form goes: Python knows an old one by size and second of its source, and many mutants share both.
    """
    path = tree / PACKAGE / module
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
    path.write_text(source, encoding="utf-8")
