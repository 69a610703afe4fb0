"""Balance of the sm_90 backward: the programs of its main kernel, and the order in which they keep all busy."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import triton

from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M
from fused_rope_attn.attention.problem import Problem
from fused_rope_attn.kernels.arguments import heads_per_section
from fused_rope_attn.runtime import device

# Bytes of a row of Q, dO and float32 dQ in the query heads of a program. A program visits one head after the other, and
# programs with tiles of different lengths are soon at different heads. Together they use about as many rows as they
# have keys, in all their heads: 69 MB with 4096 bytes, four heads of 128 columns. With twice that an H100 (an L2 of
# 50 MB) takes 1.1 to 1.5 times as long. 3.6.0 and 3.9.0, 2026-11-28.
MOST_ROW_BYTES = 4096
# With more programs than this for each multiprocessor their lengths even out.
MANY_PROGRAMS = 8
# Keys of the narrowest window with which groups are divided. Narrower ones are untimed, and with those of up to a
# quarter of the keys the post-process begins early instead, see ``backward``.
LEAST_WINDOW = 4096
# Costs in query blocks of one head: a program's start and end, for example to load keys and values, and a round of the
# tournament in which parts add up dK and dV. Fitted to 65 calls. H200, 3.9.0, 2026-11-28.
START, ROUND = 4, 3
# The least simulated time without more parts over that with them.
LEAST_SPEEDUP = 1.05
# (bytes of Q, dO and float32 dQ in a section over those of the L2, the least simulated time without sections of that
# size over that of all parts together). With 1.09 a call takes .93 of its time with 56 MiB and 1.02 with 64 MiB on an
# H100, with an L2 of 50 MiB; on an H200, with 60 MiB, .94 and .98. 112 to 128 MiB take .71 to .94 on an H200, and on an
# H100 .89 to .97 with 1.5, and .95 to 1.09 with 1.24. 3.9.0, 2026-11-26 and 28.
LARGER_SECTIONS = (1.2, 1.07), (2.2, 1.1), (2.6, 1.4)


class Balance(NamedTuple):
    """The programs of a call. Each has a tile of keys, and a part of the work of the query heads that share them.

    parts: programs for each tile of a group. Up to one for each query head, they divide the heads. More are a multiple
    of the heads, and also divide the query blocks of each head. section: groups, or parts of them, that run together.
    """

    parts: int
    section: int


@dataclass(frozen=True)
class _Work:
    """The work of a call: for each of ``groups`` key heads the tiles of keys, with their lengths in query blocks."""

    lengths: list[int]
    groups: int
    group_size: int
    multiprocessors: int

    def end(self, parts: int, section: int | None = None) -> int:
        """Return when the last program ends, in query blocks of one head.

        section: the number of groups' parts that run together, None: all.
        """
        parts_of_head = max(1, parts // self.group_size)
        lengths = [triton.cdiv(length, parts_of_head) for length in self.lengths]
        bounds = [self.group_size * number // parts for number in range(parts + 1)]
        heads = [max(1, end - begin) for begin, end in itertools.pairwise(bounds)] * self.groups
        rounds = (parts - 1).bit_length()
        return last_end(lengths, heads, section or len(heads), self.multiprocessors) + ROUND * rounds

    def more_parts(self, parts: int) -> int:
        """Return the next larger number of parts: up to one for each head of the group, or a multiple of that."""
        return min(2 * parts, self.group_size) if parts < self.group_size else 2 * parts


def balance(problem: Problem, block_n: int, row_bytes: int, section_bytes: int) -> Balance:
    """Return the ``Balance`` of a call with tiles of block_n keys.

    A call is simulated: programs start in their order, those of a section, the longest first, then those of the next.
    Large groups are divided, see ``parts_of_group``, and groups have more parts if the last program then ends earlier.
    Small sections stay in the L2, but the programs of the last one may end late. The number of sections is therefore
    halved while LARGER_SECTIONS allows it.

    Packed sequences are taken to be as long as the longest one may be, and their query blocks are not divided.

    Args:
        row_bytes: of a row of Q, dO and float32 dQ in all heads of a group.
        section_bytes: of Q, dO and dQ of a section at least.
    """
    len_q, len_k = problem.longest(problem.len_q), problem.longest(problem.len_k)
    one = problem._replace(len_q=len_q, len_k=len_k)
    lengths = [count_query_blocks(one, first_key, block_n) for first_key in range(0, len_k, block_n)]
    lengths *= triton.cdiv(problem.len_k, len_k)
    groups, multiprocessors = problem.batch * problem.heads_kv, device.num_sms(problem.device)
    work = _Work(lengths, groups, problem.group_size, multiprocessors)
    is_whole = problem.has_intervals or problem.is_deterministic
    knows_lengths = not (is_whole or problem.has_kv_starts or problem.has_kv_lens)
    parts = 1 if is_whole else parts_of_group(problem, lengths, row_bytes)

    def is_simulated(parts: int) -> bool:
        return knows_lengths and len(lengths) * groups * parts <= MANY_PROGRAMS * multiprocessors

    end = work.end(parts) if is_simulated(parts) else 0
    more = work.more_parts(parts)
    while is_simulated(more) and not (problem.is_packed and more > work.group_size):
        earlier = work.end(more)
        if end >= LEAST_SPEEDUP * earlier:
            parts, end = more, earlier
        more = work.more_parts(more)
    part_bytes = row_bytes * len_q // parts
    section = heads_per_section(groups * parts, 1, part_bytes, section_bytes)
    if is_simulated(parts):
        l2_bytes = device.l2_bytes(problem.device)
        while section < groups * parts:
            sections = triton.cdiv(groups * parts, section)
            larger = triton.cdiv(groups * parts, triton.cdiv(sections, 2))
            speedup = work.end(parts, section) / end
            if not any(larger * part_bytes <= size * l2_bytes and speedup >= least for size, least in LARGER_SECTIONS):
                break
            section = larger
    return Balance(parts, section)


def parts_of_group(problem: Problem, lengths: list[int], row_bytes: int) -> int:
    """Return the number of parts of a group so that a part has at most MOST_ROW_BYTES.

    If the parts would have unequal sizes there are twice as many. Without a mask all tiles visit the same rows at the
    same time, and groups are not divided.

    Args:
        lengths: of the tiles of keys, in query blocks.
        row_bytes: of a row of Q, dO and float32 dQ in all heads of a group.
    """
    left, right = problem.window_left, problem.window_right
    if left is not None and right is not None:
        drift = left + right >= LEAST_WINDOW
    else:
        drift = max(lengths) * len(lengths) >= 1.5 * sum(lengths)
    if not drift:
        return 1
    parts = triton.cdiv(row_bytes, MOST_ROW_BYTES)
    if problem.group_size % parts:
        parts *= 2
    return min(parts, problem.group_size)


def last_end(lengths: list[int], heads: list[int], section: int, multiprocessors: int) -> int:
    """Return when the last program ends, in query blocks of one head.

    heads: the query heads of each part, in the order of the parts. Each part has tiles of these lengths.
    """
    ends = [0] * multiprocessors
    for first in range(0, len(heads), section):
        for length in lengths:
            for count in heads[first : first + section]:
                heapq.heapreplace(ends, ends[0] + count * length + START)
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
