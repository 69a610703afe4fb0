"""What a warpgroup of the sm_90 backward does with a tile, whatever the head dim: weights, products, epilogue."""

import triton.language as tl

from fused_rope_attn.attention.hopper.backward_masks import hide_pairs
from fused_rope_attn.attention.hopper.columns import LEFT, Pieces, issue_over_columns, scale_pieces, store_pieces
from fused_rope_attn.attention.hopper.key_norm import load_raw_keys, unnorm_keys
from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M as BLOCK_M
from fused_rope_attn.attention.hopper.shapes import KEYS
from fused_rope_attn.attention.hopper.softmax import cap_scores
from fused_rope_attn.kernels.rotation import head_rotation, load_angles, rotate, store_pairs, unpack_pairs
from fused_rope_attn.kernels.softmax import LN2
from fused_rope_attn.kernels.tiles import Origin, RowFormat, Rows, columns_from, head_rows, store_tile
from fused_rope_attn.runtime.triton_compat import gl, jit, mbarrier, reinterpret

# A capped score, otherwise from -1 to 1, that gives p = 0 under any cap, and 0 times the tanh's derivative too.
HIDDEN = gl.constexpr(-1e18)


@jit
def weigh(s, lse, is_masked, keys, columns, diagonal, mask, scale, DTYPE: gl.constexpr, CLAMP: gl.constexpr):
    """(p, s): the weights exp2(s - lse) of scores s (keys, queries) float32, and s as capped.

    Where the tile ``is_masked``, pairs that must not see each other have weight 0 (``hide_pairs`` takes keys, columns,
    diagonal). lse (queries,) float32 in base 2. CLAMP: there may be keys that do not exist and that the mask lets
    through, whose scores need not stay below lse. DTYPE: of q and k.
    """
    if scale.cap_scale is None:
        p = gl.exp2(s * scale.qk_scale - lse[None, :])
        if is_masked:
            p = hide_pairs(mask, p, 0.0, keys, columns, diagonal)
            if CLAMP:
                # Their score is 0; finite is enough where K is zero.
                p = gl.where(p > 1.0, 1.0, p)
    else:
        # A branch after the exponential would keep the scores beside p, for which there are no registers.
        s = cap_scores(s, scale.cap_scale, DTYPE)
        if is_masked:
            s = hide_pairs(mask, s, HIDDEN, keys, columns, diagonal)
        p = gl.minimum(gl.exp2(s * scale.qk_scale - lse[None, :]), 1.0, propagate_nan=tl.PropagateNan.ALL)
    return p, s


@jit
def issue_product(a, b, b_full, phase, nothing, RIGHT: gl.constexpr = 0):
    """Begin the product of a (keys, columns) and the transposed b (1, 1, BLOCK_M, columns), once b has arrived.

    nothing (keys, BLOCK_M) float32: zeros in the layout of the result. RIGHT: ``right_columns``.
    """
    mbarrier.wait(b_full, phase)
    return issue_over_columns(a, b.reshape((BLOCK_M, a.shape[1])), nothing, RIGHT)


