"""Packed documents over several ranks: the plan that every layer of a batch shares."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from fused_rope_attn.distributed.cuts import check_sharding, chunk_count, chunks_of, deal
from fused_rope_attn.distributed.groups import Group, group_of
from fused_rope_attn.distributed.layout import Segment, Share, Shares, merged, share_of
from fused_rope_attn.runtime.checks import check_int, named, shown

_numbers = itertools.count(1)
# By number, which the operators take. Backward may run when only this dictionary still holds the plan.
_plans: OrderedDict[int, DocumentPlan] = OrderedDict()
_MAX_PLANS = 1024
# The sharding of calls with a plan. Compiled graphs do not depend on it, because each batch may have another.
OF_THE_PLAN = "of the plan"
# The sharding that ``plan_varlen_cp`` finds.
BALANCED = "balanced"


class DocumentPlan:
    """The documents of one packed batch, for ``rope_attention_varlen_cp``; made by ``plan_varlen_cp``.

    cu_seqlens: (documents + 1,) int32 of the whole stream, on the device. total: tokens of the whole stream.
    max_seqlen: length of the longest document. sharding: how the stream is cut, for ``cp_shard`` and the others.
    """

    def __init__(self, cu_seqlens: torch.Tensor, limits: list[int], total: int, group: Group, sharding: str):
        self.cu_seqlens, self.limits, self.total = cu_seqlens, limits, total
        self.group, self.sharding = group, sharding
        # Ranks compare this in every call. Its size does not depend on the number of documents.
        text = f"{limits} {total} {sharding}"
        self.summary = f"{len(limits) - 1} of {limits[-1]} tokens, {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self.max_seqlen = max((b - a for a, b in zip(limits, limits[1:])), default=0)
        self.number = next(_numbers)
        self._shares: dict[tuple, Shares] = {}
        self._on_device: dict[tuple, tuple] = {}
        _plans[self.number] = self
        while len(_plans) > _MAX_PLANS:
            _plans.popitem(last=False)

    @property
    def local(self) -> int:
        """Tokens of one rank."""
        return self.total // self.group.size

    def shares(self, causal: bool, window: tuple[int, int] | None) -> Shares:
        """Return the ``Share`` of every rank under these masks."""
        right = None if causal or window is None or window[1] < 0 else window[1]
        key = causal, right
        if key not in self._shares:
            found = [self._share(rank, causal, right) for rank in range(self.group.size)]
            self._shares[key] = Shares(tuple(found), self.sharding)
        return self._shares[key]

    def cu_seqlens_of(self, share: Share, causal: bool, window: tuple[int, int] | None) -> tuple:
        """Return (cu_seqlens_q, cu_seqlens_k, the longest) of each segment of this rank's ``share``, on the device."""
        key = causal, None if window is None else window[1]
        if key not in self._on_device:
            # One copy to the device for all of them.
            lists = [x for segment in share.segments for x in (segment.cu_seqlens_q, segment.cu_seqlens_k)]
            flat = torch.tensor([n for x in lists for n in x], dtype=torch.int32)
            parts = flat.to(self.cu_seqlens.device).split([len(x) for x in lists])
            found = []
            for i, segment in enumerate(share.segments):
                cu_k = segment.cu_seqlens_k
                longest = max(b - a for a, b in zip(cu_k, cu_k[1:]))
                found.append((parts[2 * i].clone(), parts[2 * i + 1].clone(), longest))
            self._on_device[key] = tuple(found)
        return self._on_device[key]

    def _share(self, rank: int, causal: bool, right: int | None) -> Share:
        owned = chunks_of(rank, self.group.size, self.sharding)
        chunk = self.total // chunk_count(self.group.size, self.sharding)
        end_of_all = self.limits[-1]
        segments = []
        # Adjacent chunks are one range.
        firsts = [i for i, c in enumerate(owned) if i == 0 or owned[i - 1] != c - 1]
        for i, following in itertools.pairwise((*firsts, len(owned))):
            begin, end = owned[i] * chunk, min((owned[following - 1] + 1) * chunk, end_of_all)
            if end <= begin:
                continue
            # The documents that begin before the chunk ends and end after it begins.
            first = bisect.bisect_right(self.limits, begin) - 1
            last = bisect.bisect_left(self.limits, end)
            limits = [x for x, y in zip(self.limits[first:last], self.limits[first + 1 : last + 1]) if y > x]
            padding = 0
            if not causal:
                padding = self.limits[last] - end
                padding = padding if right is None else min(right, padding)
            stop = end + padding
            # A document that began before the chunk has all of its keys from there on, so that positions stay.
            cu_q = tuple(max(x, begin) - begin for x in limits) + (stop - begin,)
            cu_k = tuple(x - limits[0] for x in limits) + (stop - limits[0],)
            rows = i * chunk, i * chunk + end - begin
            segments.append(Segment(rows, padding, (limits[0], stop), limits[0], cu_q, cu_k))
        return merged(share_of(segments, chunk))


