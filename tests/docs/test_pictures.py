"""The design pages' pictures are what their script draws."""

import runpy
from pathlib import Path

PICTURES = Path(__file__).parents[2] / "docs" / "design" / "pictures"


def test_committed_pictures_are_what_the_script_draws():
    script = runpy.run_path(str(PICTURES / "draw.py"))
    drawn = {
        f"{name}-{theme}.svg": script[name](theme)
        for name in ("call", "forward", "backward", "intervals")
        for theme in script["THEMES"]
    }
    assert {path.name: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")} == drawn
