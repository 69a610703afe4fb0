"""How the sm_90 forward's output leaves: through shared memory and the TMA, or where a packed sequence ends, not."""

from fused_rope_attn.attention.hopper.columns import LEFT, store_pieces
from fused_rope_attn.attention.hopper.shapes import ROWS
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.tiles import RowFormat, Rows, store_tile
from fused_rope_attn.runtime.triton_compat import (
    fence_async_shared,
    gl,
    jit,
    tma_store,
    tma_store_wait,
)


@record
class Output:
    """Where o and lse go. ``ptr`` and ``strides`` say once more where o lies, in packed calls only, else None."""

    desc: gl.tensor  # of o (B, HQ, NQ, D), in blocks of ROWS rows and the columns that leave together
    ptr: gl.tensor | None
    strides: gl.tuple | None
    lse_ptr: gl.tensor  # (B, HQ, NQ) float32, natural logarithm
    smem: gl.shared_memory_descriptor  # (CONSUMERS, 1, 1, ROWS, columns that leave together)
    D: gl.constexpr
    BLOCK_D: gl.constexpr
    IN_HALVES: gl.constexpr  # whether the left and the right half of the columns leave one after the other
    USE_INT64_OFFSETS: gl.constexpr


@jit
def write_columns(output, o_tile, tile, row, row_end, COLUMN: gl.constexpr):
    """Send o_tile (1, 1, ROWS, columns), fenced for the TMA, to rows [row, row + ROWS) of the tile's head of o.

    It goes to the columns from COLUMN on, and to no row from ``row_end`` on: the TMA knows where the tensor ends, but
    not where a packed sequence does, whose last rows go through registers.
    """
    if output.ptr is None:
        tma_store(output.desc, [tile.batch, tile.head, row, COLUMN], o_tile)
    else:
        if row + ROWS <= row_end:
            tma_store(output.desc, [tile.batch, tile.head, row, COLUMN], o_tile)
        elif row < row_end:
            BLOCK_D: gl.constexpr = o_tile.shape[3]
            WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
            strides = output.strides
            base = output.ptr + tile.head.to(gl.int64) * strides[1] + row.to(gl.int64) * strides[2]
            if COLUMN:
                base += COLUMN * strides[3]
            o = o_tile.reshape((ROWS, BLOCK_D)).load(WHOLE)
            rows = Rows(
                ptr=base, stride_row=strides[2], stride_column=strides[3], num_rows=row_end - row, first_row=None,
                format=RowFormat(
                    D=output.D - COLUMN, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=output.USE_INT64_OFFSETS
                ),
            )  # fmt: skip
            store_tile(rows, o, gl.arange(0, ROWS, gl.SliceLayout(1, WHOLE)), WHOLE)


@jit
def halves(x):
    """The left and the right half of the columns of x (ROWS, columns); they lie in the same threads."""
    COLUMNS: gl.constexpr = x.shape[1] // 2
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    left, right = gl.split(x.reshape((ROWS, 2, COLUMNS)).permute((0, 2, 1)))
    return gl.convert_layout(left, HALF, assert_trivial=True), gl.convert_layout(right, HALF, assert_trivial=True)


@jit
def write_output(output, o, tile, row, row_end, WARPGROUP: gl.constexpr):
    """Write o, 16-bit ``Pieces`` of (ROWS, BLOCK_D), to rows [row, row + ROWS), those before ``row_end``.

    The warpgroup's shared memory is free for it: its last output has left. This one may still be leaving when the
    function returns.
    """
    BLOCK_D: gl.constexpr = output.BLOCK_D
    o_tile = output.smem.index(WARPGROUP)
    if output.IN_HALVES:
        left_half, right_half = halves(o.left)
        o_tile.reshape((ROWS, BLOCK_D // 2)).store(left_half)
        fence_async_shared()
        write_columns(output, o_tile, tile, row, row_end, COLUMN=0)
        tma_store_wait(0)
        o_tile.reshape((ROWS, BLOCK_D // 2)).store(right_half)
        fence_async_shared()
        write_columns(output, o_tile, tile, row, row_end, COLUMN=BLOCK_D // 2)
    else:
        # Columns behind two pieces do not exist in memory, and nobody reads them.
        store_pieces(o_tile.reshape((ROWS, BLOCK_D)), o, LEFT)
        fence_async_shared()
        write_columns(output, o_tile, tile, row, row_end, COLUMN=0)
