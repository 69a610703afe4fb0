# mypy: ignore-errors
"""Generation step: a few new queries against a long cache of keys and values, to which the new tokens are appended.

The cache is read once and little is computed, so bytes in flight determine the time. The query heads of a group, and
the new tokens, are the rows of one tile: a head's keys are read once for all of them. All programs have equal shares of
the work (``inputs``), and each goes through the blocks in its share. A second small kernel adds up the parts of each
block (``combine_kernel``). Its start overlaps with the end of the first one (programmatic dependent launch). There are
two launches and no counter: nothing has to be reset, so that a captured graph and an eager call may run concurrently.

In a step that appends, the second kernel also folds the new tokens into each row and writes them into the cache. That
needs nothing of the first kernel and precedes the wait for it: if the first kernel leaves registers and shared memory
free, it takes no time at all. At the end of the first kernel it would take three round trips to memory.
"""

import triton
import triton.language as tl

from fused_rope_attn.generation import inputs as step
from fused_rope_attn.generation import keys as running
from fused_rope_attn.kernels import masks, schedule, softmax, tiles
from fused_rope_attn.kernels.records import unpack

# The parameters of both kernels that Triton must not specialise on.
_NUMBERS = "programs B HKV GROUP_SIZE NQ S num_pages position_limit window_left window_right".split()
# Rows of a tensor core's product. The one query row is the first of them.
ROWS = tl.constexpr(16)


