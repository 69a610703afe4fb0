"""FSDP2 around a patched module, and torch's parallelism that a patched model refuses."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel

from fused_rope_attn.integrations.transformers import patch_model, patch_report
from tests.support.hf_models import make_ids, make_model
from tests.support.hf_runs import LENGTH, assert_close, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def mesh():
    """A mesh of this process alone: what FSDP2 does to classes and hooks does not depend on how many there are."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


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


def test_what_is_refused(mesh):
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
