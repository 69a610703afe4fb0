# mypy: ignore-errors
"""sm_90 attention forward: persistent and warp-specialised. The pre-pass rotates K, warps of this kernel rotate Q.

One block per multiprocessor runs three kinds of warps, which meet only at barriers in shared memory:

- ``load`` (forward_producers.py), one warp: takes tiles from a counter and announces them to the other warps
  (forward_tiles.py), and keeps the channels of K and V blocks full through the TMA;
- ``rotate_queries`` or ``rotate_rope`` (forward_queries.py), four warps: rotate the query rows of the *next* tile
  into shared memory;
- ``attend`` (forward_attend.py), two warpgroups of 64 query rows each: products and softmax (FlashAttention-3, Shah et
  al. 2024). The product with the values is delayed by one block, and a tile's first scores are issued before the tile
  before it ends, so that the tensor cores work through the ends of the tiles.

Head dims above 128 leave too few registers for warps that rotate, and too little shared memory for a second set of
query buffers. The pre-pass then rotates Q too, and the loading warp loads each warpgroup's 64 rows as soon as it has
released its last ones. O is stored in two halves of its columns, through the same memory.
"""

from fused_rope_attn.attention.hopper.channels import Channel, allocate_barriers, channel_of, tiles_of
from fused_rope_attn.attention.hopper.forward_attend import ForwardOutput, Softmax, attend
from fused_rope_attn.attention.hopper.forward_producers import Loader, load
from fused_rope_attn.attention.hopper.forward_queries import QuerySource, rotate_queries, rotate_rope
from fused_rope_attn.attention.hopper.forward_tiles import (
    TILE_STAGES,
    Announcements,
    Schedule,
    VisitLists,
    announced_words,
    announcement_releases,
)
from fused_rope_attn.attention.hopper.masks import KeyRows, MaskOptions
from fused_rope_attn.attention.hopper.shapes import LOAD_REGISTERS, ROWS, WARPGROUP_THREADS, WARPGROUP_WARPS
from fused_rope_attn.kernels.masks import window_of
from fused_rope_attn.kernels.norm import Norm
from fused_rope_attn.kernels.rotation import RotaryTables
from fused_rope_attn.kernels.tiles import RowFormat, TensorView
from fused_rope_attn.runtime.triton_compat import gl, jit, mbarrier

_NUMBERS = (
    "num_tiles num_heads heads_per_section HQ GROUP_SIZE NQ NK tiles_per_head window num_blocks position_limit".split()
)


