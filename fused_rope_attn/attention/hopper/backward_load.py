"""The sm_90 backward's loading warp: it brings K and V once, and keeps the rings of Q and dO full."""

from fused_rope_attn.attention.hopper.backward_block import Buffer, QueryRing
from fused_rope_attn.attention.hopper.rows import RowStatistics, load_existing, load_rows
from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M as BLOCK_M
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.schedule import let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.runtime.triton_compat import TensorDescriptor, gl, jit, mbarrier


@record
class Operands:
    """Descriptors of what the TMA loads: q, do (B, HQ, NQ, D), k, v (B, HKV, NK, D); stats as for ``load``."""

    q: TensorDescriptor
    k: TensorDescriptor
    v: TensorDescriptor
    do: TensorDescriptor
    stats: TensorDescriptor


@record
class Destinations:
    """Where the loaded tiles go.

    arrival: the loading warp's own mbarrier, at which it waits for a tile of which it zeroes rows; None where
    it never does.
    """

    k: Buffer
    v: Buffer
    q: QueryRing
    do: QueryRing
    arrival: gl.shared_memory_descriptor | None


@record
class ExistingRows:
    """Rows of the tensors that exist: queries from first_query on, keys [first_key, end_key). None: all.

    In packed sequences, where q and its statistics are padded and dO is not, a row of dO lies do_shift rows behind that
    of q, and rows of dO from do_end on do not exist.
    """

    first_query: gl.tensor | None
    first_key: gl.tensor | None
    end_key: gl.tensor | None
    do_shift: gl.tensor | None
    do_end: gl.tensor | None


@jit
def load_rows_or_zeros(desc, batch, head, row, tile, full, first_row, end_row, arrival, arrivals, stats=None):
    """Load a tile with zeros for rows outside [first_row, end_row), as ``load_existing`` does; returns ``arrivals``.

    first_row None: all rows of the tile exist, or the TMA gives zeros itself. end_row None: its last rows exist.
    """
    if first_row is None:
        load_rows(desc, batch, head, row, tile, full, stats)
    else:
        if end_row is None:
            end_row = row + BLOCK_M
        arrivals = load_existing(desc, batch, head, row, tile, full, first_row, end_row, arrival, arrivals, stats)
    return arrivals


@jit
def load_keys(desc, buffer, keys, existing, arrival, arrivals):
    """Load the rows of K or V that a ``KeyBlock`` has into a ``Buffer``; the result is as of ``load_rows_or_zeros``."""
    return load_rows_or_zeros(
        desc, keys.batch, keys.head, keys.start_n, buffer.smem, buffer.full, existing.first_key, existing.end_key,
        arrival, arrivals,
    )  # fmt: skip


@jit
def load_block(desc, batch, head, start_m, ring, step, arrival, arrivals, first_row=None, end_row=None,
               stats_desc=None, stats_row=None):  # fmt: skip
    """Load query block ``step`` of a ring, the rows from start_m on, as soon as its slot is empty.

    It comes with the statistics of its rows where stats_desc is given: Q with lse, dO with delta. The rest is as for
    ``load_rows_or_zeros``, and so is the result.
    """
    blocks = ring.blocks
    slot = blocks.slot(step)
    mbarrier.wait(blocks.empty.index(slot), ((step // blocks.STAGES) & 1) ^ 1)
    stats = None
    if stats_desc is not None:
        stats = RowStatistics(desc=stats_desc, start=stats_row, smem=ring.stats.index(slot))
    return load_rows_or_zeros(
        desc, batch, head, start_m, blocks.smem.index(slot), blocks.full.index(slot), first_row, end_row, arrival,
        arrivals, stats,
    )  # fmt: skip


@jit
def load_queries(operands, destinations, batch, head_q, queries, begin, end, existing, sizes, stats_size, step,
                 arrivals):  # fmt: skip
    """Query blocks [begin, end) of each of the group's heads, of which head_q is the first, with their statistics.

    begin None: from 0 on. Returns (step, arrivals), counted on.
    """
    arrival = destinations.arrival
    first_query = existing.first_query
    if begin is None:
        begin = 0
    for group_head in range(sizes.GROUP_SIZE):
        for i in range(begin, end):
            start_m = (queries.first + i) * BLOCK_M
            stats_row = (batch * sizes.HQ + head_q + group_head) * sizes.pitch + start_m
            arrivals = load_block(
                operands.q, batch, head_q + group_head, start_m, destinations.q, step, arrival, arrivals,
                first_row=first_query, stats_desc=operands.stats, stats_row=stats_row,
            )  # fmt: skip
            stats_row += stats_size
            first_do = first_query
            if existing.do_shift is not None:
                start_m += existing.do_shift
                first_do += existing.do_shift
            arrivals = load_block(
                operands.do, batch, head_q + group_head, start_m, destinations.do, step, arrival, arrivals,
                first_row=first_do, end_row=existing.do_end, stats_desc=operands.stats, stats_row=stats_row,
            )  # fmt: skip
            step += 1
    return step, arrivals


@jit
def load(operands, destinations, keys, queries, existing, sizes, stats_size, PDL: gl.constexpr,
         LETS_NEXT_LAUNCH_START: gl.constexpr):  # fmt: skip
    """The loading warp: K and V once, and every query block with its statistics. What does not exist is zero.

    keys and queries count rows and blocks of the tensors as the TMA addresses them. The statistics are
    (2 * stats_size,) float32: the base-2 lse of every row of (B, HQ, pitch), and behind them delta.
    LETS_NEXT_LAUNCH_START: this warp does so, once the pre-process has finished.
    """
    batch = keys.batch
    arrival = destinations.arrival
    arrivals = 0
    arrivals = load_keys(operands.v, destinations.v, keys, existing, arrival, arrivals)
    # The pre-process writes all that follows, and every other warp waits for some of it.
    wait_for_previous_launch(PDL)
    if LETS_NEXT_LAUNCH_START:
        # Not earlier: the post-process relies on ``progress``, which the pre-process has set to zero.
        let_next_launch_start(PDL)
    arrivals = load_keys(operands.k, destinations.k, keys, existing, arrival, arrivals)
    head_q = keys.head * sizes.GROUP_SIZE
    step = 0
    if queries.num_ahead is not None:
        step, arrivals = load_queries(
            operands, destinations, batch, head_q, queries, 0, queries.num_ahead, existing, sizes, stats_size, step,
            arrivals,
        )  # fmt: skip
    step, arrivals = load_queries(
        operands, destinations, batch, head_q, queries, queries.num_ahead, queries.count, existing, sizes, stats_size,
        step, arrivals,
    )  # fmt: skip
    # Scores and dP of a block after the last are computed and dropped: rows past the end, which read as zeros.
    if step > 0:
        load_block(operands.q, batch, head_q, sizes.pitch, destinations.q, step, arrival, arrivals)
        load_block(operands.do, batch, head_q, sizes.pitch, destinations.do, step, arrival, arrivals)
