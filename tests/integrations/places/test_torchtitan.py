"""The override of torchtitan, on its own debug models. torchtitan's own varlen attention needs a GPU, so its kernel's
place is taken by SDPA on each document here.

Run by `make test-places`, in an environment that has torchtitan.
"""

import functools
import itertools
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-places")

from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.context_parallel import apply_cp_to_forward
from torchtitan.models.common import attention
from torchtitan.models.llama3 import model_registry as llama3
from torchtitan.models.qwen3 import model_registry as qwen3

from fused_rope_attn.integrations import torchtitan as integration
from tests.support.operators import Record
from verification.ranks import Ranks

pytestmark = pytest.mark.unpoisoned
OURS = "fused_rope_attn.integrations.torchtitan"
LENGTH, STEPS = 48, 20


def per_document(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, enable_gqa=False, **_):
    """Attend as VarlenAttention, by SDPA in float32: that of torchtitan needs a GPU and rounds to bfloat16."""
    ends = attention_masks.cu_seq_q.tolist()
    rows = [x.flatten(0, 1).transpose(0, 1)[None] for x in (q_BLNH, k_BLNH, v_BLNH)]
    options = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
    documents = [
        F.scaled_dot_product_attention(*(x[:, :, start:end] for x in rows), **options)
        for start, end in zip(ends, ends[1:])
    ]
    return torch.cat(documents, dim=2)[0].transpose(0, 1).unflatten(0, q_BLNH.shape[:2])


@pytest.fixture(autouse=True)
def varlen_attention_on_a_cpu(monkeypatch):
    monkeypatch.setattr(attention.VarlenAttention, "forward", per_document)


def make(registry, fused, attn_backend="varlen", layers=2, change=lambda config: None):
    config = registry("debugmodel", attn_backend=attn_backend).model
    config.layers = config.layers[:layers]
    change(config)
    if fused:
        lines = apply_overrides(OverrideConfig(imports=[f"{OURS}.fused_rope"]), config)
        assert len(lines) == layers
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model


def batches(steps=STEPS, rows=2, length=LENGTH):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, 2048, (rows, length + 1), generator=generator)
        ends = torch.randint(1, length, (rows,), generator=generator).tolist()
        positions = [torch.cat((torch.arange(end), torch.arange(length - end))) for end in ends]
        yield ids, torch.stack(positions)


def train(model, steps=STEPS, **sizes):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for ids, positions in batches(steps, **sizes):
        masks = model.get_attention_masks(positions)
        logits = model(ids[:, :-1], positions=positions, attention_masks=masks)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("registry", [llama3, qwen3], ids=["llama3", "qwen3"])
@pytest.mark.parametrize("attn_backend", ["varlen", "flex"])
def test_losses_are_those_of_torchtitan(registry, attn_backend):
    """An override of FlexAttention becomes attention on packed documents too."""
    own, model = train(make(registry, fused=False)), make(registry, True, attn_backend)
    assert all(isinstance(layer.attention, integration.FusedGQAttention) for layer in model.layers.values())
    torch.testing.assert_close(train(model), own, rtol=1e-4, atol=1e-4)


def test_the_norms_of_heads_are_fused(monkeypatch):
    model, (ids, positions) = make(qwen3, fused=True, layers=1), next(iter(batches()))
    (layer,) = model.layers.values()
    for norm in (layer.attention.q_norm, layer.attention.k_norm):
        monkeypatch.setattr(norm, "forward", None)
    model(ids[:, :-1], positions=positions, attention_masks=model.get_attention_masks(positions)).sum().backward()
    for norm in (layer.attention.q_norm, layer.attention.k_norm):
        assert norm.weight.grad.abs().max() > 0


@pytest.mark.parametrize("checkpointing", ["full", "selective", "saving"])
def test_activation_checkpointing(checkpointing, monkeypatch):
    """Selective checkpointing computes attention again, unless the override saves its results."""
    by_kernels = functools.partial(integration.rope_attention_varlen, backend="triton")
    monkeypatch.setattr(integration, "rope_attention_varlen", by_kernels)
    sizes = {"steps": 1, "rows": 1, "length": 12}  # the interpreter's time counts
    expected = train(make(llama3, fused=True, layers=1), **sizes)
    model = make(llama3, fused=True, layers=1)
    policy = FullAC.Config() if checkpointing == "full" else SelectiveAC.Config()
    if checkpointing == "saving":
        policy = integration.save_attention(policy)
    policy.build().apply(model)
    with Record() as record:
        losses = train(model, **sizes)
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    forward = str(integration.forward_operator.overload)
    assert record.operators.count(forward) == (1 if checkpointing == "saving" else 2)


