"""`patch_model` beside what else is done to a model: packing, fallbacks, adapters, checkpointing, compilation."""

import copy
import functools
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import attention, conventions, patch_model, unpatch_model
from fused_rope_attn.runtime.device import is_interpreted
from tests.integrations.transformers.test_models import LENGTH, assert_close, assert_same, calls, eager_rotation, run  # noqa: F401
from tests.support.generation import interpreted_step
from tests.support.hf_models import MODELS, SIZES, attentions_of, make_ids, make_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LENGTHS = (9, 1, 15)


def positions(lengths=LENGTHS):
    return torch.cat([torch.arange(length) for length in lengths])[None]


# transformers does not tell gpt-oss's masks of positions: its unpatched model sees across sequences.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt_oss"])
def test_packed_positions(name, calls):  # noqa: F811
    inputs = {"position_ids": positions(), "use_cache": False}
    assert_same(make_model(name), make_ids(1, LENGTH), grad=True, **inputs)
    assert calls == {"rope_attention_varlen": 2}
    inputs["position_ids"] = torch.cat((positions(), positions((LENGTH,))))
    assert_same(make_model(name), make_ids(2, LENGTH), **inputs)
    assert calls == {"rope_attention_varlen": 4}


def test_positions_of_one_sequence_are_not_packed(calls):  # noqa: F811
    ids = make_ids(2, LENGTH)
    assert_same(make_model("llama"), ids, position_ids=torch.arange(LENGTH)[None] + 5, use_cache=False)
    # With a cache transformers does not look for sequences.
    assert_same(make_model("llama"), ids[:1], position_ids=positions(), use_cache=True)
    assert calls == {"rope_attention": 4}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_packed_cu_seqlens(name, calls):  # noqa: F811
    model, ids = make_model(name), make_ids(1, LENGTH)
    alone = torch.cat([run(model, part, use_cache=False)[0] for part in ids.split(LENGTHS, dim=1)], dim=1)
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    inputs = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 15, "max_length_k": 15}
    patch_model(model)
    assert_close(run(model, ids, position_ids=positions(), **inputs)[0], alone, 1e-5)
    assert_close(run(model, ids, use_cache=False, **inputs)[0], alone, 1e-5)  # positions do not restart
    assert calls == {"rope_attention_varlen": 4}


FALLBACKS = {
    "output_attentions": {"output_attentions": True},
    "dropout": {},
    "not \\(B, keys\\)": {"attention_mask": torch.ones(2, 1, LENGTH, LENGTH).tril().log()},
    "holes": {"attention_mask": (torch.arange(2 * LENGTH).view(2, LENGTH) % 7 != 3).long()},
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_what_the_kernels_do_not_serve(reason, calls):  # noqa: F811
    model = make_model("llama", **({"attention_dropout": 0.5} if reason == "dropout" else {}))
    model.train(reason == "dropout")
    ids, inputs = make_ids(2, LENGTH), FALLBACKS[reason] | {"use_cache": False}
    torch.manual_seed(5)
    expected = model(ids, **inputs)
    patch_model(model)
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match=reason):
        out = model(ids, **inputs)
    assert torch.equal(out.logits, expected.logits) and not calls
    if reason == "output_attentions":
        assert all(map(torch.equal, out.attentions, expected.attentions)) and len(out.attentions) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, **inputs)  # said once
        model.eval()(ids, use_cache=False)
    assert calls == {"rope_attention": 2}


def test_holes_that_appear_while_decoding(calls):  # noqa: F811
    """Rows padded on the right, and then continued: the second step's mask is no interval."""
    model, ids = make_model("llama"), make_ids(2, 12)
    mask = torch.ones((2, 12), dtype=torch.int64)
    mask[1, 8:11] = 0

    def steps():
        past = transformers.DynamicCache(config=model.config)
        model(ids[:, :11], attention_mask=mask[:, :11], past_key_values=past)
        return model(ids[:, 11:], attention_mask=mask, past_key_values=past).logits

    expected = steps()
    patch_model(model)
    with pytest.warns(UserWarning, match="holes"):
        assert_close(steps(), expected, 1e-5)


