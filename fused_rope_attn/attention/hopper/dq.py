"""dQ's way in the sm_90 backward: blocks that a warp adds to a float32 accumulator, and the post-process behind.

``progress``, where there is one (narrow windows), says how far that is: int32 words, all zero after the pre-process,
``(B * HKV,)`` programs of a key head that are done, and ``(B * HQ * pitch / BLOCK_M,)`` whether a block has been begun.
"""

import triton
import triton.language as tl

from fused_rope_attn.kernels.lengths import count_tiles, existing_keys, packed_partner, packed_tile, padded_row
from fused_rope_attn.kernels.rotation import head_rotation, load_angles, rotate, store_pairs, unpack_pairs
from fused_rope_attn.kernels.schedule import wait_for_previous_launch, wait_until
from fused_rope_attn.kernels.softmax import sink_gradient
from fused_rope_attn.kernels.tiles import RowFormat, Rows
from fused_rope_attn.runtime.triton_compat import gl, jit, mbarrier, tma_reduce_add, tma_store, tma_store_wait

# Query rows of one block, and the warpgroups, each of which brings its part of a block's columns.
BLOCK_M = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)


@jit
def fence_proxies():
    """What this thread knows of memory holds for the TMA's next operations of its too."""
    gl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def announce(pointer):
    """Add 1 to the word at ``pointer``, once this warp's stores and additions through the TMA are complete."""
    gl.inline_asm_elementwise(
        "{ .reg .pred one; cp.async.bulk.wait_group 0; fence.proxy.async; bar.warp.sync 0xffffffff; "
        "elect.sync _|one, 0xffffffff; @one red.release.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0; }",
        "=r,l", [pointer.to(gl.uint64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def send_block(dq_desc, dq_ring, batch, head_q, block, step, BLOCK_D: gl.constexpr, ADD: gl.constexpr):
    """Store or add one block of dQ once it has arrived, and give its room back."""
    dq_smem, dq_full, dq_empty = dq_ring
    for part in gl.static_range(CONSUMERS):
        mbarrier.wait(dq_full.index(part), step & 1)
        where = [batch, head_q, block * BLOCK_M, part * (BLOCK_D // CONSUMERS)]
        if ADD:
            tma_reduce_add(dq_desc, where, dq_smem.index(part))
        else:
            tma_store(dq_desc, where, dq_smem.index(part))
    tma_store_wait(0)
    for part in gl.static_range(CONSUMERS):
        mbarrier.arrive(dq_empty.index(part))


@jit
def reduce(dq_desc, dq_ring, progress_ptr, batch, head, bh, num_heads, first, owned, count, GROUP_SIZE, pitch,
           BLOCK_D: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Add every dQ block to the accumulator through the TMA; each warpgroup brings half of the columns.

    With progress_ptr the first ``owned`` query blocks are this program's to begin: it stores them and says so, and
    whoever adds to a block waits for that. At the end the program counts itself among those of its key head.
    """
    step = 0
    if progress_ptr is not None:
        wait_for_previous_launch(PDL)
    for member in range(GROUP_SIZE):
        head_q = head * GROUP_SIZE + member
        if progress_ptr is None:
            for i in range(count):
                send_block(dq_desc, dq_ring, batch, head_q, first + i, step, BLOCK_D, True)
                step += 1
        else:
            words = progress_ptr + num_heads + (bh * GROUP_SIZE + member) * (pitch // BLOCK_M) + first
            # Two loops: with one and a branch around operations of the TMA ptxas keeps addresses of ``fold_queries``'s
            # products on the stack, 144 bytes instead of 64 and ten loads for each block.
            for i in range(owned):
                send_block(dq_desc, dq_ring, batch, head_q, first + i, step, BLOCK_D, False)
                announce(words + i)
                step += 1
            for i in range(owned, count):
                wait_until(words + i, 1)
                fence_proxies()
                send_block(dq_desc, dq_ring, batch, head_q, first + i, step, BLOCK_D, True)
                step += 1
    if progress_ptr is not None:
        announce(progress_ptr + bh)


@jit
def stage_rows(x):
    """Order of dQ's rows in shared memory and in the accumulator: (hi, b, a) -> (hi, a, b) for 4 a and 2 b.

    The eight rows that a tensor-core register tile spreads over a warp then meet no bank conflict under the 128-byte
    swizzle: lanes 0 .. 15 write rows 0, 2, 4, 6.
    """
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return x.reshape((rows // 8, 2, 4, columns)).permute((0, 2, 1, 3)).reshape((rows, columns))


@triton.jit
def tiled_words(rows, columns, BLOCK_D: tl.constexpr):
    """Where numbers lie within BLOCK_M rows that ``backward_wide.add_half`` has added: (len(rows), len(columns)).

    Panels of 8 columns, in which rows follow each other: a tensor core's results are 8 rows by 8 columns a register
    pair, two numbers a lane.
    """
    row = (rows // BLOCK_M) * (BLOCK_M * BLOCK_D) + (rows % BLOCK_M) * 8
    column = (columns // 8) * (8 * BLOCK_M) + columns % 8
    return row[:, None] + column[None, :]


@triton.jit(do_not_specialize=["HQ", "HKV", "GROUP_SIZE", "NQ", "pitch", "NK", "num_sequences", "stats_size",
                               "key_blocks"])  # fmt: skip
def postprocess_kernel(accumulator_ptr, progress_ptr, cos_ptr, sin_ptr, dq_ptr, stats_ptr, sinks_ptr, dsinks_ptr,
                       lens_ptr, cu_q_ptr, cu_k_ptr, dq_strides, cos_strides, sin_strides, softmax_scale, HQ, HKV,
                       GROUP_SIZE, NQ, pitch, NK, num_sequences, stats_size, key_blocks, HEADS: tl.constexpr,
                       D: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                       INTERLEAVED: tl.constexpr, LONG: tl.constexpr, PDL: tl.constexpr,
                       TILED: tl.constexpr):  # fmt: skip
    """dq from the accumulator (B, HQ, pitch, BLOCK_D) float32: scaled, turned back, rounded once.

    With sinks also each program's part of their gradient, dsinks (B * row blocks, HQ) float32, from the pre-process's
    stats. TILED: the accumulator is in the order of ``tiled_words`` instead of ``stage_rows``. Grid: (row blocks * head
    chunks * B), row blocks as ``count_tiles`` counts them. Packed sequences are padded as for ``backward_kernel``.

    With ``progress``, see ``backward_kernel``, rows are written as soon as the ``key_blocks`` programs of their key
    head are done, while those of other heads are at work, and rows that nobody began are zero.
    """
    num_blocks = count_tiles(NQ, num_sequences, BLOCK_N)
    num_chunks = tl.cdiv(HQ, HEADS)
    num_batches = tl.num_programs(0) // (num_blocks * num_chunks)
    pid = tl.program_id(0)
    chunk = (pid // num_blocks) % num_chunks
    batch = (pid // (num_blocks * num_chunks)).to(tl.int64)
    block = pid % num_blocks
    first_row = 0
    place = 0
    if cu_q_ptr is not None:
        sequence, first_row, NQ, block = packed_tile(block, cu_q_ptr, num_sequences, NQ, BLOCK_N)
        _, NK = packed_partner(cu_k_ptr, sequence, num_sequences, NK)
        place = padded_row(first_row, sequence, BLOCK_M)
    start = block * BLOCK_N
    start64 = tl.cast(first_row + start, tl.int64)
    rows = tl.arange(0, BLOCK_N)
    # Where ``stage_rows`` put them.
    staged = (rows // 8) * 8 + (rows % 4) * 2 + (rows // 4) % 2
    if lens_ptr is not None:
        NK = existing_keys(lens_ptr, batch, NK)
    rotation = head_rotation(cos_ptr, sin_ptr, cos_strides, sin_strides, batch, NK, R, INTERLEAVED)
    cos, sin = load_angles(rotation, rows + (start + NK - NQ), BLOCK_D, CHECK_POSITIONS=True)
    columns = tl.arange(0, BLOCK_D)
    if progress_ptr is None:
        wait_for_previous_launch(PDL)
    for head in range(chunk * HEADS, tl.minimum(chunk * HEADS + HEADS, HQ)):
        h = tl.cast(head, tl.int64)
        row = (batch * HQ + h) * pitch + place + start
        if TILED:
            # row without ``start`` is a multiple of BLOCK_M, of which ``start`` may lie inside one.
            words = accumulator_ptr + (row - start) * BLOCK_D + tiled_words(start + rows, columns, BLOCK_D)
        else:
            words = accumulator_ptr + row * BLOCK_D + staged[:, None] * BLOCK_D + columns[None, :]
        if cu_q_ptr is not None:
            # The block may lie behind its sequence's end, and behind that of the accumulator.
            dq = tl.load(words, mask=rows[:, None] < NQ - start, other=0.0) * softmax_scale
        elif progress_ptr is None:
            dq = tl.load(words) * softmax_scale
        else:
            wait_until(progress_ptr + batch * HKV + head // GROUP_SIZE, key_blocks)
            begun = tl.load(progress_ptr + (num_batches * HKV + row // BLOCK_M)) != 0
            dq = tl.load(words, mask=begun, other=0.0) * softmax_scale
        first, second = unpack_pairs(dq)
        first, second = rotate(first, second, cos, sin, CONJUGATE=True)
        dq_rows = Rows(
            ptr=dq_ptr + batch * dq_strides[0] + h * dq_strides[1] + start64 * dq_strides[2],
            stride_row=dq_strides[2], stride_column=dq_strides[3], num_rows=NQ - start, first_row=None,
            format=RowFormat(D=D, BLOCK_D=BLOCK_D, USE_INT64_OFFSETS=LONG),
        )  # fmt: skip
        store_pairs(dq_rows, first, second, rows, rotation)
        if sinks_ptr is not None:
            lse = tl.load(stats_ptr + row + rows, mask=rows < NQ - start, other=float("inf"))
            delta = tl.load(stats_ptr + stats_size + row + rows, mask=rows < NQ - start, other=0.0)
            part = sink_gradient(tl.load(sinks_ptr + head), lse, delta)
            tl.store(dsinks_ptr + (batch * num_blocks + pid % num_blocks) * HQ + head, part)
    if progress_ptr is not None:
        # Whatever follows this launch finds dk and dv complete too.
        if pid == tl.num_programs(0) - 1:
            wait_for_previous_launch(PDL)
