# mypy: ignore-errors
"""The softmax of the sm_90 forward, and the weights of its backward. Four threads, a quad, hold a row of scores.

It computes the same as ``kernels.softmax.online_softmax`` with four differences, which were all measured to pay:

- the maximum lags: it changes only when a row grows by more than 2**LAG, so that the output is rarely rescaled (an idea
  of FlashAttention-4's);
- each thread of a quad keeps a sum of its own until the end of the tile;
- two chains of comparisons find the maximum of a row, instead of one;
- the loop carries the weights as the words that the next product reads.
"""

import triton.language as tl
from triton import constexpr_function

from fused_rope_attn.attention.hopper import masks
from fused_rope_attn.attention.hopper.columns import ColumnParts
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.softmax import approximate_tanh, tanh
from fused_rope_attn.runtime.triton_compat import gl, jit

# A row's largest weight is at most 2**LAG. 16-bit floats keep their relative precision there, and sums are float32.
LAG = gl.constexpr(8.0)


@constexpr_function
def rescale_asm(values):
    """Return (assembly, constraints) that multiply ``values`` registers by factors, unless a warp's factors are all 1.

    Operands: the results, which are the first inputs too, and a factor for each. A thread holds two rows, and so two
    factors: that of registers 0 and 1, and that of registers 2 and 3, and so on.
    """
    factors = 2 * values
    assembly = (
        "{ .reg .pred grew, other; "
        f"setp.neu.f32 grew, ${factors}, 0f3F800000; setp.neu.f32 other, ${factors + 2}, 0f3F800000; "
        "or.pred grew, grew, other; vote.sync.any.pred grew, grew, 0xffffffff; @!grew bra STAY; "
        + " ".join(f"mul.f32 ${i}, ${i}, ${factors + i};" for i in range(values))
        + " STAY: }"
    )
    return assembly, ",".join(["=f"] * values + [str(i) for i in range(values)] + ["f"] * values)


@jit
def rescale_part(acc, correction):
    """Return acc (64, columns) float32 times correction (64,); a warp multiplies nothing if all its factors are 1."""
    # A thread holds half as many values of the 64 rows as there are columns; beyond 128 they are taken in two parts.
    VALUES: gl.constexpr = min(64, acc.shape[1] // 2)
    ASSEMBLY: gl.constexpr = rescale_asm(VALUES)
    factors = gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout))[:, None].broadcast_to(acc.shape)
    return gl.inline_asm_elementwise(
        ASSEMBLY[0], ASSEMBLY[1], [acc, factors], dtype=gl.float32, is_pure=True, pack=VALUES
    )


@jit
def rescale_output(acc, correction):
    """Return ``ColumnParts`` of the output so far, times correction (64,)."""
    left = rescale_part(acc.left, correction)
    return ColumnParts(left, None if acc.right is None else rescale_part(acc.right, correction))


