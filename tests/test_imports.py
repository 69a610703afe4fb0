"""Imports follow the architecture's arrows, the references stand alone, importing the package is cheap, and the house
keeps its size: files, lines, imports, names, and the files that name an option."""

import ast
import re
from collections import Counter
from pathlib import Path

from tests.support.paths import ROOT, python

PACKAGE = "fused_rope_attn"
# The house: its bars. The package has 24,400 lines, so that what the next round adds has room.
MOST = {
    "lines": 25_000,
    "files": 112,
    "files of hopper": 20,
    "imports, per cent of the lines": 4.0,
    "modules that define one public name": 2,
    "files with softcap|cap_scale": 12,
    "files with return_max_logit|max_logit": 9,
    "files with query_starts": 10,
}
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
# From top to bottom: a room imports the rooms after it. Generation is above attention because a generation step is an
# attention call with a cache, and attention is above rotation because its reference rotates with rotation's.
ROOMS = ("integrations", "distributed", "generation", "attention", "rotation", "kernels", "runtime")
MAY_IMPORT = {room: {room, *ROOMS[place + 1 :]} for place, room in enumerate(ROOMS)}
MAY_IMPORT["integrations"] |= {"__init__", "masks"}  # the public names
MAY_IMPORT |= {
    "__init__": {*ROOMS, "experimental", "masks"},  # lazily; the tests of imports below hold that
    "experimental": {"experimental", "kernels", "runtime", "__init__"},
    "masks": {"runtime"},
    "env": {*ROOMS, "__init__"},
}
AROUND = {"baselines", "verification", "bench", "tests", "tools"}
EXTRAS = {"transformers", "torchtitan", "litgpt", "flash_attn", "liger_kernel", "matplotlib", "tqdm", "pytest"}
EXTRAS |= {"hypothesis", "numpy"}


def module_of(path: Path) -> str:
    """`.../attention/portable/forward.py` is `attention.portable.forward`; a package's `__init__.py` is the package."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}


def imports_of(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return names


def internal(name: str) -> str | None:
    top, *parts = name.split(".")
    if top != PACKAGE:
        return None
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts) or "__init__"


def test_imports_follow_the_arrows():
    """Hold the order of the rooms, that the package needs nothing around it, and that tests share helpers only."""
    wrong = []
    for path in FILES:
        room = module_of(path).split(".")[0]
        for name in imports_of(path):
            top, module = name.split(".")[0], internal(name)
            forbidden = top in AROUND or top == "" or (top in EXTRAS and room != "integrations")
            if forbidden or (module and module.split(".")[0] not in MAY_IMPORT[room]):
                wrong.append(f"{module_of(path)} imports {name}")
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name in imports_of(path):
            if any(part.startswith("test_") or part == "conftest" for part in name.split(".")[:-1]):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}: move it to tests/support")
    assert not wrong, "\n".join(wrong)


def test_references_stand_alone():
    """A reference that shares code with a kernel shares its faults. The runtime has no formulas."""
    wrong = []
    for path in FILES:
        targets = filter(None, map(internal, imports_of(path))) if path.stem == "reference" else ()
        wrong += [
            f"{module_of(path)} imports {target}"
            for target in targets
            if not target.endswith("reference") and target.split(".")[0] != "runtime"
        ]
    assert not wrong, "\n".join(wrong)


def test_the_house_keeps_its_size():
    texts = {module_of(path): path.read_text(encoding="utf-8") for path in FILES}
    trees = [ast.parse(text) for text in texts.values()]
    imports = [x for tree in trees for x in ast.walk(tree) if isinstance(x, (ast.Import, ast.ImportFrom))]
    lines = sum(len(text.splitlines()) for text in texts.values())
    kinds = ast.FunctionDef, ast.ClassDef
    defined = Counter(name for tree in trees for name in {x.name for x in tree.body if isinstance(x, kinds)})
    (name, modules), *_ = [(name, count) for name, count in defined.most_common() if name[0] != "_"]
    found = {
        "lines": lines,
        "files": len(texts),
        "files of hopper": sum(module.startswith("attention.hopper") for module in texts),
        "imports, per cent of the lines": 100 * sum(x.end_lineno - x.lineno + 1 for x in imports) / lines,
        "modules that define one public name": modules,
    }
    options = [what.removeprefix("files with ") for what in MOST if what not in found]
    found |= {f"files with {x}": sum(bool(re.search(x, text)) for text in texts.values()) for x in options}
    assert all(found[what] <= most for what, most in MOST.items()), (found, name)


def test_importing_is_cheap():
    """Importing the package and listing its names loads nothing; its packages are loaded on first access. The core
    dependencies are enough: no GPU, no extra, and neither CUDA nor torch's compiler is started."""
    program = f"""
import sys
for name in {sorted(EXTRAS | AROUND)}:
    sys.modules[name] = None
import {PACKAGE}
names = dir({PACKAGE})
loaded = lambda: [name for name in sys.modules if name.startswith("{PACKAGE}.")]
assert not {{"torch", "triton"}} & set(sys.modules) and not loaded()
assert set({PACKAGE}.__all__) | {{"distributed", "experimental", "masks", "__version__"}} == set(names), names
import torch, triton
had_compiler = "torch._dynamo" in sys.modules
assert callable({PACKAGE}.rope_attention) and callable({PACKAGE}.plan) and isinstance({PACKAGE}.__version__, str)
assert not torch.cuda.is_initialized()
assert had_compiler or "torch._dynamo" not in sys.modules, "importing it takes seconds"
assert not [name for name in loaded() if name.split(".")[1] in ("integrations", "experimental")]
before = set(sys.modules)
assert not {PACKAGE}.runtime.entry.in_context_parallel() and set(sys.modules) == before
assert callable({PACKAGE}.experimental.corope_attention) and callable({PACKAGE}.distributed.rope_attention_cp)
for name in names:
    getattr({PACKAGE}, name)
assert dir({PACKAGE}) == names
assert not hasattr({PACKAGE}, "rope_atention")
"""
    result = python("-c", program, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
