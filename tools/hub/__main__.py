"""Build a folder in the format of Hugging Face's kernel-builder: ``python -m tools.hub OUT --repo-id OWNER/NAME``.

The Hub wants packages with relative imports, of the standard library, torch and Triton only. Their operators need a
namespace of their own, because several versions may be loaded in one process. So copy the files that
``rotation/api.py`` imports, make their imports relative, name the namespace after their contents, and leave annotations
unevaluated, because the Hub also takes Python 3.9.
``kernel-builder build-and-upload`` publishes the folder.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "fused_rope_attn"
NAME = "fused-rope"
ENTRY = f"{PACKAGE}.rotation.api"
TEMPLATES = Path(__file__).parent / "templates"
FUTURE = "from __future__ import annotations"
NAMESPACE = f'_NAMESPACE = "{PACKAGE}"'


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.hub", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="the folder to make; one that exists is replaced")
    parser.add_argument("--repo-id", default=f"OWNER/{NAME}", help="on the Hub; default: %(default)s")
    given = parser.parse_args()
    print(f"{build(given.out, given.repo_id)} files in {given.out}")


def build(out: Path, repo_id: str) -> int:
    """Write the folder and return the number of Python files in it."""
    shutil.rmtree(out, ignore_errors=True)
    package = out / "torch-ext" / NAME.replace("-", "_")
    sources = {path: path.read_text(encoding="utf-8") for path in files_of(ENTRY)}
    version = hashlib.sha256("".join(sources.values()).encode()).hexdigest()[:8]
    for path, text in sources.items():
        place = path.relative_to(ROOT / PACKAGE)
        text = relative(text, len(place.parts) - 1).replace(NAMESPACE, f'_NAMESPACE = "fused_rope_{version}"')
        _write(package / place, unevaluated(text))
    for name in ("__init__.py", "layers.py"):
        _write(package / name, (TEMPLATES / name).read_text(encoding="utf-8"))
    for name in ("build.toml", "flake.nix", "README.md"):
        _write(out / name, (TEMPLATES / name).read_text(encoding="utf-8").replace("REPO_ID", repo_id))
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    return len(list(package.rglob("*.py")))


def files_of(module: str) -> list[Path]:
    """Return the files that a module of the package needs, its own and those of the packages around them, sorted."""
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        path = _file_of(waiting.pop())
        if path is None or path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return sorted(found | {path.parent / "__init__.py" for path in found})


def _file_of(module: str) -> Path | None:
    """Return the file of a module; None for folders and for modules of other packages."""
    parts = module.split(".")
    path = ROOT.joinpath(*parts).with_suffix(".py")
    return path if parts[0] == PACKAGE and path.exists() else None


def relative(text: str, depth: int) -> str:
    """Make the imports of a file relative; it is ``depth`` folders below the package."""
    return re.sub(rf"\bfrom {PACKAGE}\.(?=[\w.]+ import )", f"from {'.' * (depth + 1)}", text)


def unevaluated(text: str) -> str:
    """Import ``annotations`` in a file that does not: after its docstring, as Python asks for it."""
    if FUTURE in text:
        return text
    docstring = ast.parse(text).body[0]
    lines = text.splitlines(keepends=True)
    return "".join([*lines[: docstring.end_lineno], f"\n{FUTURE}\n", *lines[docstring.end_lineno :]])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
