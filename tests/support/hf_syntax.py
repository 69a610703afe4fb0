"""The computations of transformers' attention classes, as normalised syntax trees of the installed files.

The form of a class is what it runs: its ``forward``, the methods of its own that this calls, and the functions of its
file that they call (rotation, eager attention), with the masks that the file asks for, because the masks rather than
the attention say where a window is. Names of local variables, annotations, docstrings, decorators, signatures and the
names of methods and functions are no part of it. Two classes of one form are one to ``families``. Nothing is imported:
files are read as text.

``python -m tests.support.hf_syntax`` adds the installed release's fingerprints of all supported classes to
hf_fingerprints.json; with the names of classes (``llama.LlamaAttention``) it prints their forms, to be compared.
"""

import ast
import functools
import hashlib
import json
import re
import sys
from pathlib import Path

import transformers

from fused_rope_attn.integrations.transformers.families import SINCE_5, SUPPORTED, path_of as path_of_row

RECORDED = Path(__file__).with_name("hf_fingerprints.json")
_MODELS = Path(transformers.__file__).parent / "models"
# A file's statements begin in the first column; a decorator belongs to the statement after it.
_STATEMENT = re.compile(r"^(?=@|class |def )", re.MULTILINE)
_NAME = re.compile(r"(class|def) (\w+)")
_MASKS = re.compile(r"^from \.\.\.masking_utils import (\([^)]*\)|.*)", re.MULTILINE)
# Fields of nodes that do not change the computation, or that only some Pythons write.
_NO_PART = {"ctx", "kind", "type_comment", "type_params", "decorator_list", "returns", "annotation"}


def path_of(name: str) -> Path:
    """The file of a class that ``families`` knows by ``folder.modeling_folder.Class``."""
    return _MODELS.joinpath(*name.split(".")[:-1]).with_suffix(".py")


def exists(name: str) -> bool:
    """Return whether the installed transformers has a class."""
    path = path_of(name)
    return path.exists() and name.rpartition(".")[2] in _sources(path)


def attention_classes() -> list[str]:
    """All classes with ``Attention`` in their name that are given the tables of rotation."""
    found = []
    for path in sorted(_MODELS.glob("*/modeling_*.py")):
        for name, source in _sources(path).items():
            if source.startswith("class") and "Attention" in name and "position_embeddings" in source:
                found.append(f"{path.parent.name}.{path.stem}.{name}")
    return found


def form(name: str) -> list[ast.AST]:
    """The form of a class, as a list of statements."""
    statements: list[ast.AST] = [ast.Expr(ast.Constant(_masks(path_of(name))))]
    for i, body in enumerate(_bodies(name).values()):
        statements += [ast.Expr(ast.Constant(f"{i}:")), *body]
    return statements


def functions_called(name: str) -> set[str]:
    """The functions of its file that a class runs, also through others."""
    return {called for called, source in _sources(path_of(name)).items() if source.startswith("def")} & _bodies(
        name
    ).keys()


def _bodies(name: str) -> dict[str, list[ast.AST]]:
    """Normalised statements of the methods and functions that a class runs, by name."""
    sources = _sources(path_of(name))
    cls = _definition(sources[name.rpartition(".")[2]])
    assert isinstance(cls, ast.ClassDef)
    defined = [_definition(source) for source in sources.values() if source.startswith("def")]
    functions = {node.name: node for node in (*defined, *cls.body) if isinstance(node, ast.FunctionDef)}
    wanted = ["forward"]
    return {called: _Normalise(functions[called], functions, wanted).body() for called in wanted}


def fingerprint(name: str) -> str:
    """Sixteen hexadecimal digits of a class's form, the same under every Python."""
    return hashlib.sha256("\n".join(map(_plain, form(name))).encode()).hexdigest()[:16]


def recorded() -> dict[str, str]:
    """A class of each form that has been read and put into the table, by fingerprint."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


class _Normalise(ast.NodeTransformer):
    """A function's statements, local names by the order of appearance, functions of the file by that of the calls."""

    def __init__(self, function: ast.FunctionDef, functions: dict, wanted: list[str]):
        self.function, self.functions, self.wanted = function, functions, wanted
        arguments = function.args
        self.parameters = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        self.local: dict[str, str] = {}

    def body(self) -> list[ast.AST]:
        body = self.function.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        return [ast.fix_missing_locations(self.visit(statement)) for statement in body]

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.functions and node.id not in self.parameters:
            return ast.Name(self._called(node.id), node.ctx)
        if isinstance(node.ctx, ast.Store) and node.id not in self.parameters:
            self.local.setdefault(node.id, f"v{len(self.local)}")
        return ast.Name(self.local.get(node.id, node.id), node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in self.functions:
            return ast.Name(self._called(node.attr), node.ctx)
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        node.value = self.visit(node.value)  # before the targets, as it is computed
        node.targets = [self.visit(target) for target in node.targets]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return self.visit_Assign(ast.Assign([node.target], node.value or ast.Constant(None)))

    def _called(self, name: str) -> str:
        if name not in self.wanted:
            self.wanted.append(name)
        return f"f{self.wanted.index(name)}"


@functools.cache
def _sources(path: Path) -> dict[str, str]:
    """Text of a file's classes and functions by name, without decorators."""
    parts = _STATEMENT.split(path.read_text(encoding="utf-8"))
    return {found[2]: part for part in parts if (found := _NAME.match(part))}


def _masks(path: Path) -> str:
    """The masks that a file asks for, and whether its layers have different ones."""
    text = path.read_text(encoding="utf-8")
    imported = _MASKS.search(text)
    names = sorted(re.findall(r"create_\w+", imported[1])) if imported else []
    return " ".join((*names, *(["by layer"] if "mask_mapping[" in text else [])))


def _definition(source: str) -> ast.stmt:
    return ast.parse(source).body[0]  # what follows is statements between definitions


def _plain(node: object) -> str:
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _NO_PART)
        inner = ",".join(f"{name}={_plain(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(node).__name__}({inner})"
    if isinstance(node, list):
        return f"[{','.join(map(_plain, node))}]"
    return repr(node)


def main(names: list[str]) -> None:
    for name in names:
        folder, cls = name.split(".")
        print(f"# {name}", *map(ast.unparse, form(f"{folder}.modeling_{folder}.{cls}")), sep="\n")
    if not names:
        known = recorded() if RECORDED.exists() else {}
        late = set(map(path_of_row, SINCE_5))  # does not represent others: a table may lack it
        for name in sorted(filter(exists, SUPPORTED), key=lambda name: name in late):
            known.setdefault(fingerprint(name), name)
        text = json.dumps(dict(sorted(known.items(), key=lambda item: item[::-1])), indent=1)
        RECORDED.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
