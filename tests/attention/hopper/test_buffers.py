"""Buffers that the host and the pre-passes lay out for the sm_90 kernels: tile table, rotated queries, padding.

The main kernels run on a GPU only; where a test needs what they compute, it computes it itself.
"""

import math
from dataclasses import replace

import torch

from fused_rope_attn.attention import configs
from tests.support.attention import packed, sequences_of
from tests.support.internals import described_for_launch
from tests.support.marks import cases, ignore_overflow, interpreted
from verification.testing import Case, compare, make_inputs, run_reference

SM_90 = (
    packed((70, 1, 33, 64)),
    packed(((10, 70), (40, 7), (0, 20), (20, 0), (1, 33), (129, 3))),
    packed((20, 33), behind=(90, 70)),
    packed((), behind=(5, 9)),
    packed((2, 3) * 4 + (0,) * 8),
)


def first_tile(first, sequence):
    """The row of a padded buffer where a packed sequence begins that has ``first`` queries before it."""
    return (first // 64 + sequence) * 64


@interpreted
@ignore_overflow
@cases(*SM_90)
def test_packed_tiles(case):
    """The table of tiles that the sm_90 forward reads has every query in one tile, with its sequence. In tiles of
    rotated queries each sequence has the same rows as without tiles, and zeros after them."""
    from fused_rope_attn.attention.prepass import Rotate
    from fused_rope_attn.attention.prepass_kernel import TILE_WORDS

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
        start, seen = first_tile(first, s), min(length, num_keys)  # others see no key, and may be anything
        last, end = first + length, start + length
        assert torch.equal(in_tiles[:, :, end - seen : end], rows[:, :, last - seen : last])
        assert not in_tiles[:, :, end : start - (-length // 64) * 64].any()


def unrotated(pairs, inputs, case):
    """Rows (N, D) in pair order at positions 0 to N, turned back, in the order of memory."""
    cos, sin = (table[: pairs.shape[-2]] for table in (inputs.cos, inputs.sin))
    half = case.rotary // 2
    one, two = pairs[..., ::2].clone(), pairs[..., 1::2].clone()
    a, b = one[..., :half], two[..., :half]
    one[..., :half], two[..., :half] = a * cos + b * sin, b * cos - a * sin
    return torch.stack((one, two), -1).flatten(-2) if case.interleaved else torch.cat((one, two), -1)


def words_of_dq(rows, accumulator, head_dim):
    """Return the offsets, (rows, D), of these rows of a head's dQ in that head's part of the accumulator."""
    rows, columns, width = rows[:, None], torch.arange(head_dim), accumulator.shape[-1]
    if width > 128:  # panels of 8 columns, in which rows follow each other
        return rows // 64 * (64 * width) + columns // 8 * 512 + rows % 64 * 8 + columns % 8
    # The layout of ``stage_rows``.
    return (rows // 8 * 8 + rows % 4 * 2 + rows // 4 % 2) * width + columns


@interpreted
@ignore_overflow
@cases(
    *(replace(case, sinks=True) for case in SM_90[:4]),
    replace(SM_90[2], norms=1.0, head_dim=72),
    replace(SM_90[1], sinks=True, head_dim=136),
    packed((20, 33), norms=1.0, head_dim=136),
    Case(2, 2, 1, 70, 130, 256, sinks=True),
    Case(1, 2, 2, 130, 70, 136, causal=False, interleaved=True, rotary_dim=64),
    Case(2, 4, 2, 70, 130, 64, interleaved=True, rotary_dim=32, norms=0.0),
    Case(1, 2, 1, 5, 70, 56, causal=False, sinks=True),
)
def test_the_backward_around_its_main_kernel(case):
    """This test computes the gradients in its place, head by head, and adds dQ in its layout."""
    from fused_rope_attn.attention.hopper.backward import BackwardCall

    inputs = make_inputs(case)
    problem, tensors = described_for_launch(inputs, case)
    do, exact = inputs.do, run_reference(inputs, case, torch.float64)
    o, lse = exact.o.to(case.dtype), exact.lse.float()
    call = BackwardCall(problem, (do, o, lse, *tensors), configs.HopperBackwardConfig(pdl=False))
    is_packed, group = case.seqlens is not None, case.heads_q // case.heads_kv
    # (batch entry, first query, queries, first key, keys, first row of the buffers, rows of rotated Q)
    sequences = [(b, 0, case.len_q, 0, case.len_k, 0, case.len_q) for b in range(case.batch)]
    if is_packed:
        sequences = [
            (0, first, len_q, *keys, first_tile(first, s), -(-len_q // 64) * 64)
            for s, (first, len_q, *keys) in enumerate(sequences_of(case))
        ]

    def main(_, q_desc, k_desc, v_desc, do_desc, stats_desc, dq_accumulator, gradients, **others):
        q_rot, k_rot, v, stats = (x.base.float() for x in (q_desc, k_desc, v_desc, stats_desc))
        dq = dq_accumulator if case.head_dim > 128 else dq_accumulator.base
        added = dq.view(case.batch, case.heads_q, -1)
        lse, delta = stats.reshape(2, case.batch, case.heads_q, -1)
        assert is_packed or lse.shape[2] == dq.shape[2] == -(-case.len_q // 64) * 64
        dk = torch.zeros(gradients.dk.ptr.shape)
        for b, first_q, len_q, first_k, len_k, first, size in sequences:
            rows, keys = slice(first, first + size), slice(first_k, first_k + len_k)
            # Padding has finite weights, and rows of zeros.
            end = first - (-len_q // 64) * 64
            assert not any(x[b, :, first + len_q : end].any() for x in (lse, delta, *[q_rot] * is_packed))
            assert not dq[b, :, first:end].any()
            position = torch.arange(size)[:, None] + len_k - len_q
            hidden = (position < 0) & is_packed | (torch.arange(len_k) > position) & case.causal
            words = words_of_dq(torch.arange(first, first + size), dq, case.head_dim)
            for h in range(case.heads_q):
                do_rows = torch.nn.functional.pad(do[b, h, first_q : first_q + len_q].float(), (0, 0, 0, size - len_q))
                k_rows, v_rows = k_rot[b, h // group, keys], v[b, h // group, keys]
                scores = q_rot[b, h, rows] @ k_rows.T * case.scale
                p = torch.exp(scores - lse[b, h, rows, None] * math.log(2)).masked_fill(hidden, 0.0)
                ds = p * (do_rows @ v_rows.T - delta[b, h, rows, None])
                added[b, h, words] += ds @ k_rows
                dk[b, h // group, keys] += unrotated(case.scale * ds.T @ q_rot[b, h, rows], inputs, case)
        gradients.dk.ptr.copy_(dk)

    call.main = main
    found, eager = call((do, o, lse, *tensors)), run_reference(inputs, case)
    names = ["dq", *["dsinks"] * case.sinks, *(["dk", "dq_norm", "dk_norm"] if case.norms is not None else [])]
    for name in names:
        rows = [x if x.ndim > 1 else x[None] for x in (getattr(of, name) for of in (found, exact, eager))]
        result = compare(name, *rows, grad=True, dtype=case.dtype)
        assert result.ok, f"{case.name}: {result}"
