# mypy: ignore-errors
"""The epilogue of the sm_90 backward: dk and dv of a block, through shared memory, to their tensors.

It rotates dk back. Up to head dim 128 a warpgroup owns whole rows. Beyond, two warpgroups own half of each row.
"""

from fused_rope_attn.attention.hopper import backward_block, backward_transfers, channels, columns as column_parts
from fused_rope_attn.kernels import rotation as rotations, schedule, softmax, tiles
from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.runtime.triton_compat import gl, jit, reinterpret


@record
class Stages:
    """Shared memory for dk and dv, (KEYS, columns) 16-bit each; dk's is a tile of ``dk_channel``, if there is one."""

    dk: gl.shared_memory_descriptor
    dv: gl.shared_memory_descriptor
    dk_channel: channels.Channel | None = None


@jit
def drop_keys(gradient, start_n, mask):
    """Return gradient (KEYS, columns) of the keys from start_n on with zeros for keys that do not exist."""
    keys = gl.arange(0, channels.KEYS, gl.SliceLayout(1, gradient.type.layout)) + start_n
    exists = (keys >= mask.first_key) & (keys < mask.num_keys)
    return gl.where(exists[:, None], gradient, 0.0)


@jit
def drop_keys_of_parts(gradient, start_n, mask):
    """Apply ``drop_keys`` to ``ColumnParts``."""
    dropped = replace(gradient, left=drop_keys(gradient.left, start_n, mask))
    if gradient.right is not None:
        dropped = replace(dropped, right=drop_keys(gradient.right, start_n, mask))
    return dropped


@jit
def unpack_parts(x):
    """Return the first and the second members of the pairs of ``ColumnParts``, as ``ColumnParts``."""
    left1, left2 = rotations.unpack_pairs(x.left)
    right1, right2 = None, None
    if x.right is not None:
        right1, right2 = rotations.unpack_pairs(x.right)
    return column_parts.ColumnParts(left1, right1), column_parts.ColumnParts(left2, right2)


@jit
def store_dv(rows, dv, stage):
    """Write dv, ``ColumnParts`` of (KEYS, columns), to 16-bit ``Rows``.

    It passes through ``stage``, (KEYS, columns) 16-bit in shared memory, so that whole sectors are written.
    """
    COLUMNS: gl.constexpr = stage.shape[1]
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    column_parts.store_parts(stage, dv, column_parts.LEFT)
    tile = stage.load(WHOLE)
    tiles.store_tile(rows, tile, gl.arange(0, channels.KEYS, gl.SliceLayout(1, WHOLE)), WHOLE)


@jit
def store_sums(rows, dv):
    """Write dv (KEYS, columns) float32 to the first columns of ``Rows``; four threads write a sector of 32 bytes."""
    OWN: gl.constexpr = dv.type.layout
    rows = replace(rows, format=replace(rows.format, BLOCK_D=dv.shape[1]))
    tiles.store_tile(rows, dv, gl.arange(0, channels.KEYS, gl.SliceLayout(1, OWN)), OWN)


