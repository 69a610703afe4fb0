# mypy: ignore-errors
"""The rotation inside kernels: pairs of columns, their angles, and tiles that are rotated as they are read or written.

Pair order. RoPE rotates pairs of columns. In the half layout a pair is columns ``(i, i + R/2)``, in the interleaved one
``(2i, 2i + 1)``. Inside the kernels a query or key tile always has the members of pair ``p`` in columns ``2p`` and ``2p
+ 1``, because scores do not depend on the order of the columns as long as q and k agree, and because a thread that
holds a tensor-core accumulator holds such neighbours: rotating (and un-rotating dq and dk) is register arithmetic, for
every even R <= D. The formula is in ``rotate`` alone.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from fused_rope_attn.kernels.norm import Norm, load_norm_weights, pair_inverse_rms
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.tiles import (
    columns_from,
    load_tile,
    load_where,
    row_mask,
    row_pointers,
    store_tile,
    tile_range,
)


@record
class RotaryTables:
    """The tables of a call, and how they pair columns.

    A call that does not rotate has no tables, R = 0 and INTERLEAVED, so that pair order is the order of memory.
    """

    cos_ptr: tl.tensor | None  # ([1|B,] S, R/2), float32 or q's dtype; None: no rotation
    sin_ptr: tl.tensor | None
    cos_strides: tl.tuple | None  # (batch, row, pair)
    sin_strides: tl.tuple | None
    R: tl.constexpr
    INTERLEAVED: tl.constexpr


@record
class CallRotation:
    """The rotation and the norms of a call. With ROTATE_INLINE a kernel applies them to the q and k that it reads.

    Else they are stored normed and rotated, in pair order, and q_sign is in q.
    """

    tables: RotaryTables
    q_norm: Norm | None
    k_norm: Norm | None
    q_sign: tl.tensor | None  # None: q is read as it is given, without norm and rotation
    ROTATE_INLINE: tl.constexpr


@record
class Rotation:
    """The rotation of one batch entry's rows, and the norm before it; made by ``head_rotation``."""

    tables: RotaryTables  # of this batch entry
    num_positions: tl.tensor  # positions outside [0, num_positions) belong to rows that see nothing
    norm: Norm | None  # of the rows before they are rotated; None: they are only rotated
    R: tl.constexpr
    INTERLEAVED: tl.constexpr


@record
class Angles:
    """cos and sin of pairs, (rows, BLOCK_D / 2) float32; None: they are not rotated."""

    cos: tl.tensor | None
    sin: tl.tensor | None


@triton.jit
def tables_after(tables, index, AXIS: tl.constexpr):
    """Return the ``RotaryTables`` that begin with ``index`` (int64) along an axis."""
    if tables.cos_ptr is not None:
        cos_ptr = tables.cos_ptr + index * tables.cos_strides[AXIS]
        tables = replace(tables, cos_ptr=cos_ptr, sin_ptr=tables.sin_ptr + index * tables.sin_strides[AXIS])
    return tables


@triton.jit
def head_rotation(tables, batch, num_positions, norm=None):
    """Return the ``Rotation`` of batch entry ``batch`` (int64) by the call's ``RotaryTables``."""
    tables = tables_after(tables, batch, AXIS=0)
    return Rotation(tables, num_positions, norm, R=tables.R, INTERLEAVED=tables.INTERLEAVED)


@triton.jit
def tables_from(tables, row):
    """Return the ``RotaryTables`` that begin with ``row``."""
    return tables_after(tables, tl.cast(row, tl.int64), AXIS=1)


@triton.jit
def rotation_from(rotation, position):
    """Return the ``Rotation`` of rows that count their positions from ``position`` on."""
    return replace(rotation, tables=tables_from(rotation.tables, position))


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
def rotate_back(first, second, angles):
    """Rotate pairs of a gradient back by their ``Angles``."""
    if angles.cos is not None:
        first, second = rotate(first, second, angles.cos, angles.sin, CONJUGATE=True)
    return first, second


