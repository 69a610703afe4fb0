"""`patch_model(model, unsupported="skip")` on tiny multimodal models: decoders are served, vision towers left alone.

Sequences of text alone, packed or not, are compared in every model by test_documents_sweep.py.
"""

import copy
import re

import pytest
import torch
import transformers
from packaging.version import Version

from fused_rope_attn.integrations.transformers import is_patched, patch_model, patch_report, unpatch_model
from tests.support.hf_models import attentions_of, make_ids
from tests.support.hf_runs import assert_close, assert_same, run
from tests.support.hf_vision_models import MODELS, language_model, make_inputs, make_vision_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("error:patch_model. "),
]
every_model = pytest.mark.parametrize("name", MODELS)
LEFT, RIGHT = (3, 0), (0, -3)


@every_model
def test_images(name, calls):
    """Logits and gradients; the report knows decoders from towers."""
    model = make_vision_model(name).train()
    decoder = language_model(model)
    within = next(path for path, module in model.named_modules() if module is decoder)
    for path, parameter in model.named_parameters():
        # Keys that are not rotated may all be moved by the same vector: the gradient is rounding and no more.
        parameter.requires_grad_(not (path.endswith("k_proj.bias") and not path.startswith(within)))
    for padding in ((), LEFT, RIGHT):
        inputs = make_inputs(name, padding=padding)
        present = inputs["attention_mask"].bool()
        assert_same(model, inputs.pop("input_ids"), present, True, unsupported="skip", use_cache=False, **inputs)
    assert calls == {"rope_attention": 6}
    reached = {path for path, parameter in model.named_parameters() if parameter.grad is not None}
    assert all(path in reached for path, _ in model.named_parameters() if path.startswith(within))
    assert any(path.endswith("weight") and ".0." in path for path in reached if not path.startswith(within))
    report = patch_report(model)
    assert {row.path for row in report if row.patched} == {f"{within}.layers.{i}.self_attn" for i in range(2)}
    reasons = [row.reason for row in report if not row.path.startswith(within)]
    assert reasons and all(re.search("no rotary|not in the table|none of", reason) for reason in reasons)


@every_model
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(name, cache, calls):
    model, inputs = make_vision_model(name), make_inputs(name, padding=LEFT)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    options |= {} if cache == "dynamic" else {"cache_implementation": "static"}
    expected = model.generate(**inputs, **options)
    model.__dict__.pop("_cache", None)  # transformers 4.57 keeps a static cache for the next call
    got = patch_model(model, unsupported="skip").generate(**inputs, **options)
    assert torch.equal(got.sequences, expected.sequences)
    assert_close(torch.stack(got.scores), torch.stack(expected.scores), 1e-5, "scores")
    assert calls == {"rope_attention": 2, "rope_attention_with_kvcache": 2 * 5}


@every_model
def test_a_tower_is_refused_with_the_way_out(name):
    model = make_vision_model(name)
    decoder = language_model(model)
    path = next(path for path, module in model.named_modules() if module is decoder)
    way_out = rf"unsupported='skip'\) leaves these alone and patches the 2 supported modules of {path}$"
    with pytest.raises(NotImplementedError, match=way_out):
        patch_model(model)
    assert not is_patched(model)
    # The decoder alone can be patched as it is, and serves the whole model where that hands its masks on.
    inputs = make_inputs(name)
    expected = model(**inputs).logits
    assert patch_model(decoder) is decoder
    assert_close(model(**inputs).logits, expected, 1e-5)
    assert is_patched(model) and not is_patched(unpatch_model(model))


# Positions of three kinds: in time, height and width. Qwen's models take the text's own in front of them.
LENGTHS = (7, 1, 8)
TOTAL = sum(LENGTHS)
QWEN = pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
PLACES = torch.cat([torch.arange(length) for length in LENGTHS])[None]
# (3, 1, TOTAL), as images have them: no place within a sequence says what a token is rotated by.
ANGLES = torch.stack((PLACES // 2, PLACES % 3, PLACES // 3))
POSITIONS = torch.cat((PLACES[None], ANGLES))


@QWEN
def test_packed_positions_of_images(name, calls):
    """By the text's positions, and as lengths; each sequence is what it is alone."""
    model, ids = make_vision_model(name), make_ids(1, TOTAL)
    alone = [
        run(model, part, position_ids=own, attention_mask=torch.ones_like(part))[0]
        for part, own in zip(ids.split(LENGTHS, 1), ANGLES.split(LENGTHS, 2))
    ]
    alone = torch.cat(alone, 1)
    assert_same(model, ids, grad=True, unsupported="skip", position_ids=POSITIONS, use_cache=False)
    assert_close(run(model, ids, position_ids=POSITIONS, use_cache=False)[0], alone, 1e-5)
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    declared = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 8, "max_length_k": 8}
    assert_close(run(model, ids, position_ids=ANGLES, use_cache=False, **declared)[0], alone, 1e-5)
    assert calls == {"rope_attention_varlen": 6}
    rows = torch.cat((POSITIONS, torch.arange(TOTAL).expand(4, 1, -1)), 1)  # a row of three sequences, one of one
    assert_same(model, make_ids(2, TOTAL), unsupported="skip", position_ids=rows, use_cache=False)


@QWEN
def test_three_kinds_without_the_text_s_own_are_not_packed(name, calls):
    model, ids = make_vision_model(name), make_ids(1, TOTAL)
    assert_same(model, ids, unsupported="skip", position_ids=ANGLES, use_cache=False)
    # With a cache no sequences are searched for.
    assert_same(model, ids, unsupported="skip", position_ids=POSITIONS, use_cache=True)
    # Before 5.3 Qwen 3 reads the positions in time as the text's: an image's tokens are alone when unpatched, too.
    old = name.startswith("qwen3") and Version(transformers.__version__) < Version("5.3")
    assert calls == ({"rope_attention_varlen": 2, "rope_attention": 2} if old else {"rope_attention": 4})


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