@jit
def issue_block_product(a, ring, slot, step, nothing):
    """``issue_product`` of a and the block that the ``Ring`` holds in this step, in this slot."""
    return issue_product(a, ring.smem.index(slot), ring.full.index(slot), (step // ring.STAGES) & 1, nothing)


@jit
def drop_keys(gradient, start_n, mask):
    """gradient (KEYS, columns) of the keys from start_n on, zero for those that do not exist."""
    keys = gl.arange(0, KEYS, gl.SliceLayout(1, gradient.type.layout)) + start_n
    exists = (keys >= mask.first_key) & (keys < mask.num_keys)
    return gl.where(exists[:, None], gradient, 0.0)


@jit
def drop_keys_of_pieces(gradient, start_n, mask):
    """``drop_keys`` of ``Pieces``."""
    if gradient.right is None:
        return Pieces(left=drop_keys(gradient.left, start_n, mask), right=None)
    else:
        return Pieces(left=drop_keys(gradient.left, start_n, mask), right=drop_keys(gradient.right, start_n, mask))


@jit
def unpack_pieces(x):
    """First and second members of the pairs of ``Pieces``, as ``Pieces``."""
    left1, left2 = unpack_pairs(x.left)
    if x.right is None:
        return Pieces(left=left1, right=None), Pieces(left=left2, right=None)
    else:
        right1, right2 = unpack_pairs(x.right)
        return Pieces(left=left1, right=right1), Pieces(left=left2, right=right2)


@jit
def store_dv(rows, dv, stage):
    """Write dv, ``Pieces`` of (KEYS, columns), to 16-bit ``Rows``, through shared memory, so that whole sectors are
    written.

    stage: (KEYS, columns), 16-bit.
    """
    COLUMNS: gl.constexpr = stage.shape[1]
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    store_pieces(stage, dv, LEFT)
    tile = stage.load(WHOLE)
    store_tile(rows, tile, gl.arange(0, KEYS, gl.SliceLayout(1, WHOLE)), WHOLE)


@jit
def store_sums(rows, dv):
    """Write dv (KEYS, columns) float32 to the first columns of ``Rows``."""
    # Four threads of a product's layout write a whole sector of 32 bytes.
    OWN: gl.constexpr = dv.type.layout
    row_format = RowFormat(
        D=rows.format.D, BLOCK_D=dv.shape[1], USE_INT64_OFFSETS=rows.format.USE_INT64_OFFSETS
    )  # fmt: skip
    rows = Rows(
        ptr=rows.ptr, stride_row=rows.stride_row, stride_column=rows.stride_column, num_rows=rows.num_rows,
        first_row=None, format=row_format,
    )  # fmt: skip
    store_tile(rows, dv, gl.arange(0, KEYS, gl.SliceLayout(1, OWN)), OWN)


@jit
def store_dk(rows, dk, room, keys, num_keys, gradients, WARPGROUP: gl.constexpr, FIRST_PAIR: gl.constexpr):
    """Rotate dk, ``Pieces`` of (KEYS, columns), of ``keys`` back, take it through the norm of k where there is one, and
    write it to ``Rows`` as ``store_dv`` does.

    Only the first num_keys keys of the sequence have rows in the tables. ``room``: KEYS * columns * 2 bytes of shared
    memory. FIRST_PAIR: the rotation pair that the columns begin with.
    """
    COLUMNS: gl.constexpr = rows.format.BLOCK_D
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 4], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    STAGE: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    stage = reinterpret(room, gl.float32, [KEYS, COLUMNS // 2], STAGE)
    if gradients.key_norm is not None:
        raw1, raw2 = load_raw_keys(
            gradients.key_norm, keys, rows.num_rows, gradients, PAIRS, WHOLE, COLUMNS, FIRST_PAIR
        )  # fmt: skip
    first, second = unpack_pieces(dk)
    store_pieces(stage, first, LEFT // 2)
    first = stage.load(PAIRS)
    store_pieces(stage, second, LEFT // 2)
    second = stage.load(PAIRS)
    rotation = head_rotation(
        gradients.cos_ptr, gradients.sin_ptr, gradients.cos_strides, gradients.sin_strides, keys.batch.to(gl.int64),
        num_keys, gradients.R, gradients.INTERLEAVED,
    )  # fmt: skip
    offs = gl.arange(0, KEYS, gl.SliceLayout(1, PAIRS))
    pairs = None
    if FIRST_PAIR:
        pairs = gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, PAIRS)) + FIRST_PAIR
    cos, sin = load_angles(rotation, offs + keys.start_n, COLUMNS, CHECK_POSITIONS=True, LAYOUT=PAIRS, pairs=pairs)
    first, second = rotate(first, second, cos, sin, CONJUGATE=True)
    if gradients.key_norm is not None:
        if dk.right is not None:
            # Behind its pieces the stage holds anything, and a norm sums up rows.
            exists = (gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, PAIRS)) < gradients.D // 2)[None, :]
            first, second = gl.where(exists, first, 0.0), gl.where(exists, second, 0.0)
        first, second = unnorm_keys(
            raw1, raw2, first, second, rows.num_rows, rotation, gradients.key_norm, WARPGROUP, FIRST_PAIR
        )  # fmt: skip
    store_pairs(rows, first, second, offs, rotation, PAIR_LAYOUT=PAIRS, TILE_LAYOUT=WHOLE, FIRST_PAIR=FIRST_PAIR)


@jit
def store_gradients(dk, dv, keys, NK, mask, scale, gradients, dv_stage, dk_room, dk_room_empty, dk_room_uses,
                    WARPGROUP: gl.constexpr, FIRST_COLUMN: gl.constexpr):  # fmt: skip
    """Write dv, and dk scaled and rotated back, of the KEYS keys from keys.start_n on: columns from FIRST_COLUMN on.

    dk, dv: ``Pieces`` of (KEYS, columns). dv_stage (KEYS, columns) 16-bit and dk_room, as much again, are memory that
    the block shares; dk_room has been filled dk_room_uses times, and its mbarrier dk_room_empty, if there is one, says
    when it is empty again. Keys that do not exist get zeros; rows from NK on are left out.
    """
    num_rows = NK - keys.start_n
    if mask.first_key is not None:
        dk, dv = drop_keys_of_pieces(dk, keys.start_n, mask), drop_keys_of_pieces(dv, keys.start_n, mask)
    row_format = RowFormat(D=gradients.D, BLOCK_D=dv_stage.shape[1], USE_INT64_OFFSETS=gradients.USE_INT64_OFFSETS)
    origin = Origin(batch=keys.batch.to(gl.int64), head=keys.head.to(gl.int64), row=keys.start_n)
    dv_rows = head_rows(gradients.dv_ptr, gradients.dv_strides, origin, num_rows, row_format)
    dk_rows = head_rows(gradients.dk_ptr, gradients.dk_strides, origin, num_rows, row_format)
    if gradients.dv_ptr.dtype.element_ty == gl.float32:
        store_sums(columns_from(dv_rows, FIRST_COLUMN), dv.left)
        if dv.right is not None:
            store_sums(columns_from(dv_rows, LEFT), dv.right)
    else:
        store_dv(columns_from(dv_rows, FIRST_COLUMN), dv, dv_stage)
    k_scale = scale.qk_scale * LN2
    if scale.cap_scale is not None:
        k_scale *= scale.cap_scale
    if dk_room_empty is not None:
        mbarrier.wait(dk_room_empty, (dk_room_uses & 1) ^ 1)
    dk = scale_pieces(dk, k_scale)
    store_dk(dk_rows, dk, dk_room, keys, mask.num_keys, gradients, WARPGROUP, FIRST_COLUMN // 2)