def test_chunked_prefill_and_crop(calls):  # noqa: F811
    """Several tokens at a time onto a cache that holds others, padded and not."""
    model, ids = make_model("gemma3"), make_ids(2, 30)
    for mask in (None, (torch.arange(30) >= torch.tensor([[0], [5]])).long()):

        def chunks(mask=mask):
            past, logits = transformers.DynamicCache(config=model.config), []
            for start, end in ((0, 10), (10, 17), (17, 18), (18, 30)):
                part = None if mask is None else mask[:, :end]
                logits.append(model(ids[:, start:end], attention_mask=part, past_key_values=past).logits)
            return torch.cat(logits, dim=1)

        expected = chunks(mask)
        patch_model(model)
        present = slice(None) if mask is None else mask.bool()
        assert_close(chunks(mask)[present], expected[present], 1e-5)
        unpatch_model(model)
    assert calls == {"rope_attention": 16}


def test_a_layer_without_its_model(monkeypatch):
    monkeypatch.setattr(attention, "_said_of_layers", set())
    model = patch_model(make_model("llama"))
    layer, x = model.model.layers[0], torch.randn(2, 10, SIZES["hidden_size"])
    tables = model.model.rotary_emb(x, torch.arange(10)[None])
    causal = torch.full((10, 10), float("-inf")).triu(1)[None, None]
    fused = layer(x, position_embeddings=tables)
    with pytest.warns(UserWarning, match="without its model"):
        masked = layer(x, position_embeddings=tables, attention_mask=causal)
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    assert_close(first(fused), first(masked), 1e-5)


def test_unpatching_leaves_no_trace():
    model = make_model("llama")
    own = {path: (set(module.__dict__), module.forward) for path, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other = make_model("llama")
    assert patch_model(model) is model and patch_model(model) is model  # twice is once
    changed = [path for path, module in model.named_modules() if module.forward != own[path][1]]
    assert changed == [f"model.layers.{i}.self_attn" for i in range(2)]
    assert all("forward" not in module.__dict__ for module in other.modules())  # two models side by side
    assert model.state_dict().keys() == state.keys()
    run(model, make_ids(1, 5))
    assert unpatch_model(model) is model and unpatch_model(model) is model
    for path, module in model.named_modules():
        assert set(module.__dict__) == own[path][0] and module.forward == own[path][1], path
        assert not module._forward_pre_hooks and not module._forward_pre_hooks_with_kwargs
    assert model.prepare_inputs_for_generation.__func__ is type(model).prepare_inputs_for_generation


def test_a_forward_of_the_instance_comes_back():
    model = make_model("llama")
    module = attentions_of(model)[0]
    own = functools.partial(type(module).forward, module)
    module.forward = own
    patch_model(model)
    assert module.forward is not own
    assert unpatch_model(model) and module.forward is own


@pytest.mark.parametrize("first", ["hook", "patch"])
def test_hooks_of_accelerate(first, calls):  # noqa: F811
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model, ids, seen = make_model("llama"), make_ids(1, 9), []

    class Hook(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(module)
            return args, kwargs

    def add():
        add_hook_to_module(attentions_of(model)[0], Hook())

    expected = run(model, ids)[0]
    for action in (add, lambda: patch_model(model)) if first == "hook" else (lambda: patch_model(model), add):
        action()
    assert_close(run(model, ids)[0], expected, 1e-5)
    assert len(seen) == 1 and calls == {"rope_attention": 2}
    unpatch_model(model)
    assert torch.equal(run(model, ids)[0], expected)
    assert len(seen) == 2 and calls == {"rope_attention": 2}
    remove_hook_from_module(attentions_of(model)[0])
    assert torch.equal(run(model, ids)[0], expected)


def test_what_is_not_supported_is_named():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, but is str"):
        patch_model("llama")
    with pytest.raises(TypeError, match="model"):
        unpatch_model(None)
    with pytest.raises(NotImplementedError, match="Linear has none"):
        patch_model(torch.nn.Linear(2, 2))
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=9, n_embd=16, n_layer=5, n_head=2))
    with pytest.raises(NotImplementedError, match=r"transformer.h.0.attn \(GPT2Attention\).* and 2 more"):
        patch_model(gpt2)
    both = torch.nn.ModuleDict({"one": make_model("llama"), "two": torch.nn.MultiheadAttention(8, 2)})
    with pytest.raises(NotImplementedError, match=r"two \(MultiheadAttention\)"):
        patch_model(both)
    assert not any("forward" in module.__dict__ for module in both.modules())  # nothing has been changed

    class Subclass(transformers.models.llama.modeling_llama.LlamaAttention):
        pass

    both["one"].model.layers[1].self_attn.__class__ = Subclass
    del both["two"]
    with pytest.raises(NotImplementedError, match=r"one.model.layers.1.self_attn \(Subclass\)"):
        patch_model(both)


