"""Launcher of the pre-pass, which rotates K (and for wide heads of sm_90 Q) once, in pair order."""

import torch
import triton

from fused_rope_attn.attention.masks import NO_MASKS, NO_TENSORS
from fused_rope_attn.attention.prepass_kernel import TILE_WORDS, rotate_kernel
from fused_rope_attn.kernels.arguments import tile_count
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.layouts import block_d, is_long, table_strides


def _contiguous(shape):
    """Strides of the rotated copy of a (B, H, N, D) tensor."""
    _, heads, length, head_dim = shape
    return (heads * length * head_dim, length * head_dim, head_dim, 1)


def _rotation(
    x, cos, sin, rotary_dim, interleaved, config, num_sequences, sign=None, len_q=None, len_k=None, counter=False,
    tile_rows=0, follows=False,
) -> Launch:  # fmt: skip
    """The launch of ``rotate_kernel`` over x ``(B, H, N, D)``."""
    batch, heads, length, head_dim = x.shape
    cos_strides, sin_strides = table_strides(cos, sin, rotary_dim, interleaved)
    block_n, chunk = config.rotate_rows, config.rotate_heads
    return Launch(
        rotate_kernel,
        tile_count(length, num_sequences, block_n) * triton.cdiv(heads, chunk) * batch,
        (
            x.stride(), _contiguous(x.shape), cos_strides, sin_strides, sign, heads, length, num_sequences,
            cos.shape[-2], len_q, len_k,
        ),
        {
            "ZERO_COUNTER": counter,
            "TILE_ROWS": tile_rows,
            "HEADS": chunk,
            "D": head_dim,
            "R": rotary_dim,
            "BLOCK_N": block_n,
            "BLOCK_D": block_d(head_dim),
            "INTERLEAVED": interleaved,
            "USE_INT64_OFFSETS": is_long(x.stride()),
            "END_AFTER_PREVIOUS_LAUNCH": follows,
            "PDL": config.pdl,
        },
        {"num_warps": 4, **({"launch_pdl": True} if follows else {})},
    )  # fmt: skip


class RotateQueries:
    """Rotated copy of q ``(B, HQ, NQ, D)`` times ``sign``, as ``RotateKeys`` makes it, for len_k keys.

    Query i uses table row len_k - NQ + i, or what ``masks`` make of len_k.
    """

    def __init__(self, q, len_k, cos, sin, rotary_dim, interleaved, config, sign, masks=NO_MASKS):
        self.shape = q.shape
        self.launch = _rotation(
            q, cos, sin, rotary_dim, interleaved, config, masks.num_sequences, sign, len_k=len_k
        )  # fmt: skip

    def __call__(self, stream, q, cos, sin, mask_tensors=NO_TENSORS) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=q.dtype, device=q.device)
        _, _, lens, cu_q, cu_k = mask_tensors
        self.launch(stream, q, out, cos, sin, None, lens, cu_q, None, cu_k)
        return out


class RotateKeys:
    """Rotated copy of k ``(B, HKV, NK, D)``, contiguous, columns in pair order; key j uses table row j.

    counter: the call also zeroes an int32 word, in which the next launch counts. ``masks``: keys that do not exist are
    not rotated, packed sequences begin at row 0 each. tiles: (NQ, rows of a tile), to describe packed queries' tiles
    behind the counter, which then is ``counter_size`` words long. follows: as END_AFTER_PREVIOUS_LAUNCH
    of ``rotate_kernel``.
    """

    def __init__(
        self, k, cos, sin, rotary_dim, interleaved, config, counter=False, masks=NO_MASKS, tiles=None, follows=False
    ):
        self.shape = k.shape
        self.describes = tiles is not None and masks.packed
        len_q, tile_rows = tiles if self.describes else (None, 0)
        self.num_tiles = tile_count(len_q, masks.num_sequences, tile_rows) if self.describes else 0
        self.counter_size = TILE_WORDS.value * (1 + self.num_tiles)
        self.launch = _rotation(
            k, cos, sin, rotary_dim, interleaved, config, masks.num_sequences, len_q=len_q, counter=counter,
            tile_rows=tile_rows, follows=follows and config.pdl,
        )  # fmt: skip

    def __call__(self, stream, k, cos, sin, counter=None, mask_tensors=NO_TENSORS) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=k.dtype, device=k.device)
        _, _, lens, cu_q, cu = mask_tensors
        self.launch(stream, k, out, cos, sin, counter, lens, cu, cu_q if self.describes else None, None)
        return out
