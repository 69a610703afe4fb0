"""Tiles that hold whole pages of a cache and look each of them up once."""

import math

import pytest
import torch

from fused_rope_attn.generation.configs import DecodeConfig
from fused_rope_attn.generation.launch import tile_alignment
from fused_rope_attn.generation.planning import configured
from tests.support.dtypes import F16, F32
from tests.support.generation import hold, make_inputs
from tests.support.internals import with_kvcache
from tests.support.marks import ignore_overflow, interpreted
from verification.matrix import DECODE, step

BY_PAGE = DecodeConfig(64, 1, 1, programs_per_sm=5, combine_parts=2, rows_apart=16, by_page=True)
LONGER = (
    step("three tiles", (4, 2), 1, 192, 16, (170, 64, 65), page_size=16),
    step("a window that begins within a page", (4, 2), 3, 192, 16, (150, 90), page_size=16, window=(70, 0)),
    step("pages of 32, raw keys", (2, 1), 2, 192, 16, (150, 3), page_size=32, rotated=False),
    step("float8, a scale for each head", (4, 2), 1, 160, 16, (130, 63), page_size=32, float8="head"),
    step("pages that tiles go past", (2, 1), 1, 192, 16, (150, 47), page_size=48),
)
CASES = (*LONGER, *(check for check in DECODE if check.size == "small" and check.page_size in (16, 32)))


@interpreted
@ignore_overflow
@pytest.mark.parametrize("check", [pytest.param(check, id=check.name) for check in CASES])
def test_against_float64(check):
    with configured(BY_PAGE):
        failures = [result for result in hold(check, F16 if check.float8 else F32) if not result.ok]
    assert not failures, failures


@interpreted
@pytest.mark.parametrize("appends", [True, False])
def test_what_is_not_needed_is_not_looked_up(appends):
    """A tile of 64 keys holds pages before the first key and after the last one: their entries may be anything, and
    rows of the first and of the last page that do not exist may be NaN."""
    check = step("pages", (4, 2), 2, 160, 16, (100, 20), page_size=16, append=appends)
    given = make_inputs(check, F32)._asdict() | {"kv_starts": torch.tensor([37, 20], dtype=torch.int32)}
    expected = with_kvcache(
        **given | {name: given[name].clone() for name in ("k_cache", "v_cache")}, backend="reference"
    )
    table = given["block_table"]
    for name in ("k_cache", "v_cache"):
        given[name][table[0, 2].item(), :, :5] = math.nan
        given[name][table[0, 6].item(), :, 6:] = math.nan
    table[0, :2] = -1
    table[0, 7:] = 10**6
    table[1, 0] = 10**6
    table[1, 2:] = -1
    with configured(BY_PAGE):
        found = with_kvcache(**given, backend="triton")
    torch.testing.assert_close(found, expected)
    assert torch.isfinite(found[0][0]).all() and (appends or not found[0][1].any())


@interpreted
@pytest.mark.parametrize("wrong", [12, -1, 2**31 - 1])
@pytest.mark.parametrize("page", [0, 3, 4, 8])
def test_a_page_outside_the_pool(page, wrong):
    """The keys of the only sequence fill pages 0 to 7, two tiles, and a part of page 8, in the last tile."""
    given = make_inputs(step("pages", (4, 2), 1, 160, 16, (133,), page_size=16), F32)._asdict()
    pages = given["k_cache"].shape[0]
    given["block_table"][0, page] = pages if wrong == 12 else wrong
    with configured(BY_PAGE), pytest.raises(Exception, match="pages of the pool"):
        with_kvcache(**given, backend="triton")


@pytest.mark.parametrize(
    ("page_size", "block_n", "by_page", "alignment"),
    [
        (None, 64, True, 1),
        (64, 64, False, 64),
        (128, 64, True, 64),
        (16, 64, True, 16),
        (16, 64, False, 1),
        (48, 64, True, 1),
    ],
)
def test_where_tiles_begin(page_size, block_n, by_page, alignment):
    assert tile_alignment(page_size, block_n, by_page) == alignment
