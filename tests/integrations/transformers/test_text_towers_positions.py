"""Positions of three kinds: packed sequences among them, and the sections of the tables that they choose from."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version

from fused_rope_attn.integrations.transformers import patch_model
from tests.support.hf_models import attentions_of, make_ids
from tests.support.hf_runs import assert_close, assert_same, run
from tests.support.hf_vision_models import language_model, make_inputs, make_vision_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LENGTHS = (7, 1, 8)
TOTAL = sum(LENGTHS)
QWEN = pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])


def places():
    return torch.cat([torch.arange(length) for length in LENGTHS])[None]


def angles():
    """(3, 1, TOTAL), as images have them: no place within a sequence says what a token is rotated by."""
    return torch.stack((places() // 2, places() % 3, places() // 3))


@QWEN
def test_packed_positions_of_images(name, calls):
    model, ids = make_vision_model(name), make_ids(1, TOTAL)
    positions = torch.cat((places()[None], angles()))
    assert_same(model, ids, grad=True, unsupported="skip", position_ids=positions, use_cache=False)
    assert calls == {"rope_attention_varlen": 2}
    alone = [
        run(model, part, position_ids=own, attention_mask=torch.ones_like(part))[0]
        for part, own in zip(ids.split(LENGTHS, 1), angles().split(LENGTHS, 2))
    ]
    assert_close(run(model, ids, position_ids=positions, use_cache=False)[0], torch.cat(alone, 1), 1e-5)
    rows = torch.cat((positions, torch.arange(TOTAL).expand(4, 1, -1)), 1)  # a row of three sequences, one of one
    assert_same(model, make_ids(2, TOTAL), unsupported="skip", position_ids=rows, use_cache=False)


@QWEN
def test_three_kinds_without_the_text_s_own_are_not_packed(name, calls):
    model, ids = make_vision_model(name), make_ids(1, TOTAL)
    assert_same(model, ids, unsupported="skip", position_ids=angles(), use_cache=False)
    # With a cache no sequences are searched for.
    assert_same(model, ids, unsupported="skip", position_ids=torch.cat((places()[None], angles())), use_cache=True)
    if name.startswith("qwen3") and Version(transformers.__version__) < Version("5.3"):
        # Those read the positions in time as the text's: an image's tokens are alone in the unpatched model, too.
        assert calls == {"rope_attention_varlen": 2, "rope_attention": 2}
    else:
        assert calls == {"rope_attention": 4}


@QWEN
def test_positions_of_two_dimensions(name, calls):
    """Qwen 3's decoder takes them for the text's own, Qwen 2's for all three kinds and no more."""
    assert_same(make_vision_model(name), make_ids(1, TOTAL), unsupported="skip", position_ids=places(), use_cache=False)
    assert calls == {"rope_attention_varlen" if name.startswith("qwen3") else "rope_attention": 2}


@QWEN
def test_sequences_declared_with_positions_of_images(name, calls):
    decoder, ids = language_model(make_vision_model(name)), make_ids(1, TOTAL)
    alone = [
        decoder(part, position_ids=own, attention_mask=torch.ones_like(part)).last_hidden_state
        for part, own in zip(ids.split(LENGTHS, 1), angles().split(LENGTHS, 2))
    ]
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    declared = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 8, "max_length_k": 8}
    out = patch_model(decoder)(ids, position_ids=angles(), use_cache=False, **declared).last_hidden_state
    assert_close(out, torch.cat(alone, 1), 1e-5)
    assert calls == {"rope_attention_varlen": 2}


def test_modules_with_sections_of_their_own(calls):
    """The layers of a pass share tables, but not those that one of them has chosen otherwise."""
    model, inputs = make_vision_model("qwen2_vl"), make_inputs("qwen2_vl")
    first = attentions_of(language_model(model))[0]
    # transformers 4.57 reads the module's own parameters, 5 its config's; from 5.17 on no module chooses.
    first.config = copy.copy(first.config)
    owner, name = (first, "rope_scaling") if hasattr(first, "rope_scaling") else (first.config, "rope_parameters")
    setattr(owner, name, getattr(owner, name) | {"mrope_section": [2, 3, 3]})
    assert_same(model, inputs.pop("input_ids"), unsupported="skip", **inputs)
    assert calls == {"rope_attention": 2}
