"""Balance of the sm_90 backward: in which order the programs of its main kernel keep all multiprocessors busy."""

from __future__ import annotations

import heapq

import triton

from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M
from fused_rope_attn.attention.hopper.shares import least_share
from fused_rope_attn.attention.problem import Problem
from fused_rope_attn.runtime import device

# With more programs than this for each multiprocessor their lengths even out.
MANY_PROGRAMS = 8
# Query blocks of one head that another order must save: the two launches that divide tiles take as long.
LEAST_GAIN = 8
# Bytes of Q, dO and float32 dQ in larger sections, and in those where the L2 is large or the call ends very late. With
# 112 to 128 MiB calls take .71 to .94 of the time on an H200, with an L2 of 60 MiB. On an H100, with 50 MiB, they take
# .89 to .97 of it if they end 50 % late otherwise, and .95 to 1.09 if 24 %. 3.9.0, 2026-11-26.
MOST_BYTES, MORE_BYTES = 96 << 20, 128 << 20
LARGE_L2 = 55 << 20
VERY_LATE = 1.4


def balance(problem: Problem, block_n: int, section: int, head_bytes: int) -> tuple[int, bool]:
    """Return how many key heads run together, ``section`` or more, and whether long tiles must be divided.

    A program has a tile of ``block_n`` keys of a key head and takes as long as the tile has query blocks. Programs
    start in their order: those of ``section`` key heads, the longest first, then those of the next. Small sections stay
    in the L2, but the tiles of the last one may end late. Sections are doubled until they end at most 10 % late, up to
    MOST_BYTES, head_bytes each, or more where the L2 is large or they end very late. If all heads together end late,
    there are too few tiles: ``VisibleRows`` divides them.

    Packed sequences are taken to be as long as the longest one may be, and their tiles are not divided.
    """
    has_tensors = problem.has_kv_starts or problem.has_kv_lens or problem.has_intervals
    multiprocessors, heads = device.num_sms(problem.device), problem.batch * problem.heads_kv
    len_q, len_k = problem.longest(problem.len_q), problem.longest(problem.len_k)
    sequences = triton.cdiv(problem.len_k, len_k)
    tiles = triton.cdiv(len_k, block_n)
    if has_tensors or problem.is_deterministic or sequences * tiles * heads > MANY_PROGRAMS * multiprocessors:
        return section, False
    one = problem._replace(len_q=len_q, len_k=len_k)
    lengths = sequences * [count_query_blocks(one, tile * block_n, block_n) for tile in range(tiles)]
    best = max(heads * sum(lengths) / multiprocessors, min(max(lengths), least_share(problem.group_size)))
    latest = 1.1 * best + LEAST_GAIN / problem.group_size
    if not problem.is_packed and last_end(lengths, heads, heads, multiprocessors) > latest:
        return section, True
    has_large_l2 = device.l2_bytes(problem.device) >= LARGE_L2
    while section < heads:
        end = last_end(lengths, heads, section, multiprocessors)
        most_bytes = MORE_BYTES if has_large_l2 or end > VERY_LATE * best else MOST_BYTES
        larger = min(2 * section, heads)
        if end <= latest or larger * head_bytes > most_bytes:
            break
        section = larger
    return section, False


def last_end(lengths: list[int], heads: int, section: int, multiprocessors: int) -> int:
    """Return when the last program ends, in query blocks, if each of heads key heads has tiles of these lengths."""
    ends = [0] * multiprocessors
    for first in range(0, heads, section):
        for length in lengths:
            for _ in range(min(section, heads - first)):
                heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def count_query_blocks(problem: Problem, first_key: int, block_n: int) -> int:
    """Return the number of query blocks with a row that may see any of block_n keys, from first_key on."""
    before = problem.len_k - problem.len_q  # keys before the first query
    left, right = problem.window_left, problem.window_right
    start = 0 if right is None else max(0, first_key - right - before)
    last_key = min(first_key + block_n, problem.len_k) - 1
    end = problem.len_q if left is None else min(problem.len_q, last_key + left - before + 1)
    rows = BACKWARD_BLOCK_M.value
    return max(0, triton.cdiv(end, rows) - start // rows)
