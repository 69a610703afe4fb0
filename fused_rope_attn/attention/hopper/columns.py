"""Products over the columns that a head has: a tile's columns are a power of two, and head dims 72 to 96 fill fewer.

Columns 0 .. 64 of a tile of 128 are one piece, and the 16 or 32 behind them that the head needs are another. In shared
memory a tile keeps all 128, of which products read these pieces; an accumulator in registers has a tensor for each of
them, and none for the rest, which would be zeros. All other tiles are taken whole.
"""

from triton import constexpr_function

from fused_rope_attn.kernels.records import record
from fused_rope_attn.runtime.triton_compat import gl, jit, warpgroup_mma, warpgroup_mma_wait

# Columns of the first piece: those that lie together in shared memory, 128 bytes a row.
LEFT = gl.constexpr(64)


@constexpr_function
def right_columns(head_dim, block_d):
    """Columns of the second piece of a tile of block_d columns; 0: it is taken whole."""
    if block_d != 128 or head_dim > 96:
        return 0
    return 16 if head_dim <= 80 else 32


@constexpr_function
def needed_columns(head_dim, block_d):
    """Columns of a tile of block_d that its pieces cover: what a head needs, up to a multiple of 16, or all."""
    right = right_columns(head_dim, block_d)
    return 64 + right if right else block_d


@record
class Pieces:
    """An accumulator (rows, columns) float32 of tensor cores: whole, with ``right`` None, or its two pieces."""

    left: gl.tensor
    right: gl.tensor | None


@jit
def piece_zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zeros (ROWS, COLUMNS) float32 as an accumulator of one warpgroup."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)


@jit
def zero_pieces(ROWS: gl.constexpr, BLOCK_D: gl.constexpr, RIGHT: gl.constexpr):
    """``Pieces`` of zeros for tiles of BLOCK_D columns; RIGHT: ``right_columns``."""
    if RIGHT:
        return Pieces(left=piece_zeros(ROWS, LEFT), right=piece_zeros(ROWS, RIGHT))
    else:
        return Pieces(left=piece_zeros(ROWS, BLOCK_D), right=None)


@jit
def issue_over_columns(a, b, nothing, RIGHT: gl.constexpr):
    """Begin the product of a (rows, BLOCK_D) and the transposed b (columns, BLOCK_D), both in shared memory.

    It is one group of products for ``warpgroup_mma_wait``, or two with a second piece. nothing: zeros as the result.
    """
    if RIGHT:
        left, right = b.slice(0, LEFT, dim=1), b.slice(LEFT, RIGHT, dim=1)
        token = warpgroup_mma(a.slice(0, LEFT, dim=1), left.permute((1, 0)), nothing, use_acc=False, is_async=True)
        return warpgroup_mma(a.slice(LEFT, RIGHT, dim=1), right.permute((1, 0)), token, is_async=True)
    else:
        return warpgroup_mma(a, b.permute((1, 0)), nothing, use_acc=False, is_async=True)


@jit
def issue_by_columns(a, b, pieces, ADDS: gl.constexpr = True):
    """Add the product of a (rows, inner), in registers, and b (inner, BLOCK_D), in shared memory, to ``Pieces``.

    Unless it ADDS, the pieces become the product, whatever they hold.

    They are in flight in the result, of as many groups as there are pieces. a has the layout for the first of them.
    """
    if pieces.right is None:
        return Pieces(left=warpgroup_mma(a, b, pieces.left, use_acc=ADDS, is_async=True), right=None)
    else:
        RIGHT: gl.constexpr = pieces.right.shape[1]
        a_right = gl.convert_layout(a, gl.DotOperandLayout(0, pieces.right.type.layout, 2), assert_trivial=True)
        left = warpgroup_mma(a, b.slice(0, LEFT, dim=1), pieces.left, use_acc=ADDS, is_async=True)
        right = warpgroup_mma(a_right, b.slice(LEFT, RIGHT, dim=1), pieces.right, use_acc=ADDS, is_async=True)
        return Pieces(left=left, right=right)


@jit
def wait_for_pieces(pieces, PENDING: gl.constexpr):
    """``Pieces`` that were in flight, complete; at most PENDING younger groups of products still are."""
    if pieces.right is None:
        return Pieces(left=warpgroup_mma_wait(PENDING, deps=[pieces.left]), right=None)
    else:
        left, right = warpgroup_mma_wait(PENDING, deps=[pieces.left, pieces.right])
        return Pieces(left=left, right=right)


@jit
def wait_for_pieces_and(pieces, token, PENDING: gl.constexpr):
    """``wait_for_pieces``, and for another result in flight: (pieces, the other)."""
    if pieces.right is None:
        left, other = warpgroup_mma_wait(PENDING, deps=[pieces.left, token])
        return Pieces(left=left, right=None), other
    else:
        left, right, other = warpgroup_mma_wait(PENDING, deps=[pieces.left, pieces.right, token])
        return Pieces(left=left, right=right), other


@jit
def store_pieces(tile, pieces, WIDTH: gl.constexpr):
    """Put ``Pieces``, rounded to its dtype, into a tile in shared memory, the second one from column WIDTH on.

    What the tile holds behind two pieces stays as it is.
    """
    if pieces.right is None:
        tile.store(pieces.left.to(tile.dtype))
    else:
        tile.slice(0, WIDTH, dim=1).store(pieces.left.to(tile.dtype))
        tile.slice(WIDTH, pieces.right.shape[1], dim=1).store(pieces.right.to(tile.dtype))


@jit
def scale_pieces(pieces, factor):
    """``Pieces`` times a scalar."""
    if pieces.right is None:
        return Pieces(left=pieces.left * factor, right=None)
    else:
        return Pieces(left=pieces.left * factor, right=pieces.right * factor)
