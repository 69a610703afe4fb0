"""Which module may know which: the arrows of the architecture point one way, and an import costs a user nothing."""

import ast
import graphlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = "fused_rope_attn"
# The rooms from the top floor down: a module imports from its own room or from rooms below it. A generation step is an
# attention call with a cache, and attention's reference rotates with rotation's: hence their order.
ROOMS = ("integrations", "distributed", "generation", "attention", "rotation", "kernels", "runtime")
# Context-free rooms that anybody may leave out: nobody in the package imports them.
APART = ("testing", "env", "experimental")
OUTSIDE = {"baselines", "verification", "bench", "tests", "tools"}
EXTRAS = ("transformers", "flash_attn", "liger_kernel", "matplotlib", "tqdm", "pytest", "hypothesis", "numpy")


def package_files() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def module_of(path: Path) -> str:
    """`.../attention/portable/forward.py` is `attention.portable.forward`; a package's `__init__.py` is the package."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> list[tuple[str, bool]]:
    """Absolute names that a file imports, each with whether that happens when the file itself is imported."""
    tree = ast.parse(path.read_text())
    at_top = {id(node) for node in tree.body}
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(alias.name, id(node) in at_top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import; the package writes absolute ones"
            names += [(f"{node.module}.{alias.name}", id(node) in at_top) for alias in node.names]
    return names


def internal_imports(path: Path, top_only: bool = False) -> set[str]:
    """Modules of the package that a file imports, named as by `module_of`."""
    modules = {module_of(file) for file in package_files()}
    found = set()
    for name, at_top in imports_of(path):
        parts = name.split(".")
        if parts[0] != PACKAGE or (top_only and not at_top):
            continue
        tail = parts[1:]
        while tail and ".".join(tail) not in modules:
            tail = tail[:-1]
        found.add(".".join(tail) or "__init__")
    return found


def room(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize("path", package_files(), ids=module_of)
def test_arrows_point_down(path):
    module = module_of(path)
    here = room(module)
    for target in internal_imports(path):
        there = room(target)
        if here == there:
            continue
        if (here, there) == ("__init__", "experimental"):
            continue  # for type checkers alone: test_import_loads_nothing holds that
        if there == "__init__":  # the public names, for those who stand above all rooms
            assert here in (*APART, "integrations"), f"{module} imports the public names, which are above it"
            continue
        assert there not in APART, f"{module} imports {target}, which stands apart"
        assert there in ROOMS, f"{target} has no place in the architecture"
        if here == "experimental":
            assert there in ("kernels", "runtime"), f"{module} imports {target}"
        elif here not in ("__init__", *APART):
            assert here in ROOMS, f"{module} has no place in the architecture"
            assert ROOMS.index(here) < ROOMS.index(there), f"{module} imports {target}, which is above it"


@pytest.mark.parametrize("path", [p for p in package_files() if p.stem == "reference"], ids=module_of)
def test_references_stand_alone(path):
    """An oracle that shared code with what it judges would share its faults."""
    for target in internal_imports(path):
        assert target.endswith("reference"), f"{module_of(path)} imports {target}"


@pytest.mark.parametrize("path", package_files(), ids=module_of)
def test_only_public_functions_and_tests_use_the_references(path):
    for target in internal_imports(path):
        if target.endswith("reference"):
            # One rank's attention, wherever it runs, is what context parallelism calls in the place of the public one.
            public = path.stem in ("api", "reference") or module_of(path) == "distributed.local"
            allowed = public or module_of(path).startswith("testing.")
            assert allowed, f"{module_of(path)} imports {target}"


def test_no_cycles_at_import():
    graph = {module_of(path): internal_imports(path, top_only=True) for path in package_files()}
    for module, targets in graph.items():
        targets.discard(module)
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("path", package_files(), ids=module_of)
def test_the_package_knows_nothing_around_it(path):
    for name, _ in imports_of(path):
        top = name.split(".")[0]
        assert top not in OUTSIDE, f"{module_of(path)} imports {name}"
        if not module_of(path).startswith("integrations"):
            assert top not in EXTRAS, f"{module_of(path)} imports {name}, which is in an extra"
        if top == PACKAGE and ".experimental" in name:
            assert room(module_of(path)) in ("experimental", "__init__"), f"{module_of(path)} imports {name}"


@pytest.mark.parametrize("path", package_files(), ids=module_of)
def test_only_device_asks_cuda(path):
    if module_of(path) == "runtime.device":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda."):
            raise AssertionError(f"{path.name}:{node.lineno}: {ast.unparse(node)} belongs into runtime/device.py")


@pytest.mark.parametrize("path", [p for p in package_files() if ".jit" in p.read_text()], ids=module_of)
def test_kernel_files_hold_kernels(path):
    source = path.read_text()
    for word in ("torch.autograd", "torch.library", "do_bench", "def test_"):
        assert word not in source, f"{path.name} mentions {word}"


@pytest.mark.parametrize("path", [p for p in package_files() if "jit" in p.read_text()], ids=module_of)
def test_kernels_return_no_none(path):
    """Triton 3.6 can neither assign what such a call gives nor return it in a tuple, and only 3.9 compiles in CI."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(x) for x in node.decorator_list):
            returned = [x.value for x in ast.walk(node) if isinstance(x, ast.Return)]
            parts = [part for x in returned for part in (x.elts if isinstance(x, ast.Tuple) else [x])]
            # A bare return leaves a kernel, whose other returns are bare, too.
            assert not any(isinstance(x, ast.Constant) and x.value is None for x in parts), (node.name, node.lineno)
            assert len({x is None for x in returned}) < 2, (node.name, node.lineno)


def test_import_needs_no_gpu_and_no_extra():
    """Only the core dependencies exist, no GPU is visible; importing loads no kernel cache and starts no CUDA."""
    program = f"""
import sys
for name in {EXTRAS + tuple(OUTSIDE)!r}:
    sys.modules[name] = None
import {PACKAGE}
import torch
assert not torch.cuda.is_initialized()
assert callable({PACKAGE}.rope_attention) and callable({PACKAGE}.plan) and isinstance({PACKAGE}.__version__, str)
loaded = [name for name in sys.modules if name.startswith("{PACKAGE}.")]
forbidden = [name for name in loaded if name.split(".")[1] in ("testing", "integrations", "experimental")]
assert not forbidden, forbidden
"""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | hidden
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_import_loads_nothing():
    """Neither importing the package nor listing its names loads torch. Its packages are loaded on first access."""
    program = f"""
import sys
import {PACKAGE}
names = dir({PACKAGE})
assert not {{"torch", "triton"}} & set(sys.modules)
assert not [name for name in sys.modules if name.startswith("{PACKAGE}.")]
assert set({PACKAGE}.__all__) | {{"distributed", "experimental", "__version__"}} == set(names), names
assert callable({PACKAGE}.experimental.corope_attention) and callable({PACKAGE}.distributed.rope_attention_cp)
for name in names:
    getattr({PACKAGE}, name)
assert dir({PACKAGE}) == names
assert not hasattr({PACKAGE}, "rope_atention")
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_public_names():
    import fused_rope_attn

    assert {"rope_attention", "plan", "rope_tables"} <= set(fused_rope_attn.__all__)


def test_importing_does_not_bring_the_compiler():
    """torch._dynamo takes seconds to import; a call under torch.compile brings it, importing us must not."""
    script = (
        "import sys, torch, triton; had = 'torch._dynamo' in sys.modules; import fused_rope_attn;"
        " assert had or 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
