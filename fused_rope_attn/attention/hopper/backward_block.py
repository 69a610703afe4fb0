"""What the warps of an sm_90 backward block share: records of its work, its buffers with their barriers, its range."""

from fused_rope_attn.attention.hopper.barriers import Ring, allocate_barriers
from fused_rope_attn.attention.hopper.opaque import opaque
from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M as BLOCK_M
from fused_rope_attn.attention.hopper.shapes import CONSUMERS, WARPGROUP_THREADS
from fused_rope_attn.kernels.masks import first_query, query_range
from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.records import record
from fused_rope_attn.runtime.triton_compat import gl, jit, mbarrier


@record
class Buffer:
    """A tile in shared memory, or one for each warpgroup, and the mbarriers that say when it is ``full`` and ``empty``.

    ``empty`` is None where the tile is written once.
    """

    smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor | None


@record
class QueryRing:
    """Query blocks, of Q or of dO, that the loading warp brings, and a number for each of their rows.

    blocks: their ``Ring``, each (1, 1, BLOCK_M, BLOCK_D) 16-bit, which both warpgroups empty. stats (STAGES, BLOCK_M)
    float32: the base-2 lse of the rows of Q, delta of those of dO.
    """

    blocks: Ring
    stats: gl.shared_memory_descriptor


@record
class KeyBlock:
    """The keys that a block, or one of its warps, works on: of a key head of a batch entry, from row start_n on."""

    batch: gl.tensor
    head: gl.tensor
    start_n: gl.tensor | None


@record
class QueryBlocks:
    """The query blocks that see a key block, in each head of the group: ``count`` of them from number ``first`` on.

    num_masked: without a window on the left, the blocks first .. first + num_masked - 1 need a mask and the others do
    not. With one, each block's position says whether it needs a mask; all do where num_masked is ``count`` or more. It
    is None where every key that the mask lets through exists.

    num_ahead: of how many blocks, the first of each head, 0 or 1, all heads come before any others: they see only the
    keys of the first warpgroup. None: every head comes whole.
    """

    first: gl.tensor
    num_masked: gl.tensor | None
    num_ahead: gl.tensor | None
    count: gl.tensor


@record
class Sizes:
    """Heads and rows: HQ query heads, GROUP_SIZE of them to a key head, NQ queries, NK keys.

    pitch: the rows of a head in the row statistics and in the accumulator of dQ, a multiple of BLOCK_M.
    """

    HQ: gl.tensor | None
    GROUP_SIZE: gl.tensor
    NQ: gl.tensor | None
    pitch: gl.tensor | None
    NK: gl.tensor | None


@record
class KeyNorm:
    """The norm of the keys, through which dk goes back behind its rotation.

    raw_ptr, raw_strides: k as the caller gave it, (B, HKV, NK, D). sums_ptr: float32, this block's part of the weights'
    gradient: rows of D columns, one for each warpgroup that owns whole rows, or one for both. exchange (3 *
    CONSUMERS, KEYS, 1) float32: where warpgroups that own parts of rows tell each other their sums, else None.
    """

    norm: Norm
    raw_ptr: gl.tensor
    raw_strides: gl.tuple
    sums_ptr: gl.tensor
    exchange: gl.shared_memory_descriptor | None


@record
class KeyGradients:
    """Where dk and dv (B, HKV, NK, D) are written, and the tables by which dk is rotated back."""

    dk_ptr: gl.tensor
    dv_ptr: gl.tensor
    cos_ptr: gl.tensor
    sin_ptr: gl.tensor
    dk_strides: gl.tuple
    dv_strides: gl.tuple
    cos_strides: gl.tuple
    sin_strides: gl.tuple
    key_norm: KeyNorm | None
    D: gl.constexpr
    R: gl.constexpr
    INTERLEAVED: gl.constexpr
    USE_INT64_OFFSETS: gl.constexpr


@jit
def allocate_barrier():
    """Room for one mbarrier, (1,), not yet initialised."""
    return gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())


@jit
def whole_tile(smem):
    """K or V of the block, (1, 1, 1, rows, columns), as a tile; of more than 64 columns, at an ``opaque`` address.

    Otherwise the descriptors of its products, up to 16 of 64 bits each, wait in registers around the loop, which then
    spill or, in the kernel for wide heads, make every product synchronous (C7512). Those of 64 columns have room there,
    and to make them anew costs 30 of 500 instructions.
    """
    COLUMNS: gl.constexpr = smem.shape[4]
    slot = 0 if COLUMNS == 64 else opaque(0)
    return smem.index(slot).reshape((smem.shape[3], COLUMNS))


@jit
def allocate_query_ring(desc, stats_desc, STAGES: gl.constexpr):
    """A ``QueryRing`` for the blocks of desc, (1, 1, BLOCK_M, BLOCK_D), and of stats_desc, (BLOCK_M,)."""
    ring = Ring(
        smem=gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout),
        full=allocate_barriers(STAGES),
        empty=allocate_barriers(STAGES),
        STAGES=STAGES,
    )
    return QueryRing(blocks=ring, stats=gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], stats_desc.layout))


@jit
def init_query_ring(ring):
    """Initialise the barriers of a ``QueryRing``: the loading warp fills a slot, and both warpgroups release it."""
    for slot in gl.static_range(ring.blocks.STAGES):
        ring.blocks.init_slot(slot, FILLS=1, RELEASES=CONSUMERS * WARPGROUP_THREADS)


@jit
def query_blocks(mask, start_n, NQ, num_rows, BLOCK_N: gl.constexpr):
    """(QueryBlocks, first visible row) of the key block [start_n, start_n + BLOCK_N), of num_rows query rows in all.

    All query blocks need a mask when the key block is partial, because a key that does not exist has score 0, and
    p = exp2(0 - lse) may be infinite. Query rows before the first visible one see nothing; the number counts only where
    the device reads lengths. NQ: the queries, of which num_rows is at least as many.
    """
    q_offset = mask.num_keys - NQ
    first, num_masked, _, last = query_range(mask, start_n, q_offset, num_rows, BLOCK_M, BLOCK_N)
    is_partial = start_n + BLOCK_N > mask.num_keys
    first_row = first
    if mask.first_key is not None:
        is_partial = is_partial | (start_n < mask.first_key)
    if mask.READS_LENGTHS:
        # The key block may begin before the first key, and see rows that see nothing.
        first_row = first_query(mask, q_offset)
        first = gl.minimum(last, gl.maximum(first, first_row // BLOCK_M))
    blocks = QueryBlocks(
        first=first, num_masked=gl.where(is_partial, last, num_masked) - first, num_ahead=None, count=last - first
    )  # fmt: skip
    return blocks, first_row