@jit
def store_dk(rows, dk, stage, keys, num_keys, tables, FIRST_PAIR: gl.constexpr):
    """Rotate dk, ``ColumnParts`` of (KEYS, columns), of ``keys`` back, and write it to ``Rows`` as ``store_dv`` does.

    Only the first num_keys keys of the sequence have rows in the tables. stage: KEYS * columns * 2 bytes of shared
    memory. FIRST_PAIR: the rotation pair that the columns begin with.
    """
    COLUMNS: gl.constexpr = rows.format.BLOCK_D
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 4], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    STAGE: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    stage = reinterpret(stage, gl.float32, [channels.KEYS, COLUMNS // 2], STAGE)
    first, second = unpack_parts(dk)
    column_parts.store_parts(stage, first, column_parts.LEFT // 2)
    first = stage.load(PAIRS)
    column_parts.store_parts(stage, second, column_parts.LEFT // 2)
    second = stage.load(PAIRS)
    rotation = rotations.head_rotation(tables, keys.batch.to(gl.int64), num_keys)
    offs = gl.arange(0, channels.KEYS, gl.SliceLayout(1, PAIRS))
    pairs = None
    if FIRST_PAIR:
        pairs = gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, PAIRS)) + FIRST_PAIR
    angles = rotations.load_angles(rotation, offs + keys.start_n, COLUMNS, PAIRS, pairs)
    first, second = rotations.rotate_back(first, second, angles)
    rotations.store_pairs(rows, first, second, offs, rotation, rotations.PairLayouts(PAIRS, WHOLE), FIRST_PAIR)


@jit
def sums_at(ptr, x):
    """Return pointers (KEYS, columns) to float32 for x, a part of ``ColumnParts``, from ptr on.

    They are in the order in which the threads hold an accumulator, so that each access of a warp is 256 contiguous
    bytes: 8 columns of four threads, 8 rows, 4 warps, the other 8 rows of a warp, and then more columns.
    """
    LAYOUT: gl.constexpr = x.type.layout
    rows = gl.arange(0, channels.KEYS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    of_rows = rows % 8 * 8 + rows // 16 * 64 + rows // 8 % 2 * 256
    of_columns = columns // 8 * (8 * channels.KEYS) + columns % 8
    return ptr + of_rows[:, None] + of_columns[None, :]


@jit
def load_sums(ptr, parts):
    """Return ``ColumnParts`` plus what ``keep_sums`` has stored."""
    sums = replace(parts, left=parts.left + gl.load(sums_at(ptr, parts.left)))
    if parts.right is not None:
        right_ptr = sums_at(ptr + channels.KEYS * column_parts.LEFT, parts.right)
        sums = replace(sums, right=parts.right + gl.load(right_ptr))
    return sums


@jit
def keep_sums(ptr, parts):
    """Store ``ColumnParts`` in float32."""
    gl.store(sums_at(ptr, parts.left), parts.left)
    if parts.right is not None:
        gl.store(sums_at(ptr + channels.KEYS * column_parts.LEFT, parts.right), parts.right)


@jit
def store_or_pass_on(
    dk, dv, keys, NK, mask, scale, gradients, stages, dk_steps, WARPGROUP: gl.constexpr, FIRST_COLUMN: gl.constexpr
):
    """Call ``store_gradients``, whose arguments these are, with the sums of all shares of the tile, in a fixed order.

    Counted from the last share, the first adds the sums of the second, the third those of the fourth, then the first
    those of the third, and so on: a share may wait only for shares that start before it. All but the first keep their
    sums in a slot.
    """
    if gradients.slots_ptr is None:
        store_gradients(dk, dv, keys, NK, mask, scale, gradients, stages, dk_steps, FIRST_COLUMN)
    else:
        share = gradients.share
        if share is None:
            # Loaded again, because the loop has no registers for it.
            share = backward_block.load_share(gradients.share_ptr)
        SUMS: gl.constexpr = channels.KEYS * stages.dv.shape[1]
        SLOT: gl.constexpr = backward_block.slot_words(stages.dv.shape[1])
        slot = share.slot + share.number
        counter = gradients.counters_ptr + slot * channels.CONSUMERS + WARPGROUP
        dk_ptr = gradients.slots_ptr + slot.to(gl.int64) * SLOT + WARPGROUP * (2 * SUMS)
        dv_ptr = dk_ptr + SUMS
        place = share.count - 1 - share.number
        distance = 1
        while (place % (2 * distance) == 0) & (place + distance < share.count):
            schedule.wait_until(counter - distance * channels.CONSUMERS, channels.WARPGROUP_WARPS)
            dk, dv = load_sums(dk_ptr - distance * SLOT, dk), load_sums(dv_ptr - distance * SLOT, dv)
            distance *= 2
        if place > 0:
            keep_sums(dk_ptr, dk)
            keep_sums(dv_ptr, dv)
            backward_transfers.announce(counter)
        if place == 0:
            store_gradients(dk, dv, keys, NK, mask, scale, gradients, stages, dk_steps, FIRST_COLUMN)


@jit
def store_gradients(dk, dv, keys, NK, mask, scale, gradients, stages, dk_steps, FIRST_COLUMN: gl.constexpr):
    """Write dv, and dk scaled and rotated back, of the KEYS keys from keys.start_n on: columns from FIRST_COLUMN on.

    dk, dv: ``ColumnParts`` of (KEYS, columns). If ``stages`` have a dk_channel, dk's stage is free when dk_steps steps
    of it have been released. Keys that do not exist get zeros; rows from NK on are left out.
    """
    num_rows = NK - keys.start_n
    if mask.first_key is not None:
        dk, dv = drop_keys_of_parts(dk, keys.start_n, mask), drop_keys_of_parts(dv, keys.start_n, mask)
    row_format = replace(gradients.format, BLOCK_D=stages.dv.shape[1])
    origin = tiles.Origin(batch=keys.batch.to(gl.int64), head=keys.head.to(gl.int64), row=keys.start_n)
    dv_rows = tiles.head_rows(gradients.dv, origin, num_rows, row_format)
    dk_rows = tiles.head_rows(gradients.dk, origin, num_rows, row_format)
    if gradients.dv.ptr.dtype.element_ty == gl.float32:
        store_sums(tiles.columns_from(dv_rows, FIRST_COLUMN), dv.left)
        if dv.right is not None:
            store_sums(tiles.columns_from(dv_rows, column_parts.LEFT), dv.right)
    else:
        store_dv(tiles.columns_from(dv_rows, FIRST_COLUMN), dv, stages.dv)
    if stages.dk_channel is not None:
        stages.dk_channel.wait_empty(stages.dk_channel.at(dk_steps))
    dk = column_parts.scale_parts(dk, softmax.gradient_scale(scale))
    store_dk(dk_rows, dk, stages.dk, keys, mask.num_keys, gradients.tables, FIRST_COLUMN // 2)