def test_every_supported_class_is_tested():
    tested = {conventions.name_of(type(module)) for name in MODELS for module in attentions_of(make_model(name))}
    assert tested == set(conventions.SUPPORTED)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox"])
def test_gradient_checkpointing(name, reentrant, calls):  # noqa: F811
    model, ids = make_model(name).train(), make_ids(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    if reentrant:
        model.enable_input_require_grads()
    plain = run(model, ids, grad=True, attention_mask=mask)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    patch_model(model)
    logits, grads = run(model, ids, grad=True, attention_mask=mask)
    assert_close(logits[mask.bool()], plain[0][mask.bool()], 1e-5)
    for parameter, expected in plain[1].items():
        assert_close(grads[parameter], expected, 1e-4, parameter)
    assert calls == {"rope_attention": 4}  # forward, and again in backward


@pytest.mark.unpoisoned
def test_compiled():
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    expected = [run(model, ids, grad=True, use_cache=False, **extra) for extra in ({}, {"attention_mask": mask})]
    torch._dynamo.reset()
    compiled = torch.compile(patch_model(model), backend="aot_eager")
    for (logits, grads), extra in zip(expected, ({}, {"attention_mask": mask})):
        got, got_grads = run(compiled, ids, grad=True, use_cache=False, **extra)
        present = extra.get("attention_mask", torch.ones_like(ids)).bool()
        assert_close(got[present], logits[present], 1e-5)
        for parameter, gradient in grads.items():
            assert_close(got_grads[f"_orig_mod.{parameter}"], gradient, 1e-4, parameter)
    torch._dynamo.reset()
    unpatch_model(compiled)
    assert torch.equal(run(model, ids)[0], run(make_model("llama"), ids)[0])


@pytest.mark.unpoisoned
def test_compiled_generation():
    """A step with a static cache is one graph without a break, made as often as the unpatched model's: twice."""
    model, ids = make_model("gemma3"), make_ids(2, 12)
    mask = (torch.arange(12) >= torch.tensor([[0], [5]])).long()
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **options)
    compilation = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
    compilation._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options |= {"cache_implementation": "static", "compile_config": compilation}
    assert torch.equal(patch_model(model).generate(ids, **options), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


def test_saved_and_loaded(tmp_path, calls):  # noqa: F811
    model, ids = patch_model(make_model("qwen3")), make_ids(2, 9)
    expected = run(model, ids)[0]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert_close(run(loaded, ids)[0], expected, 1e-5)
    assert calls == {"rope_attention": 2}  # a loaded model is unpatched
    assert torch.equal(run(patch_model(loaded), ids)[0], expected)


def test_copied(calls):  # noqa: F811
    model, ids = patch_model(make_model("llama")), make_ids(2, 9)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].self_attn.q_proj.weight.zero_()
    assert not torch.equal(run(twin, ids)[0], run(model, ids)[0])
    assert all(module.forward.__self__ is module for module in attentions_of(twin))
    unpatch_model(twin)
    run(twin, ids)
    assert calls == {"rope_attention": 4}


