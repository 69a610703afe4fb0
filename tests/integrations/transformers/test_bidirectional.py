"""Models without causality, as embedding models have it: `is_causal=False`, and Gemma 3's own switch."""

import warnings

import pytest
import torch
import transformers
from packaging.version import Version

from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from tests.support.hf_models import WINDOW, attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
reads_is_causal = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.6"), reason="this transformers reads is_causal here or there only"
)
PADDING = {  # columns that hold tokens, of three rows
    "none": [(0, LENGTH)] * 3,
    "left": [(3, LENGTH), (0, LENGTH), (LENGTH - 2, LENGTH)],
    "right": [(0, LENGTH), (0, LENGTH - WINDOW - 1), (0, 1)],
    "both": [(2, LENGTH - 4), (0, LENGTH - 1), (5, LENGTH)],
    "an empty row": [(0, LENGTH - 3), (0, 0), (1, LENGTH)],
}
has_switch = pytest.mark.skipif(
    not hasattr(transformers.Gemma3TextConfig(), "use_bidirectional_attention"),
    reason="this Gemma 3 has no such switch",
)


def _mask(padding):
    columns = torch.arange(LENGTH)
    return torch.stack([(columns >= first) & (columns < last) for first, last in PADDING[padding]])


@reads_is_causal
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize(
    "name, implementation", [("llama", "eager"), ("llama", "sdpa"), ("mistral", "sdpa"), ("gemma3", "eager")]
)
def test_by_the_config(name, implementation, padding, calls):
    """The very case that was silently causal, padded in every way; sliding windows reach both ways."""
    model, ids, present = make_model(name), make_ids(3, LENGTH), _mask(padding)
    model.config.is_causal = False
    model.config._attn_implementation = implementation
    inputs = {} if padding == "none" else {"attention_mask": present.long()}
    assert_same(model, ids, present, grad=padding != "an empty row", **inputs)
    assert sum(calls.values()) == 2 and not patch_report(model)[0].own


@reads_is_causal
def test_by_the_call(calls):
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    causal = run(model, ids)[0]
    expected = run(model, ids, is_causal=False)[0]
    assert not torch.allclose(expected, causal, atol=0.1)
    patch_model(model)
    assert_close(run(model, ids, is_causal=False)[0], expected, 1e-5)
    assert_close(run(model, ids)[0], causal, 1e-5)
    model.config.is_causal = False
    assert_close(run(model, ids, is_causal=True)[0], causal, 1e-5)
    assert calls == {"rope_attention": 6}


@reads_is_causal
def test_packed(calls):
    """By cu_seqlens each sequence sees itself, and no other. A bidirectional mask does not heed position ids."""
    model, lengths = make_model("mistral"), (5, 1, 12, 7)
    model.config.is_causal = False
    pieces = [make_ids(1, length, seed=length) for length in lengths]
    expected = torch.cat([run(model, piece)[0] for piece in pieces], 1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    limits = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    packing = {"cu_seq_lens_q": limits, "cu_seq_lens_k": limits, "max_length_q": 12, "max_length_k": 12}
    ids = torch.cat(pieces, 1)
    whole = run(model, ids, position_ids=positions)[0]
    patch_model(model)
    assert_close(run(model, ids, position_ids=positions, **packing)[0], expected, 1e-5)
    assert calls == {"rope_attention_varlen": 2}
    assert_close(run(model, ids, position_ids=positions)[0], whole, 1e-5)


@pytest.mark.unpoisoned
@reads_is_causal
def test_compiled():
    """A graph cannot look into the mask: padded rows are found on the device."""
    model, ids, present = make_model("mistral"), make_ids(3, LENGTH), _mask("both")
    model.config.is_causal = False
    expected = run(model, ids, attention_mask=present.long(), use_cache=False)[0]
    compiled = torch.compile(patch_model(model), backend="eager", fullgraph=True)
    got = run(compiled, ids, attention_mask=present.long(), use_cache=False)[0]
    assert_close(got[present], expected[present], 1e-5)


@reads_is_causal
def test_what_takes_the_own_forward(calls):
    model, ids = patch_model(make_model("llama")), make_ids(2, LENGTH)
    model.config.is_causal = False
    holes = torch.ones(2, LENGTH, dtype=torch.int64)
    holes[:, 4] = 0
    past = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 4)
    for reason, inputs in (("holes", {"attention_mask": holes}), ("static", {"past_key_values": past})):
        if reason == "static":
            model(ids[:, :3], past_key_values=past, is_causal=True)
            calls.clear()
        with pytest.warns(UserWarning, match=reason):
            model(ids, **inputs)
        assert not calls


SECOND_ROW = torch.tensor([[0], [1]])
# transformers 4.57 makes a mask wherever no cache is made.
MASKS_ARE_LEFT_OUT = Version(transformers.__version__) >= Version("5")


def _packed(length):
    return torch.cat((torch.arange(length - 3), torch.arange(3))).expand(2, -1)


