"""Host side of the kernels' arguments: scalars and sizes that every launcher derives from a call in the same way."""

from __future__ import annotations

import math

import torch

LOG2E = math.log2(math.e)
# Beyond any sequence, and far enough from 2**31 to be added to a position.
WIDEST_WINDOW = 2**30


def scale_and_sign(softmax_scale: float, softcap: float = 0.0) -> tuple[float, float, float | None]:
    """(qk_scale > 0 for base-2 softmax, sign to multiply q by, cap_scale): kernels never see a scale <= 0.

    With a softcap the scores are ``qk_scale * tanh(cap_scale * q k)``; without one ``qk_scale * q k``, cap_scale None.
    """
    scale, sign = (1.0, 0.0) if softmax_scale == 0.0 else (abs(softmax_scale), math.copysign(1.0, softmax_scale))
    if softcap:
        return softcap * LOG2E, sign, scale / softcap
    return scale * LOG2E, sign, None


def tile_count(length: int, num_sequences: int | None, block: int) -> int:
    """``lengths.count_tiles`` on the host."""
    return -(-length // block) if num_sequences is None else length // block + num_sequences + 1


def dot_precision(dtype: torch.dtype) -> str:
    """Input precision of tl.dot: true float32 unless the user allowed tf32 for matrix products, by either API."""
    tf32 = dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


def heads_per_section(num_heads: int, group_size: int, bytes_per_kv_head: int, section_bytes: int) -> int:
    """Return how many query heads run together so that their K and V stay in ``section_bytes`` of L2; 0 bytes: one.

    Sections are of equal size as nearly as groups allow: a small last one would leave multiprocessors idle.
    """
    if section_bytes == 0:
        return 1
    groups = max(1, num_heads // group_size)  # an empty batch has 0
    most = min(groups, max(1, section_bytes // max(1, bytes_per_kv_head)))
    return -(-groups // -(-groups // most)) * group_size
