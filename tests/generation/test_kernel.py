"""The generation step's kernel in Triton's interpreter, against float64."""

import math
from dataclasses import replace

import pytest
import torch

import fused_rope_attn
from fused_rope_attn.generation import configs
from tests.support.dtypes import F16, F32, F64
from tests.support.generation import PLAIN, hold, make_inputs, run_kernels, run_reference
from tests.support.internals import set_decode_config
from tests.support.marks import ignore_overflow, interpreted
from verification.matrix import DECODE, step

SMALL = tuple(check for check in DECODE if check.size == "small")


def named(*checks):
    return pytest.mark.parametrize("check", [pytest.param(check, id=check.name) for check in checks])


@interpreted
@ignore_overflow
@named(*SMALL)
def test_float32(check):
    failures = [result for result in hold(check, F32) if not result.ok]
    assert not failures, failures


@interpreted
@ignore_overflow
@named(*(check for check in SMALL if check.interleaved or not check.rotated or check.sinks))
def test_float16(check):
    failures = [result for result in hold(check, F16) if not result.ok]
    assert not failures, failures


@interpreted
@ignore_overflow
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(("programs", "parts"), [(1, 2), (3, 1), (4, 2), (100, 4), (100, 32)])
def test_any_number_of_shares(programs, parts, rotated, monkeypatch):
    """From one program that does everything to one for each tile, and a head's parts added in one step or in many."""
    config = replace(configs.decode("interpreter", 4, 16, rotated), programs_per_sm=programs, combine_parts=parts)
    set_decode_config(monkeypatch, config)
    check = step("shares", (2, 1), 2, 90, 16, (85, 0, 16, 40), rotated=rotated, window=(60, 0), sinks=True)
    failures = [result for result in hold(check, F32) if not result.ok]
    assert not failures, failures


@interpreted
def test_a_wrong_row_is_noticed(monkeypatch):
    """The checks can fail: a key rotated by its neighbour's angle, a key left out, a row written that is not new."""
    right = fused_rope_attn.rope_attention_with_kvcache

    def shifted(cos, sin, **given):
        return right(cos=cos.roll(1, 0), sin=sin.roll(1, 0), **given)

    def forgetful(**given):
        return right(**(given | {"window": (28, 0)}))

    def careless(**given):
        out = right(**given)
        given["v_cache"][0, 0, 3, 0] += 1
        return out

    for wrong, tensors in ((shifted, {"o", "lse", "k_cache"}), (forgetful, {"o", "lse"}), (careless, {"v_cache"})):
        monkeypatch.setattr(fused_rope_attn, "rope_attention_with_kvcache", wrong)
        assert {result.tensor for result in hold(PLAIN, F32) if not result.ok} == tensors, wrong


@interpreted
def test_only_the_new_rows_of_a_larger_buffer_are_written():
    """Tokens without a place in the cache are not written, even if there is memory after the last sequence."""
    check = step("full", (2, 1), 4, 20, 16, (18, 20, 50))
    inputs = make_inputs(check, F32)
    buffers = [torch.full((3, 30, 1, 16), 7.0) for _ in range(2)]
    views = [buffer[:, 5:25].transpose(1, 2) for buffer in buffers]
    for view, cache in zip(views, inputs[1:3]):
        view.copy_(cache)
    o, lse = run_kernels(check, inputs._replace(k_cache=views[0], v_cache=views[1]))
    for buffer, new in zip(buffers, (None, inputs.v)):
        assert bool((buffer[:, :5] == 7).all()) and bool((buffer[:, 25:] == 7).all())
        if new is not None:
            assert torch.equal(buffer[0, 23:25].transpose(0, 1), new[0, :, :2])
    assert bool((o[0, :, :2] != 0).all()) and bool(lse[0, :, :2].isfinite().all())
    for dead, dead_lse in ((o[0, :, 2:], lse[0, :, 2:]), (o[1:], lse[1:])):
        assert bool((dead == 0).all()) and bool((dead_lse == -math.inf).all())


@interpreted
def test_offsets_beyond_32_bits():
    """Rows of the caches 2^26 elements apart, 2.7e9 in all; only the pages of the rows are ever touched."""
    check = step("long", (2, 1), 1, 40, 16, (37,))
    inputs = make_inputs(check, F16)
    ref64, eager = run_reference(check, inputs, F64), run_reference(check, inputs, F16)
    caches = []
    for cache in inputs[1:3]:
        far = torch.empty(40 * 2**26, dtype=F16).as_strided((1, 1, 40, 16), (40 * 2**26, 16, 2**26, 1))
        caches.append(far.copy_(cache))
    o, _ = run_kernels(check, inputs._replace(k_cache=caches[0], v_cache=caches[1]))
    torch.testing.assert_close(o.double(), ref64[0], atol=4 * float((eager[0] - ref64[0]).abs().max()), rtol=0)
    assert torch.equal(caches[1][0, 0, 37], inputs.v[0, 0, 0])
