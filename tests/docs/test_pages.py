"""Pages: links, files and commands that they name exist, pictures are what their script draws, and snippets run.

The build of the site checks the links within the site. CONTRIBUTING.md says how snippets are marked.
"""

import re
import runpy
import traceback

import torch

from tests.support.paths import ROOT

OUTSIDE_THE_SITE = [ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md")]
# Experiments tell of files that later commits removed.
PAGES = [
    *OUTSIDE_THE_SITE,
    *(page for room in ("design", "guides", "howto") for page in ROOT.glob(f"docs/{room}/*.md")),
]
PACKAGE = r"`((?:attention|experimental|generation|integrations|kernels|rotation|runtime)/[\w./]+)`"
REPOSITORY = r"`((?:examples|bench|docs|tools|tests|verification|baselines)/[\w./-]+)`"


def test_links_and_named_files_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    dead = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) if page in OUTSIDE_THE_SITE else []
        named = [link for link in links if not link.startswith("http")] + re.findall(REPOSITORY, text)
        named += [f"fused_rope_attn/{name}" for name in re.findall(PACKAGE, text)]
        missing = [name for name in named if not (ROOT / name).exists() and not name.startswith("docs/_build")]
        targets = re.findall(r"(?:`|^)make ([a-z][a-z0-9-]*)", text, re.MULTILINE)
        missing += [f"make {name}" for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)]
        dead += [f"{page.relative_to(ROOT)}: {name}" for name in missing]
    assert not dead, "\n".join(dead)


def test_committed_pictures_are_what_the_script_draws():
    pictures = ROOT / "docs" / "design" / "pictures"
    script = runpy.run_path(str(pictures / "draw.py"))
    drawn = {
        f"{name}-{theme}.svg": script[name](theme)
        for name in ("call", "forward", "backward", "intervals")
        for theme in script["THEMES"]
    }
    assert {path.name: path.read_text(encoding="utf-8") for path in pictures.glob("*.svg")} == drawn


FENCE = re.compile(
    r"^(?:<!-- (?P<mark>not run: [^\n]+|continued) -->\n+)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


def test_snippets_run(tmp_path, monkeypatch):
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