def test_bare_decoder(calls):  # noqa: F811
    model, ids = make_model("llama").model, make_ids(2, 9)
    expected = model(ids).last_hidden_state
    assert_close(patch_model(model)(ids).last_hidden_state, expected, 1e-5)
    assert calls == {"rope_attention": 2}


def test_adapters(calls):  # noqa: F811
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config).eval()
    assert_same(model, ids, grad=True, use_cache=False)
    assert calls == {"rope_attention": 2}
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert names and all("lora_" in name for name in names)
    expected = unpatch_model(model).generate(input_ids=ids[:, :8], max_new_tokens=4, do_sample=False)
    patched = patch_model(model).generate(input_ids=ids[:, :8], max_new_tokens=4, do_sample=False)
    assert torch.equal(expected, patched)
    with model.disable_adapter():
        assert_close(run(model, ids)[0], run(make_model("llama"), ids)[0], 1e-5)


def test_trainer(tmp_path):
    ids = make_ids(8, 16)
    data = [{"input_ids": row, "labels": row} for row in ids]

    def losses(patched):
        model = make_model("llama", use_cache=False)
        options = transformers.TrainingArguments(
            tmp_path / str(patched), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1,
            report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, seed=1,
        )  # fmt: skip
        trainer = transformers.Trainer(patch_model(model) if patched else model, options, train_dataset=data)
        trainer.train()
        return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    plain = losses(False)
    assert plain.shape == (4,)
    assert_close(losses(True), plain, 2e-4)  # the log has four digits


def test_autocast(calls):  # noqa: F811
    """q in bfloat16 beside tables in float32, and the other way round."""
    ids = make_ids(2, LENGTH)
    for model, cast in ((make_model("gpt_oss"), torch.bfloat16), (make_model("llama").bfloat16(), None)):
        reference = make_model("gpt_oss" if cast else "llama")
        exact = run(reference, ids, use_cache=False)[0]
        with torch.autocast("cpu", cast, enabled=cast is not None):
            plain = run(model, ids, use_cache=False)[0].float()
            fused = run(patch_model(model), ids, use_cache=False)[0].float()
        spread = (plain - exact).square().mean().sqrt()
        assert (fused - exact).square().mean().sqrt() <= 1.5 * spread
    assert calls == {"rope_attention": 4}


@pytest.fixture
def interpreted(monkeypatch):
    """The portable kernels, in Triton's interpreter."""
    assert is_interpreted() or torch.cuda.is_available()
    monkeypatch.setattr(attention, "rope_attention_with_kvcache", interpreted_step)
    for name in ("rope_attention", "rope_attention_varlen"):
        operator = functools.partial(getattr(attention, name), backend="triton")
        monkeypatch.setattr(attention, name, operator)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["gemma2", "glm4", "gpt_oss"])
def test_in_the_interpreter(name, interpreted):
    model, ids = make_model(name), make_ids(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    assert_same(model, ids, mask.bool(), grad=True, attention_mask=mask, use_cache=False)
    options = {"attention_mask": mask, "max_new_tokens": 2, "do_sample": False, "cache_implementation": "static"}
    patched = model.generate(ids, **options)
    assert torch.equal(patched, unpatch_model(model).generate(ids, **options))


def test_the_example(tmp_path):
    script, out = Path(__file__).parents[3] / "examples" / "train_llama.py", tmp_path / "curves.png"
    command = [sys.executable, str(script), "--small", "--steps", "4", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(script.parents[1]), "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert out.stat().st_size > 5000
    assert float(re.search(r"(\S+) at most", done.stdout).group(1)) < 1e-5
    patched, plain = (line.split(": ", 1)[1] for line in re.findall(r"^(?:un)?patch_model: .*$", done.stdout, re.M))
    assert patched == plain and patched.startswith("## 2026")
