"""The generation step's kernels in Triton's interpreter, in configurations and memory that random calls do not have."""

import math
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention_with_kvcache, rope_tables
from fused_rope_attn.generation import configs
from fused_rope_attn.generation.configs import DecodeConfig
from fused_rope_attn.generation.planning import configured
from tests.support.calls import INTERPRETER, assert_right, check_calls
from tests.support.dtypes import F16, F32
from tests.support.generation import CACHES, PAGED, arguments, with_own_caches
from tests.support.internals import with_kvcache, write
from tests.support.marks import ignore_overflow, interpreted
from tests.support.operators import kernel_or_reference
from verification.matrix import DECODE, step

pytestmark = ignore_overflow
OUTSIDE = "block_table must hold pages of the pool"


@interpreted
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(("programs", "parts"), [(1, 2), (3, 1), (4, 2), (100, 4), (100, 32)])
def test_any_number_of_shares(programs, parts, rotated):
    config = replace(configs.decode("interpreter", 4, 16, rotated), programs_per_sm=programs, combine_parts=parts)
    check = step("shares", (2, 1), 2, 90, 16, (85, 0, 16, 40), rotated=rotated, window=(60, 0), sinks=True)
    with configured(config):
        assert_right(replace(check, dtype=F32))


@interpreted
@pytest.mark.parametrize(
    "check",
    [check for check in DECODE if check.size == "small" and (check.len_q == 33 or check.float8 and not check.rotated)],
    ids=lambda check: check.name,
)
def test_chunks_of_a_prompt_and_raw_float8(check):
    """Chunks are too large for random calls, and raw keys in float8 too rare."""
    assert_right(replace(check, dtype=F32))


@interpreted
def test_more_sequences_than_are_read_at_once():
    """A program reads the lengths of 256 at a time."""
    assert_right(step("many", (1, 1), 1, 20, 16, (19, 0, 7) * 86 + (3,), window=(9, 0), dtype=F32))


BY_PAGE = DecodeConfig(64, 1, 1, programs_per_sm=5, combine_parts=2, rows_apart=16, by_page=True)


@interpreted
@pytest.mark.parametrize("changes", [{"page_size": 16}, {"page_size": 32, "kv_starts": (), "append": True},
                                     {"page_size": 48}], ids=str)  # fmt: skip
def test_tiles_that_look_each_of_their_pages_up_once(changes):
    """Tiles of 32 keys hold two pages or one, or go past one."""
    with configured(replace(BY_PAGE, block_n=32)):
        check_calls(INTERPRETER, "decode", 25, "by page", **changes)


@pytest.mark.parametrize("wrong", [23, -1, 2**31 - 1])
@pytest.mark.parametrize("place", [(0, 0), (0, 3), (0, 8), (1, 0)])
@pytest.mark.parametrize("way", ["reference", *(pytest.param(way, marks=interpreted) for way in ("triton", "by page"))])
def test_a_page_outside_the_pool(way, place, wrong):
    """Keys fill pages 0 to 7 and a part of page 8, in the last tile of three; the other sequence only writes."""
    given = arguments(step("pages", (4, 2), 1, 160, 16, (133, 0), page_size=16))
    assert len(given["k_cache"]) == 23
    given["block_table"][place] = wrong
    before, written = with_own_caches(given), given["block_table"][[0, 1], [8, 0]].tolist()
    with configured(BY_PAGE if way == "by page" else None), pytest.raises(Exception, match=OUTSIDE):
        with_kvcache(**given, backend="reference" if way == "reference" else "triton")
    others = [page for page in range(23) if page not in written]
    for name in CACHES:
        torch.testing.assert_close(given[name][others], before[name][others], rtol=0, atol=0, equal_nan=True)


@kernel_or_reference("reference", "triton")
def test_a_page_outside_the_pool_to_write_to(backend):
    given = arguments(PAGED)
    given = {name: given[name] for name in ("k", "v", *CACHES, "cos", "sin", "cache_seqlens", "block_table")}
    given["block_table"][1, 0] = 9
    with pytest.raises(Exception, match=OUTSIDE):
        write(**given, backend=backend)


