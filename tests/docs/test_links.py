"""Links, files and commands that pages name exist. The build of the site checks the links within the site."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTSIDE_THE_SITE = [ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md")]
# Experiments tell of files that later commits removed.
PAGES = [
    *OUTSIDE_THE_SITE,
    *(page for room in ("design", "guides", "howto") for page in ROOT.glob(f"docs/{room}/*.md")),
]
PACKAGE = r"`((?:attention|experimental|generation|integrations|kernels|rotation|runtime)/[\w./]+)`"
REPOSITORY = r"`((?:examples|bench|docs|tools|tests|verification|baselines)/[\w./-]+)`"


def test_links_and_named_files_exist():
    """List the links, files and make targets that a page names and the repository lacks."""
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
