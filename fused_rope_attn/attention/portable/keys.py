# mypy: ignore-errors
"""The keys and values that a tile of queries goes through, in the forward pass and for dQ."""

import triton
import triton.language as tl

from fused_rope_attn.kernels.masks import Mask
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import Rotation
from fused_rope_attn.kernels.tiles import HeadTiles, Origin, head_tiles


@record
class Keys:
    """Keys and values of one head of a sequence, read BLOCK_N at a time."""

    k: HeadTiles
    v: HeadTiles
    rotation: Rotation | None  # of the keys; None where they lie rotated in memory
    mask: Mask
    BLOCK_N: tl.constexpr


@triton.jit
def keys_of_head(sequence, head, k_ptr, v_ptr, k_strides, v_strides, rotation, format, BLOCK_N: tl.constexpr,
                 USE_TMA: tl.constexpr):  # fmt: skip
    """``Keys`` of key head ``head`` (int64) of a ``Sequence``, of k and v (B, HKV, NK, D)."""
    origin = Origin(batch=sequence.batch, head=head, row=sequence.first_k)
    mask = sequence.mask
    k = head_tiles(k_ptr, k_strides, origin, sequence.num_keys, format, mask.READS_LENGTHS, USE_TMA, mask.first_key)
    v = head_tiles(v_ptr, v_strides, origin, sequence.num_keys, format, mask.READS_LENGTHS, USE_TMA, mask.first_key)
    return Keys(k=k, v=v, rotation=rotation, mask=mask, BLOCK_N=BLOCK_N)
