"""Patched models in training and in wrappers: checkpointing, compilation, traces, adapters, the Trainer, autocast."""

import peft
import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
MASK = (torch.arange(LENGTH) >= torch.tensor([[0], [6]])).long()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox"])
def test_gradient_checkpointing(name, reentrant, calls):
    model, ids = make_model(name).train(), make_ids(2, LENGTH)
    if reentrant:
        model.enable_input_require_grads()
    plain = run(model, ids, grad=True, attention_mask=MASK)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    patch_model(model)
    logits, grads = run(model, ids, grad=True, attention_mask=MASK)
    assert_close(logits[MASK.bool()], plain[0][MASK.bool()], 1e-5)
    for parameter, expected in plain[1].items():
        assert_close(grads[parameter], expected, 1e-4, parameter)
    assert calls == {"rope_attention": 4}  # forward, and again in backward


def test_left_padding_predicts_the_first_real_token():
    """Its label must be -100, because outputs of padding are unspecified: the loss depends on them otherwise."""
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    labels = ids.masked_fill(MASK == 0, -100)
    right = labels.clone()
    right[:, 1:][MASK[:, :-1] == 0] = -100
    inputs = {"input_ids": ids, "attention_mask": MASK, "use_cache": False}
    for given, same in ((labels, False), (right, True)):
        plain, patched = (patch(model)(**inputs, labels=given).loss for patch in (unpatch_model, patch_model))
        assert (abs(patched - plain) <= 1e-5 * plain) if same else (abs(patched - plain) > 1e-3 * plain)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_compiled(name, padded):
    model, ids = make_model(name, num_hidden_layers=1), make_ids(2, LENGTH)
    inputs = {"attention_mask": MASK} if padded else {}
    expected = run(model, ids, grad=True, use_cache=False, **inputs)
    torch._dynamo.reset()
    compiled = torch.compile(patch_model(model), backend="aot_eager", fullgraph=not padded)
    logits, grads = run(compiled, ids, grad=True, use_cache=False, **inputs)
    present = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    assert_close(logits[present], expected[0][present], 1e-5)
    for parameter, gradient in expected[1].items():
        assert_close(grads[f"_orig_mod.{parameter}"], gradient, 1e-4, parameter)
    torch._dynamo.reset()
    unpatch_model(compiled)
    assert torch.equal(run(model, ids, use_cache=False, **inputs)[0], expected[0])


class Logits(torch.nn.Module):
    """Return a model's logits alone, because ``torch.jit.trace`` takes no other result."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.skipif(transformers.__version__ < "5", reason="its models cannot be traced, patched or not")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.unpoisoned
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_traced(name, implementation, calls):
    """A trace holds the model's own attention: TorchScript knows none of these kernels."""
    model, ids = make_model(name).requires_grad_(False), make_ids(2, LENGTH)
    model.config._attn_implementation = implementation
    expected = model(ids, attention_mask=MASK).logits
    with pytest.warns(UserWarning, match="patch_model: torch.jit.trace is not served"):
        traced = torch.jit.trace(Logits(patch_model(model)), (ids, MASK), check_trace=False)
    for end in (LENGTH, LENGTH - 2):
        given, present = MASK[:, :end], MASK[:, :end].bool()
        assert_close(traced(ids[:, :end], given)[present], expected[:, :end][present], 1e-5)
    calls.clear()
    assert_close(model(ids, attention_mask=MASK).logits[MASK != 0], expected[MASK != 0], 1e-5)
    assert sum(calls.values()) == 2


@pytest.mark.parametrize("first", ["adapters", "patch"])
def test_adapters(first, calls):
    """PEFT puts its layers into the modules that are patched, and takes them out again when it merges."""
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    plain = run(model, ids)[0]
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(patch_model(model) if first == "patch" else model, config).eval()
    if first == "patch":
        run(model, ids)
        assert calls.pop("rope_attention") == 2
    assert_same(model, ids, grad=True, use_cache=False)
    assert calls == {"rope_attention": 2}
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert names and all("lora_" in name for name in names)
    options = {"input_ids": ids[:, :8], "max_new_tokens": 4, "do_sample": False}
    expected = unpatch_model(model).generate(**options)
    assert torch.equal(patch_model(model).generate(**options), expected)
    with model.disable_adapter():
        assert_close(run(model, ids)[0], plain, 1e-5)
    adapted = run(unpatch_model(model), ids)[0]
    merged = patch_model(model).merge_and_unload()
    assert_close(run(merged, ids)[0], adapted, 1e-4)
    assert [row.patched for row in patch_report(merged)] == [True, True]


def test_trainer(tmp_path):
    data = [{"input_ids": row, "labels": row} for row in make_ids(8, 16)]

    def losses(patched):
        model = make_model("llama", use_cache=False)
        sizes = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "use_cpu": True, "seed": 1}
        quiet = {"logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
        options = transformers.TrainingArguments(tmp_path / str(patched), **sizes, **quiet)
        trainer = transformers.Trainer(patch_model(model) if patched else model, options, train_dataset=data)
        trainer.train()
        return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    plain = losses(False)
    assert plain.shape == (4,)
    assert_close(losses(True), plain, 2e-4)  # the log has four digits


def test_autocast(calls):
    """q in bfloat16 with tables in float32, and the other way round; weights of norms have float32 gradients."""
    for name, cast in (("gpt_oss", True), ("llama", False), ("qwen3", True)):
        model, ids = make_model(name), make_ids(2, LENGTH)
        exact, exact_grads = run(model, ids, grad=True, use_cache=False)
        model = model if cast else model.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            plain, plain_grads = run(model, ids, grad=True, use_cache=False)
            fused, grads = run(patch_model(model), ids, grad=True, use_cache=False)
        assert (fused.float() - exact).norm() <= 1.5 * (plain.float() - exact).norm()
        for norm in (path for path in exact_grads if path.endswith(("q_norm.weight", "k_norm.weight"))):
            spread = (plain_grads[norm] - exact_grads[norm]).norm()
            assert grads[norm].dtype is torch.float32 and (grads[norm] - exact_grads[norm]).norm() <= 1.5 * spread, norm
    assert {row.norms for row in patch_report(model)} == {"fused"}
    assert calls == {"rope_attention": 6}
