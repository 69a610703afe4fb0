"""What a call's masks decide about its launches."""

from __future__ import annotations

from typing import NamedTuple

from fused_rope_attn.kernels.arguments import window_bounds
from fused_rope_attn.runtime.layouts import signature


class Masks(NamedTuple):
    """What a call's masks decide about its launches: presence and values of the host's, signatures of the tensors.

    left, right: keys before and after the query's own, None for unbounded; with causal, right is None. The tensors, in
    the order in which kernels take them: sinks (HQ,), kv_starts and kv_lens (B,) int32, cu_seqlens_q and cu_seqlens_k
    (sequences + 1,) int32. max_seqlen: of packed sequences, as a power of two, so that batches share their launches.
    """

    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    tensors: tuple = (None,) * 5
    max_seqlen: int = 0

    @property
    def packed(self) -> bool:
        return self.tensors[3] is not None

    @property
    def bounded(self) -> bool:
        """Whether the number of keys is read on the device, or may begin after the first."""
        return any(x is not None for x in self.tensors[1:])

    def longest(self, length: int) -> int:
        """Rows of one sequence at most, in tensors of ``length`` rows."""
        return min(self.max_seqlen, length) if self.packed else length

    @property
    def num_sequences(self) -> int | None:
        return self.tensors[3][0][0] - 1 if self.packed else None


NO_MASKS = Masks()
NO_TENSORS = (None,) * 5


def describe_masks(causal: bool, left: int, right: int, softcap: float, tensors: tuple, max_seqlen: int = 0) -> Masks:
    """``Masks`` of a call; left and right as in ``window``, -1 for unbounded."""
    return Masks(
        *window_bounds(causal, left, right),
        softcap,
        tuple(None if x is None else signature(x) for x in tensors),
        1 << max(0, max_seqlen - 1).bit_length() if tensors[3] is not None else 0,
    )
