"""`patch_model` on the kernels, in Triton's interpreter and on a GPU: whole models, compiled, captured, with Liger."""

import importlib

import pytest
import torch
import transformers

from bench.models import shapes
from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from tests.support.dtypes import BF16
from tests.support.hf_models import WINDOW, make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same, left_padded, make_cache, parts, run, steps
from tests.support.internals import count_prepared_steps, forget_calls
from tests.support.marks import ignore_overflow

pytestmark = ignore_overflow
DEVICE = torch.device("cuda")
# Sinks, caps, windows, chunks, pairs, norms, latent attention, layers that do not rotate. Other classes use these in
# other combinations, which tests of the reference compare.
NAMES = ("cohere", "deepseek_v3", "gemma2", "glm4", "gpt_oss", "llama4", "qwen3", "smollm3")
# Qwen 3 without its windows: its static layers count on the host.
WHOLE = {"use_sliding_window": False, "sliding_window": None}


def at(positions):
    """Positions by another name: 4.57 would look for the cache's length in its rows, which no graph can."""
    return {"cache_position": positions[0]} if transformers.__version__ < "5" else {}


@pytest.mark.parametrize("name", NAMES)
def test_in_the_interpreter(name, interpreted_attention):
    """float32: logits and gradients with padding, and parts of one token and of several onto both kinds of caches."""
    ends = (WINDOW - 1, WINDOW + 2, WINDOW + 3)
    model, ids, mask = make_model(name), make_ids(2, ends[-1]), left_padded(ends[-1], 0, 3)
    assert_same(model, ids, mask.bool(), grad=True, attention_mask=mask, use_cache=False)
    with torch.no_grad():
        for kind in ("dynamic", "static"):
            got = parts(patch_model(model), make_cache(model, kind), ids, mask, ends)
            expected = parts(unpatch_model(model), make_cache(model, kind), ids, mask, ends)
            assert_close(got[mask.bool()], expected[mask.bool()], 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name):
    """The same, and greedy tokens with both kinds of caches."""
    model, ids = make_model(name).to(DEVICE), make_ids(2, LENGTH).to(DEVICE)
    mask = left_padded(LENGTH, 0, 7, device=DEVICE)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **options)
    assert_same(model, ids, mask.bool(), True, tolerance=1e-4, attention_mask=mask, use_cache=False)
    assert torch.equal(model.generate(ids, **options), expected)
    if name != "llama4":  # with static caches 5.17 gives one of its mask functions an argument that it lacks
        static = model.generate(ids, **options, cache_implementation="static", disable_compile=True)
        assert torch.equal(static, expected)


