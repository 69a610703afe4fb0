"""The query tiles of the sm_90 forward in shared memory, and the warps that rotate them on their way there."""

from fused_rope_attn.attention.hopper.barriers import arrive_by_threads
from fused_rope_attn.attention.hopper.opaque import opaque
from fused_rope_attn.attention.hopper.shapes import ROWS, WARPGROUP_THREADS
from fused_rope_attn.attention.hopper.tiles import next_tile, query_end, query_position, rotated_row, tile_bounds
from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.rotation import head_rotation, load_rotated, pair_norm_weights, with_norm
from fused_rope_attn.kernels.tiles import RowFormat, Rows, prefetch_rows, rows_from
from fused_rope_attn.runtime.triton_compat import (
    barrier,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma_store,
    tma_store_wait,
)


@record
class QueryBuffers:
    """Tiles of ROWS queries in shared memory, one for each warpgroup that multiplies, in pair order.

    Either there are two sets of them, of which the ``tile_step``-th tile uses number ``tile_step % 2``, with one pair
    of mbarriers each; or, IS_SINGLE, there is one set, and each warpgroup has mbarriers of its own, so that the next
    queries can follow as soon as the one warpgroup has done with its last ones.
    """

    smem: gl.shared_memory_descriptor  # (2 * CONSUMERS, ROWS, BLOCK_D), or (CONSUMERS, 1, 1, ROWS, BLOCK_D)
    full: gl.shared_memory_descriptor  # (CONSUMERS, 1)
    empty: gl.shared_memory_descriptor  # (CONSUMERS, 1)
    CONSUMERS: gl.constexpr
    IS_SINGLE: gl.constexpr

    @jit
    def init(self):
        """Initialise the mbarriers, before any warp uses them."""
        for i in gl.static_range(self.CONSUMERS):
            mbarrier.init(self.full.index(i), count=1)
            mbarrier.init(self.empty.index(i), count=(1 if self.IS_SINGLE else self.CONSUMERS) * WARPGROUP_THREADS)

    @jit
    def barrier(self, tile_step, WARPGROUP: gl.constexpr):
        """Which of the mbarriers serves warpgroup WARPGROUP."""
        if self.IS_SINGLE:
            return WARPGROUP
        else:
            return tile_step % 2

    @jit
    def phase(self, tile_step):
        """How often that mbarrier has served before, modulo 2."""
        if self.IS_SINGLE:
            return tile_step & 1
        else:
            return (tile_step // 2) & 1

    @jit
    def tile(self, tile_step, WARPGROUP: gl.constexpr):
        """The shared memory of warpgroup WARPGROUP's queries."""
        if self.IS_SINGLE:
            return self.smem.index(WARPGROUP)
        else:
            return self.smem.index((tile_step % 2) * self.CONSUMERS + WARPGROUP)

    @jit
    def wait_full(self, tile_step, WARPGROUP: gl.constexpr, pred=True):
        """Wait until the queries of warpgroup WARPGROUP have come."""
        mbarrier.wait(self.full.index(self.barrier(tile_step, WARPGROUP)), self.phase(tile_step), pred=pred)

    @jit
    def release(self, tile_step, WARPGROUP: gl.constexpr, pred=True):
        """Warpgroup WARPGROUP, whose tensor cores alone have read them, reads its queries no more."""
        if pred:
            arrive_by_threads(self.empty.index(self.barrier(tile_step, WARPGROUP)))

    @jit
    def wait_empty(self, tile_step, WARPGROUP: gl.constexpr = 0):
        """Wait until nothing reads the last content any more: of warpgroup WARPGROUP, or unless IS_SINGLE of any."""
        if self.IS_SINGLE:
            mbarrier.wait(self.empty.index(WARPGROUP), self.phase(tile_step + 1))
        else:
            mbarrier.wait(self.empty.index(self.barrier(tile_step, WARPGROUP)), self.phase(tile_step) ^ 1)


@record
class QuerySource:
    """The queries as they lie in memory, (B, HQ, NQ, D), and how they are normed and rotated."""

    ptr: gl.tensor
    strides: gl.tuple
    cos_ptr: gl.tensor
    sin_ptr: gl.tensor
    cos_strides: gl.tuple  # (batch, row, pair)
    sin_strides: gl.tuple
    norm_ptr: gl.tensor | None  # weights (D,), or None for no norm, like eps and offset
    norm_eps: gl.tensor | None
    norm_offset: gl.tensor | None
    sign: gl.tensor  # 1 or -1, the sign of softmax_scale
    position_limit: gl.tensor | None  # positions that the tables have; None: as many as there are keys, or more
    saved_desc: gl.tensor | None  # where the rotated queries are kept for a backward pass, in blocks of ROWS rows
    D: gl.constexpr
    R: gl.constexpr
    INTERLEAVED: gl.constexpr
    USE_INT64_OFFSETS: gl.constexpr


@jit
def rotate_queries(tiles, queries, source, NQ, NK):
    """Rotate the query rows of each tile into shared memory, and save them where asked; a warpgroup's work."""
    BLOCK_D: gl.constexpr = queries.smem.shape[2]
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 16], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, BLOCK_D // 64], [32, 1], [4, 1], [1, 0])
    # Rows that four warps rotate at a time, eight pairs a thread.
    CHUNK: gl.constexpr = 2048 // BLOCK_D
    offs = gl.arange(0, CHUNK, gl.SliceLayout(1, PAIRS))
    row_format = RowFormat(D=source.D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=source.USE_INT64_OFFSETS)
    weights = None
    if source.norm_ptr is not None:
        norm = Norm(weight_ptr=source.norm_ptr, eps=source.norm_eps, offset=source.norm_offset, D=source.D)
        weights = pair_norm_weights(norm, source.R, source.INTERLEAVED, BLOCK_D, PAIRS)
    tile_step = 0
    tile = next_tile(tiles, tile_step)
    while tile.num_blocks > 0:
        num_positions = tile_bounds(tile, NK).num_keys
        if source.position_limit is not None:
            num_positions = source.position_limit
        rotation = head_rotation(
            source.cos_ptr, source.sin_ptr, source.cos_strides, source.sin_strides, tile.batch.to(gl.int64),
            num_positions, source.R, source.INTERLEAVED,
        )  # fmt: skip
        rotation = with_norm(rotation, source.norm_ptr, source.norm_eps, source.norm_offset, source.D)
        strides = source.strides
        head = Rows(
            ptr=source.ptr + tile.batch.to(gl.int64) * strides[0] + tile.head.to(gl.int64) * strides[1],
            stride_row=strides[2], stride_column=strides[3], num_rows=query_end(tile, NQ), first_row=None,
            format=row_format,
        )  # fmt: skip
        if weights is not None:
            # With norms these warps are closest to being what everything waits for.
            prefetch_rows(head, tile.start_m, query_end(tile, NQ), queries.CONSUMERS * ROWS, LINES)
        queries.wait_empty(tile_step)
        if source.saved_desc is not None:
            # The last tile's queries have left, and with them those that lay here before.
            tma_store_wait(0)
            barrier()
        for warpgroup in gl.static_range(queries.CONSUMERS):
            for chunk in gl.static_range(ROWS // CHUNK):
                # Addresses of all rows at once, or loads of a chunk ahead of the last one's end, do not fit into the
                # registers of these warps.
                start = opaque(tile.start_m) + warpgroup * ROWS + chunk * CHUNK
                q = load_rotated(
                    rows_from(head, start), offs, rotation, query_position(tile, start, NQ, NK), source.sign,
                    PAIR_LAYOUT=PAIRS, TILE_LAYOUT=WHOLE, weights=weights,
                )  # fmt: skip
                # Loads of the next chunk stay behind it; beside the norm's weights there is no room even for one ahead.
                if warpgroup + chunk > 0 or weights is not None:
                    barrier()
                queries.tile(tile_step, warpgroup).slice(chunk * CHUNK, CHUNK, dim=0).store(q)
        fence_async_shared()
        if source.saved_desc is not None:
            barrier()
            for warpgroup in gl.static_range(queries.CONSUMERS):
                # Behind its end a packed sequence has whole blocks of ROWS to itself, and no more.
                if tile.start_m + warpgroup * ROWS < query_end(tile, NQ):
                    tma_store(
                        source.saved_desc, [tile.batch, tile.head, rotated_row(tile) + warpgroup * ROWS, 0],
                        queries.tile(tile_step, warpgroup).reshape((1, 1, ROWS, BLOCK_D)),
                    )  # fmt: skip
        mbarrier.arrive(queries.full.index(queries.barrier(tile_step, 0)))
        tile_step += 1
        tile = next_tile(tiles, tile_step)
    if source.saved_desc is not None:
        tma_store_wait(0)
