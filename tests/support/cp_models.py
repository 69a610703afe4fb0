"""Programs that tests of models with shared sequences run on every rank."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import torch

from fused_rope_attn.distributed import cp_shard, cp_shift_labels, plan_varlen_cp
from fused_rope_attn.integrations.transformers import patch_model, patch_report, unpatch_model
from tests.support.hf_models import make_ids, make_model
from verification.ranks import group_of


def positions_of(documents: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in documents])[None]


def labels_of(ids: torch.Tensor, documents: tuple[int, ...]) -> torch.Tensor:
    """(B, N) shifted labels of the whole sequence."""
    limits = torch.tensor((0, *documents)).cumsum(0)
    shifted = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], -100)), 1)
    shifted[:, limits[1:] - 1] = -100
    return shifted


def step(
    ranks: tuple[int, ...], family: str, documents: tuple[int, ...], options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(logits of this rank's rows, its part of the mean loss, its parts of the gradients) of a patched model."""
    options = dict(options)
    cut = {"group": group_of(ranks), "sharding": options.pop("sharding", "zigzag")}
    rows = options.pop("rows", 1)
    planned = options.pop("planned", None)
    checkpoints, by_torch = options.pop("checkpoints", False), options.pop("by_torch", False)
    invariant = options.pop("batch_invariant", False)
    shares = {"cp_group": cut["group"], "cp_sharding": cut["sharding"]}
    model = patch_model(make_model(family), **shares, batch_invariant=invariant)
    if options.pop("copied", False):
        model = copy.deepcopy(model)
    if checkpoints:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, positions = make_ids(rows, sum(documents)), positions_of(documents)
    limits = torch.tensor((0, *documents)).cumsum(0)
    given: dict[str, Any] = {}
    if planned:
        given["cp_plan"] = plan_varlen_cp(limits, group=cut["group"], sharding=planned)
        cut["sharding"] = given["cp_plan"].sharding
    given |= {
        "input_ids": cp_shard(ids, 1, **cut),
        "position_ids": cp_shard(positions, 1, **cut).expand(rows, -1),
        "labels": cp_shard(ids, 1, **cut),
        "shift_labels": cp_shift_labels(ids, **cut, cu_seqlens=limits),
        "num_items_in_batch": int((labels_of(ids, documents) != -100).sum()),
    }
    if by_torch:  # as transformers' Trainer cuts a batch, with accelerate's ParallelismConfig
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor.experimental import context_parallel

        whole = [ids.clone(), positions.clone().expand(rows, -1).contiguous(), ids.clone(), labels_of(ids, documents)]
        given |= dict(zip(("input_ids", "position_ids", "labels", "shift_labels"), whole))
        mesh = DeviceMesh.from_group(cut["group"], "cpu", mesh_dim_names=("cp",))
        cutting = context_parallel(mesh, buffers=whole, buffer_seq_dims=[1] * 4, no_restore_buffers=set(whole))
    with cutting if by_torch else nullcontext():
        found = model(**given)
        found.loss.backward()
    assert all(row.patched for row in patch_report(model))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found.logits.detach(), found.loss.detach(), gradients


def refused(ranks: tuple[int, ...], what: str) -> None:
    """Give a patched model of shards a forward pass that it refuses."""
    from transformers import DynamicCache

    group, ids, rows = group_of(ranks), make_ids(1, 8), make_ids(2, 8)
    positions = cp_shard(torch.arange(16)[None], 1, group=group)
    plan, longer = (plan_varlen_cp([0, 9, end], group=group) for end in (16, 32))
    model = patch_model(make_model("llama"), cp_group=group)
    changes: dict[str, dict[str, Any]] = {
        "no positions": {"position_ids": None},
        "labels": {"labels": ids},
        "padding": {"attention_mask": torch.tensor([[0] + [1] * 7])},
        "cache": {"past_key_values": DynamicCache()},
        "rows": {"input_ids": rows, "position_ids": torch.arange(4).repeat(2, 2)},
        "plan of rows": {"cp_plan": plan, "input_ids": rows, "position_ids": positions.expand(2, -1)},
        "plan, longer": {"cp_plan": longer},
        "plan of nobody": {"cp_plan": plan},
        "attentions": {"output_attentions": True},
    }
    if what == "layer":
        model.model.layers[0](torch.randn(1, 8, 64), position_embeddings=(torch.ones(1, 8, 16),) * 2)
    if "nobody" in what:
        patch_model(unpatch_model(model))
    model(**{"input_ids": ids, "position_ids": positions} | changes[what])


def undone(ranks: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a model before it was patched for shards, and after it was unpatched, pickled in between."""
    model, ids = make_model("llama"), make_ids(1, 8)
    before = model(ids).logits.detach()
    patch_model(model, cp_group=group_of(ranks))
    model = pickle.loads(pickle.dumps(model))
    unpatch_model(model)
    after = model(ids, labels=ids)
    return before, after.logits.detach()
