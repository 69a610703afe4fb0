"""The documentation site: Sphinx with MyST and furo. ``make docs`` builds it strictly, without a network or a GPU.

References to PyTorch and Python are resolved from the table below instead of by intersphinx, which would download an
inventory at every build.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from docutils import nodes
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import fused_rope_attn  # noqa: E402  the version that the site describes is the checkout's

project = "fused_rope_attn"
author = "the fused_rope_attn authors"
release = version = fused_rope_attn.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.extlinks",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
needs_sphinx = "8.0"
nitpicky = True
templates_path: list[str] = []

myst_enable_extensions = ["colon_fence", "deflist", "attrs_block", "attrs_inline"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = f"fused_rope_attn {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#2457a6", "color-brand-content": "#2457a6"},
    "dark_css_variables": {"color-brand-primary": "#8ab4f8", "color-brand-content": "#8ab4f8"},
}
# The repository is the one that this checkout was cloned from. A URL with "@" may hold a password.
_REMOTE = ["git", "-C", str(ROOT), "config", "--get", "remote.origin.url"]
try:
    repository = subprocess.run(_REMOTE, capture_output=True, text=True).stdout.strip().removesuffix(".git")
except OSError:  # no git
    repository = ""
if repository.startswith("https://") and "@" not in repository:
    html_theme_options["footer_icons"] = [{"name": "Repository", "url": repository, "html": repository, "class": ""}]
    if "github.com" in repository:
        html_theme_options |= {"source_repository": repository, "source_branch": "main", "source_directory": "docs/"}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# Show the signature, which names every option: autodoc prefers overloads, and those have the options in a TypedDict.
ModuleAnalyzer.overloads = property(lambda self: {}, lambda self, found: None)

_TORCH = "https://docs.pytorch.org/docs/stable/"
_TRITON = "https://triton-lang.org/main/"
_TRANSFORMERS = "https://huggingface.co/docs/transformers/main/en/"
extlinks = {
    "torch": (_TORCH + "%s", None),
    "triton": (_TRITON + "%s", None),
    "transformers": (_TRANSFORMERS + "%s", None),
    "arxiv": ("https://arxiv.org/abs/%s", "arXiv:%s"),
}
_PYTHON = "https://docs.python.org/3/library/"
# Where the objects that our signatures and docstrings name are documented.
EXTERNAL = {
    "torch.Tensor": _TORCH + "tensors.html#torch.Tensor",
    "Tensor": _TORCH + "tensors.html#torch.Tensor",
    "torch.device": _TORCH + "tensor_attributes.html#torch.device",
    "device": _TORCH + "tensor_attributes.html#torch.device",
    "torch.dtype": _TORCH + "tensor_attributes.html#torch.dtype",
    "dtype": _TORCH + "tensor_attributes.html#torch.dtype",
    "torch.nn.Module": _TORCH + "generated/torch.nn.Module.html",
    "torch.nn.modules.module.Module": _TORCH + "generated/torch.nn.Module.html",
    "nn.Module": _TORCH + "generated/torch.nn.Module.html",
    "Module": _TORCH + "generated/torch.nn.Module.html",
    "fused_rope_attn.integrations.transformers.patch.Model": _TORCH + "generated/torch.nn.Module.html",  # its bound
    "Any": _PYTHON + "typing.html#typing.Any",
    "typing.Any": _PYTHON + "typing.html#typing.Any",
    "collections.abc.Sequence": _PYTHON + "collections.abc.html#collections.abc.Sequence",
    **{name: _PYTHON + f"stdtypes.html#{name}" for name in ("int", "float", "bool", "str", "tuple", "dict", "list")},
    "None": _PYTHON + "constants.html#None",
    **{
        name: _PYTHON + f"exceptions.html#{name}"
        for name in ("TypeError", "ValueError", "NotImplementedError", "RuntimeError")
    },
}


def _resolve_external(app, env, node, content_node):
    """An outside object's page, for a reference that this site does not answer; None lets the build complain."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or target not in EXTERNAL:
        return None
    reference = nodes.reference("", "", internal=False, refuri=EXTERNAL[target])
    reference += content_node
    return reference


def setup(app):
    app.connect("missing-reference", _resolve_external)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