def plan_of(number: int) -> DocumentPlan:
    """Return the plan of this number."""
    if number not in _plans:
        raise RuntimeError(f"plan must be one of the last {_MAX_PLANS} that plan_varlen_cp made in this process")
    return _plans[number]


def plan_varlen_cp(
    cu_seqlens: torch.Tensor | Sequence[int],
    *,
    group: Any,
    sharding: str = "zigzag",
    total_tokens: int | None = None,
    device: torch.device | str | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
) -> DocumentPlan:
    """Plan a packed batch for ``rope_attention_varlen_cp``: once a batch, for all layers and both passes.

    The stream is cut as ``sharding`` says, whatever the documents: several ranks may have parts of one document.

    Args:
        cu_seqlens: ``(documents + 1,)`` int32 or int64, or a list: document ``i`` is tokens ``[cu[i], cu[i + 1])`` of
            the whole stream, the same on every rank. A tensor of a GPU is read, which waits for the GPU.
        group: a ProcessGroup or a DeviceMesh of one dimension, of P ranks.
        sharding: as in ``cp_shard``; or ``"balanced"``, which finds the one by which all ranks have equal work, of
            these documents: the result has its name in ``plan.sharding``, with which everything of this batch is cut.
        total_tokens: T, tokens of the stream, a multiple of 2P (``"contiguous"``: of P). Tokens after the last
            document belong to none and give 0. Default: where the last document ends, which then is such a multiple.
        device: where the attention runs. Default: cu_seqlens' device.
        causal, window: the masks for which ``"balanced"`` equalises work; a layer may have others.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    members = group_of(group)
    check_sharding("sharding", sharding, members.size, also=(BALANCED,))
    if not isinstance(cu_seqlens, torch.Tensor):
        cu_seqlens = torch.tensor(list(cu_seqlens), dtype=torch.int32)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, but is {named(cu_seqlens.dtype)}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape (documents + 1,), but has {shown(cu_seqlens.shape)}")
    limits = cu_seqlens.tolist()
    if limits[0] != 0 or any(b < a for a, b in zip(limits, limits[1:])):
        raise ValueError("cu_seqlens must begin with 0 and never fall")
    total = limits[-1] if total_tokens is None else check_int("total_tokens", total_tokens, "an int or None")
    if sharding == BALANCED:
        sharding = deal(limits, total, members.size, causal, window)
    count = chunk_count(members.size, sharding)
    if total % count or total < limits[-1]:
        raise ValueError(
            f"total_tokens must be a multiple of {count} for {members.size} ranks and sharding={sharding!r}, and at "
            f"least the {limits[-1]} tokens of cu_seqlens, but is {total}: pad the stream, and leave the padding out "
            "of cu_seqlens"
        )
    where = cu_seqlens.device if device is None else torch.device(device)
    return DocumentPlan(cu_seqlens.to(where, torch.int32).contiguous(), limits, total, members, sharding)
