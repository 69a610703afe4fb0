# mypy: ignore-errors
"""The number of tiles, the order in which programs take them, and waits between launches."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def count_tiles(N, num_sequences, BLOCK: tl.constexpr):
    """Return how many tiles of BLOCK rows N rows take; num_sequences None: they are not packed.

    Packed sequences end anywhere, so that each may take one tile more: ``sequences.packed_tile``.
    """
    if num_sequences is None:
        return tl.cdiv(N, BLOCK)
    else:
        return N // BLOCK + num_sequences + 1


def tile_count(length: int, num_sequences: int | None, block: int) -> int:
    """Return ``count_tiles`` on the host."""
    return -(-length // block) if num_sequences is None else length // block + num_sequences + 1


@triton.jit
def scheduled_tile(pid, num_tiles, num_heads, heads_per_section, LAST_TILE_FIRST: tl.constexpr):
    """Return (tile, head) of program ``pid``, of num_tiles tiles of each of num_heads heads (of all batch entries).

    Heads run in sections of ``heads_per_section``; the keys and values of a section share the L2. Under a causal mask
    the last tiles take the longest: with LAST_TILE_FIRST they start first.
    """
    section = pid // (heads_per_section * num_tiles)
    first_head = section * heads_per_section
    heads = tl.minimum(heads_per_section, num_heads - first_head)
    rest = pid - first_head * num_tiles
    tile = rest // heads
    if LAST_TILE_FIRST:
        tile = num_tiles - 1 - tile
    return tile, first_head + rest % heads


def heads_per_section(num_heads: int, group_size: int, bytes_per_kv_head: int, section_bytes: int) -> int:
    """Return how many query heads run together so that their K and V stay in ``section_bytes`` of L2; 0 bytes: one.

    Sections are of equal size as nearly as groups allow: a small last one would leave multiprocessors idle.
    """
    if section_bytes == 0:
        return 1
    groups = max(1, num_heads // group_size)  # an empty batch has 0
    most = min(groups, max(1, section_bytes // max(1, bytes_per_kv_head)))
    return -(-groups // -(-groups // most)) * group_size


@triton.jit
def overlapped_tile(pid, num_tiles, num_heads, heads_per_section, most_overlapping):
    """Return (tile, head) of program ``pid``. The last tiles of a section alternate with the first tiles of the next.

    At most most_overlapping tiles of each head alternate, and at most half of its tiles. A head's tiles start in order.
    Under a causal mask long and short tiles of keys alternate.
    """
    overlapping = tl.minimum(num_tiles // 2, most_overlapping)
    first = tl.minimum(heads_per_section, num_heads)
    num_begun = first * overlapping  # of the first section, with which nothing alternates
    rest = tl.maximum(pid - num_begun, 0)
    # Count a section's other tiles and the next section's first ones together. The last section may have fewer heads.
    last_section = tl.cdiv(num_heads, heads_per_section) - 1
    section = tl.minimum(rest // (heads_per_section * num_tiles), tl.maximum(last_section - 1, 0))
    rest -= section * heads_per_section * num_tiles
    following = tl.maximum(tl.minimum(heads_per_section, num_heads - (section + 1) * heads_per_section), 0)
    size = first * (num_tiles - overlapping) + following * overlapping
    section = tl.where(rest < size, section, section + 1)
    rest = tl.where(rest < size, rest, rest - size)
    first_head = section * heads_per_section
    own = tl.minimum(heads_per_section, num_heads - first_head)
    both = tl.minimum(2 * heads_per_section, num_heads - first_head)
    num_alone = own * (num_tiles - 2 * overlapping)
    is_alone = rest < num_alone
    heads = tl.where(is_alone, own, both)
    rest = tl.where(is_alone, rest, rest - num_alone)
    tile, head = rest // heads, rest % heads
    tile += tl.where(is_alone, overlapping, tl.where(head < own, num_tiles - overlapping, 0))
    is_begun = pid < num_begun
    return tl.where(is_begun, pid // first, tile), tl.where(is_begun, pid % first, first_head + head)


@triton.jit
def block_of_heads(pid, num_blocks, num_chunks):
    """Return (block of rows, chunk of heads, batch int64) of program ``pid``; neighbours have neighbouring blocks."""
    block = pid % num_blocks
    chunk = (pid // num_blocks) % num_chunks
    batch = (pid // (num_blocks * num_chunks)).to(tl.int64)
    return block, chunk, batch


@triton.jit
def wait_for_previous_launch(PDL: tl.constexpr):
    """Block until the kernel launched before this one has finished (programmatic dependent launch only)."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_launch_start(PDL: tl.constexpr):
    """Allow the next kernel's prologue to overlap with this kernel's tail (programmatic dependent launch only)."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_until(pointer, count):
    """Spin until ``*pointer >= count``, with acquire semantics."""
    tl.inline_asm_elementwise(
        "{ .reg .pred arrived; .reg .u32 found; "
        "AGAIN: ld.acquire.gpu.global.u32 found, [$1]; setp.ge.u32 arrived, found, $2; @arrived bra ARRIVED; "
        "nanosleep.u32 64; bra AGAIN; ARRIVED: mov.u32 $0, found; }",
        "=r,l,r",
        [pointer.to(tl.uint64, bitcast=True), count],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
