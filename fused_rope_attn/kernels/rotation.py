# mypy: ignore-errors
"""The rotation inside kernels: pairs of columns, their angles, and tiles that are rotated as they are read or written.

Pair order. RoPE rotates pairs of columns, and the two usual layouts disagree on which: ``(i, i + R/2)`` (half) or
``(2i, 2i + 1)`` (interleaved). Inside the kernels a query or key tile always has the members of pair ``p`` in columns
``2p`` and ``2p + 1``, whatever the layout in memory: scores do not depend on the order of the columns as long as q and
k agree. A thread that holds a tensor-core accumulator holds such neighbours, so rotating (and un-rotating dq and dk)
is register arithmetic, for every even R <= D, and ``rotate`` below is the only place where the formula exists.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from fused_rope_attn.kernels.norm import Norm, load_norm_weights, norm_pairs, pair_inverse_rms
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.tiles import (
    columns_from,
    load_head_tile,
    load_tile,
    load_where,
    row_mask,
    row_pointers,
    rows_from,
    store_tile,
    tile_range,
)


@record
class Rotation:
    """One batch entry's tables, how they pair columns, and the norm before; made by ``head_rotation``."""

    cos_ptr: tl.tensor  # to row 0 of (S, R/2), float32 or q's dtype
    sin_ptr: tl.tensor
    cos_strides: tl.tuple  # (batch, row, pair)
    sin_strides: tl.tuple
    num_positions: tl.tensor  # positions outside [0, num_positions) belong to rows that see nothing: angle 0
    norm: Norm | None  # of the rows before they are rotated; None: they are only rotated
    R: tl.constexpr
    INTERLEAVED: tl.constexpr


@triton.jit
def head_rotation(cos_ptr, sin_ptr, cos_strides, sin_strides, batch, num_positions, R: tl.constexpr,
                  INTERLEAVED: tl.constexpr):  # fmt: skip
    """``Rotation`` of batch entry ``batch`` (int64) from the tables' pointers and strides (batch, row, pair), without a
    norm."""
    return Rotation(
        cos_ptr=cos_ptr + batch * cos_strides[0],
        sin_ptr=sin_ptr + batch * sin_strides[0],
        cos_strides=cos_strides,
        sin_strides=sin_strides,
        num_positions=num_positions,
        norm=None,
        R=R,
        INTERLEAVED=INTERLEAVED,
    )


@triton.jit
def with_norm(rotation, weight_ptr, eps, offset, D: tl.constexpr):
    """The same ``Rotation`` behind a ``Norm`` of rows of D columns; without one where ``weight_ptr`` is None."""
    return Rotation(
        cos_ptr=rotation.cos_ptr,
        sin_ptr=rotation.sin_ptr,
        cos_strides=rotation.cos_strides,
        sin_strides=rotation.sin_strides,
        num_positions=rotation.num_positions,
        norm=Norm(weight_ptr=weight_ptr, eps=eps, offset=offset, D=D) if weight_ptr is not None else None,
        R=rotation.R,
        INTERLEAVED=rotation.INTERLEAVED,
    )


@triton.jit
def rotate(first, second, cos, sin, CONJUGATE: tl.constexpr):
    """Rotate every pair by its angle (RoFormer, Su et al. 2021, eq. 34), or by the negative angle (the transpose).

    The products of the first member are fused with the sums. Left to itself, the compiler fuses either product of a
    sum, depending on the code around it: a kernel's first tile and its pipelined loop then disagree in the last bit of
    a rotation, and the backward pass finds other weights than the forward pass. (Fused products of the second member
    or of cos are as right, but the sm_90 forward with norms spills 256 bytes with the latter.)
    """
    if CONJUGATE:
        sin = -sin
    return tl.math.fma(first, cos, -(second * sin)), tl.math.fma(first, sin, second * cos)


