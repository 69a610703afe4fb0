"""The generated page of supported attention classes."""

import pytest
import transformers

from fused_rope_attn.integrations.transformers.families import Convention
from tools import families

needs_transformers_5 = pytest.mark.skipif(transformers.__version__ < "5", reason="classes are left out before it")


@needs_transformers_5
def test_the_page_matches_the_tables(tmp_path, monkeypatch):
    assert families.main(["--check"]) == 0, "run `python -m tools.families`"
    monkeypatch.setattr(families, "PAGE", tmp_path / "families.md")
    assert families.main(["--check"]) == 1
    assert families.main([]) == 0 and families.main(["--check"]) == 0
    families.PAGE.write_text(families.page().replace("GPTJ", "GPTK"), encoding="utf-8")
    assert families.main(["--check"]) == 1


def test_fields_of_a_convention_are_described():
    assert families.describe(Convention()) == ""
    gated = Convention(gate="gate_proj", interleaved=True, softcap=True, sinks=True, finish=("sigmoid", "o_proj"))
    words = ["the output times the gate's sigmoid", "interleaved pairs", "softcap", "sinks"]
    assert families.describe(gated).split("; ")[1:] == words
    with pytest.raises(KeyError):
        families.describe(Convention(window="of nobody"))
