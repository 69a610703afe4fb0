"""Device code that every kernel shares: tile order, strided tiles, rotation pairs, table rows, softmax.

Pair order. RoPE turns pairs of columns, and the two usual layouts disagree on which: ``(i, i + R/2)`` (half) or
``(2i, 2i + 1)`` (interleaved). Inside the kernels a query or key tile always has the members of pair ``p`` in columns
``2p`` and ``2p + 1``, whatever the layout in memory: scores do not depend on the order of the columns as long as q and
k agree. A thread that holds a tensor-core accumulator holds such neighbours, so rotating (and un-rotating dq and dk)
is register arithmetic, for every even R <= D, and ``rotate`` below is the only place where the formula exists.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def wait_for_previous_launch(PDL: tl.constexpr):
    """Block until the kernel launched before this one has finished (programmatic dependent launch only)."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_launch_start(PDL: tl.constexpr):
    """Allow the next kernel's prologue to overlap with this kernel's tail (programmatic dependent launch only)."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_until(pointer, count):
    """Block until the word at ``pointer`` is ``count`` or more; what was written before it became so can be read."""
    tl.inline_asm_elementwise(
        "{ .reg .pred arrived; .reg .u32 found; "
        "AGAIN: ld.acquire.gpu.global.u32 found, [$1]; setp.ge.u32 arrived, found, $2; @arrived bra ARRIVED; "
        "nanosleep.u32 64; bra AGAIN; ARRIVED: mov.u32 $0, found; }",
        "=r,l,r", [pointer.to(tl.uint64, bitcast=True), count], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def tile_range(N: tl.constexpr, AXIS: tl.constexpr, LAYOUT: tl.constexpr):
    """0 .. N along one axis of a tile. LAYOUT is the tile's in Gluon kernels, which spell layouts out; else None."""
    if LAYOUT is None:
        return tl.arange(0, N)
    else:
        return gl.arange(0, N, gl.SliceLayout(1 - AXIS, LAYOUT))


@triton.jit
def scheduled_tile(pid, num_tiles, num_heads, heads_per_section, LAST_FIRST: tl.constexpr):
    """(tile, head) of program pid. Heads run in sections whose K and V share the L2; longest tiles come first."""
    section = pid // (heads_per_section * num_tiles)
    first = section * heads_per_section
    heads = tl.minimum(heads_per_section, num_heads - first)
    rest = pid - first * num_tiles
    tile = rest // heads
    if LAST_FIRST:
        tile = num_tiles - 1 - tile
    return tile, first + rest % heads


@triton.jit
def tile_pointers(base, rows, columns, stride_row, stride_column, LONG: tl.constexpr):
    """Pointers to (rows, columns); LONG where a row offset within one tile can pass 2**31."""
    if LONG:
        rows = rows.to(tl.int64)
        columns = columns.to(tl.int64)
    return base + rows[:, None] * stride_row + columns[None, :] * stride_column


@triton.jit
def row_mask(rows, first_row, row_limit):
    """Rows [first_row, row_limit) of a tile, (len(rows), 1); first_row None: from the first on."""
    mask = rows[:, None] < row_limit
    if first_row is not None:
        mask = mask & (rows[:, None] >= first_row)
    return mask


@triton.jit
def load_tile(base, rows, row_limit, stride_row, stride_column, D: tl.constexpr, BLOCK_D: tl.constexpr,
              CHECK_ROWS: tl.constexpr, LONG: tl.constexpr, LAYOUT: tl.constexpr = None, first_row=None):  # fmt: skip
    """Tile (len(rows), BLOCK_D); columns past D, and with CHECK_ROWS rows outside [first_row, row_limit), are zero."""
    columns = tile_range(BLOCK_D, 1, LAYOUT)
    pointers = tile_pointers(base, rows, columns, stride_row, stride_column, LONG)
    if CHECK_ROWS:
        mask = row_mask(rows, first_row, row_limit)
        if D == BLOCK_D:
            return tl.load(pointers, mask=mask, other=0.0)
        else:
            return tl.load(pointers, mask=mask & (columns[None, :] < D), other=0.0)
    else:
        if D == BLOCK_D:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=columns[None, :] < D, other=0.0)