@triton.jit
def load_angles(rotation, positions, BLOCK_D: tl.constexpr, CHECK_POSITIONS: tl.constexpr,
                LAYOUT: tl.constexpr = None, pairs=None):  # fmt: skip
    """cos and sin (len(positions), BLOCK_D / 2) float32; pairs past R/2 get angle 0.

    CHECK_POSITIONS: positions that the tables do not have get angle 0 too; without it there must be none. With
    ``pairs`` the columns of the result belong to these pairs instead of 0 .. BLOCK_D / 2.
    """
    if pairs is None:
        pairs = tile_range(BLOCK_D // 2, 1, LAYOUT)
    rows = positions.to(tl.int64)[:, None]
    cos_pointers = rotation.cos_ptr + rows * rotation.cos_strides[1] + pairs[None, :] * rotation.cos_strides[2]
    sin_pointers = rotation.sin_ptr + rows * rotation.sin_strides[1] + pairs[None, :] * rotation.sin_strides[2]
    mask = None
    if CHECK_POSITIONS or BLOCK_D != rotation.R:
        mask = pairs[None, :] < rotation.R // 2
        if CHECK_POSITIONS:
            mask = mask & (rows >= 0) & (rows < rotation.num_positions)
    cos = load_where(cos_pointers, mask, 1.0)
    sin = load_where(sin_pointers, mask, 0.0)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def pack_pairs(first, second):
    """(rows, P), (rows, P) -> (rows, 2P) in pair order."""
    return tl.reshape(tl.join(first, second), (first.shape[0], 2 * first.shape[1]))


@triton.jit
def unpack_pairs(x):
    """(rows, 2P) in pair order -> (rows, P), (rows, P)."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def pair_columns(D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, LAYOUT: tl.constexpr,
                 FIRST_PAIR: tl.constexpr = 0):  # fmt: skip
    """Half layout: memory columns of the first and second member of every pair; unrotated columns pair up after R/2.

    The BLOCK_D / 2 pairs from number FIRST_PAIR on.
    """
    pairs = tile_range(BLOCK_D // 2, 1, LAYOUT)
    if FIRST_PAIR:
        pairs += FIRST_PAIR
    if R == D:
        return pairs, pairs + D // 2
    else:
        # The largest power of two that divides every break, so that loads stay vectorised.
        RUN: tl.constexpr = ((R // 2) | (D // 2)) & -((R // 2) | (D // 2))
        first = tl.where(pairs < R // 2, pairs, pairs + R // 2)
        second = tl.where(pairs < R // 2, pairs + R // 2, pairs + D // 2)
        return tl.max_contiguous(tl.multiple_of(first, RUN), RUN), tl.max_contiguous(tl.multiple_of(second, RUN), RUN)


@triton.jit
def norm_columns(D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_D: tl.constexpr,
                 LAYOUT: tl.constexpr = None, FIRST_PAIR: tl.constexpr = 0):  # fmt: skip
    """Memory columns of the first and second members of pairs, and which pairs exist, (BLOCK_D / 2,) each.

    The order, and FIRST_PAIR, are those of ``load_pairs``. LAYOUT is that of its tiles in Gluon kernels.
    """
    pairs = tile_range(BLOCK_D // 2, 1, LAYOUT)
    if FIRST_PAIR:
        pairs += FIRST_PAIR
    if INTERLEAVED:
        return 2 * pairs, 2 * pairs + 1, pairs < D // 2
    else:
        columns1, columns2 = pair_columns(D, R, BLOCK_D, LAYOUT, FIRST_PAIR)
        return columns1, columns2, pairs < D // 2


@triton.jit
def pair_norm_weights(norm, R: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_D: tl.constexpr,
                      LAYOUT: tl.constexpr = None, FIRST_PAIR: tl.constexpr = 0):  # fmt: skip
    """``load_norm_weights`` of the ``norm_columns``, (1, BLOCK_D / 2) each."""
    columns1, columns2, is_pair = norm_columns(norm.D, R, INTERLEAVED, BLOCK_D, LAYOUT, FIRST_PAIR)
    exists = None
    if norm.D < 2 * FIRST_PAIR + BLOCK_D:
        exists = is_pair
    return load_norm_weights(norm, columns1, exists)[None, :], load_norm_weights(norm, columns2, exists)[None, :]


@triton.jit
def load_pairs(rows, offs, rotation, CHECK_ROWS: tl.constexpr, PAIR_LAYOUT: tl.constexpr = None,
               TILE_LAYOUT: tl.constexpr = None, FIRST_PAIR: tl.constexpr = 0):  # fmt: skip
    """First and second members of every pair of the rows ``offs``, as float32 tiles (len(offs), BLOCK_D / 2).

    Rows that do not exist are zero, as in ``load_tile``. Gluon kernels name the PAIR_LAYOUT of these tiles, which
    ``offs`` has, and the TILE_LAYOUT of the whole tile of which they are the halves. With FIRST_PAIR a tile of BLOCK_D
    columns holds the pairs from this number on, of rows with D columns in all.
    """
    D: tl.constexpr = rows.format.D
    BLOCK_D: tl.constexpr = rows.format.BLOCK_D
    if rotation.INTERLEAVED:
        if FIRST_PAIR:
            rows = columns_from(rows, 2 * FIRST_PAIR)
        if PAIR_LAYOUT is None:
            first, second = unpack_pairs(load_tile(rows, offs, CHECK_ROWS))
        else:
            offs = gl.convert_layout(offs, gl.SliceLayout(1, TILE_LAYOUT))
            first, second = unpack_pairs(load_tile(rows, offs, CHECK_ROWS, TILE_LAYOUT))
            first, second = gl.convert_layout(first, PAIR_LAYOUT), gl.convert_layout(second, PAIR_LAYOUT)
    else:
        columns1, columns2 = pair_columns(D, rotation.R, BLOCK_D, PAIR_LAYOUT, FIRST_PAIR)
        pointers1 = row_pointers(rows, offs, columns1)
        pointers2 = row_pointers(rows, offs, columns2)
        mask = None
        if CHECK_ROWS or D < 2 * FIRST_PAIR + BLOCK_D:
            mask = tile_range(BLOCK_D // 2, 1, PAIR_LAYOUT)[None, :] < D // 2 - FIRST_PAIR
            if CHECK_ROWS:
                mask = mask & row_mask(rows, offs)
        first = load_where(pointers1, mask, 0.0)
        second = load_where(pointers2, mask, 0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def load_normed_pairs(rows, offs, rotation):
    """``load_pairs``, normed where ``rotation`` has a norm; rows that do not exist stay zero."""
    first, second = load_pairs(rows, offs, rotation, CHECK_ROWS=True)
    norm = rotation.norm
    if norm is not None:
        weight1, weight2 = pair_norm_weights(norm, rotation.R, rotation.INTERLEAVED, rows.format.BLOCK_D)
        first, second = norm_pairs(first, second, weight1, weight2, norm)
    return first, second


@triton.jit
def norm_and_rotate(first, second, cos, sin, sign, rotation, weights, PAIR_LAYOUT: tl.constexpr = None):
    """Pairs of ``load_pairs`` normed, where ``rotation`` has a norm, rotated, and times ``sign``; all float32.

    weights: ``pair_norm_weights``, or None without a norm. PAIR_LAYOUT: of the pairs, which Gluon kernels name. A row's
    factor comes last, with the sign, because it commutes with the rotation: nothing waits for the row's sum but one
    multiplication, which calls without norms have, too. All kernels multiply in this order, and so give the same bits.
    """
    if rotation.norm is not None:
        sign = pair_inverse_rms(first, second, rotation.norm, PAIR_LAYOUT) * sign
        first, second = first * weights[0], second * weights[1]
    first, second = rotate(first, second, cos, sin, CONJUGATE=False)
    return first * sign, second * sign


@triton.jit
def store_pairs(rows, first, second, offs, rotation, PAIR_LAYOUT: tl.constexpr = None,
                TILE_LAYOUT: tl.constexpr = None, FIRST_PAIR: tl.constexpr = 0):  # fmt: skip
    """Write pairs back to their columns in memory; inverse of ``load_pairs``, rounding once.

    With FIRST_PAIR a tile of BLOCK_D columns holds the pairs from this number on, of rows with D columns in all.
    """
    D: tl.constexpr = rows.format.D
    BLOCK_D: tl.constexpr = rows.format.BLOCK_D
    if rotation.INTERLEAVED:
        x = pack_pairs(first, second)
        if PAIR_LAYOUT is not None:
            x = gl.convert_layout(x, TILE_LAYOUT)
            offs = gl.convert_layout(offs, gl.SliceLayout(1, TILE_LAYOUT))
        if FIRST_PAIR:
            rows = columns_from(rows, 2 * FIRST_PAIR)
        store_tile(rows, x, offs, TILE_LAYOUT)
    else:
        columns1, columns2 = pair_columns(D, rotation.R, BLOCK_D, PAIR_LAYOUT, FIRST_PAIR)
        exists = tile_range(BLOCK_D // 2, 1, PAIR_LAYOUT)[None, :] < D // 2 - FIRST_PAIR
        mask = (offs[:, None] < rows.num_rows) & exists
        dtype = rows.ptr.dtype.element_ty
        tl.store(row_pointers(rows, offs, columns1), first.to(dtype), mask=mask)
        tl.store(row_pointers(rows, offs, columns2), second.to(dtype), mask=mask)


@triton.jit
def load_rotated(rows, offs, rotation, position_offset, sign=1.0, CHECK_ROWS: tl.constexpr = True,
                 PAIR_LAYOUT: tl.constexpr = None, TILE_LAYOUT: tl.constexpr = None,
                 DTYPE: tl.constexpr = None, weights=None):  # fmt: skip
    """Rows ``offs`` of q or k, normed and rotated in float32, times ``sign``, rounded once to DTYPE, in pair order.

    DTYPE None is the memory's. Row i has position ``position_offset + i``. CHECK_ROWS and the layouts as in
    ``load_pairs``. weights: ``pair_norm_weights`` in PAIR_LAYOUT, where the caller has them; None: they are loaded.
    """
    BLOCK_D: tl.constexpr = rows.format.BLOCK_D
    if rotation.norm is not None:
        if weights is None:
            weights = pair_norm_weights(rotation.norm, rotation.R, rotation.INTERLEAVED, BLOCK_D, PAIR_LAYOUT)
    first, second = load_pairs(rows, offs, rotation, CHECK_ROWS, PAIR_LAYOUT, TILE_LAYOUT)
    cos, sin = load_angles(rotation, offs + position_offset, BLOCK_D, CHECK_POSITIONS=True, LAYOUT=PAIR_LAYOUT)
    first, second = norm_and_rotate(first, second, cos, sin, sign, rotation, weights, PAIR_LAYOUT)
    return pack_pairs(first, second).to(rows.ptr.dtype.element_ty if DTYPE is None else DTYPE)


@triton.jit
def load_rotated_tile(tiles, rotation, start, offs, position_offset, sign=1.0, CHECK_ROWS: tl.constexpr = True):
    """Rows ``start + offs`` of ``HeadTiles`` as products take them: rotated, in pair order.

    rotation None: they lie so in memory, and ``position_offset`` and ``sign`` say nothing. Otherwise they are rotated
    here, as ``load_rotated`` does; row i has position ``position_offset + i``.
    """
    if rotation is None:
        return load_head_tile(tiles, start, offs, CHECK_ROWS)
    else:
        return load_rotated(rows_from(tiles.rows, start), offs, rotation, start + position_offset, sign, CHECK_ROWS)


@triton.jit
def load_rotated_columns(rows, offs, rotation, position_offset, sign=1.0, DTYPE: tl.constexpr = None):
    """``load_rotated`` in the order of memory instead of pair order, rows from ``num_rows`` on zero.

    It reads everything twice, once for each member of a pair: for a few rows that meet keys in the order of memory.
    """
    R: tl.constexpr = rotation.R
    columns = tl.arange(0, rows.format.BLOCK_D)
    if rotation.INTERLEAVED:
        is_second = columns % 2 == 1
        partners = tl.where(is_second, columns - 1, columns + 1)
        pairs = columns // 2
    else:
        is_second = columns >= R // 2
        partners = tl.where(is_second, columns - R // 2, columns + R // 2)
        pairs = tl.where(is_second, columns - R // 2, columns)
    is_rotated = columns < R
    partners = tl.where(is_rotated, partners, columns)
    pairs = tl.where(is_rotated, pairs, R // 2)  # a pair past the last one: angle 0
    mask = (offs[:, None] < rows.num_rows) & (columns[None, :] < rows.format.D)
    x = tl.load(row_pointers(rows, offs, columns), mask=mask, other=0.0)
    partner = tl.load(row_pointers(rows, offs, partners), mask=mask, other=0.0)
    cos, sin = load_angles(
        rotation, offs + position_offset, rows.format.BLOCK_D, CHECK_POSITIONS=True, LAYOUT=None, pairs=pairs
    )
    x, partner = x.to(tl.float32), partner.to(tl.float32)
    norm = rotation.norm
    if norm is not None:
        D: tl.constexpr = rows.format.D
        # Loaded as pairs too, because their squares are summed in that order.
        pairs1, pairs2 = load_pairs(rows, offs, rotation, CHECK_ROWS=True)
        sign = pair_inverse_rms(pairs1, pairs2, norm) * sign
        x *= load_norm_weights(norm, columns, columns < D)[None, :]
        partner *= load_norm_weights(norm, partners, partners < D)[None, :]
    is_second = is_second[None, :]
    first, second = tl.where(is_second, partner, x), tl.where(is_second, x, partner)
    first, second = rotate(first, second, cos, sin, CONJUGATE=False)
    return (tl.where(is_second, second, first) * sign).to(rows.ptr.dtype.element_ty if DTYPE is None else DTYPE)


@triton.jit
def store_unrotated(rows, gradient, offs, rotation, position_offset):
    """Rotate a float32 gradient in pair order back to the unrotated frame and write it: transpose of ``load_rotated``,
    without its norm.

    gradient (len(offs), BLOCK_D), rounded once to the memory's dtype; row i has position ``position_offset + i``.
    """
    first, second = unpack_pairs(gradient)
    cos, sin = load_angles(rotation, offs + position_offset, rows.format.BLOCK_D, CHECK_POSITIONS=True)
    first, second = rotate(first, second, cos, sin, CONJUGATE=True)
    store_pairs(rows, first, second, offs, rotation)
