"""Every Python snippet of README.md and of the documentation runs on a CPU as it is printed, by itself.

A snippet after a line ``<!-- continued -->`` goes on in the namespace of the one before. One that cannot run (it would
download something, or needs a GPU) is preceded by a line ``<!-- not run: REASON -->``.
"""

import re
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>not run: [^\n]+|continued) -->\n+)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


def test_snippets_run(tmp_path, monkeypatch):
    """Run all snippets, and list those that raise."""
    monkeypatch.chdir(tmp_path)  # for the files that they write
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.relative_to(ROOT).parts]
    failed, count = [], 0
    for page in (ROOT / "README.md", *sorted(pages)):
        text = page.read_text(encoding="utf-8")
        for fence in FENCE.finditer(text):
            mark = fence["mark"] or ""
            if mark.startswith("not run"):
                continue
            if mark != "continued":
                namespace = {"__name__": "__main__"}
            line = text.count("\n", 0, fence.start("code"))  # a traceback then names the page's own line
            torch.manual_seed(0)
            count += 1
            try:
                exec(compile("\n" * line + fence["code"], str(page), "exec"), namespace)
            except Exception:
                failed.append(f"{page.relative_to(ROOT)}:{line + 1}\n{traceback.format_exc(limit=-1)}")
    assert count > 20, "the fences were not found"
    assert not failed, "\n".join(failed)