@torch.no_grad()
def test_steps_are_prepared_once(interpreted_attention):
    """The length of a dynamic cache is no part of the signature of a step's launches."""
    model, ids = patch_model(make_model("llama")), make_ids(1, 15)
    past = make_cache(model, "dynamic")
    model(ids[:, :9], past_key_values=past)
    forget_calls()
    steps(model, past, ids, 9)
    assert count_prepared_steps() == 1


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen3-0.6B"])
def test_bfloat16_is_as_close_to_float32(name):
    """With random weights: what rounding costs the patched model, and what it costs sdpa."""
    model = shapes.make(next(shape for shape in shapes.MODELS if shape.name == name), DEVICE).eval()
    ids = torch.randint(model.config.vocab_size, (1, 1024), device=DEVICE)
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits.float()
        fused = patch_model(model)(ids, use_cache=False).logits.float()
        exact = unpatch_model(model).float()(ids, use_cache=False).logits
    distance = {name: (x - exact).square().mean().sqrt().item() for name, x in (("plain", plain), ("fused", fused))}
    assert distance["fused"] <= 1.05 * distance["plain"], distance


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "suffix", "norms", "replaced"),
    [
        ("llama", "llama", "", "apply_rotary_pos_emb LlamaRMSNorm LlamaMLP LlamaForCausalLM.forward"),
        ("gemma3", "gemma3_text", "fused", "apply_rotary_pos_emb Gemma3RMSNorm Gemma3MLP"),
    ],
)
def test_with_everything_of_liger(name, suffix, norms, replaced, monkeypatch):
    """Liger's norms of heads are left to the kernels as the model's own are; its other norms run."""
    liger_kernels = pytest.importorskip("liger_kernel.transformers", reason="pip install liger-kernel")
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    # Liger replaces names in transformers' module; they are put back when the test ends.
    for path in replaced.split():
        *owner, last = path.split(".")
        owner = getattr(modeling, owner[0]) if owner else modeling
        monkeypatch.setattr(owner, last, getattr(owner, last))
    model, ids = make_model(name).to(DEVICE), make_ids(2, LENGTH).to(DEVICE)
    expected, expected_grads = run(model, ids, grad=True, use_cache=False)
    options = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    getattr(liger_kernels, f"apply_liger_kernel_to_{suffix}")(model=model, **options)
    liger = run(model, ids, use_cache=False)[0]
    logits, grads = run(patch_model(model), ids, grad=True, use_cache=False)
    assert [row.norms for row in patch_report(model)] == [norms] * 2
    assert_close(logits, expected, 1e-4)
    for parameter, gradient in expected_grads.items():
        assert_close(grads[parameter], gradient, 1e-3, parameter)
    assert_close(run(unpatch_model(model), ids, use_cache=False)[0], liger, 1e-6)  # Liger's patches are left


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("static", [False, True])
def test_a_decoding_step_does_not_wait(static, name):
    model = patch_model(make_model(name, **WHOLE).to(DEVICE))
    ids, mask = make_ids(2, 20).to(DEVICE), left_padded(20, 0, 5, device=DEVICE)
    past = transformers.StaticCache(config=model.config, max_cache_len=32) if static else transformers.DynamicCache()
    with torch.no_grad():
        for start, end in ((0, 18), (18, 19), (19, 20)):
            part, step_mask = ids[:, start:end].contiguous(), mask[:, :end].contiguous()
            positions = torch.arange(start, end, device=DEVICE)[None]
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if end == 20 else "default")
            try:
                model(part, attention_mask=step_mask, position_ids=positions, past_key_values=past, **at(positions))
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.unpoisoned
def test_compiled_training():
    model, ids = make_model("qwen3").to(DEVICE, BF16), make_ids(2, 64).to(DEVICE)
    expected = patch_model(model)(ids, labels=ids, use_cache=False).loss
    torch._dynamo.reset()
    compiled = torch.compile(model)
    for _ in range(2):
        loss = compiled(ids, labels=ids, use_cache=False).loss
        loss.backward()
    assert_close(loss.detach(), expected.detach(), 1e-2)
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_captured_step(name):
    """A static cache: the graph rotates, writes, attends and counts, and is replayed for other tokens."""
    model, ids = patch_model(make_model(name, **WHOLE).to(DEVICE)), make_ids(2, 21).to(DEVICE)
    past = transformers.StaticCache(config=model.config, max_cache_len=32)
    token, position = ids[:, 18:19].clone(), torch.full((1, 1), 18, device=DEVICE)

    def step():
        return model(token, position_ids=position, past_key_values=past, **at(position)).logits

    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        model(ids[:, :18], past_key_values=past)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert_close(step(), expected[:, 18:19], 1e-4)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()
        for i in (19, 20):
            token.copy_(ids[:, i : i + 1])
            position.fill_(i)
            graph.replay()
            assert_close(logits, expected[:, i : i + 1], 1e-4)


@pytest.mark.gpu
@pytest.mark.unpoisoned
def test_compiled_generation():
    """transformers compiles the decoding step of a static cache by itself."""
    model, ids = patch_model(make_model("gemma3").to(DEVICE)), make_ids(2, 12).to(DEVICE)
    options = {"attention_mask": left_padded(12, 0, 5, device=DEVICE), "max_new_tokens": 10, "do_sample": False}
    expected = model.generate(ids, **options)
    torch._dynamo.reset()
    assert torch.equal(model.generate(ids, **options, cache_implementation="static"), expected)
    torch._dynamo.reset()
