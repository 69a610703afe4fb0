# mypy: ignore-errors
"""The keys and values that a tile of queries attends to, in the forward pass and for dQ."""

import triton
import triton.language as tl

from fused_rope_attn.attention.portable.parts import nope_tiles
from fused_rope_attn.kernels.masks import Mask
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import Rotation
from fused_rope_attn.kernels.tiles import HeadTiles, Origin, head_tiles


@record
class HeadKeys:
    """Keys and values of one head of a sequence, read BLOCK_N at a time."""

    k: HeadTiles
    k_nope: HeadTiles | None
    v: HeadTiles
    rotation: Rotation | None  # of the keys; None: they are stored rotated
    mask: Mask
    BLOCK_N: tl.constexpr


@triton.jit
def keys_of_head(
    sequence, head, k, v, nope, rotation, format, value_format, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr
):
    """Return the ``HeadKeys`` of key head ``head`` (int64) of a ``Sequence``.

    k and v are ``TensorView``s, and nope is ``NopeViews`` or None.
    """
    origin = Origin(batch=sequence.batch, head=head, row=sequence.first_k)
    mask, num_keys = sequence.mask, sequence.num_keys
    k_tiles = head_tiles(k, origin, num_keys, format, mask.first_key, mask.READS_LENGTHS, USE_TMA)
    v_tiles = head_tiles(v, origin, num_keys, value_format, mask.first_key, mask.READS_LENGTHS, USE_TMA)
    k_nope = None
    if nope is not None:
        k_nope = nope_tiles(nope.k, nope, origin, num_keys, mask.first_key, mask.READS_LENGTHS)
    return HeadKeys(k=k_tiles, k_nope=k_nope, v=v_tiles, rotation=rotation, mask=mask, BLOCK_N=BLOCK_N)
