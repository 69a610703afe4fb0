# mypy: ignore-errors
"""The largest logit of each batch entry, or packed sequence, and head, from those of its rows."""

import triton
import triton.language as tl

from fused_rope_attn.kernels.lengths import packed_rows


@triton.jit(do_not_specialize=["H", "NQ"])
def max_logit_kernel(highest_ptr, max_logit_ptr, cu_q_ptr, H, NQ, BLOCK: tl.constexpr):
    """Take the maximum over the rows of one batch entry and head; a program for each.

    highest: (B, H, NQ) float32, or (H, NQ) of packed rows with cu_q (sequences + 1,) int32, else None. max_logit:
    (B | sequences, H) float32, -inf where there are no rows.
    """
    entry = tl.program_id(0)
    first = entry.to(tl.int64) * NQ
    length = NQ
    if cu_q_ptr is not None:
        sequence = entry // H
        begin, length = packed_rows(cu_q_ptr, sequence, sequence + 1, NQ)
        first = (entry % H).to(tl.int64) * NQ + begin
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, length, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        rows = tl.load(highest_ptr + first + offs, mask=offs < length, other=float("-inf"))
        highest = tl.maximum(highest, rows)
    tl.store(max_logit_ptr + entry, tl.max(highest, 0))
