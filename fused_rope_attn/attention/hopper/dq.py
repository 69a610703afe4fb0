"""dQ's way in the sm_90 backward up to head dim 128: blocks that a warp of its own adds to a float32 accumulator.

``progress``, where there is one (narrow windows), says how far that is: int32 words, all zero after the pre-process,
``(B * HKV,)`` programs of a key head that are done, and ``(B * HQ * pitch / BLOCK_M,)`` whether a block has been begun.
``postprocess_kernel`` reads both.
"""

from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M as BLOCK_M
from fused_rope_attn.attention.hopper.shapes import CONSUMERS
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.schedule import wait_for_previous_launch, wait_until
from fused_rope_attn.runtime.triton_compat import gl, jit, mbarrier, tma_reduce_add, tma_store, tma_store_wait


@record
class Progress:
    """A program's part in ``progress``, whose words ptr points to; all fields are None where there is none.

    key_head: the number of the program's key head among num_key_heads, B * HKV. The first num_begun of the query blocks
    that the program visits in each head are its own to begin: it stores them.
    """

    ptr: gl.tensor | None
    key_head: gl.tensor | None
    num_key_heads: gl.tensor | None
    num_begun: gl.tensor | None


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
def send_block(dq_desc, dq, batch, head_q, block, step, ADD: gl.constexpr):
    """Store one block of dQ, or ADD it to what is there, once it has arrived, and give its room back.

    dq: a ``Buffer`` with a part of the columns and a pair of mbarriers for each warpgroup; step: blocks sent before.
    """
    COLUMNS: gl.constexpr = dq.smem.shape[4]
    for part in gl.static_range(CONSUMERS):
        mbarrier.wait(dq.full.index(part), step & 1)
        coordinates = [batch, head_q, block * BLOCK_M, part * COLUMNS]
        if ADD:
            tma_reduce_add(dq_desc, coordinates, dq.smem.index(part))
        else:
            tma_store(dq_desc, coordinates, dq.smem.index(part))
    tma_store_wait(0)
    for part in gl.static_range(CONSUMERS):
        mbarrier.arrive(dq.empty.index(part))


@jit
def drop_block(dq, step):
    """Give the room of one block of dQ back as soon as it has arrived, as ``send_block`` does, and send nothing."""
    for part in gl.static_range(CONSUMERS):
        mbarrier.wait(dq.full.index(part), step & 1)
    for part in gl.static_range(CONSUMERS):
        mbarrier.arrive(dq.empty.index(part))


@jit
def reduce(dq_desc, dq, progress, keys, queries, sizes, PDL: gl.constexpr):
    """The adding warp: every dQ block goes to the accumulator (B, HQ, pitch, columns) through the TMA.

    With ``Progress`` this program stores the blocks that are its own to begin and says so, and whoever adds to a block
    waits for that. At the end the program counts itself among those of its key head.
    """
    # dQ comes one step late: what comes in the first step is that of no block.
    if queries.count > 0:
        drop_block(dq, 0)
    step = 1
    if progress.ptr is not None:
        wait_for_previous_launch(PDL)
    num_ahead = 0
    if queries.num_ahead is not None:
        num_ahead = queries.num_ahead
        for group_head in range(sizes.GROUP_SIZE):
            for i in range(num_ahead):
                head_q = keys.head * sizes.GROUP_SIZE + group_head
                send_block(dq_desc, dq, keys.batch, head_q, queries.first + i, step, ADD=True)
                step += 1
    for group_head in range(sizes.GROUP_SIZE):
        head_q = keys.head * sizes.GROUP_SIZE + group_head
        if progress.ptr is None:
            for i in range(num_ahead, queries.count):
                send_block(dq_desc, dq, keys.batch, head_q, queries.first + i, step, ADD=True)
                step += 1
        else:
            head_blocks = (progress.key_head * sizes.GROUP_SIZE + group_head) * (sizes.pitch // BLOCK_M)
            words = progress.ptr + progress.num_key_heads + head_blocks + queries.first
            # Two loops: with one and a branch around operations of the TMA ptxas keeps addresses of ``fold_queries``'s
            # products on the stack, 144 bytes instead of 64 and ten loads for each block.
            for i in range(progress.num_begun):
                send_block(dq_desc, dq, keys.batch, head_q, queries.first + i, step, ADD=False)
                announce(words + i)
                step += 1
            for i in range(progress.num_begun, queries.count):
                wait_until(words + i, 1)
                fence_proxies()
                send_block(dq_desc, dq, keys.batch, head_q, queries.first + i, step, ADD=True)
                step += 1
    if progress.ptr is not None:
        announce(progress.ptr + progress.key_head)


@jit
def stage_rows(x):
    """Order of dQ's rows in shared memory and in the accumulator: (hi, b, a) -> (hi, a, b) for 4 a and 2 b.

    The eight rows that a tensor-core register tile spreads over a warp then meet no bank conflict under the 128-byte
    swizzle: lanes 0 .. 15 write rows 0, 2, 4, 6. ``postprocess_kernel.staged_rows`` finds them again.
    """
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return x.reshape((rows // 8, 2, 4, columns)).permute((0, 2, 1, 3)).reshape((rows, columns))
