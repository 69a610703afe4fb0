"""Buffers that the pre-passes lay out for the sm_90 kernels: tile table, rotated queries, statistics, dQ."""

import torch

from fused_rope_attn.attention import configs
from fused_rope_attn.attention.hopper.backward import BackwardCall
from fused_rope_attn.attention.prepass import Rotate
from fused_rope_attn.attention.prepass_kernel import TILE_WORDS
from fused_rope_attn.rotation.reference import rotate
from tests.support.attention import packed, sequences_of
from tests.support.internals import described_for_launch
from tests.support.marks import cases, ignore_overflow, interpreted
from verification.testing import Case, make_inputs, run_reference


@interpreted
@ignore_overflow
@cases(
    packed((70, 1, 33, 64)),
    packed(((10, 70), (40, 7), (0, 20), (20, 0), (1, 33), (129, 3))),
    packed((20, 33), behind=(90, 70)),
    packed((), behind=(5, 9)),
    packed((2, 3) * 4 + (0,) * 8),
)
def test_packed_tiles(case):
    """The table of tiles that the sm_90 forward reads has every query in one tile, with its sequence. In tiles of
    rotated queries each sequence has the same rows as without tiles, and zeros after them."""
    problem, tensors = described_for_launch(make_inputs(case), case)
    config = configs.HopperForwardConfig(128, rotate_rows=64, pdl=False)
    rotate = Rotate("k", tensors, problem, config, tile_rows=32)
    counter = torch.full((rotate.counter_size,), -7, dtype=torch.int32)
    rotate(0, tensors, counter)
    table = [tuple(row[:6]) for row in counter.reshape(-1, TILE_WORDS.value)[1:].tolist()]
    expected = [
        (first_q + start, first_q + len_q, first_k, len_k, len_q, s)
        for s, (first_q, len_q, first_k, len_k) in enumerate(sequences_of(case))
        for start in range(0, len_q, 32)
    ]
    assert counter[0] == 0 and [row for row in table if row[0] < row[1]] == expected
    rows, in_tiles = (Rotate("q", tensors, problem, config, in_tiles=x)(0, tensors) for x in (False, True))
    for s, (first, length, _, num_keys) in enumerate(sequences_of(case)):
        # A sequence begins at the row of its first whole tile. Queries that see no key may be anything.
        start, seen = (first // 64 + s) * 64, min(length, num_keys)
        last, end = first + length, start + length
        assert torch.equal(in_tiles[:, :, end - seen : end], rows[:, :, last - seen : last])
        assert not in_tiles[:, :, end : start - (-length // 64) * 64].any()


def words_of_dq(rows, width):
    """Return the offsets (rows, width) of rows of a head's dQ in its part of the sum that the main kernel adds to."""
    rows, columns = rows[:, None], torch.arange(width)
    if width > 128:  # panels of 8 columns, in which rows follow each other
        return rows // 64 * (64 * width) + columns // 8 * 512 + rows % 64 * 8 + columns % 8
    return (rows // 8 * 8 + rows % 4 * 2 + rows // 4 % 2) * width + columns


@interpreted
@ignore_overflow
@cases(
    packed(((10, 70), (40, 7), (0, 20), (20, 0), (1, 33), (129, 3)), sinks=True),
    packed((20, 33), behind=(90, 70), norms=1.0, head_dim=136),
    Case(1, 2, 2, 130, 170, 136, causal=False, interleaved=True, rotary_dim=64),
)
def test_the_backward_around_its_main_kernel(case):
    """It prepares the statistics of each row, and zeros in the sum of dQ and in the padding of packed sequences. It
    reads the sum, here random numbers in pair order, and rotates it back."""
    inputs = make_inputs(case)
    problem, tensors = described_for_launch(inputs, case)
    exact = run_reference(inputs, case, torch.float64)
    o, expected = exact["o"].to(case.dtype), torch.zeros_like(inputs.q)
    given = inputs.do, o, exact["lse"].float(), *tensors
    call = BackwardCall(problem, given, configs.HopperBackwardConfig(pdl=False))
    sequences = sequences_of(case) if case.seqlens else [(0, case.len_q, 0, case.len_k)]

    def main(_, q_desc, stats_desc, dq_accumulator, **others):
        q_rot, stats, dq = (getattr(x, "base", x) for x in (q_desc, stats_desc, dq_accumulator))
        lse, delta = stats.reshape(2, case.batch, case.heads_q, -1)
        for s, (first_q, len_q, _, len_k) in enumerate(sequences):
            first = (first_q // 64 + s) * 64
            last, end = first + len_q, first - (-len_q // 64) * 64
            own = slice(first_q, first_q + len_q)
            torch.testing.assert_close(delta[:, :, first:last], (o.float() * inputs.do.float()).sum(-1)[:, :, own])
            assert not dq[:, :, first:end].any()
            assert not any(x[:, :, last:end].any() for x in ((lse, delta, q_rot) if case.seqlens else ()))
            pairs = torch.randn(case.batch, case.heads_q, len_q, case.head_dim)
            words = words_of_dq(torch.arange(first, last), dq.shape[-1])[:, : case.head_dim]
            dq.view(case.batch, case.heads_q, -1)[:, :, words] = pairs
            row = pairs if case.interleaved else torch.cat((pairs[..., ::2], pairs[..., 1::2]), -1)
            angles = (table[(torch.arange(len_q) + len_k - len_q).clamp(0)] for table in (inputs.cos, -inputs.sin))
            expected[:, :, own] = case.scale * rotate(row, *angles, interleaved=case.interleaved)

    call.main = main
    dq = call(given).dq
    if case.norms is not None:
        return  # another kernel computes the gradient of norms
    for first_q, len_q, _, len_k in sequences:
        seen = slice(first_q + max(0, len_q - len_k), first_q + len_q)  # other rows see no key
        torch.testing.assert_close(dq[:, :, seen], expected[:, :, seen])
