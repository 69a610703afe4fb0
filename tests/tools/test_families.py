"""The generated page of supported attention classes."""

import pytest
import transformers

from tools import families


@pytest.mark.skipif(transformers.__version__ < "5", reason="classes are left out before it")
def test_the_page_matches_the_tables(tmp_path, monkeypatch):
    assert families.main(["--check"]) == 0, "run `python -m tools.families`"
    monkeypatch.setattr(families, "PAGE", tmp_path / "families.md")
    assert families.main(["--check"]) == 1
    assert families.main([]) == 0 and families.main(["--check"]) == 0
    families.PAGE.write_text(families.page().replace("GPTJ", "GPTK"), encoding="utf-8")
    assert families.main(["--check"]) == 1
