"""What the ranks share in one call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fused_rope_attn.distributed.groups import Group
from fused_rope_attn.distributed.layout import Run, Share, Shares


class Call(NamedTuple):
    """What the ranks share in one call.

    shares: every rank's. chunk: rows of a chunk. tables_are_local: cos and sin have the rows of the local rows.
    cu_seqlens: of each of this rank's pieces (cu_seqlens_q, cu_seqlens_k, the longest) on the device, None without
    documents.
    """

    group: Group
    chunk: int
    shares: Shares
    tables_are_local: bool = False
    cu_seqlens: tuple[tuple[torch.Tensor, torch.Tensor, int], ...] | None = None

    @property
    def sharding(self) -> str:
        return self.shares.sharding

    @property
    def own(self) -> Share:
        return self.shares.shares[self.group.rank]

    @property
    def owned(self) -> tuple[int, ...]:
        return self.shares.owned_by(self.group.rank)

    def sent_to(self, place: int) -> list[Run | None]:
        """By rank: which rows it needs of this rank's chunk number ``place``, as that rank's buffer has them."""
        return [self.shares.needed.get((rank, self.owned[place])) for rank in range(self.group.size)]

    def received_from(self, place: int) -> list[Run | None]:
        """By rank: which rows this rank needs of that one's chunk number ``place``, as this rank's buffer has them."""
        needed, own = self.shares.needed, self.group.rank
        return [needed.get((own, self.shares.owned_by(rank)[place])) for rank in range(self.group.size)]
