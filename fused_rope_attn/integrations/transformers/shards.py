"""Sequences that several ranks share: the description of a forward pass over one rank's shard."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fused_rope_attn.distributed.api import cp_unshard
from fused_rope_attn.distributed.documents import DocumentPlan, plan_varlen_cp
from fused_rope_attn.distributed.groups import group_of
from fused_rope_attn.distributed.layout import SHARDINGS, check_sharding
from fused_rope_attn.integrations.transformers import caches, obstacles
from fused_rope_attn.integrations.transformers.state import Shards, names_of_parameters
from fused_rope_attn.runtime.checks import kind_of, refuse_choice
from fused_rope_attn.runtime.entry import in_context_parallel

# The argument of a model's forward that is the ``DocumentPlan`` of a batch.
PLAN = "cp_plan"
_ON_SHARDS = "is not served by a model that patch_model has given a cp_group"
_SEVERAL_ROWS = f"a batch of several rows of packed documents {_ON_SHARDS}: pack them into one row"


def shards_of(cp_group: Any, cp_sharding: Any) -> Shards | None:
    """Return the ``Shards`` of ``patch_model``'s arguments. Raise TypeError or ValueError naming them."""
    if cp_group is None:
        if cp_sharding not in SHARDINGS:
            refuse_choice("cp_sharding", cp_sharding, SHARDINGS)
        return None
    try:
        group = group_of(cp_group)
    except (TypeError, ValueError) as error:
        raise type(error)(f"cp_{error}") from None
    check_sharding("cp_sharding", cp_sharding, group.size)
    return Shards(group, cp_sharding)


class Shared(NamedTuple):
    """The batch of all ranks. plan: of packed documents, or None."""

    shards: Shards
    causal: bool
    plan: DocumentPlan | None


def describe_shard(attentions: list[nn.Module], config: Any, given: dict[str, Any], shards: Shards) -> Shared:
    """Return the ``Shared`` of a decoder's forward pass with these arguments.

    All ranks exchange their position ids: a document begins at every id that is not the one before it plus one. A batch
    may have a plan of its documents, which makes this unnecessary and tells how the batch is cut. Raise if the pass
    cannot be computed on shards, because the modules' own forward cannot either.
    """
    obstacles.refuse_wrong_calls(attentions, given, on_shards=True)
    causal = obstacles.is_causal(attentions, config, given)
    reason = obstacles.obstacle(attentions, config, given, causal)
    if reason:
        raise NotImplementedError(f"{reason} {_ON_SHARDS}")
    if obstacles.chunk_of(attentions) is not None:
        raise NotImplementedError(f"attention in chunks {_ON_SHARDS}")
    if caches.cache_of(given) is not None:
        raise NotImplementedError(f"a cache {_ON_SHARDS}: generate with the model unpatched, or whole")
    if given.get("cu_seq_lens_q") is not None:
        raise NotImplementedError(f"cu_seq_lens_q {_ON_SHARDS}: leave it out, position_ids say where documents begin")
    position_ids = given.get("position_ids")
    if position_ids is None:
        raise ValueError(
            "position_ids must be given to a model that has a cp_group, this rank's shard of them: "
            "cp_positions(total_len, group=, sharding=), or of packed documents their cp_shard"
        )
    if position_ids.ndim != 2:
        raise NotImplementedError(f"position_ids of {position_ids.ndim} dimensions, which images have, {_ON_SHARDS}")
    mask = given.get("attention_mask")
    if mask is not None and not bool((mask != 0).all()):
        raise NotImplementedError(
            f"an attention_mask with padding {_ON_SHARDS}: pad after the sequence, where causal attention does not "
            "see it, leave the mask out and give the padding the label -100"
        )
    plan = given.get(PLAN)
    if plan is None:
        plan = _plan(position_ids, shards)
    else:
        _check_plan(plan, position_ids, shards)
    return Shared(shards, bool(causal), plan)


def _check_plan(plan: Any, position_ids: Tensor, shards: Shards) -> None:
    if not isinstance(plan, DocumentPlan):
        raise TypeError(f"{PLAN} must be a DocumentPlan from plan_varlen_cp, but is {kind_of(plan)}")
    if plan.group != shards.group:
        raise ValueError(f"{PLAN} must be of the ranks of the model's cp_group")
    if position_ids.shape[1] != plan.local:
        every = position_ids.shape[1] * shards.group.size
        raise ValueError(f"{PLAN} must be of the {every} tokens that all ranks have, but is of {plan.total}")
    if position_ids.shape[0] > 1:
        raise NotImplementedError(_SEVERAL_ROWS)


def _plan(position_ids: Tensor, shards: Shards) -> DocumentPlan | None:
    whole = cp_unshard(position_ids, 1, **shards.options)
    begins = whole[:, 1:] != whole[:, :-1] + 1
    if in_context_parallel():
        _check_cut(whole, begins, shards)
    if not bool(begins.any()):
        return None
    if whole.shape[0] > 1:
        raise NotImplementedError(_SEVERAL_ROWS)
    first = torch.nn.functional.pad(begins[0], (1, 0), value=True).nonzero().flatten()
    return plan_varlen_cp(torch.nn.functional.pad(first, (0, 1), value=whole.shape[1]), **shards.options)


def _check_cut(whole: Tensor, begins: Tensor, shards: Shards) -> None:
    """Raise if torch's context_parallel, or the caller, has cut the sequences differently than these shards."""
    firsts = torch.cat((whole[:, :1], torch.where(begins, whole[:, 1:], 0)), 1)
    if bool((firsts != 0).any()):
        raise ValueError(
            f"cp_sharding must be how torch's context_parallel has cut the sequence, but is {shards.sharding!r}, by "
            "which the ranks' position_ids join to a document that does not begin with 0: torch cuts by 'zigzag', "
            "unless its load balancing is turned off, and cuts only what is among its buffers"
        )


def check_labels(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise if the loss would shift labels within the shard. A forward pre-hook of models with a loss."""
    given = dict(zip(names_of_parameters(model), args)) | kwargs
    if given.get("labels") is not None and given.get("shift_labels") is None:
        raise ValueError(
            "shift_labels must be given with labels to a model that has a cp_group: the token after a chunk's last "
            "one is another rank's; pass shift_labels=cp_shift_labels(labels of the whole sequence, group=, sharding=)"
        )
