"""The sm_90 backward's loading warp: which query blocks a key block sees, and the rings that hold them."""

from fused_rope_attn.attention.hopper.dq import BLOCK_M
from fused_rope_attn.attention.hopper.rows import load_existing, load_rows
from fused_rope_attn.kernels.masks import Mask, first_query, query_range
from fused_rope_attn.kernels.schedule import let_next_launch_start, wait_for_previous_launch
from fused_rope_attn.runtime.triton_compat import gl, jit, mbarrier

# Key rows of one block; the keys of one of its warpgroups, the M of a wgmma.
BLOCK_N = gl.constexpr(128)
KEYS = gl.constexpr(64)


@jit
def query_blocks(start_n, NQ, pitch, NK, start, left, right, IS_CAUSAL: gl.constexpr, BOUNDED: gl.constexpr,
                 BLOCK_N: gl.constexpr = BLOCK_N):  # fmt: skip
    """(first, masked, count, alive): the query blocks that see the key block, of pitch rows in all.

    Of ``count`` blocks from ``first`` on, those before number ``masked`` need a mask (with ``left`` those at the other
    end too): all of them when the key block is partial, because a key that does not exist has score 0, and
    p = exp2(0 - lse) may be infinite. ``start`` as ``first_key`` gives it, or None. Rows before ``alive`` see nothing;
    without BOUNDED nobody asks.
    """
    mask = Mask(num_keys=NK, first_key=start, left=left, right=right, IS_CAUSAL=IS_CAUSAL, READS_LENGTHS=BOUNDED)
    first, masked, _, last = query_range(mask, start_n, NK - NQ, pitch, BLOCK_M, BLOCK_N)
    partial = start_n + BLOCK_N > NK
    alive = first
    if start is not None:
        partial = partial | (start_n < start)
    if BOUNDED:
        # The key block may begin before ``start``, and see rows that see nothing.
        alive = first_query(mask, NK - NQ)
        first = gl.minimum(last, gl.maximum(first, alive // BLOCK_M))
    return first, gl.where(partial, last, masked) - first, last - first, alive


@jit
def load_block(desc, batch, head, start_m, stats_desc, row, ring, step, STAGES: gl.constexpr, raw, zeroed, alive,
               limit=None):  # fmt: skip
    """Query block ``step`` of a ring: Q with lse, dO with delta. Rows before ``alive`` and from ``limit`` on are zero.

    Returns ``zeroed``. stats_desc None: the tile alone; alive None: all rows as they are; limit None: to the last.
    """
    smem, stats_smem, full, empty = ring
    slot = step % STAGES
    mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
    stats = stats_smem.index(slot)
    if alive is None:
        load_rows(desc, batch, head, start_m, smem.index(slot), full.index(slot), stats_desc, row, stats)
    else:
        if limit is None:
            limit = start_m + BLOCK_M
        zeroed = load_existing(
            desc, batch, head, start_m, smem.index(slot), full.index(slot), raw, zeroed, alive, limit, stats_desc, row,
            stats,
        )  # fmt: skip
    return zeroed


@jit
def load(q_desc, k_desc, v_desc, do_desc, stats_desc, k_buffer, v_buffer, q_ring, do_ring, raw, batch, head, start_n,
         first, count, alive, start, NK, shift, limit, GROUP_SIZE, HQ, pitch, stats_size, Q_STAGES: gl.constexpr,
         DO_STAGES: gl.constexpr, OWNED: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Load K and V once, and every query block with its statistics. What does not exist is zero.

    start and NK: the rows of k of the keys that exist, None where the TMA knows; raw: the barrier of ``load_existing``.
    Packed sequences, otherwise None: dO lies ``shift`` rows from Q, which is padded, and ends at row ``limit``.
    """
    k_smem, k_full = k_buffer
    v_smem, v_full = v_buffer
    zeroed = 0
    if raw is None:
        load_rows(v_desc, batch, head, start_n, v_smem, v_full)
    else:
        zeroed = load_existing(v_desc, batch, head, start_n, v_smem, v_full, raw, zeroed, start, NK)
    # The pre-process writes all that follows, and every other warp waits for some of it.
    wait_for_previous_launch(PDL)
    if OWNED:
        # Not earlier: the post-process relies on ``progress``, which the pre-process has set to zero.
        let_next_launch_start(PDL)
    if raw is None:
        load_rows(k_desc, batch, head, start_n, k_smem, k_full)
    else:
        zeroed = load_existing(k_desc, batch, head, start_n, k_smem, k_full, raw, zeroed, start, NK)
    head_q = head * GROUP_SIZE
    step = 0
    for member in range(GROUP_SIZE):
        for i in range(count):
            start_m = (first + i) * BLOCK_M
            row = (batch * HQ + head_q + member) * pitch + start_m
            zeroed = load_block(
                q_desc, batch, head_q + member, start_m, stats_desc, row, q_ring, step, Q_STAGES, raw, zeroed, alive
            )
            row += stats_size
            alive_do = alive
            if shift is not None:
                start_m += shift
                alive_do += shift
            zeroed = load_block(
                do_desc, batch, head_q + member, start_m, stats_desc, row, do_ring, step, DO_STAGES, raw, zeroed,
                alive_do, limit,
            )  # fmt: skip
            step += 1
    # Scores and dP of a block after the last are computed and dropped: rows past the end, which read as zeros.
    if step > 0:
        load_block(q_desc, batch, head_q, pitch, None, 0, q_ring, step, Q_STAGES, raw, zeroed, None)
        load_block(do_desc, batch, head_q, pitch, None, 0, do_ring, step, DO_STAGES, raw, zeroed, None)
