"""Every Python snippet of README.md and of the documentation runs by itself, on a CPU, as it is printed.

A snippet that cannot (it would download something, or needs a GPU) is preceded by a line ``<!-- not run: REASON -->``.
"""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n+)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.relative_to(ROOT).parts),
]


def snippets(page: Path) -> list[tuple[str, str, str | None]]:
    """(``page:line``, code, why it is not run) of every Python fence; the code keeps the page's line numbers."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        line = text.count("\n", 0, fence.start("code"))
        found.append((f"{page.relative_to(ROOT)}:{line + 1}", "\n" * line + fence["code"], fence["reason"]))
    return found


_SNIPPETS = [snippet for page in _PAGES for snippet in snippets(page)]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("where", "code"), [s[:2] for s in _SNIPPETS if s[2] is None], ids=lambda x: x.partition("\n")[0]
)
def test_snippet_runs_by_itself(where, code):
    exec(compile(code, where.partition(":")[0], "exec"), {"__name__": "__main__"})


def test_there_are_snippets_and_nearly_all_of_them_run():
    pages = {where.partition(":")[0] for where, _, reason in _SNIPPETS if reason is None}
    guides = {str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "guides").glob("*.md")}
    assert {"README.md", "docs/quickstart.md", *guides} <= pages
    assert sum(reason is not None for *_, reason in _SNIPPETS) <= 3


def test_no_python_hides_under_another_name():
    """Fences are Python, or one of the kinds that nobody runs."""
    allowed = {
        "",
        "python",
        "console",
        "text",
        "{toctree}",
        "{include}",
        "{eval-rst}",
        "{figure}",
        "{image}",
        "{list-table}",
    }
    for page in _PAGES:
        opened = re.findall(
            r"^```([^\s`]*)[^\n]*\n.*?^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        assert set(opened) <= allowed, page
