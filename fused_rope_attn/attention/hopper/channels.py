# mypy: ignore-errors
"""Sizes of the sm_90 kernels, and channels: how warps pass tiles to one another through shared memory.

A channel is CUTLASS's pipeline: producers fill its slots one after another, consumers empty them, and two mbarriers a
slot say when it is full and when it is empty. Most tiles arrive through the TMA (``load_rows``).

Rows of a tile that do not exist have to be zero, whatever memory holds there: a weight of zero does not hide a NaN. The
TMA writes zeros past the end of a tensor. If a sequence begins or ends inside a tensor, the loading warp waits for the
tile and zeroes those rows itself (``load_existing_rows``), so that the warps that multiply need not check. Only one or
two tiles of a sequence pay this round trip to memory.
"""

from fused_rope_attn.kernels.records import record, replace
from fused_rope_attn.kernels.sequences import PADDED_TILE_ROWS
from fused_rope_attn.runtime.triton_compat import (
    async_copy,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    reinterpret,
    tma_load,
)

# All warps but the loading one are in warpgroups of four.
WARPGROUP_WARPS = gl.constexpr(4)
WARPGROUP_THREADS = gl.constexpr(128)
# Warpgroups of a block of the backward that multiply, and so consume the loading warp's tiles.
CONSUMERS = gl.constexpr(2)
# Rows of one wgmma (its M): the query rows of a warpgroup in the forward, its key rows in the backward. The forward has
# two or three such warpgroups, the backward two.
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)

# Query rows that the backward loads and multiplies at a time, and key rows of its tile, which both warpgroups share.
BACKWARD_BLOCK_M = gl.constexpr(PADDED_TILE_ROWS.value)
BACKWARD_BLOCK_N = gl.constexpr(128)
# Registers of a thread of the backward's two warpgroups that multiply, and of the warps that load or add in all
# kernels. A multiprocessor has 65,536: two warpgroups with 240 and one with 24 take 64,512.
MULTIPLY_REGISTERS = gl.constexpr(240)
LOAD_REGISTERS = gl.constexpr(24)

# The hardware's named barriers, ``bar`` counters 0 to 15 of a block. Triton takes those of its partitions from 0 on.
# The forward's warpgroup 0 waits at the first one for the tensor cores, warpgroups 1 and 2 at the next two.
TENSOR_CORES = gl.constexpr(8)
# Threads that meet at each of them.
TWO_WARPGROUPS = gl.constexpr(256)


