"""Balance of the sm_90 backward: the programs of its main kernel, and the order in which they keep all busy."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import triton

from fused_rope_attn.attention.hopper.shapes import BACKWARD_BLOCK_M
from fused_rope_attn.attention.hopper.shares import least_share
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
# Query blocks of one head that must be saved by more parts of a group or by larger sections.
LEAST_GAIN = 6
# Bytes of Q, dO and float32 dQ in larger sections, and in those where the L2 is large or the call ends very late. With
# 112 to 128 MiB calls take .71 to .94 of the time on an H200, with an L2 of 60 MiB. On an H100, with 50 MiB, they take
# .89 to .97 of it if they end 50 % late otherwise, and .95 to 1.09 if 24 %. 3.9.0, 2026-11-26.
MOST_BYTES, MORE_BYTES = 96 << 20, 128 << 20
LARGE_L2 = 55 << 20
VERY_LATE = 1.4


class Balance(NamedTuple):
    """The programs of a call. Each has a tile of keys, and a part of the work of the query heads that share them.

    parts: programs that divide the query heads of a group, or if there are more, a multiple of its heads, also the
    query blocks of each head. section: groups, or parts of them, that run together.
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

    def end(self, parts: int, section: int) -> int:
        """Return the query blocks after which the last program ends, if ``section`` parts of groups run together."""
        lengths = [triton.cdiv(length, self._parts_of_head(parts)) for length in self.lengths]
        return last_end(lengths, self.groups * parts, section, self.multiprocessors)

    def best(self, parts: int) -> float:
        """Return the query blocks after which all programs could end, if none has less work than a share may have."""
        mean = self.groups * parts * sum(self.lengths) / self._parts_of_head(parts) / self.multiprocessors
        return max(mean, min(max(self.lengths), least_share(self._heads(parts))))

    def latest(self, parts: int) -> float:
        """Return the end, in query blocks, that is early enough."""
        return 1.1 * self.best(parts) + LEAST_GAIN / self._heads(parts)

    def more_parts(self, parts: int) -> int:
        """Return the next larger number of parts: up to one for each head of the group, or a multiple of that."""
        return min(2 * parts, self.group_size) if parts < self.group_size else 2 * parts

    def _heads(self, parts: int) -> int:
        return triton.cdiv(self.group_size, parts)

    def _parts_of_head(self, parts: int) -> int:
        return max(1, parts // self.group_size)


def balance(problem: Problem, block_n: int, row_bytes: int, section_bytes: int) -> Balance:
    """Return the ``Balance`` of a call with tiles of block_n keys.

    A program takes as long as it has query blocks, times its query heads. Programs start in their order: those of a
    section, the longest first, then those of the next. Small sections stay in the L2, but the tiles of the last one
    may end late. Large groups are divided, see ``parts_of_group``, and groups have more parts if all parts together end
    late. Sections are doubled until they end at most 10 % late, up to MOST_BYTES, or more where the L2 is large or they
    end very late.

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

    def evens_out() -> bool:
        return len(lengths) * groups * parts > MANY_PROGRAMS * multiprocessors

    while knows_lengths and not evens_out() and work.end(parts, groups * parts) > work.latest(parts):
        if problem.is_packed and parts == problem.group_size:
            break
        parts = work.more_parts(parts)
    part_bytes = row_bytes * len_q // parts
    section = heads_per_section(groups * parts, 1, part_bytes, section_bytes)
    if knows_lengths and not evens_out():
        has_large_l2 = device.l2_bytes(problem.device) >= LARGE_L2
        while section < groups * parts:
            end, larger = work.end(parts, section), min(2 * section, groups * parts)
            most_bytes = MORE_BYTES if has_large_l2 or end > VERY_LATE * work.best(parts) else MOST_BYTES
            if end <= work.latest(parts) or larger * part_bytes > most_bytes:
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
