"""One call of context parallelism: the properties that all ranks share."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fused_rope_attn.distributed.groups import Group
from fused_rope_attn.distributed.layout import Message, Share, Shares


class Call(NamedTuple):
    """The properties of one call, equal on all ranks.

    method: "all_gather" or "all_to_all". shares: every rank's. chunk: rows of a chunk. tables_are_local: cos and sin
    have the rows of the local rows. cu_seqlens: (cu_seqlens_q, cu_seqlens_k, the longest) of each of this rank's
    segments on the device, None without documents.
    """

    group: Group
    method: str
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

    @property
    def sent(self) -> list[list[Message]]:
        """Return the messages that this rank sends, by receiver."""
        return [self.shares.messages.get((self.group.rank, rank), []) for rank in range(self.group.size)]

    @property
    def received(self) -> list[list[Message]]:
        """Return the messages that this rank receives, by sender."""
        return [self.shares.messages.get((rank, self.group.rank), []) for rank in range(self.group.size)]