@triton.jit
def load_angles(rotation, positions, BLOCK_D: tl.constexpr, LAYOUT: tl.constexpr = None, pairs=None):
    """Load the ``Angles`` of positions.

    Pairs past R/2 get angle 0, and positions that the tables do not have the angles of the nearest one. With ``pairs``
    the columns of the result belong to these pairs instead of 0 .. BLOCK_D / 2.
    """
    tables = rotation.tables
    if tables.cos_ptr is None:
        return Angles(cos=None, sin=None)
    else:
        if pairs is None:
            pairs = tile_range(BLOCK_D // 2, 1, LAYOUT)
        last = tl.cast(rotation.num_positions, tl.int32) - 1
        rows = tl.minimum(tl.maximum(positions, 0), last).to(tl.int64)[:, None]
        cos_pointers = tables.cos_ptr + rows * tables.cos_strides[1] + pairs[None, :] * tables.cos_strides[2]
        sin_pointers = tables.sin_ptr + rows * tables.sin_strides[1] + pairs[None, :] * tables.sin_strides[2]
        mask = None
        if rotation.R < BLOCK_D:
            mask = pairs[None, :] + rows.to(tl.int32) * 0 < rotation.R // 2
        cos = load_where(cos_pointers, mask, 1.0)
        sin = load_where(sin_pointers, mask, 0.0)
        return Angles(cos.to(tl.float32), sin.to(tl.float32))


@triton.jit
def pack_pairs(first, second):
    """Join (rows, P) and (rows, P) to (rows, 2P) in pair order."""
    return tl.reshape(tl.join(first, second), (first.shape[0], 2 * first.shape[1]))


@triton.jit
def unpack_pairs(x):
    """Split (rows, 2P) in pair order into (rows, P) and (rows, P)."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@record
class Pairing:
    """The pairs of columns of rows that are not rotated; the functions below also take it from a ``Rotation``."""

    R: tl.constexpr
    INTERLEAVED: tl.constexpr


@record
class PairLayouts:
    """The layouts of Gluon kernels: PAIRS of tiles of first or second members, WHOLE of tiles of whole rows."""

    PAIRS: tl.constexpr
    WHOLE: tl.constexpr


@triton.jit
def pair_columns(pairs, D: tl.constexpr, R: tl.constexpr):
    """Return the memory columns of the first and second members of ``pairs`` in the half layout.

    Columns that are not rotated pair up after R/2.
    """
    if R == D:
        return pairs, pairs + D // 2
    else:
        # The largest power of two that divides every break, so that loads stay vectorised.
        RUN: tl.constexpr = ((R // 2) | (D // 2)) & -((R // 2) | (D // 2))
        first = tl.where(pairs < R // 2, pairs, pairs + R // 2)
        second = tl.where(pairs < R // 2, pairs + R // 2, pairs + D // 2)
        return tl.max_contiguous(tl.multiple_of(first, RUN), RUN), tl.max_contiguous(tl.multiple_of(second, RUN), RUN)


@triton.jit
def norm_columns(pairs, D: tl.constexpr, pairing):
    """Return the memory columns of the first and second members of ``pairs`` in the order of ``load_pairs``, and which
    pairs exist, (len(pairs),) each."""
    if pairing.INTERLEAVED:
        return 2 * pairs, 2 * pairs + 1, pairs < D // 2
    else:
        columns1, columns2 = pair_columns(pairs, D, pairing.R)
        return columns1, columns2, pairs < D // 2


@triton.jit
def pair_norm_weights(norm, pairing, BLOCK_D: tl.constexpr, LAYOUT: tl.constexpr = None):
    """Load the norm's weights of the first and second members of a tile's pairs, (1, BLOCK_D / 2) each."""
    columns1, columns2, is_pair = norm_columns(tile_range(BLOCK_D // 2, 1, LAYOUT), norm.D, pairing)
    exists = None
    if norm.D < BLOCK_D:
        exists = is_pair
    return load_norm_weights(norm, columns1, exists)[None, :], load_norm_weights(norm, columns2, exists)[None, :]


@triton.jit
def row_norm_weights(norm, offs, BLOCK_D: tl.constexpr):
    """Load ``pair_norm_weights`` of interleaved pairs for each row of a tile, (len(offs), BLOCK_D / 2).

    They come in the layout of the rows and 16 bytes at a time, where ``pair_norm_weights`` loads every second column by
    itself. In calls without tables call this after the rows are loaded, as ``load_angles``. With no such load there
    Triton norms the tile in the layout of a product's operand, and spills 3 KB.
    """
    columns = tl.arange(0, BLOCK_D)[None, :] + offs[:, None] * 0
    weight = tl.load(norm.weight_ptr + columns, mask=columns < norm.D, other=0.0)
    return unpack_pairs(weight.to(tl.float32) + norm.offset)


@triton.jit
def load_pairs(rows, offs, pairing, layouts=None, CHECK_ROWS: tl.constexpr = True):
    """Load first and second members of every pair of the rows ``offs``, as float32 tiles (len(offs), BLOCK_D / 2).

    With CHECK_ROWS, rows that do not exist are zero, as in ``load_tile``. layouts: the ``PairLayouts`` of Gluon
    kernels; ``offs`` has that of the pairs.
    """
    LAYOUT: tl.constexpr = None if layouts is None else layouts.PAIRS
    D: tl.constexpr = rows.format.D
    BLOCK_D: tl.constexpr = rows.format.BLOCK_D
    if pairing.INTERLEAVED:
        if rows.ptr.dtype.element_ty == tl.bfloat16:
            # A pair is a word of 32 bits, and its members are the upper halves of float32.
            pairs = tile_range(BLOCK_D // 2, 1, LAYOUT)
            mask = None
            if CHECK_ROWS:
                mask = row_mask(rows, offs)
            if D < BLOCK_D:
                exists = pairs[None, :] < D // 2
                if CHECK_ROWS:
                    exists = mask & exists
                mask = exists
            ptr = rows.ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            in_words = replace(rows, ptr=ptr, stride_row=rows.stride_row // 2)
            words = load_where(row_pointers(in_words, offs, pairs), mask, 0)
            first = (words << 16).to(tl.float32, bitcast=True)
            second = (words & -65536).to(tl.float32, bitcast=True)
        elif layouts is None:
            first, second = unpack_pairs(load_tile(rows, offs, CHECK_ROWS))
        else:
            offs = gl.convert_layout(offs, gl.SliceLayout(1, layouts.WHOLE))
            first, second = unpack_pairs(load_tile(rows, offs, CHECK_ROWS, layouts.WHOLE))
            first, second = gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT)
    else:
        columns1, columns2 = pair_columns(tile_range(BLOCK_D // 2, 1, LAYOUT), D, pairing.R)
        pointers1 = row_pointers(rows, offs, columns1)
        pointers2 = row_pointers(rows, offs, columns2)
        mask = None
        if CHECK_ROWS or D < BLOCK_D:
            mask = tile_range(BLOCK_D // 2, 1, LAYOUT)[None, :] < D // 2
            if CHECK_ROWS:
                mask = mask & row_mask(rows, offs)
        first = load_where(pointers1, mask, 0.0)
        second = load_where(pointers2, mask, 0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def norm_and_rotate(first, second, angles, sign, rotation, weights, LAYOUT: tl.constexpr = None):
    """Norm pairs of ``load_pairs`` if ``rotation`` has a norm, rotate them, and multiply them by ``sign``; all float32.

    angles: ``Angles``. weights: ``pair_norm_weights``, or None without a norm. LAYOUT: of the pairs in
    Gluon kernels. A row's factor is the last one, with the sign, because it commutes with the rotation: only one
    multiplication waits for the row's sum, and calls without norms have it too. All kernels multiply in this order,
    because they are to give the same bits.
    """
    if rotation.norm is not None:
        sign = pair_inverse_rms(first, second, rotation.norm, LAYOUT) * sign
        first, second = first * weights[0], second * weights[1]
    if angles.cos is not None:
        first, second = rotate(first, second, angles.cos, angles.sin, CONJUGATE=False)
    return first * sign, second * sign


@triton.jit
def store_pairs(rows, first, second, offs, pairing, layouts=None, FIRST_PAIR: tl.constexpr = 0):
    """Write pairs to their columns in memory, rounded once: the inverse of ``load_pairs``.

    With FIRST_PAIR a tile of BLOCK_D columns holds the pairs from this number on, of rows with D columns in all.
    """
    LAYOUT: tl.constexpr = None if layouts is None else layouts.PAIRS
    D: tl.constexpr = rows.format.D
    BLOCK_D: tl.constexpr = rows.format.BLOCK_D
    if pairing.INTERLEAVED:
        x = pack_pairs(first, second)
        WHOLE: tl.constexpr = None if layouts is None else layouts.WHOLE
        if layouts is not None:
            x = gl.convert_layout(x, WHOLE)
            offs = gl.convert_layout(offs, gl.SliceLayout(1, WHOLE))
        if FIRST_PAIR:
            rows = columns_from(rows, 2 * FIRST_PAIR)
        store_tile(rows, x, offs, WHOLE)
    else:
        pairs = tile_range(BLOCK_D // 2, 1, LAYOUT)
        if FIRST_PAIR:
            pairs += FIRST_PAIR
        columns1, columns2 = pair_columns(pairs, D, pairing.R)
        exists = tile_range(BLOCK_D // 2, 1, LAYOUT)[None, :] < D // 2 - FIRST_PAIR
        mask = (offs[:, None] < rows.num_rows) & exists
        dtype = rows.ptr.dtype.element_ty
        tl.store(row_pointers(rows, offs, columns1), first.to(dtype), mask=mask)
        tl.store(row_pointers(rows, offs, columns2), second.to(dtype), mask=mask)


@triton.jit
def load_rotated(
    rows, offs, rotation, position_offset, sign=1.0, CHECK_ROWS: tl.constexpr = True, DTYPE: tl.constexpr = None
):
    """Return ``load_rotated_pairs`` in pair order, rounded once to DTYPE, None: the memory's."""
    first, second = load_rotated_pairs(rows, offs, rotation, position_offset, sign, CHECK_ROWS)
    return pack_pairs(first, second).to(rows.ptr.dtype.element_ty if DTYPE is None else DTYPE)


@triton.jit
def load_rotated_pairs(rows, offs, rotation, position_offset, sign=1.0, CHECK_ROWS: tl.constexpr = True):
    """Load the rows ``offs`` of q or k, norm and rotate them in float32, and multiply them by ``sign``: (first members,
    second members), each (len(offs), BLOCK_D / 2).

    Row i has position ``position_offset + i``. CHECK_ROWS as in ``load_pairs``.
    """
    BLOCK_D: tl.constexpr = rows.format.BLOCK_D
    weights = None
    if rotation.norm is not None and rotation.tables.cos_ptr is not None:
        weights = pair_norm_weights(rotation.norm, rotation, BLOCK_D)
    first, second = load_pairs(rows, offs, rotation, CHECK_ROWS=CHECK_ROWS)
    if rotation.norm is not None and rotation.tables.cos_ptr is None:
        weights = row_norm_weights(rotation.norm, offs, BLOCK_D)
    angles = load_angles(rotation, offs + position_offset, BLOCK_D)
    return norm_and_rotate(first, second, angles, sign, rotation, weights)


@triton.jit
def store_unrotated(rows, gradient, offs, rotation, position_offset):
    """Rotate a float32 gradient in pair order back to the unrotated frame and write it: transpose of ``load_rotated``,
    without its norm.

    gradient (len(offs), BLOCK_D), rounded once to the memory's dtype; row i has position ``position_offset + i``.
    """
    first, second = unpack_pairs(gradient)
    angles = load_angles(rotation, offs + position_offset, rows.format.BLOCK_D)
    first, second = rotate_back(first, second, angles)
    store_pairs(rows, first, second, offs, rotation)
