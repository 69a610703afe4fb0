"""Packed sequences in a patched model, by positions and by cu_seqlens."""

import pytest
import torch

from fused_rope_attn.integrations.transformers import patch_model
from tests.support.hf_models import MODELS, THOROUGH, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LENGTHS = (9, 1, 15)
# Decoders that make their masks without position ids.
WHOLE = ("gpt_oss",)


def positions(lengths=LENGTHS):
    return torch.cat([torch.arange(length) for length in lengths])[None]


@pytest.mark.parametrize("name", THOROUGH)
def test_packed_positions(name, calls):
    operator = "rope_attention_varlen" if name not in WHOLE else "rope_attention"
    inputs = {"position_ids": positions(), "use_cache": False}
    assert_same(make_model(name), make_ids(1, LENGTH), grad=True, **inputs)
    assert calls == {operator: 2}
    inputs["position_ids"] = torch.cat((positions(), positions((LENGTH,))))
    assert_same(make_model(name), make_ids(2, LENGTH), **inputs)
    assert calls == {operator: 4}


@pytest.mark.parametrize("name", [name for name in MODELS if name not in THOROUGH])
def test_packed_positions_of_every_other_family(name):
    """A decoder that makes its masks without position ids shows every document to the next, patched or not."""
    assert_same(make_model(name), make_ids(1, LENGTH), position_ids=positions(), use_cache=False)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_packed_positions_of_flash_attention(name, calls):
    """flash-attention reads position ids itself, where there is one row, and no mask tells it of documents."""
    model, ids = patch_model(make_model(name)), make_ids(2, LENGTH)
    alone = torch.cat([run(model, part, use_cache=False)[0] for part in ids[:1].split(LENGTHS, dim=1)], dim=1)
    model.config._attn_implementation = "flash_attention_2"
    assert_close(run(model, ids[:1], position_ids=positions(), use_cache=False)[0], alone, 1e-5)
    assert calls.pop("rope_attention_varlen") == 2
    run(model, ids, position_ids=positions().expand(2, -1), use_cache=False)
    assert set(calls) == {"rope_attention"}


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