@triton.jit
def store_tile(base, tile, rows, row_limit, stride_row, stride_column, D: tl.constexpr, BLOCK_D: tl.constexpr,
               LONG: tl.constexpr, LAYOUT: tl.constexpr = None):  # fmt: skip
    """Inverse of ``load_tile`` with CHECK_ROWS."""
    columns = tile_range(BLOCK_D, 1, LAYOUT)
    pointers = tile_pointers(base, rows, columns, stride_row, stride_column, LONG)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(rows[:, None] < row_limit) & (columns[None, :] < D))


@triton.jit
def load_head_tile(source, place, start, rows, row_limit, stride_row, stride_column, D: tl.constexpr,
                   BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr, CHECK_ROWS: tl.constexpr,
                   LONG: tl.constexpr, BOUNDED: tl.constexpr = False, first_row=None):  # fmt: skip
    """Rows [start, start + BLOCK) of ``head_source``'s part of a tensor.

    With CHECK_ROWS, rows outside [first_row, row_limit) read as zero. The TMA does so past the end of the tensor only,
    which is row_limit unless BOUNDED.
    """
    if first_row is not None:
        first_row -= start
    if TMA:
        batch, head, origin = place
        tile = tl.reshape(source.load([batch.to(tl.int32), head.to(tl.int32), origin + start, 0]), (BLOCK, BLOCK_D))
        if CHECK_ROWS:
            if BOUNDED or first_row is not None:
                tile = tl.where(row_mask(rows, first_row, row_limit - start), tile, 0.0).to(tile.dtype)
        return tile
    else:
        base = source + tl.cast(start, tl.int64) * stride_row
        return load_tile(
            base, rows, row_limit - start, stride_row, stride_column, D, BLOCK_D, CHECK_ROWS, LONG, None, first_row
        )


@triton.jit
def head_source(tensor, place, strides, TMA: tl.constexpr):
    """What ``load_head_tile`` reads: the (B, H, N, D) descriptor itself, or a pointer to the first row of a place.

    ``place``: (batch, head, origin), the first two int64; origin is the row where a packed sequence begins, else 0.
    """
    if TMA:
        return tensor
    else:
        batch, head, origin = place
        return tensor + batch * strides[0] + head * strides[1] + tl.cast(origin, tl.int64) * strides[2]


