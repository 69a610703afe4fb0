"""What a warpgroup of the sm_90 backward does with a tile, whatever the head dim: weights, products, epilogue."""

import triton.language as tl

from fused_rope_attn.attention.hopper.backward_load import KEYS
from fused_rope_attn.attention.hopper.dq import BLOCK_M
from fused_rope_attn.attention.hopper.masks import hide_pairs
from fused_rope_attn.attention.hopper.softmax import cap_scores
from fused_rope_attn.kernels.rotation import head_rotation, load_angles, rotate, store_pairs, unpack_pairs
from fused_rope_attn.kernels.tiles import RowFormat, Rows, store_tile
from fused_rope_attn.runtime.triton_compat import gl, jit, mbarrier, reinterpret, warpgroup_mma

# A capped score, otherwise from -1 to 1, that gives p = 0 under any cap, and 0 times the tanh's derivative too.
HIDDEN = gl.constexpr(-1e18)


@jit
def weigh(s, lse, hidden, clamp: gl.constexpr, keys, columns, diagonal, left, right, qk_scale, cap_scale,
          DTYPE: gl.constexpr, IS_CAUSAL: gl.constexpr):  # fmt: skip
    """(p, s): the weights exp2(s - lse) of scores (keys, queries), 0 where ``hidden`` and not to be seen; s as capped.

    clamp: whether there may be keys that do not exist, whose scores need not stay below lse.
    """
    if cap_scale is None:
        p = gl.exp2(s * qk_scale - lse[None, :])
        if hidden:
            p = hide_pairs(p, 0.0, keys, columns, diagonal, left, right, IS_CAUSAL)
            if clamp:
                # Their score is 0; finite is enough where K is zero.
                p = gl.where(p > 1.0, 1.0, p)
    else:
        # A branch after the exponential would keep the scores beside p, for which there are no registers.
        s = cap_scores(s, cap_scale, DTYPE)
        if hidden:
            s = hide_pairs(s, HIDDEN, keys, columns, diagonal, left, right, IS_CAUSAL)
        p = gl.minimum(gl.exp2(s * qk_scale - lse[None, :]), 1.0, propagate_nan=tl.PropagateNan.ALL)
    return p, s


@jit
def issue_product(a, b, b_full, phase, nothing):
    """Begin the product of a (keys, columns) and the transposed b (1, 1, BLOCK_M, columns), once b has arrived."""
    mbarrier.wait(b_full, phase)
    b_t = b.reshape((BLOCK_M, a.shape[1])).permute((1, 0))
    return warpgroup_mma(a, b_t, nothing, use_acc=False, is_async=True)


@jit
def drop_keys(dk, dv, start, start_k, len_k):
    """dk, dv of the keys from ``start`` on, zero for those outside [start_k, len_k), which do not exist."""
    keys = gl.arange(0, KEYS, gl.SliceLayout(1, dk.type.layout)) + start
    exists = (keys >= start_k) & (keys < len_k)
    return gl.where(exists[:, None], dk, 0.0), gl.where(exists[:, None], dv, 0.0)


@jit
def store_dv(rows_ptr, dv, stage, rows_left, strides, D: gl.constexpr, COLUMNS: gl.constexpr, LONG: gl.constexpr):
    """Write dv (KEYS, COLUMNS), 16-bit, through shared memory of its shape to a layout that writes whole sectors."""
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    stage.store(dv)
    dv = stage.load(WHOLE)
    rows = Rows(
        ptr=rows_ptr, stride_row=strides[2], stride_column=strides[3], num_rows=rows_left, first_row=None,
        format=RowFormat(D=D, BLOCK_D=COLUMNS, USE_INT64_OFFSETS=LONG),
    )  # fmt: skip
    store_tile(rows, dv, gl.arange(0, KEYS, gl.SliceLayout(1, WHOLE)), WHOLE)


@jit
def store_dk(rows_ptr, dk, room, cos_ptr, sin_ptr, cos_strides, sin_strides, batch, start, NK, strides,
             FIRST: gl.constexpr, D: gl.constexpr, R: gl.constexpr, COLUMNS: gl.constexpr, INTERLEAVED: gl.constexpr,
             LONG: gl.constexpr):  # fmt: skip
    """Turn dk (KEYS, COLUMNS) float32 of keys from ``start`` on back and write it, as ``store_dv`` does.

    ``room``: KEYS * COLUMNS * 2 bytes of shared memory. FIRST: the pair that its columns begin with.
    """
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 4], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    STAGE: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    stage = reinterpret(room, gl.float32, [KEYS, COLUMNS // 2], STAGE)
    first, second = unpack_pairs(dk)
    stage.store(first)
    first = stage.load(PAIRS)
    stage.store(second)
    second = stage.load(PAIRS)
    rotation = head_rotation(cos_ptr, sin_ptr, cos_strides, sin_strides, batch.to(gl.int64), NK, R, INTERLEAVED)
    offs = gl.arange(0, KEYS, gl.SliceLayout(1, PAIRS))
    pairs = None
    if FIRST:
        pairs = gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, PAIRS)) + FIRST
    cos, sin = load_angles(rotation, offs + start, COLUMNS, CHECK_POSITIONS=True, LAYOUT=PAIRS, pairs=pairs)
    first, second = rotate(first, second, cos, sin, CONJUGATE=True)
    rows = Rows(
        ptr=rows_ptr, stride_row=strides[2], stride_column=strides[3], num_rows=NK - start, first_row=None,
        format=RowFormat(D=D, BLOCK_D=COLUMNS, USE_INT64_OFFSETS=LONG),
    )  # fmt: skip
    store_pairs(rows, first, second, offs, rotation, PAIR_LAYOUT=PAIRS, TILE_LAYOUT=WHOLE, FIRST_PAIR=FIRST)