@jit
def wait_at_named_barrier(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Arrive at a named barrier, and wait until THREADS threads have arrived."""
    gl.inline_asm_elementwise(f"bar.sync {BARRIER}, {THREADS}; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def arrive_at_named_barrier(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Arrive at a named barrier without waiting, because another warp waits there."""
    gl.inline_asm_elementwise(
        f"bar.arrive {BARRIER}, {THREADS}; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@jit
def wait_for_tensor_cores(WARPGROUP: gl.constexpr):
    """Wait until the previous warpgroup has issued its products, so that one computes while another multiplies."""
    wait_at_named_barrier(TENSOR_CORES + WARPGROUP, TWO_WARPGROUPS)


@jit
def hand_over_tensor_cores(WARPGROUP: gl.constexpr, COUNT: gl.constexpr):
    """Let the next of COUNT warpgroups issue its products."""
    arrive_at_named_barrier(TENSOR_CORES + (WARPGROUP + 1) % COUNT, TWO_WARPGROUPS)


@record
class Cursor:
    """A producer's or consumer's place in a channel: the slot, and a parity that changes each time all slots are used.

    parity None: it follows from ``step`` and is computed at the wait that needs it, so that no register holds it
    before.
    """

    slot: gl.tensor
    step: gl.tensor | None
    parity: gl.tensor | None


@record
class Channel:
    """STAGES slots of shared memory that producers fill and consumers empty in a cycle.

    A producer waits until a slot is empty, fills it and arrives at ``full``, or lets the TMA arrive. A consumer waits
    until it is full and releases it. Both sides count steps, one for each slot that they have filled or emptied since
    the kernel began; ``at`` turns a step into a ``Cursor``. For example step 7 of a channel with two stages uses slot 1
    for the fourth time.

    buffer (slots * TILES, ...): the tiles, TILES of them in each slot. full and empty (slots, 1): mbarriers; ``empty``
    is None if nothing waits for it. rope: the rotated columns of the same rows, one tile for each of ``buffer``, which
    fills and empties with it; None unless the call is multi-head latent attention. FIRST: the channel's first slot,
    because channels of several warpgroups may share the arrays (``of_warpgroup``). TILE: which of a slot's tiles
    ``tile`` returns. SHARED: all slots of a warpgroup have one tile, and only their barriers differ. Each of several
    consumers then has a barrier of its own: the parity of a common one would not say which of them is next.
    """

    buffer: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor | None
    STAGES: gl.constexpr
    FIRST: gl.constexpr = 0
    TILES: gl.constexpr = 1
    TILE: gl.constexpr = 0
    SHARED: gl.constexpr = False
    rope: gl.shared_memory_descriptor | None = None

    @jit
    def init_slot(self, slot, FILLS: gl.constexpr, RELEASES: gl.constexpr):
        """Initialise the mbarriers of a slot, which FILLS arrivals fill and RELEASES arrivals release.

        ``release`` is one arrival for each warpgroup, ``release_by_threads`` one for each thread.
        """
        mbarrier.init(self.full.index(slot), count=FILLS)
        if self.empty is not None:
            mbarrier.init(self.empty.index(slot), count=RELEASES)

    @jit
    def init(self, FILLS: gl.constexpr, RELEASES: gl.constexpr):
        """Initialise the mbarriers of all slots, as ``init_slot`` does."""
        SLOTS: gl.constexpr = self.full.shape[0]
        for slot in gl.static_range(SLOTS):
            self.init_slot(slot, FILLS, RELEASES)

    @jit
    def of_warpgroup(self, WARPGROUP: gl.constexpr):
        """Return a warpgroup's view: its own slots if there is one tile a slot, else its own tile of each slot."""
        if self.TILES == 1:
            return replace(self, FIRST=WARPGROUP * self.STAGES)
        else:
            return replace(self, TILE=WARPGROUP)

    @jit
    def at(self, step):
        """Return the ``Cursor`` of a step."""
        return Cursor(slot=self.FIRST + step % self.STAGES, step=step, parity=None)

    @jit
    def parity(self, cursor):
        """Return the parity of a cursor, wherever it is kept."""
        if cursor.parity is None:
            return (cursor.step // self.STAGES) & 1
        else:
            return cursor.parity

    @jit
    def start_at(self, step):
        """Return the ``Cursor`` of a step for a loop that advances it by ``after``."""
        cursor = self.at(step)
        return Cursor(slot=cursor.slot, step=None, parity=self.parity(cursor))

    @jit
    def after(self, cursor):
        """Return the next ``Cursor`` after one that began with ``start_at``, without a division."""
        is_last = cursor.slot == self.FIRST + self.STAGES - 1
        slot = gl.where(is_last, self.FIRST, cursor.slot + 1)
        return Cursor(slot, step=None, parity=gl.where(is_last, cursor.parity ^ 1, cursor.parity))

    @jit
    def tile(self, cursor):
        """Return the tile in shared memory."""
        if self.SHARED:
            return self.buffer.index(self.FIRST // self.STAGES)
        elif self.TILES == 1:
            return self.buffer.index(cursor.slot)
        else:
            return self.buffer.index(cursor.slot * self.TILES + self.TILE)

    @jit
    def full_barrier(self, cursor):
        """Return the mbarrier at which a producer arrives, or the TMA for it."""
        return self.full.index(cursor.slot)

    @jit
    def wait_full(self, cursor, pred=True):
        """Wait as a consumer until the slot has been filled."""
        mbarrier.wait(self.full.index(cursor.slot), self.parity(cursor), pred=pred)

    @jit
    def wait_empty(self, cursor):
        """Wait as a producer until consumers have released what the slot held before; at first there is nothing."""
        if self.SHARED:
            # That of the step before, which had the same tile.
            cursor = self.at(cursor.step + self.STAGES - 1)
        parity = self.parity(cursor) ^ 1
        mbarrier.wait(self.empty.index(cursor.slot), parity)

    @jit
    def fill(self, cursor):
        """Arrive as a producer: the slot is full."""
        mbarrier.arrive(self.full.index(cursor.slot))

    @jit
    def release(self, cursor, pred=True):
        """Arrive as a consumer that has finished reading the slot, once for the warpgroup."""
        mbarrier.arrive(self.empty.index(cursor.slot), pred=pred)

    @jit
    def release_by_threads(self, cursor, pred=True):
        """Release as ``release`` does, with one arrival of each thread, which avoids a barrier of the warpgroup.

        Triton makes the warps of a partition wait for one another before a single arrival for all of them. They need
        not if the slot's readers were tensor cores that have been waited for, or loads that precede this. For loads it
        relies on sm_90 to perform a warp's accesses to shared memory in order, which PTX does not promise. It orders no
        stores of the threads.
        """
        if pred:
            # No copies of this thread are pending, so that its arrival is immediate.
            async_copy.mbarrier_arrive(self.empty.index(cursor.slot), increment_count=False)


@jit
def allocate_barriers(COUNT: gl.constexpr):
    """Allocate COUNT mbarriers, (COUNT, 1), not yet initialised."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@jit
def channel_of(buffer, STAGES: gl.constexpr, rope=None):
    """Return a ``Channel`` of the STAGES tiles of ``buffer``, with barriers that are not yet initialised."""
    return Channel(buffer, allocate_barriers(STAGES), allocate_barriers(STAGES), STAGES, rope=rope)


@jit
def written_once(buffer, rope=None):
    """Return a ``Channel`` of one slot that nothing has to empty: it is filled once, or other barriers say so."""
    return Channel(buffer, allocate_barriers(1), empty=None, STAGES=1, rope=rope)


@jit
def tiles_of(desc, COUNT: gl.constexpr):
    """Allocate COUNT tiles of the blocks that a descriptor loads."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


@record
class RowStatistics:
    """A float32 for each row of a tile, which the TMA loads with it: from ``start`` of ``desc`` into ``smem``."""

    desc: gl.tensor
    start: gl.tensor
    smem: gl.shared_memory_descriptor


@record
class RopePart:
    """The rotated columns of the rows of a tile, which the TMA loads with it, of head ``head`` of ``desc``."""

    desc: gl.tensor | None
    head: gl.tensor
    smem: gl.shared_memory_descriptor | None  # None: there are none


@jit
def rope_part(desc, head, channel, cursor):
    """Return the ``RopePart`` of a slot. desc None: other warps write the rotated columns, or there are none."""
    smem = None
    if desc is not None:
        smem = channel.rope.index(cursor.slot)
    return RopePart(desc, head, smem)


@jit
def zero_rows(tile, first_row, last_row):
    """Zero rows [first_row, last_row) of a tile in shared memory, with one warp.

    tile: (1, 1, rows, columns), 16-bit, its columns a multiple of 64. It is stored in panels of 64 columns, 128 bytes a
    row. The swizzle permutes 16-byte words within eight rows of a panel and keeps each row whole.
    """
    ROWS: gl.constexpr = tile.shape[2]
    PANELS: gl.constexpr = tile.shape[3] // 64
    ONE_WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # A row of a panel, and eight of them at a time, in words.
    rows = reinterpret(tile, gl.int32, [PANELS * ROWS, 32], FLAT)
    eights = reinterpret(tile, gl.int32, [PANELS * ROWS // 8, 256], FLAT)
    row = gl.to_tensor(first_row)
    while row < last_row:
        if (row % 8 == 0) & (row + 8 <= last_row):
            for panel in gl.static_range(PANELS):
                eights.index(panel * (ROWS // 8) + row // 8).store(gl.zeros([256], gl.int32, ONE_WARP))
            row += 8
        else:
            for panel in gl.static_range(PANELS):
                rows.index(panel * ROWS + row).store(gl.zeros([32], gl.int32, ONE_WARP))
            row += 1


@jit
def zero_hidden_rows(tile, words_ptr):
    """Zero the rows of a tile that have a bit in the words at words_ptr, 32 rows a word, as ``zero_rows`` does."""
    WORDS: gl.constexpr = tile.shape[2] // 32
    for i in range(WORDS):
        word = gl.load(words_ptr + i)
        row = i * 32
        if word == -1:
            zero_rows(tile, row, row + 32)
        else:
            while word != 0:
                if (word & 1) != 0:
                    zero_rows(tile, row, row + 1)
                # Without the sign, which a shift would repeat.
                word = (word >> 1) & 0x7FFFFFFF
                row += 1


@jit
def load_rows(desc, batch, head, row, tile, full, stats=None, rope=None):
    """Load rows [row, row + BLOCK) of a head (of ``desc``, (B, H, N, D)) into ``tile`` (1, 1, BLOCK, columns).

    The mbarrier ``full`` completes when they have arrived, and their ``RowStatistics`` and ``RopePart`` if there are
    any.
    """
    OF_STATS: gl.constexpr = 0 if stats is None else stats.desc.block_type.nbytes
    HAS_ROPE: gl.constexpr = rope is not None and rope.smem is not None
    OF_ROPE: gl.constexpr = rope.desc.block_type.nbytes if HAS_ROPE else 0
    mbarrier.expect(full, desc.block_type.nbytes + OF_STATS + OF_ROPE)
    if stats is not None:
        tma_load(stats.desc, [stats.start], full, stats.smem)
    if HAS_ROPE:
        tma_load(rope.desc, [batch, rope.head, row, 0], full, rope.smem)
    tma_load(desc, [batch, head, row, 0], full, tile)


@jit
def load_existing_rows(
    desc, batch, head, row, tile, full, first_row, last_row, arrival, arrivals, stats=None, rope=None
):
    """Load rows as ``load_rows`` does, with zeros for rows outside [first_row, last_row).

    ``arrival`` is an mbarrier of the loading warp alone, at which it waits for a tile before it zeroes rows;
    ``arrivals`` counts how often it has done so. Returns the new ``arrivals``.
    """
    BLOCK: gl.constexpr = tile.shape[2]
    if (first_row > row) | (last_row < row + BLOCK):
        load_rows(desc, batch, head, row, tile, arrival, stats, rope)
        mbarrier.wait(arrival, arrivals & 1)
        zero_rows(tile, 0, gl.minimum(first_row - row, BLOCK))
        zero_rows(tile, gl.maximum(last_row - row, 0), BLOCK)
        if rope is not None and rope.smem is not None:
            zero_rows(rope.smem, 0, gl.minimum(first_row - row, BLOCK))
            zero_rows(rope.smem, gl.maximum(last_row - row, 0), BLOCK)
        fence_async_shared()
        mbarrier.arrive(full)
        arrivals += 1
    else:
        load_rows(desc, batch, head, row, tile, full, stats, rope)
    return arrivals


@jit
def load_seen_rows(desc, batch, head, row, tile, full, words_ptr, is_hidden, arrival, arrivals, stats=None):
    """Load rows as ``load_rows`` does, with zeros for those that have a bit in the words at words_ptr.

    is_hidden: whether there may be such. The other arguments and the result are those of ``load_existing_rows``.
    """
    if is_hidden:
        load_rows(desc, batch, head, row, tile, arrival, stats)
        mbarrier.wait(arrival, arrivals & 1)
        zero_hidden_rows(tile, words_ptr)
        fence_async_shared()
        mbarrier.arrive(full)
        arrivals += 1
    else:
        load_rows(desc, batch, head, row, tile, full, stats)
    return arrivals
