"""Patched models in training and in wrappers: compiled, traced, exported, adapted, sharded, under autocast."""

import peft
import pytest
import torch
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel

from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from tests.support.export import dimension, exported
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, assert_same, left_padded, run

MASK = left_padded(LENGTH, 0, 6)
needs_5 = pytest.mark.skipif(transformers.__version__ < "5", reason="4.57 cannot trace it, patched or not")


@pytest.mark.unpoisoned
@pytest.mark.parametrize(("name", "padded"), [("llama", True), ("qwen3", False)])
def test_compiled(name, padded):
    model, ids = make_model(name, num_hidden_layers=1), make_ids(2, LENGTH)
    mask = MASK if padded else torch.ones_like(MASK)
    inputs = {"use_cache": False} | ({"attention_mask": MASK} if padded else {})
    expected, expected_grads = run(model, ids, grad=True, **inputs)
    torch._dynamo.reset()
    compiled = torch.compile(patch_model(model), backend="aot_eager", fullgraph=not padded)
    logits, grads = run(compiled, ids, grad=True, **inputs)
    assert_close(logits[mask != 0], expected[mask != 0], 1e-5)
    for parameter, gradient in expected_grads.items():
        assert_close(grads[f"_orig_mod.{parameter}"], gradient, 1e-4, parameter)
    torch._dynamo.reset()
    unpatch_model(compiled)
    assert torch.equal(run(model, ids, **inputs)[0], expected)


@needs_5
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.unpoisoned
@pytest.mark.parametrize(("name", "implementation"), [("llama", "eager"), ("mistral", "sdpa"), ("gemma3", "sdpa")])
def test_traced(name, implementation, calls):
    """A trace holds the model's own attention: TorchScript knows none of these kernels."""
    model, ids = make_model(name).requires_grad_(False), make_ids(2, LENGTH)
    model.config._attn_implementation = implementation
    expected = model(ids, attention_mask=MASK).logits
    patch_model(model)
    with pytest.warns(UserWarning, match="patch_model: torch.jit.trace is not served"):
        traced = torch.jit.trace(lambda *given: model(*given, use_cache=False).logits, (ids, MASK), check_trace=False)
    for end in (LENGTH, LENGTH - 2):
        given, present = MASK[:, :end], MASK[:, :end].bool()
        assert_close(traced(ids[:, :end], given)[present], expected[:, :end][present], 1e-5)
    calls.clear()
    assert_close(model(ids, attention_mask=MASK).logits[MASK != 0], expected[MASK != 0], 1e-5)
    assert sum(calls.values()) == 2


@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    ("name", "implementation", "is_padded", "kind", "layers"),
    [
        ("llama", "eager", False, "named", 1),
        pytest.param("gpt_oss", "eager", True, "named", 2, marks=needs_5),
        pytest.param("deepseek_v3", "sdpa", False, "named", 1, marks=needs_5),
        ("llama4", "sdpa", True, "named", 2),
        ("mistral", "sdpa", True, "AUTO", 1),
        ("gemma3", "sdpa", True, "DYNAMIC", 2),
    ],
)
def test_export(name, implementation, is_padded, kind, layers):
    """A program gives what the model gives without a patch, for batches and lengths other than those of the export."""
    model, runs = make_model(name, num_hidden_layers=layers), []
    model.config._attn_implementation = implementation
    for batch, length in ((3, 17), (2, 9), (4, 33)):
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[0, :5] = 0
        ids, inputs = make_ids(batch, length), {"use_cache": False, "attention_mask": mask if is_padded else None}
        runs.append((ids, inputs, mask != 0 if is_padded else slice(None), model(ids, **inputs).logits))
    axes = {0: dimension(kind, "b"), 1: dimension(kind, "n")}
    shapes = {"input_ids": axes, "use_cache": None, "attention_mask": axes if is_padded else None}
    program = exported(patch_model(model), runs[0][:1], shapes, **runs[0][1])
    for ids, inputs, present, logits in runs:
        assert_close(program(ids, **inputs).logits[present], logits[present], 1e-5)


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


@pytest.mark.parametrize("first", ["patch", "shard"])
@pytest.mark.parametrize("wraps", ["attention", "layer"])
def test_fully_sharded(first, wraps, mesh, calls):
    model, ids = make_model("qwen3"), make_ids(2, LENGTH)
    expected, expected_grads = run(model, ids, grad=True)
    if first == "patch":
        patch_model(model)
    for layer in model.model.layers:
        fully_shard(layer.self_attn if wraps == "attention" else layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if first == "shard":
        patch_model(model)
    logits, grads = run(model, ids, grad=True)
    assert_close(logits, expected, 1e-5)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert_close(grad.full_tensor(), expected_grads[name], 1e-4, name)
    assert calls == {"rope_attention": 2}
    assert all(row.patched and row.norms == "fused" for row in patch_report(model))


def test_parallelism_that_is_refused(mesh):
    model, ids = patch_model(make_model("llama")), make_ids(2, 16)
    with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
        with pytest.raises(NotImplementedError, match="under torch's context_parallel.*unpatch_model"):
            model(ids)
        with pytest.raises(NotImplementedError, match="context_parallel"):
            model.model.layers[0](torch.randn(2, 16, 64), position_embeddings=(torch.ones(1, 16, 16),) * 2)
    replica = model.model._replicate_for_data_parallel()  # what DataParallel makes one of for every device
    with pytest.raises(NotImplementedError, match="DistributedDataParallel"):
        replica(ids)
    assert model(ids).logits.shape[:2] == (2, 16)
