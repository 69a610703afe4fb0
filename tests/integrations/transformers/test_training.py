"""Patched models in training: checkpointing, compilation, adapters, the Trainer, autocast."""

import peft
import pytest
import torch
import transformers

from fused_rope_attn.integrations.transformers import patch_model, unpatch_model
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox"])
def test_gradient_checkpointing(name, reentrant, calls):
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


def test_left_padding_predicts_the_first_real_token():
    """Its label must be -100, because outputs of padding are unspecified: the loss depends on them otherwise."""
    model, ids = make_model("llama"), make_ids(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    labels = ids.masked_fill(mask == 0, -100)
    losses = []
    for first_token in (True, False):
        if not first_token:
            labels[:, 1:][mask[:, :-1] == 0] = -100
        for patch in (unpatch_model, patch_model):
            model.zero_grad()
            loss = patch(model)(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
            loss.backward()
            losses.append((loss.detach(), model.model.embed_tokens.weight.grad.clone()))
    (plain, plain_grad), (patched, patched_grad), *pairs = losses
    assert abs(patched - plain) > 1e-3 * plain and (patched_grad - plain_grad).norm() > 1e-2 * plain_grad.norm()
    (plain, plain_grad), (patched, patched_grad) = pairs
    assert_close(patched, plain, 1e-5)
    assert_close(patched_grad, plain_grad, 1e-4)


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


def test_adapters(calls):
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
            tmp_path / str(patched),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            seed=1,
        )
        trainer = transformers.Trainer(patch_model(model) if patched else model, options, train_dataset=data)
        trainer.train()
        return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    plain = losses(False)
    assert plain.shape == (4,)
    assert_close(losses(True), plain, 2e-4)  # the log has four digits


def test_autocast(calls):
    """q in bfloat16 with tables in float32, and the other way round."""
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