MODULES_ALONE = {  # arguments of a call with two rows of that length
    "nothing": lambda length: {},
    "no cache": lambda length: {"use_cache": False},
    "a full mask": lambda length: {"attention_mask": torch.ones(2, length, dtype=torch.int64)},
    "padding on the left": lambda length: {"attention_mask": (torch.arange(length) >= 3 * SECOND_ROW).long()},
    "padding on the right": lambda length: {"attention_mask": (torch.arange(length) < length - 3 * SECOND_ROW).long()},
    "packed": lambda length: {"position_ids": _packed(length), "use_cache": False},
    "packed with a cache": lambda length: {"position_ids": _packed(length)},
}


@pytest.mark.parametrize("given", MODULES_ALONE)
@pytest.mark.parametrize("first", [False, True], ids=["all layers", "one layer"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_modules_alone(name, implementation, first, given, calls):
    """The recipe of embedding models: a causal mask stays one, and SDPA without a mask becomes bidirectional."""
    for length in (WINDOW - 1, LENGTH):
        model, ids, inputs = make_model(name), make_ids(2, length), MODULES_ALONE[given](length)
        model.config._attn_implementation = implementation
        for module in attentions_of(model)[: 1 if first else None]:
            module.is_causal = False
        calls.clear()
        assert_same(model, ids, inputs.get("attention_mask", torch.ones_like(ids)).bool(), **inputs)
        without_windows = name == "llama" or length < WINDOW
        bidirectional = not first and (given == "a full mask" or given[:2] == "no" and MASKS_ARE_LEFT_OUT)
        if implementation == "eager" or without_windows and ("padding" in given or bidirectional):
            assert sum(calls.values()) == 2 and not patch_report(model)[0].own
        else:
            (reason,) = patch_report(model)[0].own
            assert reason.startswith("attention that is causal in some" if first else "is_causal = False of the att")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_generation_with_modules_alone(implementation, calls):
    model, ids = make_model("mistral"), make_ids(2, 12)
    model.config._attn_implementation = implementation
    for module in attentions_of(model):
        module.is_causal = False
    options = {"attention_mask": (torch.arange(12) >= 3 * SECOND_ROW).long(), "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(patch_model(model).generate(ids, **options), expected)
    assert calls["rope_attention_with_kvcache"] == 6


@reads_is_causal
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_modules_and_config(name, calls):
    """The config's masks reach one key further than a module's window, whatever the modules say."""
    model, ids = make_model(name), make_ids(2, LENGTH)
    model.config.is_causal = False
    for module in attentions_of(model):
        module.is_causal = False
    assert_same(model, ids)
    assert sum(calls.values()) == 2


@reads_is_causal
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_an_empty_static_cache(implementation, calls):
    """Without a mask, transformers attends to unwritten rows of the cache."""
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    model.config.is_causal, model.config._attn_implementation = False, implementation

    def prefill():
        past = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 4)
        return run(model, ids, past_key_values=past)[0]

    expected = prefill()
    patch_model(model)
    with pytest.warns(UserWarning, match="is static"):
        assert torch.equal(prefill(), expected)
    assert not calls


@has_switch
@pytest.mark.parametrize("padding", ["none", "left", "both"])
def test_by_the_modules(padding, calls):
    """Gemma 3's windows end one key earlier than those of `is_causal=False`."""
    model = make_model("gemma3", use_bidirectional_attention=True)
    ids, present = make_ids(3, LENGTH), _mask(padding)
    inputs = {} if padding == "none" else {"attention_mask": present.long()}
    assert_same(model, ids, present, **inputs)
    assert sum(calls.values()) == 2
    with pytest.warns(UserWarning, match="causal in some modules"):
        model(ids, is_causal=True)


@has_switch
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("given", ["nothing", "padding on the left", "packed"])
def test_the_switch_of_gemma3(given, implementation, calls):
    """Its masks follow the config, also where it changes after loading, and know packed documents."""
    for loaded in (True, False):
        model, ids = make_model("gemma3", use_bidirectional_attention=loaded), make_ids(2, LENGTH)
        model.config.use_bidirectional_attention, model.config._attn_implementation = True, implementation
        inputs = MODULES_ALONE[given](LENGTH)
        assert_same(model, ids, inputs.get("attention_mask", torch.ones_like(ids)).bool(), **inputs)
    assert sum(calls.values()) == 4


@has_switch
def test_masks_that_generate_makes_are_causal(calls):
    """Those of static caches are, whatever the modules say: only eager attention reads them at all times."""
    model, ids = make_model("gemma3", use_bidirectional_attention=True), make_ids(2, LENGTH)
    options = {"max_new_tokens": 3, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    options |= {"cache_implementation": "static"}
    expected = model.generate(ids, **options)
    model.__dict__.pop("_cache", None)  # transformers 4.57 keeps it for the next call
    with pytest.warns(UserWarning, match="masks that are made outside of the decoder"):
        got = patch_model(model).generate(ids, **options)
    assert torch.equal(torch.stack(got.scores), torch.stack(expected.scores)) and not calls


@pytest.mark.skipif(Version(transformers.__version__) >= Version("5.6"), reason="newer ones are served")
def test_older_transformers_decides_itself(calls):
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    expected = run(model, ids, is_causal=False)[0]
    with pytest.warns(UserWarning, match="is_causal=False with transformers"):
        assert torch.equal(run(patch_model(model), ids, is_causal=False)[0], expected)
    assert not calls


def test_causal_models_stay_so():
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_same(model, ids, is_causal=True)
    unpatch_model(model)
