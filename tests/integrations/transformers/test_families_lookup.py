"""Conventions, subclasses that change nothing, and the table of classes against the installed transformers."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils import parametrize
from transformers.models.llama.modeling_llama import LlamaAttention

from fused_rope_attn.integrations.transformers import families as on, patch_model
from fused_rope_attn.integrations.transformers.families import NEWEST, RELEASE, SUPPORTED, UNSUPPORTED
from fused_rope_attn.integrations.transformers.obstacles import EAGER, ROTATIONS
from tests.support.hf_models import attentions_of, make_ids, make_model
from tests.support.hf_runs import assert_same
from tests.support.hf_syntax import attention_classes, exists, fingerprint, functions_called, recorded


def test_what_single_modules_say():
    for window, told in ((None, False), (None, True), (8, False), (8, True)):
        module = SimpleNamespace(sliding_window=window, force_rope=told)
        assert on.Convention(rotates="windowed or told").rotates_in(module, None) is (window == 8 or told)
    for dropout, rate in ((0.25, 0.25), (torch.nn.Dropout(0.5), 0.5)):
        assert on.attention_dropout(SimpleNamespace(attention_dropout=dropout)) == rate
    assert on.attention_dropout(SimpleNamespace()) == 0


def test_positions_in_time_are_the_texts():
    """Decoders of Qwen 3 read them like this before transformers 5.3."""
    ids = torch.arange(30).view(3, 2, 5)
    assert torch.equal(on.first_row(ids), ids[0]) and torch.equal(on.first_row(ids[1]), ids[1])


@pytest.mark.parametrize("release", [(5, 3), (5, 4)])
def test_queries_scaled_by_position(release, monkeypatch):
    """By positions, which padding shifts, and before 5.4 by places in the cache: 1 + b log(1 + n // length)."""
    monkeypatch.setattr(on, "RELEASE", release)
    parameters = {"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}
    module, q = SimpleNamespace(config=SimpleNamespace(rope_parameters=parameters)), torch.ones(2, 3, 5, 8)
    places = torch.arange(3, 8)
    given = {"cache_position": places, "position_ids": torch.stack((places, places - 2))}
    factors = 1 + 0.5 * torch.tensor([1.0, 2.0, 2.0, 2.0, 2.0]).log()
    second = factors if release == (5, 3) else torch.cat((torch.ones(2), factors[:3]))
    scaled = on.scaled_by_position(module, q, given, None)
    assert scaled.shape == q.shape and torch.equal(scaled[:, 2, :, 7], torch.stack((factors, second)))


class Double(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def forward(self, *args, **kwargs):
    return LlamaAttention.forward(self, *args, **kwargs)


def parametrized(module):
    """torch gives a parametrized module a class of its own, with the tensor as a property."""
    parametrize.register_parametrization(module, "sinks", Double())
    return type(module)


@pytest.mark.parametrize(
    ("name", "make"),
    [("llama", lambda module: type("Plain", (LlamaAttention,), {})), ("gpt_oss", parametrized)],
    ids=["plain", "parametrized"],
)
def test_a_subclass_that_changes_nothing(name, make, calls):
    """FSDP2's is one too: see test_training.py."""
    model = make_model(name)
    module = attentions_of(model)[0]
    convention = on.convention_of(module)
    module.__class__ = make(module)
    assert on.convention_of(module) is convention
    assert_same(model, make_ids(2, 9), grad=name == "llama", use_cache=False)
    assert calls == {"rope_attention": 2}


def test_what_changes_something_is_another_class(monkeypatch):
    model = make_model("llama")
    module = attentions_of(model)[0]
    module.__class__ = type("Mixed", (type("Other", (), {"forward": forward}), LlamaAttention), {})
    assert on.convention_of(module) is None
    module.__class__ = LlamaAttention
    for library in (__name__, "unsloth.models.llama"):  # before and after transformers' own name
        assert on.convention_of(module) is not None
        forward.__module__ = library
        with monkeypatch.context() as patch:
            patch.setattr(LlamaAttention, "forward", forward)  # as libraries do, for all models
            assert on.convention_of(module) is None
            with pytest.raises(NotImplementedError, match="self_attn"):
                patch_model(model)


def test_recurrences_are_no_attention():
    """MiniMax calls one attention; blocks around attention and recurrences have to read the padding mask."""
    minimax = make_model("minimax")
    assert {type(x).__name__ for x in minimax.modules() if on.looks_like_attention(x)} == {"MiniMaxAttention"}
    assert on.hands_padding_on(minimax.model) and not on.hands_padding_on(make_model("llama").model)


def test_classes_that_are_supported_since_transformers_5():
    for path in map(on.path_of, on.SINCE_5):
        assert (path in SUPPORTED) is (path not in UNSUPPORTED) is (RELEASE >= (5,)), path


HOW = "compare `python -m tests.support.hf_syntax FOLDER.CLASS` with that of another release, see docs/howto"
READ = tuple(map(int, NEWEST.split(".")))[:2]
newest = pytest.mark.skipif(RELEASE < READ, reason="the tables name classes of later releases")


def test_supported_classes_compute_what_was_read():
    """Every form is on record, under a class of the same convention: a release that changes a forward shows here."""
    known, changed = recorded(), []
    for name in filter(exists, SUPPORTED):
        exemplar = known.get(fingerprint(name))
        if exemplar is None or SUPPORTED.get(exemplar) != SUPPORTED[name]:
            changed.append(f"{name} ({'a form never read' if exemplar is None else 'the form of ' + exemplar})")
    assert not changed, f"transformers {RELEASE}: {', '.join(changed)}: {HOW}"


@newest
def test_classes_of_a_supported_form_are_supported():
    forms = {fingerprint(name): name for name in filter(exists, SUPPORTED)}
    others = [name for name in attention_classes() if name not in SUPPORTED and name not in UNSUPPORTED]
    found = {name: forms[digits] for name in others if (digits := fingerprint(name)) in forms}
    assert not found, f"supported but for a row in `families` and one in tests/support/hf_models.py: {found}"


def test_functions_of_modeling_files_are_looked_at():
    known = {*ROTATIONS, *EAGER}
    missed = {path: names for path in filter(exists, SUPPORTED) if (names := functions_called(path) - known)}
    assert not missed, f"functions that somebody may replace unseen, which `obstacles` has to name: {missed}"


@newest
def test_every_class_of_the_tables_exists():
    assert not SUPPORTED.keys() & UNSUPPORTED.keys()
    assert not [name for name in (*SUPPORTED, *UNSUPPORTED) if not exists(name)]
    assert all(reason[0].islower() and reason[-1] != "." for reason in UNSUPPORTED.values())
