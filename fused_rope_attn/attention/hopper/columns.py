# mypy: ignore-errors
"""Products over the columns that a head has, for heads of 72 to 96 columns in tiles of 128.

Triton's tiles have a power of two of columns. Such a head needs columns 0 to 63 and the next 16 or 32: its accumulators
are two tensors, a left and a right part, and the rest of the tile, which would be zeros, is neither multiplied nor held
in registers. Shared memory holds all 128 columns, and products read the two parts of it. All other tiles are one part.
"""

from triton import constexpr_function

from fused_rope_attn.kernels.records import record
from fused_rope_attn.runtime.triton_compat import gl, jit, warpgroup_mma, warpgroup_mma_wait

# Columns of the left part: one panel of shared memory, 128 bytes a row.
LEFT = gl.constexpr(64)


@constexpr_function
def right_columns(head_dim, block_d):
    """Return the columns of the right part of a tile of block_d columns; 0: the tile is one part."""
    if block_d != 128 or head_dim > 96:
        return 0
    return 16 if head_dim <= 80 else 32


@constexpr_function
def needed_columns(head_dim, block_d):
    """Return the columns of a tile of block_d that its parts cover: the head's, up to a multiple of 16, or all."""
    right = right_columns(head_dim, block_d)
    return 64 + right if right else block_d


@record
class ColumnParts:
    """An accumulator (rows, columns) float32 of tensor cores: one part, with ``right`` None, or two."""

    left: gl.tensor
    right: gl.tensor | None


@jit
def part_zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return zeros (ROWS, COLUMNS) float32 as an accumulator of one warpgroup."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)


@jit
def zero_parts(ROWS: gl.constexpr, BLOCK_D: gl.constexpr, RIGHT: gl.constexpr):
    """Return ``ColumnParts`` of zeros for tiles of BLOCK_D columns; RIGHT: ``right_columns``."""
    left = part_zeros(ROWS, LEFT if RIGHT else BLOCK_D)
    return ColumnParts(left, part_zeros(ROWS, RIGHT) if RIGHT else None)


@jit
def issue_over_columns(a, b, nothing, RIGHT: gl.constexpr):
    """Begin the product of a (rows, BLOCK_D) and the transposed b (columns, BLOCK_D), both in shared memory.

    ``warpgroup_mma_wait`` counts it as one group of products, or as two if there is a right part. nothing: zeros in the
    layout of the result.
    """
    if RIGHT:
        left, right = b.slice(0, LEFT, dim=1), b.slice(LEFT, RIGHT, dim=1)
        token = warpgroup_mma(a.slice(0, LEFT, dim=1), left.permute((1, 0)), nothing, use_acc=False, is_async=True)
        return warpgroup_mma(a.slice(LEFT, RIGHT, dim=1), right.permute((1, 0)), token, is_async=True)
    else:
        return warpgroup_mma(a, b.permute((1, 0)), nothing, use_acc=False, is_async=True)


@record
class ScoreRows:
    """Rows of Q or K in shared memory: their columns, and of multi-head latent attention the rotated ones; else None.

    columns (rows, BLOCK_D), rope (rows, R).
    """

    columns: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor | None


@jit
def rows_in(channel, cursor, COUNT: gl.constexpr = None, START: gl.constexpr = 0):
    """Return the ``ScoreRows`` of a channel's slot: all, or COUNT of them from row START on."""
    ALL: gl.constexpr = channel.buffer.shape[-2]
    columns = channel.tile(cursor).reshape((ALL, channel.buffer.shape[-1]))
    rope = None
    if channel.rope is not None:
        rope = channel.rope.index(cursor.slot).reshape((ALL, channel.rope.shape[-1]))
    if COUNT is not None and COUNT != ALL:
        columns = columns.slice(START, COUNT, dim=0)
        if rope is not None:
            rope = rope.slice(START, COUNT, dim=0)
    return ScoreRows(columns, rope)


@jit
def issue_row_scores(q, k, nothing, RIGHT: gl.constexpr):
    """Begin the scores of ``ScoreRows`` q and k, as ``issue_over_columns`` does, or one group of products more."""
    token = issue_over_columns(q.columns, k.columns, nothing, RIGHT)
    if q.rope is None:
        return token
    else:
        return warpgroup_mma(q.rope, k.rope.permute((1, 0)), token, is_async=True)


@jit
def issue_by_columns(a, b, parts):
    """Add the product of a (rows, inner), in registers, and b (inner, BLOCK_D), in shared memory, to ``ColumnParts``.

    The result is in flight, in as many groups as there are parts. a has the layout for the left one.
    """
    if parts.right is None:
        return ColumnParts(left=warpgroup_mma(a, b, parts.left, is_async=True), right=None)
    else:
        RIGHT: gl.constexpr = parts.right.shape[1]
        a_right = gl.convert_layout(a, gl.DotOperandLayout(0, parts.right.type.layout, 2), assert_trivial=True)
        left = warpgroup_mma(a, b.slice(0, LEFT, dim=1), parts.left, is_async=True)
        right = warpgroup_mma(a_right, b.slice(LEFT, RIGHT, dim=1), parts.right, is_async=True)
        return ColumnParts(left=left, right=right)


@jit
def wait_for_parts(parts, PENDING: gl.constexpr):
    """Wait until these ``ColumnParts`` are complete and return them; up to PENDING younger groups stay in flight."""
    if parts.right is None:
        return ColumnParts(left=warpgroup_mma_wait(PENDING, deps=[parts.left]), right=None)
    else:
        left, right = warpgroup_mma_wait(PENDING, deps=[parts.left, parts.right])
        return ColumnParts(left=left, right=right)


@jit
def wait_for_parts_and(parts, token, PENDING: gl.constexpr):
    """Wait as ``wait_for_parts`` does, also for another result in flight: (parts, the other)."""
    if parts.right is None:
        left, other = warpgroup_mma_wait(PENDING, deps=[parts.left, token])
        return ColumnParts(left=left, right=None), other
    else:
        left, right, other = warpgroup_mma_wait(PENDING, deps=[parts.left, parts.right, token])
        return ColumnParts(left=left, right=right), other


@jit
def store_parts(tile, parts, WIDTH: gl.constexpr):
    """Store ``ColumnParts``, rounded to its dtype, in a tile of shared memory, the right one from column WIDTH on.

    Columns of the tile after the right part keep their contents.
    """
    if parts.right is None:
        tile.store(parts.left.to(tile.dtype))
    else:
        tile.slice(0, WIDTH, dim=1).store(parts.left.to(tile.dtype))
        tile.slice(WIDTH, parts.right.shape[1], dim=1).store(parts.right.to(tile.dtype))


@jit
def scale_parts(parts, factor):
    """Return ``ColumnParts`` times a scalar."""
    return ColumnParts(parts.left * factor, None if parts.right is None else parts.right * factor)
