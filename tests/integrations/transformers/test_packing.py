"""Packed sequences in a patched model, by positions and by cu_seqlens. test_families.py has every class."""

import pytest
import torch
import transformers
from packaging.version import Version

from fused_rope_attn.integrations.transformers import patch_model, patch_report
from tests.support import hf_flash
from tests.support.hf_models import attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LENGTHS = (9, 1, 15)


def positions(lengths=LENGTHS):
    return torch.cat([torch.arange(length) for length in lengths])[None]


# Positions (1, LENGTH) that masks and flash-attention understand in different ways.
POSITIONS = {
    "restarts": positions(),
    "a gap": torch.cat((positions((9,)), positions((16,)) + 14), 1),
    "a gap in a document": torch.cat((positions((4,)), positions((6,)) + 9, positions((15,))), 1),
    "one document": positions((LENGTH,)) + 3,
    "one token each": torch.zeros(1, LENGTH, dtype=torch.int64),
    "restarts, float": positions().float(),
    "halves": positions((LENGTH,)) / 2,
}


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "gpt_oss"])
def test_packed_positions(name, calls):
    """GPT-OSS's decoder makes its masks without position ids, and so shows every document to the next."""
    operator = "rope_attention_varlen" if name != "gpt_oss" else "rope_attention"
    for rows in (positions(), torch.cat((positions(), positions((LENGTH,))))):
        assert_same(make_model(name), make_ids(len(rows), LENGTH), grad=True, position_ids=rows, use_cache=False)
    assert calls == {operator: 4}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "granitemoehybrid", "persimmon"])
def test_flash_attention(name, monkeypatch):
    """It reads the positions of one row, with a cache and a mask of ones too. Granite's and Persimmon's layers hand it
    none."""
    if name in ("granitemoehybrid", "persimmon") and Version(transformers.__version__) < Version("5"):
        pytest.skip("the unpatched models fail with this release")
    hf_flash.install(monkeypatch)
    model, ids = make_model(name), make_ids(1, LENGTH)
    model.config._attn_implementation = hf_flash.IMPLEMENTATION
    for position_ids in POSITIONS.values():
        for inputs in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(ids)}):
            assert_same(model, ids, position_ids=position_ids, **inputs)
    assert_same(model, make_ids(2, LENGTH), position_ids=positions().expand(2, -1), use_cache=False)
    assert not any(row.own for row in patch_report(model))
    mask = torch.ones_like(ids)
    mask[:, -4:] = 0  # flash-attention removes padding, and then reads no positions
    assert_same(model, ids, mask.bool(), position_ids=positions(), attention_mask=mask)


def test_a_layer_alone_that_flash_attention_gives_positions(monkeypatch):
    hf_flash.install(monkeypatch)
    model = make_model("llama")
    model.config._attn_implementation = hf_flash.IMPLEMENTATION
    hidden, layer = torch.randn(1, LENGTH, model.config.hidden_size), attentions_of(model)[0]
    inputs = {"position_embeddings": model.model.rotary_emb(hidden, positions()), "position_ids": positions()}
    expected = layer(hidden, attention_mask=None, **inputs)[0]
    patch_model(model)
    with pytest.warns(UserWarning, match="positions from which flash-attention finds sequences"):
        assert torch.equal(layer(hidden, attention_mask=None, **inputs)[0], expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("use_cache", [None, True, False])
def test_positions_of_every_kind(use_cache, implementation):
    model, ids = make_model("gemma3"), make_ids(1, LENGTH)
    model.set_attn_implementation(implementation)
    for position_ids in POSITIONS.values():
        assert_same(model, ids, position_ids=position_ids, use_cache=use_cache)
    assert not any(row.own for row in patch_report(model))


def test_gradient_checkpointing_makes_no_cache(calls):
    """Layers get no cache then, and neither do the masks: documents are separated."""
    model = make_model("llama").train()
    model.gradient_checkpointing_enable()
    assert_same(model, make_ids(1, LENGTH), grad=True, position_ids=positions())
    assert set(calls) == {"rope_attention_varlen"}


def test_positions_of_one_sequence_are_not_packed(calls):
    ids = make_ids(2, LENGTH)
    assert_same(make_model("llama"), ids, position_ids=torch.arange(LENGTH)[None] + 5, use_cache=False)
    # With a cache transformers does not look for sequences.
    assert_same(make_model("llama"), ids[:1], position_ids=positions(), use_cache=True)
    assert calls == {"rope_attention": 4}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_packed_cu_seqlens(name, calls):
    model, ids = make_model(name), make_ids(1, LENGTH)
    alone = torch.cat([run(model, part, use_cache=False)[0] for part in ids.split(LENGTHS, dim=1)], dim=1)
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    inputs = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 15, "max_length_k": 15}
    patch_model(model)
    assert_close(run(model, ids, position_ids=positions(), **inputs)[0], alone, 1e-5)
    assert_close(run(model, ids, use_cache=False, **inputs)[0], alone, 1e-5)  # positions do not restart
    assert calls == {"rope_attention_varlen": 4}
