"""The tile of each program of a launch, with its sequence, keys and queries."""

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn.kernels.masks import window_of
from fused_rope_attn.kernels.sequences import (
    MaskArguments,
    scheduled_keys,
    scheduled_queries,
    sequence_of_keys,
    sequence_of_queries,
)  # fmt: skip
from tests.support.marks import interpreted

pytestmark = interpreted
BLOCK, BATCH, HEADS, SECTION = 8, 2, 3, 2
NAMES = (
    "number index num_rows sequence batch head row batch_head of_batch first_q num_queries first_k num_keys q_offset "
    "first_key"
).split()


@triton.jit
def write_programs(
    out_ptr, starts_ptr, lens_ptr, cu_q_ptr, cu_k_ptr, num_sequences, window, NQ, NK, HEADS, num_heads, section,
    OF_QUERIES: tl.constexpr, READS_LENGTHS: tl.constexpr, FROM_START: tl.constexpr, BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Write the values of NAMES of each program, at its place in (programs, WORDS)."""
    masks = MaskArguments(
        starts_ptr=starts_ptr, lens_ptr=lens_ptr, cu_q_ptr=cu_q_ptr, cu_k_ptr=cu_k_ptr, num_sequences=num_sequences,
        window=window_of(window), READS_LENGTHS=READS_LENGTHS, FROM_START=FROM_START,
    )  # fmt: skip
    if OF_QUERIES:
        tile = scheduled_queries(tl.program_id(0), NQ, NK, HEADS, num_heads, section, masks, BLOCK)
        sequence = sequence_of_queries(tile, NK, masks)
    else:
        tile = scheduled_keys(tl.program_id(0), NK, NQ, HEADS, num_heads, section, masks, BLOCK)
        sequence = sequence_of_keys(tile, NQ, NK, masks)
    out = out_ptr + tl.program_id(0) * WORDS
    found = (
        tile.number, tile.index, tile.num_rows, tile.sequence, tile.origin.batch, tile.origin.head, tile.origin.row,
        tile.batch_head, sequence.batch, sequence.first_q, sequence.num_queries, sequence.first_k, sequence.num_keys,
        sequence.q_offset, sequence.mask.first_key,
    )  # fmt: skip
    for i in tl.static_range(WORDS):
        if found[i] is not None:
            tl.store(out + i, found[i])


def programs(
    count, len_q, len_k, *, of_queries, causal, batch=1, starts=None, lens=None, ends=None, ends_k=None, left=None,
    from_start=False,
):  # fmt: skip
    """A dict of NAMES for each of ``count`` programs; -1 where there is none."""
    given = [None if x is None else torch.tensor(x, dtype=torch.int32) for x in (starts, lens, ends, ends_k)]
    right = tl.constexpr(0) if causal else None
    out = torch.full((count, len(NAMES)), -1, dtype=torch.int64)
    num_sequences = None if ends is None else len(ends) - 1
    write_programs[(count,)](
        out, *given, num_sequences, (left, right), len_q, len_k, HEADS, batch * HEADS, SECTION, OF_QUERIES=of_queries,
        READS_LENGTHS=any(x is not None for x in given), FROM_START=from_start, BLOCK=BLOCK, WORDS=len(NAMES),
    )  # fmt: skip
    return [dict(zip(NAMES, row)) for row in out.tolist()]


def assert_in_order(found, tiles, heads, last_first):
    """Each tile of every head has a program: heads in sections, and the longest tiles of a section first."""
    numbers = range(tiles - 1, -1, -1) if last_first else range(tiles)
    sections = [range(i, min(i + SECTION, heads)) for i in range(0, heads, SECTION)]
    expected = [(number, head) for section in sections for number in numbers for head in section]
    assert [(x["number"], x["batch_head"]) for x in found] == expected


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("of_queries", [True, False])
def test_tiles_of_batch_entries(of_queries, causal):
    """Programs begin with the last queries under a causal mask, and with the first keys."""
    lens, starts = [21, 9], [0, 4]
    given = {"of_queries": of_queries, "causal": causal, "batch": BATCH, "starts": starts, "lens": lens, "left": 11}
    found = programs(3 * BATCH * HEADS, 19, 21, **given)
    assert_in_order(found, 3, BATCH * HEADS, of_queries and causal)
    for x in found:
        batch, head = divmod(x["batch_head"], HEADS)
        keys = lens[batch]
        expected = {"batch": batch, "head": head, "of_batch": batch, "index": x["number"], "row": 0, "sequence": -1}
        expected |= {"num_rows": 19 if of_queries else 21, "first_q": 0, "num_queries": 19, "first_k": 0}
        expected |= {"num_keys": keys, "q_offset": keys - 19, "first_key": min(keys, max(starts[batch], keys - 30, 0))}
        assert expected.items() <= x.items()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("of_queries", [True, False])
def test_tiles_of_packed_sequences(of_queries, causal):
    """A sequence of the one has as its partner the sequence of that number of the other."""
    ends, ends_k = [0, 9, 9, 20], [0, 5, 12, 33]
    tiles = (20 if of_queries else 33) // BLOCK + 3 + 1
    found = programs(tiles * HEADS, 20, 33, of_queries=of_queries, causal=causal, ends=ends, ends_k=ends_k)
    assert_in_order(found, tiles, HEADS, of_queries and causal)
    own, held = (ends if of_queries else ends_k), set()
    for x in found:
        s = x["sequence"]
        queries, keys = (([*of, of[-1]])[s + 1] - of[s] for of in (ends, ends_k))
        expected = {"batch": 0, "head": x["batch_head"], "of_batch": 0, "first_key": -1, "row": own[s]}
        expected |= {"index": x["number"] - (own[s] // BLOCK + s), "num_rows": queries if of_queries else keys}
        expected |= {"first_q": ends[s], "num_queries": queries, "first_k": ends_k[s], "num_keys": keys}
        assert (expected | {"q_offset": keys - queries}).items() <= x.items()
        held |= {(x["head"], x["row"] + i) for i in range(x["index"] * BLOCK, x["num_rows"])}
    assert held == {(head, row) for head in range(HEADS) for row in range(own[-1])}


def test_sequences_that_begin_at_their_start():
    """FROM_START: keys, and for tiles of keys queries too, count from ``kv_starts``; 20 keys and queries."""
    given = {"causal": True, "batch": 2, "starts": [5, 30], "lens": [18, 20], "from_start": True}
    keys = {row["batch"]: row for row in programs(3 * 2 * HEADS, 20, 20, of_queries=False, **given)}
    queries = {row["batch"]: row for row in programs(3 * 2 * HEADS, 20, 20, of_queries=True, **given)}
    expected = {"row": 5, "num_rows": 15, "first_k": 5, "num_keys": 13, "first_q": 7, "num_queries": 13, "q_offset": 0}
    assert expected.items() <= keys[0].items() and keys[0]["first_key"] == -1
    # A start at or after the end: no keys, and no query has a position.
    empty = {"row": 20, "num_rows": 0, "first_k": 20, "num_keys": 0, "first_q": 20, "num_queries": 0, "q_offset": 0}
    assert empty.items() <= keys[1].items()
    assert {"row": 0, "num_rows": 20, "first_k": 5, "num_keys": 13, "q_offset": -7}.items() <= queries[0].items()
