"""`patch_model` changes a model, `unpatch_model` restores it, copies stay patched, and both refuse other models.
`patch_report` says what is patched, and how often it ran.
"""

import copy
import io
import pickle
import warnings
from types import FunctionType, SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama import modeling_llama

from fused_rope_attn.integrations.transformers import attention, is_patched, patch_model, patch_report, unpatch_model
from fused_rope_attn.integrations.transformers.families import SUPPORTED
from fused_rope_attn.integrations.transformers.state import DECODER, PATCH, state_of, warn_of
from tests.support.hf_models import SIZES, WINDOW, attentions_of, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, noted, run


class Subclass(modeling_llama.LlamaAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_unpatching_leaves_no_trace():
    model = make_model("llama")
    own = {path: (set(module.__dict__), module.forward) for path, module in model.named_modules()}
    state, other = model.state_dict().keys(), make_model("llama")
    assert patch_model(model) is model and patch_model(model) is model  # twice is once
    changed = [path for path, module in model.named_modules() if module.forward != own[path][1]]
    assert changed == [f"model.layers.{i}.self_attn" for i in range(2)]
    assert not is_patched(other)  # two models side by side
    assert model.state_dict().keys() == state
    run(model, make_ids(1, 5))
    assert unpatch_model(model) is model and unpatch_model(model) is model
    for path, module in model.named_modules():
        assert set(module.__dict__) == own[path][0] and module.forward == own[path][1], path
        assert not module._forward_pre_hooks and not module._forward_pre_hooks_with_kwargs


def test_whose_preparation_of_inputs_is_replaced():
    """That of models which generate, and no other module's, be it around them or within."""
    patched = patch_model(nn.ModuleDict({"model": make_model("llama")}))
    name = "prepare_inputs_for_generation"
    assert [path for path, module in patched.named_modules() if name in module.__dict__] == ["model"]


@pytest.mark.parametrize("first", ["hook", "patch"])
def test_hooks_of_accelerate(first, calls):
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model, ids, seen = make_model("llama"), make_ids(1, 9), []

    hook = ModelHook()
    hook.pre_forward = lambda module, *args, **kwargs: seen.append(module) or (args, kwargs)
    expected = run(model, ids)[0]
    steps = [lambda: add_hook_to_module(attentions_of(model)[0], hook), lambda: patch_model(model)]
    for step in steps if first == "hook" else reversed(steps):
        step()
    assert_close(run(model, ids)[0], expected, 1e-5)
    assert len(seen) == 1 and calls == {"rope_attention": 2}
    unpatch_model(model)
    assert torch.equal(run(model, ids)[0], expected)
    assert len(seen) == 2 and calls == {"rope_attention": 2}
    remove_hook_from_module(attentions_of(model)[0])
    assert torch.equal(run(model, ids)[0], expected)


def model_of(name, **options):
    options |= SIZES | {"num_hidden_layers": 1, "attn_implementation": "eager"}
    return lambda: getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options))


def with_attention(cls):
    decoder = make_model("llama").model
    decoder.layers[1].self_attn.__class__ = cls
    return decoder


OddAttention = type("OddAttention", (nn.Identity,), {})  # of an unknown model
NO_KEYWORDS = "its decoder layer passes no additional keyword"
REMOTE = type("LlamaAttention", (nn.Module,), {"__module__": "transformers_modules.llama"})
NOTHING_SUPPORTED = [
    (model_of("GPT2"), r"h.0.attn \(GPT2Attention: its model has no rotary"),
    (model_of("Bert"), r"\S+ \(BertSelfAttention: its model has no rotary"),
    (model_of("StableLm"), rf"\S+ \(StableLmAttention: {NO_KEYWORDS}"),
    (model_of("Nemotron"), rf"\S+ \(NemotronAttention: {NO_KEYWORDS}"),
    (model_of("Esm", position_embedding_type="rotary"), r"\S+ \(EsmSelfAttention: it is not in the table of supported"),
    (REMOTE, r"\(model\) \(LlamaAttention: it is none of transformers' own classes"),
    # Three modules of each class are named, with one reason for all of them.
    (lambda: nn.Sequential(*map(OddAttention, [8] * 3)), r"0, 1, 2 \(OddAttention: it is none of [^(]*\)$"),
    (lambda: nn.Sequential(*map(OddAttention, [8] * 4)), r"0, 1, 2 and 1 more \(OddAttention: it is none of [^(]*\)$"),
]
PARTLY_SUPPORTED = [
    (lambda: with_attention(Subclass), r"layers.1.self_attn \(Subclass: its forward was replaced by .*Subclass.f"),
    (lambda: with_attention(OddAttention), "layers.1.self_attn .* patches the 1 supported modules$"),
    (
        lambda: nn.ModuleDict({"one": make_model("llama"), "two": nn.MultiheadAttention(8, 2)}),
        r"two \(MultiheadAttention: it is none of .*'skip'\) leaves .* 2 supported modules of one.model$",
    ),
]


