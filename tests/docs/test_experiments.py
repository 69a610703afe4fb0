"""docs/experiments: the index has a row for every experiment, with a date, an outcome and what became of it."""

import re
from pathlib import Path

EXPERIMENTS = Path(__file__).parents[2] / "docs" / "experiments"
INDEX = (EXPERIMENTS / "index.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| (?P<date>\d{4}-\d\d-\d\d) \| (?P<cells>.*) \|$", re.MULTILINE)
_STATUS = {"kept", "dropped", "superseded", "finding"}


def sections() -> dict[str, str]:
    """Anchor of every experiment, and the date that stands below its heading."""
    found = {}
    for page in EXPERIMENTS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if page.name != "index.md":
            headings = len(re.findall(r"^## ", text, re.MULTILINE))
            anchors = re.findall(r"^\(([\w-]+)\)=\n## .+\n\n\*(\d{4}-\d\d-\d\d)\*$", text, re.MULTILINE)
            assert len(anchors) == headings, f"{page.name}: every section has an anchor before it and a date behind it"
            found |= dict(anchors)
    return found


def test_every_experiment_is_in_the_index_under_its_date():
    known = sections()
    named = {}
    for row in _ROW.finditer(INDEX):
        for anchor in re.findall(r"\]\(#([\w-]+)\)", row["cells"]):
            named.setdefault(anchor, set()).add(row["date"])
    assert set(named) == set(known)
    assert all(known[anchor] in dates for anchor, dates in named.items())


def test_every_row_says_what_came_of_it():
    questions = INDEX[: INDEX.index("\n## Runs\n")]
    rows = [row["cells"].split(" | ") for row in _ROW.finditer(questions)]
    assert len(rows) > 40
    for question, outcome, status in rows:
        assert question.startswith("[") and "?](" in question and outcome.strip() and status in _STATUS, question


def test_every_page_is_in_the_table_of_contents():
    pages = {page.stem for page in EXPERIMENTS.glob("*.md")} - {"index"}
    assert set(re.search(r"```\{toctree\}\n:hidden:\n\n(.*?)```", INDEX, re.DOTALL)[1].split()) == pages