@jit(do_not_specialize=_NUMBERS)
def forward_kernel(q_ptr, q_desc, q_rot_desc, k_desc, v_desc, o_desc, o_ptr, cos_ptr, sin_ptr, q_norm_ptr, lse_ptr,
                   counter_ptr, highest_ptr, sinks_ptr, starts_ptr, lens_ptr, q_rope_desc, k_rope_desc, key_rows_ptr,
                   hidden_ptr, visits_ptr, q_strides, o_strides, cos_strides, sin_strides, qk_scale, q_sign, cap_scale,
                   norm_eps, norm_offset, window, num_blocks, num_tiles, num_heads, heads_per_section, HQ, GROUP_SIZE,
                   NQ, NK, tiles_per_head, position_limit,
                   D: gl.constexpr, R: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
                   STAGES: gl.constexpr, CONSUMERS: gl.constexpr, INTERLEAVED: gl.constexpr,
                   READS_LENGTHS: gl.constexpr, FROM_START: gl.constexpr, USE_INT64_OFFSETS: gl.constexpr,
                   TOKEN_TABLES: gl.constexpr, PDL: gl.constexpr,
                   ATTEND_REGISTERS: gl.constexpr, ROTATE_REGISTERS: gl.constexpr, PIN_SUMS: gl.constexpr,
                   VALUES: gl.constexpr, IS_ALIGNED: gl.constexpr, QUERIES_IN_TILES: gl.constexpr,
                   Q_LAYOUT: gl.constexpr):  # fmt: skip
    """Compute o and lse of a (B, HQ, NQ, D) call. Grid: one block per multiprocessor, or one per tile if fewer.

    k_desc and v_desc (B, HKV, NK, D), in blocks of BLOCK_N rows: keys rotated, in pair order, and values. Queries are
    either given unrotated, at q_ptr with q_strides, tables and possibly the weights q_norm (D,), and rotated here; or
    they are given rotated, as q_desc. The arguments of the other way are None. q_rot_desc, in blocks of ROWS rows: the
    tensor that saves queries rotated here for the backward pass, or None. o_desc as in ``ForwardOutput``. lse (B, HQ,
    NQ) float32. counter_ptr: int32, zeroed by the pre-pass. Strides are in elements, (B, H, N, D) for tensors and
    (batch, row, pair) for tables.

    Arguments that a call does not use are None and cost nothing: highest (B, HQ, NQ) float32, the largest logit of each
    row, q_norm, sinks (HQ,), kv_starts and kv_lens (B,) int32, cap_scale to window as in the portable kernel. Packed
    sequences, B = 1, have o itself and its strides in addition to its descriptor, and ``tiles_per_head`` tiles of a
    head. The table after the counter says which of them hold queries.

    key_rows, hidden and visits, of ``visits_kernel`` for num_blocks blocks of keys. With them there is no other mask,
    and starts and lens say only at which positions the sequence is.

    TOKEN_TABLES: row t of the tables belongs to packed token t, and sequences have as many queries as keys.

    position_limit: queries from this position on are not rotated; None: no query is past the last key.

    Multi-head latent attention: q_desc and k_desc hold the columns that are not rotated. k_rope_desc (B, 1, NK, R)
    holds the rotated keys. The queries' other columns are at q_ptr before the rotation, or in q_rope_desc (B, HQ, NQ,
    R) after it. Their scores are added to those of the first columns. In other calls both rope descriptors are None.

    heads_per_section as for ``scheduled_tile``. PIN_SUMS: see ``ptxas.pin``; VALUES: see ``attend``. IS_ALIGNED: use
    ``shapes.is_aligned``, which holds. QUERIES_IN_TILES: packed queries in q_rot, or in the rotated q, are stored as in
    ``Saving.TILES``. The REGISTERS are those of a thread of each kind of warps; Q_LAYOUT is the shared memory's of
    queries that are rotated here.
    """
    NONE: gl.constexpr = None  # a literal None cannot be an element of a tuple here
    IS_PACKED: gl.constexpr = tiles_per_head is not None
    HAS_STARTS: gl.constexpr = starts_ptr is not None
    # If a tile's keys may begin after key 0 or end before NK, it is announced with its bounds.
    HAS_BOUNDS: gl.constexpr = IS_PACKED or HAS_STARTS or lens_ptr is not None or window[0] is not None
    HAS_INTERVALS: gl.constexpr = visits_ptr is not None
    ROTATES_QUERIES: gl.constexpr = q_ptr is not None
    IS_LATENT: gl.constexpr = k_rope_desc is not None
    WORDS: gl.constexpr = announced_words(HAS_BOUNDS, IS_PACKED)
    # Columns of O in one store. The buffers of wide heads and latent attention leave shared memory for half of them.
    O_COLUMNS: gl.constexpr = BLOCK_D if BLOCK_D <= 128 and not IS_LATENT else BLOCK_D // 2
    DTYPE: gl.constexpr = k_desc.dtype
    if q_desc is None:
        q_smem = gl.allocate_shared_memory(DTYPE, [2 * CONSUMERS, ROWS, BLOCK_D], Q_LAYOUT)
    else:
        q_smem = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    o_smem = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, O_COLUMNS], o_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    q_rope, k_rope = None, None
    if IS_LATENT:
        k_rope = tiles_of(k_rope_desc, STAGES)
        if ROTATES_QUERIES:
            q_rope = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, R], Q_LAYOUT)
        else:
            q_rope = tiles_of(q_rope_desc, CONSUMERS)
    tile_smem = gl.allocate_shared_memory(gl.int32, [TILE_STAGES * WORDS, 1], mbarrier.MBarrierLayout())
    tile_channel = channel_of(tile_smem, TILE_STAGES)
    tiles = Announcements(channel=tile_channel, WORDS=WORDS, HAS_BOUNDS=HAS_BOUNDS, IS_PACKED=IS_PACKED)
    # Rotated here, the queries of all warpgroups share two stages. Otherwise each warpgroup has a channel of one stage.
    Q_STAGES: gl.constexpr = 2 if q_desc is None else 1
    TILES: gl.constexpr = CONSUMERS if q_desc is None else 1
    queries = Channel(
        q_smem, allocate_barriers(CONSUMERS), allocate_barriers(CONSUMERS), Q_STAGES, TILES=TILES, rope=q_rope
    )
    keys = channel_of(k_smem, STAGES, k_rope)
    values = channel_of(v_smem, STAGES)
    arrival = None
    if HAS_BOUNDS or HAS_INTERVALS:
        arrival = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(arrival, count=1)
    TILE_READERS: gl.constexpr = CONSUMERS + 1 if ROTATES_QUERIES else CONSUMERS
    for i in gl.static_range(TILE_STAGES):
        tile_channel.init_slot(i, FILLS=1, RELEASES=announcement_releases(TILE_READERS, IS_PACKED))
    # In latent attention the loading warp and those that rotate fill a slot.
    queries.init(FILLS=2 if ROTATES_QUERIES and IS_LATENT else 1, RELEASES=TILES)
    for i in gl.static_range(STAGES):
        keys.init_slot(i, FILLS=1, RELEASES=CONSUMERS * WARPGROUP_THREADS)
        values.init_slot(i, FILLS=1, RELEASES=CONSUMERS * WARPGROUP_THREADS)

    # Numbers that a tile's announcement contains are None here, because Triton 3.6 fails on unused arguments of warps.
    key_rows, lists = None, None
    if HAS_INTERVALS:
        words = gl.allocate_shared_memory(gl.int32, [2 * STAGES, 1], mbarrier.MBarrierLayout())
        key_rows = KeyRows(key_rows_ptr, num_blocks * BLOCK_N, words)
        lists = VisitLists(visits_ptr, hidden_ptr, num_blocks)
    masks = MaskOptions(window_of(window), READS_LENGTHS, HAS_STARTS and not FROM_START, IS_ALIGNED, key_rows)
    schedule = Schedule(
        counter_ptr,
        starts_ptr,
        lens_ptr,
        num_tiles,
        num_heads,
        heads_per_section,
        HQ=None if IS_PACKED else HQ,
        GROUP_SIZE=GROUP_SIZE,
        NQ=None if IS_PACKED else NQ,
        NK=None if IS_PACKED else NK,
        tiles_per_head=tiles_per_head,
        BLOCK_N=BLOCK_N,
        BLOCK_M=CONSUMERS * ROWS,
        QUERIES_IN_TILES=QUERIES_IN_TILES,
        FROM_START=FROM_START,
        intervals=lists,
    )
    # Warpgroups that attend read NK where tiles have no bounds, with intervals only to rotate their first queries.
    NO_NK: gl.constexpr = HAS_BOUNDS or (HAS_INTERVALS and not ROTATES_QUERIES)
    loader = Loader(q_desc, k_desc, v_desc, arrival, PDL, q_rope_desc, k_rope_desc)
    softmax = Softmax(qk_scale, cap_scale, sinks_ptr, PIN_SUMS, VALUES)
    row_format = RowFormat(D, BLOCK_D, USE_INT64_OFFSETS)
    o = TensorView(o_ptr, o_strides)
    output = ForwardOutput(o_desc, o, lse_ptr, highest_ptr, o_smem, row_format, TWO_STORES=O_COLUMNS < BLOCK_D)
    if ROTATES_QUERIES:
        tables = RotaryTables(cos_ptr, sin_ptr, cos_strides, sin_strides, R, INTERLEAVED)
        norm = Norm(q_norm_ptr, norm_eps, norm_offset, D) if q_norm_ptr is not None else None
        q = TensorView(q_ptr, q_strides)
        starts = starts_ptr if FROM_START else None
        q_format = RowFormat(R, R, USE_INT64_OFFSETS) if IS_LATENT else row_format
        source = QuerySource(q, tables, norm, q_sign, position_limit, starts, TOKEN_TABLES, q_rot_desc, q_format)
        # In latent attention these warps rotate all tiles, and the loading warp loads the other columns.
        first, loaded = source, NONE
        if IS_LATENT:
            first, loaded = NONE, queries
        gl.warp_specialize(
            [
                (attend, (0, tiles, queries, keys, values, output, softmax, masks, first, NQ, NONE if NO_NK else NK)),
                (attend, (1, tiles, queries, keys, values, output, softmax, masks, first, NQ, NONE if NO_NK else NK)),
                (
                    rotate_rope if IS_LATENT else rotate_queries,
                    (tiles, queries, source, NONE if IS_PACKED else NQ, NONE if HAS_BOUNDS else NK),
                ),
                (load, (loader, schedule, masks, tiles, loaded, keys, values)),
            ],
            [WARPGROUP_WARPS, WARPGROUP_WARPS, 1],
            [ATTEND_REGISTERS, ROTATE_REGISTERS, LOAD_REGISTERS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (attend, (0, tiles, queries, keys, values, output, softmax, masks, NONE, NQ, NONE if NO_NK else NK)),
                (attend, (1, tiles, queries, keys, values, output, softmax, masks, NONE, NQ, NONE if NO_NK else NK)),
                (attend, (2, tiles, queries, keys, values, output, softmax, masks, NONE, NQ, NONE if NO_NK else NK)),
                (load, (loader, schedule, masks, tiles, queries, keys, values)),
            ],
            [WARPGROUP_WARPS, WARPGROUP_WARPS, 1],
            [ATTEND_REGISTERS, ATTEND_REGISTERS, LOAD_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (attend, (0, tiles, queries, keys, values, output, softmax, masks, NONE, NQ, NONE if NO_NK else NK)),
                (attend, (1, tiles, queries, keys, values, output, softmax, masks, NONE, NQ, NONE if NO_NK else NK)),
                (load, (loader, schedule, masks, tiles, queries, keys, values)),
            ],
            [WARPGROUP_WARPS, 1],
            [ATTEND_REGISTERS, LOAD_REGISTERS],
        )