@pytest.mark.parametrize("supported", [0, 1])
def test_what_is_not_supported_is_named(supported):
    """Also with unsupported="skip", if nothing else is left to patch."""
    text = "no attention but what patch_model can replace, but has " if supported else "an attention .* but has only "
    for make, message in (NOTHING_SUPPORTED, PARTLY_SUPPORTED)[supported]:
        model = make()
        for options in ({},) if supported else ({}, {"unsupported": "skip"}):
            with pytest.raises(NotImplementedError, match=f"^model must have {text}{message}"):
                patch_model(model, **options)
            assert not is_patched(model) and not any("forward" in module.__dict__ for module in model.modules())
        assert not supported or is_patched(patch_model(model, unsupported="skip"))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": "llama"}, TypeError, "model must be a torch.nn.Module, but is str"),
        ({"model": nn.Linear(2, 2)}, NotImplementedError, "model must have attention modules .* but Linear has none$"),
        ({"unsupported": "ignore"}, ValueError, "unsupported must be 'raise' or 'skip', but is 'ignore'"),
        ({"deterministic": 1}, TypeError, "deterministic must be a bool or None, but is int"),
        ({"cp_group": 3}, TypeError, "cp_group must be a ProcessGroup"),
        ({"cp_sharding": "ring"}, ValueError, "cp_sharding must be"),
    ],
)
def test_arguments_are_checked(given, error, message):
    model = make_model("llama")
    with pytest.raises(error, match=message):
        patch_model(**{"model": model} | given)
    assert not is_patched(model)
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, but is NoneType"):
        unpatch_model(None)


@pytest.mark.parametrize("padded", [False, True])
def test_a_decoder_with_attention_of_both_kinds(padded, calls):
    """The modules that are left alone need the mask that the decoder makes; those that are patched do not read it."""
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    model.model.layers[0].self_attn.__class__ = Subclass
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, : WINDOW if padded else 0] = 0
    inputs = {"attention_mask": mask} if padded else {}
    expected = run(model, ids, **inputs)[0]
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False, **inputs)
    patch_model(model, unsupported="skip")
    assert_close(run(model, ids, **inputs)[0][mask != 0], expected[mask != 0], 1e-5)
    assert calls == {"rope_attention": 1}
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, **inputs), tokens)
    assert [is_patched(layer) for layer in model.model.layers] == [False, True]


def test_deterministic_reaches_every_call(monkeypatch):
    calls = [noted(monkeypatch, attention, name) for name in ("rope_attention", "rope_attention_varlen")]
    model, ids = make_model("llama"), make_ids(1, LENGTH)
    positions = torch.cat((torch.arange(9), torch.arange(LENGTH - 9)))[None]
    for given, expected in ((None, False), (True, True), (False, False)):
        patch_model(model, deterministic=given)  # the last call decides
        model(ids)
        model(ids, position_ids=positions, use_cache=False)
        for seen in calls:
            assert [options["deterministic"] for _, options in seen] == [expected] * 2
            seen.clear()


def test_who_reads_the_masks_of_a_decoder():
    """Layers of other kinds than attention do. Numbers of layers above 256 are equal, but not the same object."""
    full, sliding, chunked, linear = (f"{kind}_attention" for kind in ("full", "sliding", "chunked", "linear"))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    for layer_types, read in ((None, False), ([full, sliding, chunked], False), ([linear, full], True)):
        model = make_model("llama", num_hidden_layers=257 if layer_types is None else 2, **sizes)
        model.config.__dict__["layer_types"] = layer_types
        assert state_of(patch_model(model).model, DECODER).reads_masks is read


def saved_whole(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved_whole])
def test_copies_are_patched(duplicate, calls):
    model, ids = patch_model(make_model("gemma3")), make_ids(2, LENGTH)
    expected = run(model, ids)[0]
    twin = duplicate(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(run(twin, ids)[0], expected)
    assert calls == {"rope_attention": 4} and is_patched(twin)
    assert all(module.forward.args == (module,) for module in attentions_of(twin))  # its own modules, not the model's
    tokens = twin.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens, model.generate(ids, max_new_tokens=3, do_sample=False))
    unpatch_model(twin)
    assert not is_patched(twin) and is_patched(model)
    calls.clear()
    run(twin, ids)
    assert not calls and all("forward" not in module.__dict__ for module in twin.modules())
    run(patch_model(duplicate(unpatch_model(model))), ids)
    assert calls == {"rope_attention": 2}


def test_conventions_are_pickled():
    for convention in SUPPORTED.values():
        assert pickle.loads(pickle.dumps(convention)) == convention


def test_saved_and_loaded(tmp_path, calls):
    model, ids = patch_model(make_model("qwen3")), make_ids(2, 9)
    expected = run(model, ids)[0]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert_close(run(loaded, ids)[0], expected, 1e-5)
    assert calls == {"rope_attention": 2}  # a loaded model is unpatched
    assert torch.equal(run(patch_model(loaded), ids)[0], expected)


def test_a_release_with_another_name_for_caches_is_refused(monkeypatch):
    """Keys that a module never sees would be missing from its results."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, kv=None, **kwargs):
        raise AssertionError

    model = make_model("llama")
    forward = FunctionType(forward.__code__, vars(modeling_llama), "forward", forward.__defaults__)
    forward.__module__ = modeling_llama.__name__
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(NotImplementedError, match="passes caches by another name than cache, past_key_values"):
        patch_model(model)
    assert not is_patched(model)


@pytest.mark.parametrize("version", ["5.25.0", "5.24.1", "5.23.0", "6.0.0.dev0"])
def test_a_release_that_nobody_has_read(version, monkeypatch):
    monkeypatch.setattr(f"{patch_model.__module__}.transformers", SimpleNamespace(__version__=version))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch_model(make_model("llama"))
    texts = [str(warning.message) for warning in caught if "patch_model knows" in str(warning.message)]
    assert len(texts) == (version[:4] not in ("5.23", "5.24")) and all(f"transformers {version}" in x for x in texts)
    assert not texts or caught[-1].filename == __file__


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
