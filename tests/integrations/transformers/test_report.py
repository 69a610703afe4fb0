"""The answers of `patch_report` and `is_patched`, and the number of warnings of a model that takes its own forward."""

import warnings

import pytest
import torch

from fused_rope_attn.integrations.transformers import is_patched, patch_model, patch_report, unpatch_model
from fused_rope_attn.integrations.transformers.state import DECODER, PATCH, state_of, warn_of
from tests.support.hf_models import attentions_of, make_ids, make_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_calls_are_counted_where_they_run():
    model, ids = make_model("llama"), make_ids(1, 5)
    assert not is_patched(model)
    assert [row.reason for row in patch_report(model)] == [
        "patch_model has not been called since the module came into the model"
    ] * 2
    patch_model(model)
    assert is_patched(model) and is_patched(model.model.layers[1])
    model(ids)
    with pytest.warns(UserWarning):
        model(ids, output_attentions=True)
    model.generate(ids, max_new_tokens=3, do_sample=False)
    rows = patch_report(model)
    assert [row.path for row in rows] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for row in rows:
        assert (row.name, row.patched, row.reason, row.served) == ("LlamaAttention", True, "", 4)
        assert row.own == {"output_attentions=True": 1}
    patch_model(model)  # again, and nothing is forgotten
    assert patch_report(model)[0].served == 4
    assert not is_patched(unpatch_model(model)) and patch_report(model)[0].served == 0


def test_the_table_has_a_line_for_layers_that_are_alike():
    model, ids = patch_model(make_model("llama", num_hidden_layers=5)), make_ids(1, 5)
    model(ids)
    lines = str(patch_report(model)).splitlines()
    assert lines[0].split()[:3] == ["module", "class", "patched"] and set(lines[1]) == {"-", " "}
    assert lines[2].split() == ["model.layers.{0-4}.self_attn", "LlamaAttention", "yes", "1", "0"]
    assert len(lines) == 4 and "torch.compile" in lines[3]
    layer = model.model.layers[3].self_attn
    unpatch_model(layer)
    state_of(model.model.layers[1].self_attn, PATCH).calls["holes"] = 7
    lines = str(patch_report(model)).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == [
        "model.layers.{0,",
        "model.layers.1.self_attn",
        "model.layers.3.self_attn",
    ]
    assert "{0, 2, 4}.self_attn" in lines[2] and lines[3].endswith("7: holes") and " no: " in lines[4]
    assert str(patch_report(torch.nn.Linear(2, 2))) == "the model has no attention modules"
    for function in (patch_report, is_patched):
        with pytest.raises(TypeError, match="model must be a torch.nn.Module, but is str"):
            function("llama")


def test_the_table_line_by_line():
    """Columns are as wide as their text, and two spaces apart."""
    model = patch_model(make_model("llama", num_hidden_layers=4))
    modules = attentions_of(model)
    for i, (served, own) in enumerate(((12345, {}), (12345, {}), (7, {"holes": 2, "a BlockMask": 1}), (12345, {}))):
        state_of(modules[i], PATCH).calls.update({"": served, **own})
    assert str(patch_report(model)).splitlines() == [
        "module                           class           patched  calls served here  calls of its own forward",
        "-------------------------------  --------------  -------  -----------------  ------------------------",
        "model.layers.{0-1, 3}.self_attn  LlamaAttention  yes      12345              0",
        "model.layers.2.self_attn         LlamaAttention  yes      7                  2: holes; 1: a BlockMask",
        "Calls in graphs of torch.compile and replays of CUDA graphs are not counted.",
    ]
    assert str(patch_report(modules[0])).splitlines()[2].split()[0] == "(model)"


def test_the_table_tells_layers_apart():
    """By their class, and by how often they ran; two that are alike have a line."""
    two = str(patch_report(patch_model(make_model("llama")))).splitlines()[2]
    assert two.split()[0] == "model.layers.{0-1}.self_attn"
    model = patch_model(make_model("llama", num_hidden_layers=5))
    modules = attentions_of(model)
    modules[0].__class__ = type("Own", (type(modules[0]),), {})
    state_of(modules[4], PATCH).calls[""] = 3
    lines = str(patch_report(model)).splitlines()[2:-1]
    names = ["model.layers.0.self_attn", "model.layers.{1-3}.self_attn", "model.layers.4.self_attn"]
    assert [line.split()[0] for line in lines] == names
    assert [line.split()[1:4:2] for line in lines] == [["Own", "0"], ["LlamaAttention", "0"], ["LlamaAttention", "3"]]


@pytest.mark.unpoisoned
def test_graphs_are_not_counted():
    model, ids = patch_model(make_model("llama")), make_ids(1, 5)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(ids, use_cache=False)
        compiled(ids, use_cache=False)
    assert patch_report(model)[0].served == 0


def test_what_goes_on_is_told_again():
    model = patch_model(make_model("llama"))
    passes = state_of(model.model, DECODER).passes
    told = []
    for _ in range(1000):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of(passes, "holes")
        told += [str(warning.message) for warning in caught]
    assert len(told) == 3 and all("holes is not served" in text for text in told)
    assert "time" not in told[0] and "for the 100th time" in told[1] and "for the 1000th time" in told[2]


def test_modules_that_came_later_are_named():
    model = patch_model(make_model("llama"))
    model.model.layers[1].self_attn = make_model("llama").model.layers[1].self_attn
    rows = patch_report(model)
    assert [row.patched for row in rows] == [True, False] and "since the module came" in rows[1].reason
    patch_model(model)
    assert all(row.patched for row in patch_report(model))
    assert len(attentions_of(model)) == 2