@kernel_or_reference("reference", "triton")
@pytest.mark.parametrize("scale", [None, torch.tensor([0.01]), torch.tensor(0.01)])
def test_float8_saturates_and_keeps_nan(scale, backend):
    """NaN was 384 in the interpreter. A scale may have no axis."""
    given = arguments(step("float8", (4, 2), 2, 40, 16, (30, 0), float8="head")) | {"k_scale": scale, "v_scale": scale}
    given["v"][0, 0, 0, :4] = torch.tensor([1e6, -1e6, math.inf, math.nan])
    given["k"][0, 1, 1, 2] = math.nan
    other = with_own_caches(given)
    with_kvcache(**given, backend=backend)
    names = ("k", "v", *CACHES, "cos", "sin", "cache_seqlens", "k_scale", "v_scale")
    write(**{name: other[name] for name in names}, backend=backend)
    for caches in (given, other):
        row = caches["v_cache"][0, 0, 30, :4].float()
        assert row[:3].tolist() == [448.0, -448.0, 448.0] and bool(row[3].isnan())
        assert caches["k_cache"][0, 1, 31].float().isnan().nonzero().flatten().tolist() == [2, 10]


@interpreted
def test_only_the_new_rows_of_a_larger_buffer_are_written():
    """Tokens without a place in the cache are not written, even if there is memory after the last sequence."""
    given = arguments(step("full", (2, 1), 4, 20, 16, (18, 20, 50)))
    buffers = [torch.full((3, 30, 1, 16), 7.0) for _ in CACHES]
    for name, buffer in zip(CACHES, buffers):
        given[name] = buffer[:, 5:25].transpose(1, 2).copy_(given[name])
    o, lse = with_kvcache(**given, backend="triton")
    for buffer in buffers:
        assert bool((buffer[:, :5] == 7).all()) and bool((buffer[:, 25:] == 7).all())
    assert torch.equal(buffers[1][0, 23:25].transpose(0, 1), given["v"][0, :, :2])
    assert bool((o[0, :, :2] != 0).all()) and bool(lse[0, :, :2].isfinite().all())
    for dead, dead_lse in ((o[0, :, 2:], lse[0, :, 2:]), (o[1:], lse[1:])):
        assert bool((dead == 0).all()) and bool((dead_lse == -math.inf).all())


@interpreted
def test_offsets_beyond_32_bits():
    """Rows of the caches 2^26 elements apart, 2.7e9 in all; only the pages of the rows are ever touched."""
    given = arguments(step("long", (2, 1), 1, 40, 16, (37,)), F16)
    far = with_own_caches(given)
    expected = with_kvcache(**given, backend="triton")
    for name in CACHES:
        x = torch.empty(40 * 2**26, dtype=F16).as_strided((1, 1, 40, 16), (40 * 2**26, 16, 2**26, 1))
        far[name] = x.copy_(far[name])
    found = with_kvcache(**far, backend="triton")
    assert all(torch.equal(x, y) for x, y in zip(found, expected))
    assert torch.equal(far["v_cache"][0, 0, 37], given["v"][0, 0, 0])


@interpreted
def test_a_step_on_a_copy_reads_unaligned_queries():
    """Attention takes aligned rows, and a step passes its queries on."""
    q, k_cache, v_cache = torch.randn(1, 4, 3, 33)[..., :32], torch.randn(1, 2, 40, 32), torch.randn(1, 2, 40, 32)
    given = k_cache, v_cache, *rope_tables(40, 32)
    options = {"cache_seqlens": torch.tensor([20], dtype=torch.int32), "batch_invariant": True, "backend": "triton"}
    found, expected = (rope_attention_with_kvcache(x, *given, **options) for x in (q, q.contiguous()))
    assert torch.equal(found, expected)
