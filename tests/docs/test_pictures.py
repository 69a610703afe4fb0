"""The design pages' pictures: the committed files are what the script draws, and well-formed."""

import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

PICTURES = Path(__file__).parents[2] / "docs" / "design" / "pictures"
SCRIPT = runpy.run_path(str(PICTURES / "draw.py"))


@pytest.mark.parametrize("theme", SCRIPT["THEMES"])
@pytest.mark.parametrize("name", ["call", "forward", "backward"])
def test_committed_pictures_are_what_the_script_draws(name, theme):
    drawn = SCRIPT[name](theme)
    assert (PICTURES / f"{name}-{theme}.svg").read_text(encoding="utf-8") == drawn
    width, height = map(float, ElementTree.fromstring(drawn).get("viewBox").split()[2:])
    for box in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(box.get("x")) and float(box.get("x")) + float(box.get("width")) <= width
        assert 0 <= float(box.get("y")) and float(box.get("y")) + float(box.get("height")) <= height
