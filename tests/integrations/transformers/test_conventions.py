"""The convention of a module, number by number: models use the same functions as a whole."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from fused_rope_attn.integrations.transformers import families as on


@pytest.mark.parametrize(
    ("window", "told", "rotates"), [(None, False, False), (None, True, True), (8, False, True), (8, True, True)]
)
def test_layers_that_rotate_where_they_are_told_to(window, told, rotates):
    module = SimpleNamespace(sliding_window=window, force_rope=told)
    assert on.Convention(rotates="windowed or told").rotates_in(module, None) is rotates


def test_modules_that_know_no_dropout_drop_nothing():
    assert on.attention_dropout(SimpleNamespace()) == 0.0
    assert on.attention_dropout(SimpleNamespace(attention_dropout=0.25)) == 0.25
    assert on.attention_dropout(SimpleNamespace(attention_dropout=torch.nn.Dropout(0.5))) == 0.5


def test_columns_are_chosen_by_section():
    """Reorder tables in time, height and width: as many columns of each as a section has, then from the first again."""
    columns = torch.arange(10)
    table = torch.stack([100 * kind + columns + torch.zeros(2, 5, 1) for kind in range(3)])
    chosen = on.by_section(table, (2, 3, 1, 4))
    assert chosen.shape == (2, 5, 10)
    assert chosen[1, 4].tolist() == [0, 1, 102, 103, 104, 205, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("shape", "text", "of_four", "row"),
    [
        ((2, 5), "all", "none", "all"),
        ((4, 5), "all", "none", "all"),  # a batch of four rows
        ((4, 2, 5), "first", "first", "first"),
        ((3, 2, 5), "none", "none", "first"),
        ((5, 2, 5), "none", "none", "first"),
        ((4,), "none", "none", "first"),
        ((4, 1, 2, 5), "none", "none", "first"),
    ],
    ids=str,
)
def test_positions_of_the_text(shape, text, of_four, row):
    ids = torch.arange(torch.Size(shape).numel()).view(shape)
    expected = {"all": ids, "first": ids[0], "none": None}
    for function, kind in ((on.text_positions, text), (on.first_of_four, of_four), (on.first_row, row)):
        found = function(ids)
        assert found is None if kind == "none" else torch.equal(found, expected[kind]), function.__name__


def test_gates_of_columns_and_of_heads():
    """A gate has a column for every column of the rows, or one for every head of them."""
    rows = torch.arange(1.0, 13.0).view(1, 2, 6)
    module = SimpleNamespace(o_proj=lambda x: x)
    gate = torch.tensor([[[0.0, 30.0], [30.0, 0.0]]])  # sigmoid .5 and 1
    sigmoid, softplus = (on.Convention(finish=(name, "o_proj")) for name in ("sigmoid", "softplus"))
    assert sigmoid.output(module, rows, gate).tolist() == [[[0.5, 1.0, 1.5, 4, 5, 6], [7, 8, 9, 5, 5.5, 6]]]
    whole = gate.repeat_interleave(3, -1)
    assert torch.equal(sigmoid.output(module, rows, whole), sigmoid.output(module, rows, gate))
    torch.testing.assert_close(softplus.output(module, rows, gate)[0, 0, 3:], 30 * rows[0, 0, 3:])


def test_conventions_do_not_change():
    """All modules of a class share one."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        on.Convention().sinks = True


@pytest.mark.parametrize("release", [(5, 3), (5, 4)])
def test_queries_scaled_by_position(release, monkeypatch):
    """By positions, which padding shifts, and before 5.4 by places in the cache: 1 + b log(1 + n // length)."""
    monkeypatch.setattr(on, "RELEASE", release)
    parameters = {"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}
    module, q = SimpleNamespace(config=SimpleNamespace(rope_parameters=parameters)), torch.ones(2, 3, 5, 8)
    places = torch.arange(3, 8)
    given = {"cache_position": places, "position_ids": torch.stack((places, places - 2))}
    factors = 1 + 0.5 * torch.tensor([1.0, 2.0, 2.0, 2.0, 2.0]).log()
    scaled = on.scaled_by_position(module, q, given, None)
    if release == (5, 3):
        assert scaled.shape == q.shape and torch.equal(scaled[1, 2, :, 7], factors)
        return
    assert torch.equal(scaled[0, 0, :, 0], factors)
    assert torch.equal(scaled[1, 0, 2:, 0], factors[:3]) and scaled[1, 0, :2, 0].tolist() == [1.0, 1.0]