@triton.jit
def pair_columns(D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, LAYOUT: tl.constexpr,
                 FIRST: tl.constexpr = 0):  # fmt: skip
    """Half layout: memory columns of the first and second member of every pair; unrotated columns pair up after R/2.

    The BLOCK_D / 2 pairs from number FIRST on.
    """
    pairs = tile_range(BLOCK_D // 2, 1, LAYOUT)
    if FIRST:
        pairs += FIRST
    if R == D:
        return pairs, pairs + D // 2
    else:
        # The largest power of two that divides every break, so that loads stay vectorised.
        RUN: tl.constexpr = ((R // 2) | (D // 2)) & -((R // 2) | (D // 2))
        first = tl.where(pairs < R // 2, pairs, pairs + R // 2)
        second = tl.where(pairs < R // 2, pairs + R // 2, pairs + D // 2)
        return tl.max_contiguous(tl.multiple_of(first, RUN), RUN), tl.max_contiguous(tl.multiple_of(second, RUN), RUN)


@triton.jit
def load_pairs(base, rows, row_limit, stride_row, stride_column, D: tl.constexpr, R: tl.constexpr,
               BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, CHECK_ROWS: tl.constexpr, LONG: tl.constexpr,
               LAYOUT: tl.constexpr = None, WHOLE: tl.constexpr = None, first_row=None):  # fmt: skip
    """First and second members of every pair as float32 tiles (len(rows), BLOCK_D / 2).

    Gluon kernels name the LAYOUT of these tiles, and of the WHOLE tile of which they are the halves.
    """
    if INTERLEAVED:
        if LAYOUT is None:
            x = load_tile(
                base, rows, row_limit, stride_row, stride_column, D, BLOCK_D, CHECK_ROWS, LONG, None, first_row
            )
            first, second = unpack_pairs(x)
        else:
            rows = gl.convert_layout(rows, gl.SliceLayout(1, WHOLE))
            x = load_tile(base, rows, row_limit, stride_row, stride_column, D, BLOCK_D, CHECK_ROWS, LONG, WHOLE)
            first, second = unpack_pairs(x)
            first, second = gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT)
    else:
        columns1, columns2 = pair_columns(D, R, BLOCK_D, LAYOUT)
        pointers1 = tile_pointers(base, rows, columns1, stride_row, stride_column, LONG)
        pointers2 = tile_pointers(base, rows, columns2, stride_row, stride_column, LONG)
        if CHECK_ROWS or D != BLOCK_D:
            mask = tile_range(BLOCK_D // 2, 1, LAYOUT)[None, :] < D // 2
            if CHECK_ROWS:
                mask = mask & row_mask(rows, first_row, row_limit)
            first = tl.load(pointers1, mask=mask, other=0.0)
            second = tl.load(pointers2, mask=mask, other=0.0)
        else:
            first = tl.load(pointers1)
            second = tl.load(pointers2)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_pairs(base, first, second, rows, row_limit, stride_row, stride_column, D: tl.constexpr, R: tl.constexpr,
                BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, LONG: tl.constexpr, LAYOUT: tl.constexpr = None,
                WHOLE: tl.constexpr = None, FIRST: tl.constexpr = 0):  # fmt: skip
    """Write pairs back to their columns in memory; inverse of ``load_pairs``, rounding once.

    Those of the tile may be the pairs from number FIRST on.
    """
    if INTERLEAVED:
        x = pack_pairs(first, second)
        if LAYOUT is not None:
            x = gl.convert_layout(x, WHOLE)
            rows = gl.convert_layout(rows, gl.SliceLayout(1, WHOLE))
        if FIRST:
            base += 2 * FIRST * stride_column
        store_tile(base, x, rows, row_limit, stride_row, stride_column, D - 2 * FIRST, BLOCK_D, LONG, WHOLE)
    else:
        columns1, columns2 = pair_columns(D, R, BLOCK_D, LAYOUT, FIRST)
        mask = (rows[:, None] < row_limit) & (tile_range(BLOCK_D // 2, 1, LAYOUT)[None, :] < D // 2 - FIRST)
        dtype = base.dtype.element_ty
        tl.store(tile_pointers(base, rows, columns1, stride_row, stride_column, LONG), first.to(dtype), mask=mask)
        tl.store(tile_pointers(base, rows, columns2, stride_row, stride_column, LONG), second.to(dtype), mask=mask)


@triton.jit
def pack_pairs(first, second):
    """(rows, P), (rows, P) -> (rows, 2P) in pair order."""
    return tl.reshape(tl.join(first, second), (first.shape[0], 2 * first.shape[1]))


@triton.jit
def unpack_pairs(x):
    """(rows, 2P) in pair order -> (rows, P), (rows, P)."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def head_tables(cos_ptr, sin_ptr, cos_strides, sin_strides, batch):
    """One batch entry's ``tables``: (cos, sin, cos strides, sin strides), the strides as (batch, row, column)."""
    return cos_ptr + batch * cos_strides[0], sin_ptr + batch * sin_strides[0], cos_strides, sin_strides


@triton.jit
def load_angles(tables, positions, position_limit, R: tl.constexpr, BLOCK_D: tl.constexpr, CHECK_ROWS: tl.constexpr,
                LAYOUT: tl.constexpr = None, pairs=None):  # fmt: skip
    """cos and sin (len(positions), BLOCK_D / 2) float32; pairs past R/2 get angle 0.

    With CHECK_ROWS, positions outside ``[0, position_limit)`` get angle 0 too: they belong to rows that see nothing.
    With ``pairs`` the columns of the result belong to these pairs instead of 0 .. BLOCK_D / 2.
    """
    cos_base, sin_base, cos_strides, sin_strides = tables
    if pairs is None:
        pairs = tile_range(BLOCK_D // 2, 1, LAYOUT)
    rows = positions.to(tl.int64)[:, None]
    cos_pointers = cos_base + rows * cos_strides[1] + pairs[None, :] * cos_strides[2]
    sin_pointers = sin_base + rows * sin_strides[1] + pairs[None, :] * sin_strides[2]
    if CHECK_ROWS or BLOCK_D != R:
        mask = pairs[None, :] < R // 2
        if CHECK_ROWS:
            mask = mask & (rows >= 0) & (rows < position_limit)
        cos = tl.load(cos_pointers, mask=mask, other=1.0)
        sin = tl.load(sin_pointers, mask=mask, other=0.0)
    else:
        cos = tl.load(cos_pointers)
        sin = tl.load(sin_pointers)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def rotate(first, second, cos, sin, CONJUGATE: tl.constexpr):
    """RoFormer (Su et al. 2021), eq. 34: turn every pair by its angle, or by the negative angle (the transpose)."""
    if CONJUGATE:
        sin = -sin
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def load_rotated(base, rows, row_limit, strides, tables, position_offset, position_limit, sign, D: tl.constexpr,
                 R: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr, CHECK_ROWS: tl.constexpr,
                 LONG: tl.constexpr, LAYOUT: tl.constexpr = None, WHOLE: tl.constexpr = None,
                 first_row=None):  # fmt: skip
    """Rows of q or k, rotated in float32, times ``sign``, rounded once, in pair order."""
    first, second = load_pairs(
        base, rows, row_limit, strides[2], strides[3], D, R, BLOCK_D, INTERLEAVED, CHECK_ROWS, LONG, LAYOUT, WHOLE,
        first_row,
    )  # fmt: skip
    cos, sin = load_angles(tables, rows + position_offset, position_limit, R, BLOCK_D, True, LAYOUT)
    first, second = rotate(first, second, cos, sin, CONJUGATE=False)
    return pack_pairs(first * sign, second * sign).to(base.dtype.element_ty)


@triton.jit
def load_rotated_columns(base, rows, row_limit, strides, tables, position_offset, position_limit, sign,
                         D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
                         LONG: tl.constexpr):  # fmt: skip
    """``load_rotated`` in the order of memory instead of pair order, rows outside [0, row_limit) zero.

    Reads everything twice, once for each member of a pair: for a few rows that meet keys as they lie in memory.
    """
    columns = tl.arange(0, BLOCK_D)
    if INTERLEAVED:
        is_second = columns % 2 == 1
        partners = tl.where(is_second, columns - 1, columns + 1)
        pairs = columns // 2
    else:
        is_second = columns >= R // 2
        partners = tl.where(is_second, columns - R // 2, columns + R // 2)
        pairs = tl.where(is_second, columns - R // 2, columns)
    turning = columns < R
    partners = tl.where(turning, partners, columns)
    pairs = tl.where(turning, pairs, R // 2)  # a pair past the last one: angle 0
    mask = (rows[:, None] < row_limit) & (columns[None, :] < D)
    x = tl.load(tile_pointers(base, rows, columns, strides[2], strides[3], LONG), mask=mask, other=0.0)
    partner = tl.load(tile_pointers(base, rows, partners, strides[2], strides[3], LONG), mask=mask, other=0.0)
    cos, sin = load_angles(tables, rows + position_offset, position_limit, R, BLOCK_D, True, None, pairs)
    # A second member turned by an angle is a first member turned by the negative one.
    sin = tl.where(is_second[None, :], -sin, sin)
    x, _ = rotate(x.to(tl.float32), partner.to(tl.float32), cos, sin, CONJUGATE=False)
    return (x * sign).to(base.dtype.element_ty)


@triton.jit
def prefetch_rows(base, first, limit, stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, LONG: tl.constexpr):
    """Bring rows [first, first + ROWS) that are below ``limit`` into the L2, without waiting (NVIDIA's GPUs only)."""
    ITEM: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = max(1, BLOCK_D * ITEM // 128)
    # Those past the last row ask for it again.
    rows = tl.minimum(first + tl.arange(0, ROWS), tl.maximum(limit - 1, 0))
    columns = tl.arange(0, LINES) * (128 // ITEM)
    addresses = tile_pointers(base, rows, columns, stride, 1, LONG).to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_unrotated(base, gradient, rows, row_limit, strides, tables, position_offset, position_limit,
                    D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
                    LONG: tl.constexpr, LAYOUT: tl.constexpr = None, WHOLE: tl.constexpr = None):  # fmt: skip
    """Turn a float32 gradient in pair order back to the unrotated frame and write it: transpose of ``load_rotated``."""
    first, second = unpack_pairs(gradient)
    if LAYOUT is not None:
        first, second = gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT)
    cos, sin = load_angles(tables, rows + position_offset, position_limit, R, BLOCK_D, True, LAYOUT)
    first, second = rotate(first, second, cos, sin, CONJUGATE=True)
    store_pairs(
        base, first, second, rows, row_limit, strides[2], strides[3], D, R, BLOCK_D, INTERLEAVED, LONG, LAYOUT, WHOLE
    )


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh with one exponential and one division, to about 1e-7; exp2 may overflow. PRECISE: relative to x too.

    Capped scores are small against their cap, which multiplies the error: float32 needs the series near 0.
    """
    result = 1.0 - 2.0 / (1.0 + tl.math.exp2(x * (2.0 * LOG2E)))
    if PRECISE:
        # Up to |x| = 1/4 the first term left out, 1382 x**11 / 155925, is 1e-8 of x.
        y = x * x
        series = 1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0 + y * (62.0 / 2835.0))))
        result = tl.where(y < 0.0625, x * series, result)
    return result


@triton.jit
def online_softmax(scores, row_max, row_sum, qk_scale, MASKED: tl.constexpr):
    """One step of the running softmax in base 2: (p, correction, row_max, row_sum). qk_scale > 0.

    ``row_max`` holds the maximum of ``scores * qk_scale``; a row that has seen nothing has -inf, and while it does its
    subtrahend is 0, so that exp2 gives 0 and never NaN.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * qk_scale)
    subtrahend = new_max
    if MASKED:
        subtrahend = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.math.exp2(scores * qk_scale - subtrahend[:, None])
    correction = tl.math.exp2(row_max - subtrahend)
    return p, correction, new_max, row_sum * correction + tl.sum(p, 1)


@triton.jit
def rescale(row_max, new_max):
    """What sums under the base-2 maximum ``row_max`` are multiplied by under ``new_max``; 0 where they saw nothing."""
    return tl.math.exp2(row_max - tl.where(new_max == float("-inf"), 0.0, new_max))


@triton.jit
def add_sink(row_max, row_sum, sink, seen):
    """One more key of base-2 logit ``sink`` without a value: (row_max, row_sum, weight of what was summed before).

    A row that saw no key (not ``seen``) stays without one: its sum stays 0.
    """
    new_max = tl.maximum(row_max, sink)
    weight = rescale(row_max, new_max)
    return new_max, tl.where(seen, row_sum * weight + rescale(sink, new_max), 0.0), weight


@triton.jit
def sink_gradient(sink, lse, delta):
    """Part of a sink's gradient from some rows: base-2 lse (+inf where a row saw nothing) and delta, float32.

    The sink is a key without a value: dS = P * (0 - delta).
    """
    return -tl.sum(tl.math.exp2(sink.to(tl.float32) * LOG2E - lse) * delta, 0)


@triton.jit
def finish_softmax(acc, row_max, row_sum, sink):
    """(o, lse) of the running sums ``acc`` (rows, columns), base-2 ``row_max`` and ``row_sum`` (rows,).

    sink: base-2 logit of one more key without a value, (rows,) or None. Only a row that saw no key sums to zero, and
    stays without one: o = 0, lse = -inf. NaN counts as seen and stays NaN.
    """
    seen = row_sum != 0.0
    if sink is not None:
        row_max, row_sum, weight = add_sink(row_max, row_sum, sink, seen)
        acc = acc * weight[:, None]
    # A row that saw nothing has met values with p = 0, which NaN or infinity among them would have turned into NaN.
    o = tl.where(seen[:, None], acc / tl.where(seen, row_sum, 1.0)[:, None], 0.0)
    lse = tl.where(seen, (row_max + tl.math.log2(tl.where(seen, row_sum, 1.0))) * LN2, float("-inf"))
    return o, lse


@triton.jit
def add_product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b for long sums. In float32 the block's product is summed first and added whole.

    A chain of one addition per key or query loses up to sqrt(N) units in the last place: 4e-5 of dv's rms at 128K. The
    multiplication by one keeps Triton from folding the sum back into the product.
    """
    if a.dtype == tl.float32:
        product = tl.dot(a, b, input_precision=PRECISION)
        return tl.math.fma(product, tl.full(product.shape, 1.0, tl.float32), acc)
    else:
        return tl.dot(a, b, acc)