@triton.jit(do_not_specialize=_NUMBERS)
def decode_kernel(
    inputs, outputs, parts_ptr, programs, B, HKV, GROUP_SIZE, NQ, S, num_pages, position_limit, window_left,
    window_right, BLOCK_M: tl.constexpr, BLOCK_NEW: tl.constexpr, IS_CHUNK: tl.constexpr, NEW_WITH_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attend to one share of all key tiles. Grid: (programs,).

    inputs: ``StepInputs``, with tables of position_limit rows; outputs: ``StepOutputs``. S: rows of the cache, or as
    many as a sequence's pages have, of num_pages in the pool.

    IS_CHUNK: there are many tokens, and a block leaves out those after its last query. NEW_WITH_PARTS: the new tokens
    are left to ``combine_kernel``, and so are blocks that no other program step.

    A block is one key head of one sequence with BLOCK_M of its ``NQ * GROUP_SIZE`` query rows; row m belongs to token
    ``m // GROUP_SIZE``. Partial sums of a shared block are written to parts (``part_pointers``).
    """
    schedule.let_next_launch_start(PDL)
    inputs, outputs = unpack((inputs, outputs))
    inputs = step.complete_step(inputs, B, NQ, S, num_pages, position_limit, window_left, window_right)
    lengths = inputs.lengths
    D: tl.constexpr = inputs.format.D
    BLOCK_D: tl.constexpr = inputs.format.BLOCK_D
    BLOCK_N: tl.constexpr = lengths.BLOCK_N
    m_blocks = tl.cdiv(NQ * GROUP_SIZE, BLOCK_M)
    blocks = HKV * m_blocks  # of one sequence
    total, _ = step.tiles_before(lengths, 0)
    share = step.share_of(total * blocks, programs)
    pid = tl.program_id(0)
    remaining = tl.minimum(share, total * blocks - pid * share)
    if remaining <= 0:
        return
    # A sequence has ``blocks`` times the tiles of one of its blocks, and so do the sequences before it.
    sequence, before = step.sequence_of(lengths, pid * share // blocks)
    keys = step.cached_keys(lengths, sequence)
    rest = pid * share - before * blocks
    block = rest // step.count_key_tiles(keys, BLOCK_N)
    tile = rest % step.count_key_tiles(keys, BLOCK_N)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    while remaining > 0:
        keys = step.cached_keys(lengths, sequence)
        num_tiles = step.count_key_tiles(keys, BLOCK_N)
        last_tile = tl.minimum(num_tiles, tile + remaining)
        batch = tl.cast(sequence, tl.int64)
        head_kv = tl.cast(block // m_blocks, tl.int64)
        start_m = block % m_blocks * BLOCK_M
        num_rows = NQ * GROUP_SIZE - start_m
        rows = step.query_rows(batch, head_kv, start_m, num_rows, GROUP_SIZE, BLOCK_M)
        first_row = None
        if lengths.ALIGNMENT > 1 and (lengths.starts_ptr is not None or window_left is not None):
            first_row = keys.first_key
        cache = step.cache_of_head(inputs, keys, batch, head_kv, first_row)
        queries = step.load_step_queries(inputs, rows, keys, cache.float8)
        sums = running.no_sums(BLOCK_M, BLOCK_D, cache.float8)
        first = keys.first_tile + tile * BLOCK_N
        end = tl.minimum(keys.num_keys, keys.first_tile + last_tile * BLOCK_N)
        last_token = (start_m + BLOCK_M - 1) // GROUP_SIZE
        if IS_CHUNK and masks.is_causal(window_right) and not lengths.HAS_NEW_KEYS:
            end = tl.minimum(end, keys.q_offset + last_token + 1)
        seen_by_all = None
        if IS_CHUNK and window_left is None and first_row is None:
            # All queries of the block see the keys before this one; before position 0, or from S on, they see none.
            first_position = keys.q_offset + start_m // GROUP_SIZE
            last_position = keys.q_offset + tl.minimum(last_token, NQ - 1)
            seen_by_all = keys.num_keys
            if window_right is not None:
                seen_by_all = tl.minimum(seen_by_all, first_position + window_right + 1)
            seen_by_all = tl.where((first_position >= 0) & (last_position < S), seen_by_all, 0)
        sums = running.attend_cached(sums, queries, cache, first, seen_by_all, end, offs_n)

        if lengths.HAS_NEW_KEYS and not NEW_WITH_PARTS:
            if last_tile == num_tiles:
                # The program with the last tile also attends to the new tokens. It reads them from the arguments,
                # because another program may still be writing them to the cache.
                new = step.new_keys_of_head(inputs, keys, batch, head_kv)
                num_seen = new.k.num_rows
                if IS_CHUNK and masks.is_causal(window_right):
                    num_seen = tl.where(start_m == 0, num_seen, tl.minimum(num_seen, last_token + 1))
                sums = running.attend_new(sums, queries, cache, new, num_seen, start_m == 0, BLOCK_NEW)
        sums = running.whole_sums(sums, cache.float8)

        is_whole = (tile == 0) & (last_tile == num_tiles)
        if is_whole and not NEW_WITH_PARTS:
            step.store_rows(outputs, rows, sums, HKV * GROUP_SIZE, NQ, inputs.format)
        else:
            number = 2 * pid + (tile == 0).to(tl.int32)
            if NEW_WITH_PARTS:
                number = tl.where(is_whole, 2 * programs + sequence * blocks + block, number)
            part, stats = step.part_pointers(parts_ptr, number, BLOCK_M, D)
            part_format = tiles.RowFormat(D, BLOCK_D, USE_INT64_OFFSETS=False)
            part_rows = tiles.Rows(part, D, 1, num_rows=num_rows, first_row=None, format=part_format)
            tiles.store_tile(part_rows, sums.acc, offs_m)
            tl.store(stats + offs_m, sums.row_max, mask=offs_m < num_rows)
            tl.store(stats + BLOCK_M + offs_m, sums.row_sum, mask=offs_m < num_rows)
        remaining -= last_tile - tile
        tile = 0
        block += 1
        if block == blocks:
            block = 0
            sequence += 1


@triton.jit
def new_tokens_of_row(inputs, keys, batch, head_kv, head, row, GROUP_SIZE, BLOCK_NEW: tl.constexpr):
    """Return the ``RunningSums`` of one query row over the new tokens. The first row of a key head appends these.

    batch, head_kv and head are int64; row: of the ``NQ * GROUP_SIZE`` of the key head.
    """
    offs = tl.arange(0, ROWS)
    heads, tokens = head + tl.zeros((ROWS,), tl.int64), row // GROUP_SIZE + tl.zeros((ROWS,), tl.int32)
    rows = step.QueryRows(batch, heads, tokens, offs, num_rows=1)
    cache = step.cache_of_head(inputs, keys, batch, head_kv)
    queries = step.load_step_queries(inputs, rows, keys, cache.float8)
    new = step.new_keys_of_head(inputs, keys, batch, head_kv)
    sums = running.no_sums(ROWS, inputs.format.BLOCK_D, cache.float8)
    sums = running.attend_new(sums, queries, cache, new, new.k.num_rows, row == 0, BLOCK_NEW)
    sums = running.whole_sums(sums, cache.float8)
    is_row = offs == 0
    return running.RunningSums(
        acc=tl.sum(tl.where(is_row[:, None], sums.acc, 0.0), 0)[None, :],
        row_max=tl.zeros((1,), tl.float32) + tl.max(tl.where(is_row, sums.row_max, float("-inf")), 0),
        row_sum=tl.zeros((1,), tl.float32) + tl.sum(tl.where(is_row, sums.row_sum, 0.0), 0),
    )


@triton.jit(do_not_specialize=_NUMBERS)
def combine_kernel(
    inputs, outputs, parts_ptr, programs, B, HKV, GROUP_SIZE, NQ, S, num_pages, position_limit, window_left,
    window_right, BLOCK_M: tl.constexpr, BLOCK_NEW: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    NEW_WITH_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add up one query row: the new tokens (NEW_WITH_PARTS), and its parts. Grid: (B * HKV * NQ * GROUP_SIZE,).

    Without the new tokens only rows with parts from several programs are written. The arguments are those of
    ``decode_kernel``; BLOCK_PARTS parts are added at once.
    """
    inputs, outputs = unpack((inputs, outputs))
    inputs = step.complete_step(inputs, B, NQ, S, num_pages, position_limit, window_left, window_right)
    lengths = inputs.lengths
    D: tl.constexpr = inputs.format.D
    BLOCK_D: tl.constexpr = inputs.format.BLOCK_D
    BLOCK_N: tl.constexpr = lengths.BLOCK_N
    pid = tl.program_id(0)
    group_rows = NQ * GROUP_SIZE
    m_blocks = tl.cdiv(group_rows, BLOCK_M)
    blocks = HKV * m_blocks
    row = pid % group_rows
    head_kv = pid // group_rows % HKV
    sequence = pid // group_rows // HKV
    batch = tl.cast(sequence, tl.int64)
    head = tl.cast(head_kv * GROUP_SIZE + row % GROUP_SIZE, tl.int64)
    total, before = step.tiles_before(lengths, sequence)
    keys = step.cached_keys(lengths, sequence)
    num_tiles = step.count_key_tiles(keys, BLOCK_N)
    share = step.share_of(total * blocks, programs)
    first_tile = before * blocks + (head_kv * m_blocks + row // BLOCK_M) * num_tiles
    first_program = first_tile // share
    last_program = (first_tile + num_tiles - 1) // share
    running.assert_pages(inputs.cache.table, batch, keys, pid % (HKV * group_rows), HKV * group_rows)
    if NEW_WITH_PARTS:
        head_kv64 = tl.cast(head_kv, tl.int64)
        sums = new_tokens_of_row(inputs, keys, batch, head_kv64, head, row, GROUP_SIZE, BLOCK_NEW)
        acc, row_max, row_sum = sums.acc, sums.row_max, sums.row_sum
    else:
        acc = tl.zeros((1, BLOCK_D), tl.float32)
        row_max = tl.full((1,), float("-inf"), tl.float32)
        row_sum = tl.zeros((1,), tl.float32)
    # Programs with nothing to add wait too, because the next kernel may begin when all programs have ended.
    schedule.wait_for_previous_launch(PDL)
    if first_program == last_program and not NEW_WITH_PARTS:
        return

    columns = tl.arange(0, BLOCK_D)
    for start in range(first_program, last_program + 1, BLOCK_PARTS):
        program = start + tl.arange(0, BLOCK_PARTS)
        exists = program <= last_program
        number = 2 * program + (program == first_program).to(tl.int32)
        if NEW_WITH_PARTS:
            block = (sequence * HKV + head_kv) * m_blocks + row // BLOCK_M
            number = tl.where(first_program == last_program, 2 * programs + block, number)
        part, stats = step.part_pointers(parts_ptr, number, BLOCK_M, D)
        row_stats = stats + row % BLOCK_M
        part_max = tl.load(row_stats, mask=exists, other=float("-inf"))
        part_sum = tl.load(row_stats + BLOCK_M, mask=exists, other=0.0)
        part_rows = part[:, None] + (row % BLOCK_M) * D + columns[None, :]
        part_acc = tl.load(part_rows, mask=exists[:, None] & (columns[None, :] < D), other=0.0)
        new_max = tl.maximum(row_max, tl.max(part_max, 0))
        weight = softmax.rescale(row_max, new_max)
        part_weight = softmax.rescale(part_max, new_max)
        acc = acc * weight[:, None] + tl.sum(part_acc * part_weight[:, None], 0)[None, :]
        row_sum = row_sum * weight + tl.sum(part_sum * part_weight, 0)
        row_max = new_max
    offs_m = tl.arange(0, 1)
    rows = step.QueryRows(batch, head + offs_m, row // GROUP_SIZE + offs_m, offs_m, num_rows=1)
    sums = running.RunningSums(acc, row_max, row_sum)
    step.store_rows(outputs, rows, sums, HKV * GROUP_SIZE, NQ, inputs.format)
