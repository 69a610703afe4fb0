"""The answers of `patch_report` and `is_patched`, and the number of warnings of a model that takes its own forward."""

import warnings

import pytest
import torch

from fused_rope_attn.integrations.transformers import is_patched, patch_model, patch_report, unpatch_model
from fused_rope_attn.integrations.transformers.state import DECODER, PATCH, state_of, warn_of
from tests.support.hf_models import attentions_of, make_ids, make_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
NEVER = "patch_model has not been called since the module came into the model"


def test_calls_are_counted_where_they_run():
    model, ids = make_model("llama"), make_ids(1, 5)
    assert not is_patched(model)
    assert [row.reason for row in patch_report(model)] == [NEVER] * 2
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


def test_the_table():
    """A line for layers that are alike in class, calls and reasons; columns are as wide as their text."""
    model = patch_model(make_model("llama", num_hidden_layers=8))
    modules = attentions_of(model)
    for i, module in enumerate(modules):
        state_of(module, PATCH).calls.update({"": 7, "holes": 2, "a BlockMask": 1} if i == 2 else {"": 12345})
    modules[4].__class__ = type("OwnAttention", (type(modules[4]),), {})
    unpatch_model(modules[5])
    lines = str(patch_report(model)).splitlines()
    yes, no = "yes".ljust(len(NEVER) + 4), f"no: {NEVER}"
    assert lines[0] == (
        f"module                                class           {'patched'.ljust(len(no))}  "
        "calls served here  calls of its own forward"
    )
    assert lines[1:] == [
        "  ".join("-" * width for width in (36, 14, len(no), 17, 24)),
        f"model.layers.{{0-1, 3, 6-7}}.self_attn  LlamaAttention  {yes}  12345              0",
        f"model.layers.2.self_attn              LlamaAttention  {yes}  7                  2: holes; 1: a BlockMask",
        f"model.layers.4.self_attn              OwnAttention    {yes}  12345              0",
        f"model.layers.5.self_attn              LlamaAttention  {no}  0                  0",
        "Calls in graphs of torch.compile and replays of CUDA graphs are not counted.",
    ]
    assert str(patch_report(modules[0])).splitlines()[2].split()[0] == "(model)"
    state_of(modules[3], PATCH).calls[""] = 3
    assert str(patch_report(model)).splitlines()[2].startswith("model.layers.{0-1, 6-7}.self_attn ")
    assert str(patch_report(torch.nn.Linear(2, 2))) == "the model has no attention modules"
    for function in (patch_report, is_patched):
        with pytest.raises(TypeError, match="model must be a torch.nn.Module, but is str"):
            function("llama")


@pytest.mark.unpoisoned
def test_graphs_are_not_counted():
    model, ids = patch_model(make_model("llama")), make_ids(1, 5)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(ids, use_cache=False)
        compiled(ids, use_cache=False)
    assert patch_report(model)[0].served == 0


def test_what_goes_on_is_told_again():
    passes = state_of(patch_model(make_model("llama")).model, DECODER).passes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(1000):
            warn_of(passes, "holes")
    told = [str(warning.message) for warning in caught]
    assert len(told) == 3 and all("holes is not served" in text for text in told)
    assert "time" not in told[0] and "for the 100th time" in told[1] and "for the 1000th time" in told[2]


def test_modules_that_came_later_are_named():
    model = patch_model(make_model("llama"))
    model.model.layers[1].self_attn = make_model("llama").model.layers[1].self_attn
    assert [(row.patched, row.reason) for row in patch_report(model)] == [(True, ""), (False, NEVER)]
    assert all(row.patched for row in patch_report(patch_model(model)))