@jit
def finish_part(acc, seen, factor, DTYPE: gl.constexpr):
    """Return acc (64, columns) float32 times factor (64,), zero in rows that are not ``seen``, rounded to DTYPE."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))
    seen = gl.convert_layout(seen, gl.SliceLayout(1, acc.type.layout))
    return gl.where(seen[:, None], acc * factor[:, None], 0.0).to(DTYPE)


@jit
def finish_output(acc, seen, factor, DTYPE: gl.constexpr):
    """Finish the ``ColumnParts`` of the output as ``finish_part`` does."""
    left = finish_part(acc.left, seen, factor, DTYPE)
    return ColumnParts(left, None if acc.right is None else finish_part(acc.right, seen, factor, DTYPE))


@jit
def cap_scores(scores, scale, DTYPE: gl.constexpr):
    """Return scores after the cap of ``scale``, a ``ScoreScale``, for inputs of DTYPE; without a cap unchanged.

    bfloat16 takes the hardware's tanh, which is exact to 2**-11 of its value: a quarter of the error of rounding a
    score to bfloat16. It is one instruction of the unit that makes the exponentials, which is the bottleneck;
    ``softmax.tanh`` is two of them and a division.
    """
    if scale.cap_scale is None:
        return scores
    elif DTYPE == gl.bfloat16:
        return approximate_tanh(scores * scale.cap_scale)
    else:
        return tanh(scores * scale.cap_scale, PRECISE=False)


@record
class RowState:
    """The softmax of 64 rows after some blocks, float32, in base 2."""

    maximum: gl.tensor  # (64,), may be less than the largest score times qk_scale by LAG; -inf: nothing is seen
    sums: gl.tensor  # (64, 4), one for each thread of a quad
    highest: gl.tensor | None  # (64,), the largest score times qk_scale, if the call wants it


@jit
def follow_maximum(scores, rows, qk_scale):
    """Begin a step of the running softmax: (the ``RowState`` with new maxima, subtrahend, correction), each (64,).

    A row that has seen nothing has the maximum -inf. Its subtrahend is 0, so that exp2 gives 0 and not NaN. To follow
    the highest score takes registers, but no instruction, and changes no other result.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    of_block = gl.max(gl.max(scores.reshape((scores.shape[0], scores.shape[1] // 8, 8)), 1), 1)
    before = rows.maximum if rows.highest is None else rows.highest
    highest = gl.maximum(before, gl.convert_layout(of_block, ROW, assert_trivial=True) * qk_scale)
    maximum, subtrahend, correction = lag(rows.maximum, highest)
    return RowState(maximum, rows.sums, None if rows.highest is None else highest), subtrahend, correction


@jit
def lagging_maximum(row_max, highest, qk_scale):
    """Return (row_max, subtrahend, correction) after a block with the largest scores ``highest`` (rows,)."""
    return lag(row_max, gl.maximum(row_max, highest * qk_scale))


@jit
def lag(row_max, highest):
    """Return (row_max, subtrahend, correction) where the largest of all scores so far is ``highest``, in base 2."""
    new_max = gl.where(highest - row_max > LAG, highest, row_max)
    subtrahend = gl.where(new_max == float("-inf"), 0.0, new_max)
    return new_max, subtrahend, tl.math.exp2(row_max - subtrahend)


@jit
def sum_quads(p):
    """Return the sums of weights p (rows, BLOCK_N) in each of the four threads of a quad, (rows, 4)."""
    return gl.sum(gl.sum(p.reshape((p.shape[0], p.shape[1] // 8, 4, 2)), 3), 1)


@jit
def weigh_scores(scores, subtrahend, correction, rows, qk_scale):
    """End the step that ``follow_maximum`` began: (weights (64, BLOCK_N), ``RowState``)."""
    p = tl.math.exp2(scores * qk_scale - subtrahend[:, None])
    part = gl.convert_layout(sum_quads(p), rows.sums.type.layout, assert_trivial=True)
    factor = gl.convert_layout(correction, gl.SliceLayout(1, rows.sums.type.layout))
    return p, replace(rows, sums=rows.sums * factor[:, None] + part)


@jit
def weigh_first(scores, qk_scale, ROW: gl.constexpr):
    """Weigh the scores (64, keys) of a tile's first block: (weights, ``RowState`` with its maxima in layout ROW)."""
    QUADS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    unseen = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, scores.type.layout))
    no_sums = gl.zeros([64, 4], gl.float32, QUADS)
    rows, subtrahend, correction = follow_maximum(scores, RowState(unseen, no_sums, None), qk_scale)
    p, rows = weigh_scores(scores, subtrahend, correction, rows, qk_scale)
    return p, replace(rows, maximum=gl.convert_layout(rows.maximum, ROW, assert_trivial=True))


@jit
def pack_weights(p, DTYPE: gl.constexpr):
    """Pack p (64, BLOCK_N) float32 into int32: a word for each two neighbours, rounded to DTYPE, and a word of zeros.

    A 16-bit tensor that a loop carries takes a register for every value, and instructions that split words and join
    them again. A carried zero takes nothing.
    """
    PAIR: gl.constexpr = "bf16x2" if DTYPE == gl.bfloat16 else "f16x2"
    ASSEMBLY: gl.constexpr = f"cvt.rn.{PAIR}.f32 $0, $3, $2; mov.b32 $1, 0;"
    return gl.inline_asm_elementwise(ASSEMBLY, "=r,=r,f,f", [p], dtype=gl.int32, is_pure=True, pack=2)


@jit
def keep_queries(q):
    """Pack 16-bit q as ``pack_weights`` does."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, 0;", "=r,=r,r", [q], dtype=gl.int32, is_pure=True, pack=2
    )


@jit
def whole_weights(words, LAYOUT: gl.constexpr):
    """Return a block's packed weights in LAYOUT; if they are those of its first half, the other keys get 0."""
    if words.type.layout == LAYOUT:
        return words
    else:
        whole = gl.join(words, gl.zeros_like(words)).permute((0, 2, 1)).reshape((words.shape[0], 2 * words.shape[1]))
        return gl.convert_layout(whole, LAYOUT, assert_trivial=True)


@jit
def unpack_weights(words, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Unpack the weights of ``pack_weights`` as an operand of a product; "not pure" keeps this before the products."""
    if DTYPE == gl.bfloat16:
        p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [words], dtype=gl.bfloat16, is_pure=False, pack=2)
    else:
        p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [words], dtype=gl.float16, is_pure=False, pack=2)
    return gl.convert_layout(p, LAYOUT)


# The backward. A capped score is from -1 to 1; this one gives p = 0 under any cap, also times the tanh's derivative.
HIDDEN = gl.constexpr(-1e18)


@jit
def weigh(s, lse, is_masked, keys, columns, diagonal, mask, scale, DTYPE: gl.constexpr, CLAMP: gl.constexpr):
    """Return (p, s): the weights exp2(s - lse) of scores s (keys, queries) float32, and s after its cap.

    If the tile ``is_masked``, pairs that must not see each other have weight 0 (``hide_pairs`` takes keys, columns,
    diagonal). lse (queries,) float32 in base 2. CLAMP: the mask may let keys through that do not exist, and their
    scores may exceed lse. DTYPE: of q and k.
    """
    if scale.cap_scale is None:
        p = gl.exp2(s * scale.qk_scale - lse[None, :])
        if is_masked:
            p = masks.hide_pairs(mask, p, 0.0, keys, columns, diagonal)
            if CLAMP:
                # Their score is 0, and K is zero, so that any finite weight will do.
                p = gl.where(p > 1.0, 1.0, p)
    else:
        # Mask before the exponential: a branch after it would keep scores and p alive, for which registers are lacking.
        s = cap_scores(s, scale, DTYPE)
        if is_masked:
            s = masks.hide_pairs(mask, s, HIDDEN, keys, columns, diagonal)
        p = gl.minimum(gl.exp2(s * scale.qk_scale - lse[None, :]), 1.0, propagate_nan=tl.PropagateNan.ALL)
    return p, s


@jit
def derivative_factor(p, s, scale):
    """Return the factor of dP - delta in dS: ``weigh``'s weights p, with a cap times the tanh's derivative."""
    return p if scale.cap_scale is None else p * (1.0 - s * s)


@jit
def with_factor(buffers, scale, SHAPE: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the ``Buffers``, with a tile for ``derivative_factor`` if there is a cap: else the weights are it."""
    if scale.cap_scale is None:
        return buffers
    else:
        return replace(buffers, ds_factor=gl.allocate_shared_memory(DTYPE, SHAPE, LAYOUT))
