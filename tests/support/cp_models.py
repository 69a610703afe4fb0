"""Programs that tests of models with shared sequences run on every rank."""

import copy
import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import DynamicCache

from fused_rope_attn.distributed import cp_shard, cp_shift_labels, plan_varlen_cp
from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from tests.support.hf_models import make_ids, make_model
from verification.ranks import group_of


def positions_of(documents):
    return torch.cat([torch.arange(length) for length in documents])[None]


def labels_of(ids, documents):
    """(B, N) shifted labels of the whole sequence."""
    limits = torch.tensor((0, *documents)).cumsum(0)
    shifted = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], -100)), 1)
    shifted[:, limits[1:] - 1] = -100
    return shifted


DEFAULTS = {"sharding": "zigzag", "rows": 1, "planned": None, "checkpoints": False, "by_torch": False}
DEFAULTS |= {"batch_invariant": False, "copied": False}


def step(ranks, family, documents, options):
    """(logits of this rank's rows, its part of the mean loss, its parts of the gradients) of a patched model."""
    chosen, group = SimpleNamespace(**DEFAULTS | options), group_of(ranks)
    shares = {"cp_group": group, "cp_sharding": chosen.sharding, "batch_invariant": chosen.batch_invariant}
    model = patch_model(make_model(family), **shares)
    if chosen.copied:
        model = copy.deepcopy(model)
    if chosen.checkpoints:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = make_ids(chosen.rows, sum(documents))
    positions, labels = positions_of(documents).expand(chosen.rows, -1), labels_of(ids, documents)
    limits = torch.tensor((0, *documents)).cumsum(0)
    given = {"num_items_in_batch": int((labels != -100).sum())}
    if chosen.planned:
        given["cp_plan"] = plan_varlen_cp(limits, group=group, sharding=chosen.planned)
    whole = {"input_ids": ids.clone(), "position_ids": positions.contiguous(), "labels": ids, "shift_labels": labels}
    cutting = nullcontext()
    if chosen.by_torch:  # as transformers' Trainer cuts a batch, with accelerate's ParallelismConfig
        mesh, buffers = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",)), list(whole.values())
        cutting = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 4, no_restore_buffers=set(buffers))
    else:
        cut = {"group": group, "sharding": chosen.planned or chosen.sharding}
        whole = {name: cp_shard(x, 1, **cut) for name, x in whole.items()}
        whole["shift_labels"] = cp_shift_labels(ids, **cut, cu_seqlens=limits)
    with cutting:
        found = model(**whole, **given)
        found.loss.backward()
    assert all(row.patched for row in patch_report(model))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found.logits.detach(), found.loss.detach(), gradients


_ROWS = {"input_ids": make_ids(2, 8), "position_ids": torch.arange(4).repeat(2, 2)}
# The message of a refusal, and what the model is given; of a plan the number of tokens that it has on two ranks.
REFUSALS = {
    "position_ids must be given": {"position_ids": None},
    "shift_labels must be given": {"labels": make_ids(1, 8)},
    "attention_mask with padding": {"attention_mask": torch.tensor([[0] + [1] * 7])},
    "a cache": {"past_key_values": DynamicCache()},
    "several rows of packed documents": _ROWS,
    "several rows of packed doc": _ROWS | {"cp_plan": 16},
    "cp_plan must be of the 16 tokens that all ranks have, but is of 32": {"cp_plan": 32},
    "cp_plan must be given to a model whose ranks patch_model knows": {"cp_plan": 16},
    "call the model": {},
    "output_attentions=True is not served by a model that patch_model has given": {"output_attentions": True},
}


def refused(ranks, message):
    """Give a patched model of shards a forward pass that it refuses."""
    group = group_of(ranks)
    given = {"input_ids": make_ids(1, 8), "position_ids": cp_shard(torch.arange(16)[None], 1, group=group)}
    given |= REFUSALS[message]
    if "cp_plan" in given:
        given["cp_plan"] = plan_varlen_cp([0, 9, given["cp_plan"]], group=group)
    model = patch_model(make_model("llama"), cp_group=group)
    if message == "call the model":
        model.model.layers[0](torch.randn(1, 8, 64), position_embeddings=(torch.ones(1, 8, 16),) * 2)
    if message.endswith("whose ranks patch_model knows"):
        patch_model(unpatch_model(model))
    model(**given)


def undone(ranks):
    """Logits of a model before it was patched for shards, and after it was unpatched, pickled in between."""
    model, ids = make_model("llama"), make_ids(1, 8)
    before = model(ids).logits.detach()
    patch_model(model, cp_group=group_of(ranks))
    model = pickle.loads(pickle.dumps(model))
    unpatch_model(model)
    after = model(ids, labels=ids)
    return before, after.logits.detach()
