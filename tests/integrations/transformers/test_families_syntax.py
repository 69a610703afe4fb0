"""The table of families against the installed transformers: its attention classes as syntax trees."""

import pytest
import transformers
from packaging.version import Version

from fused_rope_attn.integrations.transformers.families import NEWEST, SUPPORTED, UNSUPPORTED
from fused_rope_attn.integrations.transformers.obstacles import EAGER, ROTATIONS
from tests.support.hf_syntax import attention_classes, exists, fingerprint, functions_called, recorded

READ = Version(NEWEST)
HOW = "compare `python -m tests.support.hf_syntax FOLDER.CLASS` with that of another release, see docs/howto"


def test_supported_classes_compute_what_was_read():
    """Every form is on record, under a class of the same convention: a release that changes a forward shows here."""
    known, changed = recorded(), []
    for name in filter(exists, SUPPORTED):
        exemplar = known.get(fingerprint(name))
        if exemplar is None or SUPPORTED.get(exemplar) != SUPPORTED[name]:
            changed.append(f"{name} ({'a form never read' if exemplar is None else 'the form of ' + exemplar})")
    assert not changed, f"transformers {transformers.__version__}: {', '.join(changed)}: {HOW}"


@pytest.mark.skipif(Version(transformers.__version__) < READ, reason="a release whose classes were compared later")
def test_classes_of_a_supported_form_are_supported():
    """A class that computes what a supported one does is in one of the two tables."""
    forms = {fingerprint(name): name for name in filter(exists, SUPPORTED)}
    others = [name for name in attention_classes() if name not in SUPPORTED and name not in UNSUPPORTED]
    found = {name: forms[digits] for name in others if (digits := fingerprint(name)) in forms}
    assert not found, f"supported but for a row in `families` and one in tests/support/hf_models.py: {found}"


def test_functions_of_modeling_files_are_looked_at():
    """A function that a supported class calls in a pass, also through others, is among those that are looked at."""
    known = {*ROTATIONS, *EAGER}
    missed = {path: names for path in filter(exists, SUPPORTED) if (names := functions_called(path) - known)}
    assert not missed, f"functions that somebody may replace unseen, which `obstacles` has to name: {missed}"


@pytest.mark.skipif(Version(transformers.__version__) < READ, reason="the tables name classes of later releases")
def test_every_class_of_the_tables_exists():
    assert not SUPPORTED.keys() & UNSUPPORTED.keys()
    assert not [name for name in (*SUPPORTED, *UNSUPPORTED) if not exists(name)]
    assert all(reason[0].islower() and reason[-1] != "." for reason in UNSUPPORTED.values())


def test_forms_see_what_matters():
    """Names and the order of classes are no part of a form; norms, masks, rotation and windows are."""
    llama = fingerprint("llama.modeling_llama.LlamaAttention")
    same = "gemma.modeling_gemma.GemmaAttention"
    others = (
        "qwen3.modeling_qwen3.Qwen3Attention",  # norms
        "phimoe.modeling_phimoe.PhimoeAttention",  # masks, in another class of the file
        "helium.modeling_helium.HeliumAttention",  # rotation, in another function
        "gemma2.modeling_gemma2.Gemma2Attention",  # softcap, in eager attention
        "qwen2.modeling_qwen2.Qwen2Attention",  # a window
    )
    assert fingerprint(same) == llama
    assert llama not in map(fingerprint, others)
