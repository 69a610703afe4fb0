"""`patch_model`'s options: what is not supported may be skipped, gradients may be asked to be deterministic."""

import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import attention, is_patched, patch_model, patch_report, unpatch_model
from fused_rope_attn.integrations.transformers.state import DECODER, state_of
from tests.support.hf_models import WINDOW, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_skipped_modules_are_left_alone(calls):
    both = torch.nn.ModuleDict({"one": make_model("llama"), "two": torch.nn.MultiheadAttention(8, 2)})
    with pytest.raises(
        NotImplementedError, match=r"two \(MultiheadAttention: .*unsupported='skip'.* 2 supported modules of one.model$"
    ):
        patch_model(both)
    assert not is_patched(both)
    assert patch_model(both, unsupported="skip") is both and not is_patched(both["two"])
    both["one"](make_ids(1, 5))
    x = torch.randn(3, 8)
    both["two"](x, x, x)
    assert calls == {"rope_attention": 2}
    last = patch_report(both)[-1]
    assert last.path == "two" and not last.patched and "none of transformers' own classes" in last.reason
    assert not is_patched(unpatch_model(both))


@pytest.mark.parametrize("padded", [False, True])
def test_a_decoder_with_attention_of_both_kinds(padded, calls):
    """The modules that are left alone need the mask that the decoder makes; those that are patched do not read it."""

    class Other(transformers.models.llama.modeling_llama.LlamaAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model, ids = make_model("llama"), make_ids(2, LENGTH)
    model.model.layers[0].self_attn.__class__ = Other
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, : WINDOW if padded else 0] = 0
    inputs = {"attention_mask": mask} if padded else {}
    expected = run(model, ids, **inputs)[0]
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False, **inputs)
    patch_model(model, unsupported="skip")
    assert_close(run(model, ids, **inputs)[0][mask != 0], expected[mask != 0], 1e-5)
    assert calls == {"rope_attention": 1}
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, **inputs), tokens)
    assert [row.patched for row in patch_report(model)] == [False, True]


def test_nothing_to_patch_is_refused_either_way():
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=9, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(NotImplementedError, match="GPT2Attention"):
        patch_model(gpt2, unsupported="skip")
    with pytest.raises(NotImplementedError, match="Linear has none"):
        patch_model(torch.nn.Linear(2, 2), unsupported="skip")


def test_options_are_checked():
    model = make_model("llama")
    with pytest.raises(ValueError, match="unsupported must be 'raise' or 'skip', but is 'ignore'"):
        patch_model(model, unsupported="ignore")
    with pytest.raises(TypeError, match="deterministic must be a bool or None, but is int"):
        patch_model(model, deterministic=1)
    assert not is_patched(model)


def test_deterministic_reaches_every_call(monkeypatch):
    seen = []
    for name in ("rope_attention", "rope_attention_varlen"):
        monkeypatch.setattr(attention, name, _recording(getattr(attention, name), seen))
    model, ids = make_model("llama"), make_ids(1, LENGTH)
    positions = torch.cat((torch.arange(9), torch.arange(LENGTH - 9)))[None]
    for given, expected in ((None, False), (True, True), (False, False)):
        patch_model(model, deterministic=given)  # the last call decides
        model(ids)
        model(ids, position_ids=positions, use_cache=False)
        assert seen == [expected] * 4
        seen.clear()


def _recording(operator, seen):
    def recorded(*args, **kwargs):
        seen.append(kwargs["deterministic"])
        return operator(*args, **kwargs)

    return recorded


@pytest.mark.parametrize(("count", "more"), [(1, ""), (3, ""), (4, " and 1 more"), (7, " and 4 more")])
def test_three_modules_are_named(count, more):
    class OddAttention(torch.nn.Module):
        pass

    """Of each class, with one reason for all of them."""
    named = ", ".join(map(str, range(min(count, 3))))
    with pytest.raises(
        NotImplementedError, match=rf", but has only {named}{more} \(OddAttention: it is none of [^(]*\)$"
    ):
        patch_model(torch.nn.Sequential(*(OddAttention() for _ in range(count))))


def test_a_decoder_by_itself_has_no_path():
    class OddAttention(torch.nn.Module):
        pass

    decoder = make_model("llama").model
    decoder.layers[1].self_attn = OddAttention()
    with pytest.raises(NotImplementedError, match=" patches the 1 supported modules$"):
        patch_model(decoder)


@pytest.mark.parametrize(
    ("layer_types", "read"),
    [
        (None, False),
        (["full_attention"] * 2, False),
        (["sliding_attention", "full_attention"], False),
        (["linear_attention", "full_attention"], True),
        (["full_attention", "sliding_attention", "chunked_attention"], False),
    ],
    ids=str,
)
def test_who_reads_the_masks_of_a_decoder(layer_types, read):
    """Layers of other kinds than attention do."""
    model = make_model("llama")
    model.config.__dict__["layer_types"] = layer_types
    assert state_of(patch_model(model).model, DECODER).reads_masks is read


def test_more_layers_than_python_keeps_numbers_of():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = patch_model(make_model("llama", num_hidden_layers=257, **sizes))
    assert len(patch_report(model)) == 257 and not state_of(model.model, DECODER).reads_masks