def test_compilation_by_block_makes_one_graph_for_all_packings():
    """torchtitan compiles each block with fullgraph=True; lengths of documents differ in every step."""
    model, counter = make(llama3, fused=True), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in model.layers.children():
        block.compile(backend=counter, fullgraph=True)
    torch.testing.assert_close(train(model, steps=4), train(make(llama3, fused=True), steps=4), rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 4  # two blocks, first with the lengths as constants and then with any


def test_the_command_line_of_the_guide():
    """torchtitan parses it, and both overrides find their places in the config of a whole training."""
    names = f"{OURS}.fused_rope,{OURS}.save_attention"
    settings = ["--compile.enable", "--parallelism.spmd_backend", "partial_dtensor"]
    words = ["--module", "llama3", "--config", "llama3_8b", "--override.imports", names, *settings]
    config = ConfigManager().parse_args(words)
    lines = apply_overrides(config.override, config)
    assert sum("FusedGQAttention" in line for line in lines) == 32
    assert sum("SelectiveAC.Config -> SelectiveACWithAttention" in line for line in lines) == 1


def test_what_is_refused():
    blocks = make(llama3, fused=True).layers.values()
    with pytest.raises(NotImplementedError, match="Variable-length attention CP"):
        apply_cp_to_forward([block.attention.inner_attention for block in blocks], None)
    config = llama3("debugmodel", attn_backend="varlen").model.layers[0].attention
    config.rope = attention.RoPE.Config(dim=16, max_seq_len=64)
    with pytest.raises(NotImplementedError, match="rope must be ComplexRoPE or CosSinRoPE, but is RoPE.Config"):
        integration.fused_rope(config)


@pytest.mark.parametrize("parallelism", ["fsdp", "tp"])
def test_two_ranks(parallelism):
    """Losses and norms of all gradients. With tensor parallelism the kernels get the local heads."""
    with closing(Ranks(2)) as pool:
        results = pool.results(losses_and_norms, parallelism)[0]
    for own, fused in zip(results[::2], results[1::2]):
        assert own == pytest.approx(fused, rel=1e-4, abs=1e-6)
    assert len(results) == 4 and any("q_norm" in name for name in results[2])


def losses_and_norms(parallelism):
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims, utils
    from torchtitan.models.llama3.parallelize import parallelize_llama
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config
    from torchtitan.models.qwen3.parallelize import parallelize_qwen3
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    parallel_dims.device_type, attention.VarlenAttention.forward = "cpu", per_document
    # The newer backends of torchtitan 0.3.0 need a newer torch.
    backend, tp = "partial_dtensor", 2 if parallelism == "tp" else 1
    utils.set_spmd_backend(backend)
    sizes = {"dp_replicate": 1, "dp_shard": 2 // tp, "cp": 1, "tp": tp, "pp": 1, "ep": 1, "world_size": 2}
    options = {
        "parallel_dims": ParallelDims(**sizes, spmd_backend=backend),
        "training": TrainingConfig(mixed_precision_param="float32"),
        "parallelism": ParallelismConfig(tensor_parallel_degree=tp, spmd_backend=backend),
        "compile_config": CompileConfig(),
        "ac_config": None,
        "dump_folder": "",
    }
    shard_qwen3 = functools.partial(set_qwen3_sharding_config, enable_ep=False)
    kinds = (llama3, parallelize_llama, set_llama3_sharding_config), (qwen3, parallelize_qwen3, shard_qwen3)
    results, (ids, positions) = [], next(iter(batches()))
    for (registry, parallelize, shard), fused in itertools.product(kinds, (False, True)):
        model = make(registry, fused, layers=1, change=functools.partial(shard, enable_sp=tp > 1))
        model = parallelize(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
        logits = model(ids[:, :-1], positions=positions, attention_masks=model.get_attention_masks(positions))
        loss = F.cross_entropy(whole(logits).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norms = {name: whole(p.grad).norm().item() for name, p in model.named_parameters()}
        results.append({"loss": loss.item()} | norms)
    return results


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x
