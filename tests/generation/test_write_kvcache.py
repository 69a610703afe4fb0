"""`write_kvcache`: prompts into contiguous caches and into pages, padded and packed, rotated, raw and quantised."""

import math

import pytest
import torch

from fused_rope_attn import apply_rope, rope_attention, rope_attention_with_kvcache, rope_tables, write_kvcache
from fused_rope_attn.generation.reference import dequantise, gather_pages, quantise, stored
from tests.support.dtypes import F32
from tests.support.internals import OPERATORS, write
from tests.support.marks import interpreted
from tests.support.operators import kernel_or_reference

PAGE, PAGES, HEADS, HEAD_DIM = 16, 4, 2, 24
LENGTHS, NEW = (5, 0, 50), (20, 0, 20)  # the last sequence has room for 14 tokens


def arguments(packed, paged, float8, rotated):
    """(k and v, caches, options) of three sequences; unused pages and rows hold NaN, unneeded entries nonsense."""
    torch.manual_seed(0)
    total, batch = sum(NEW), len(NEW)
    new = [torch.randn(total, HEADS, HEAD_DIM) for _ in range(2)]
    options = {"cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32), "cache_is_rotated": rotated, "rotary_dim": 16}
    if packed:
        ends = torch.tensor((0, *NEW)).cumsum(0).int()
        options["cu_seqlens"] = ends
        given = [torch.cat((x, torch.full((7, HEADS, HEAD_DIM), math.nan))) for x in new]  # after the last sequence
    else:
        options["new_lens"] = torch.tensor(NEW, dtype=torch.int32)
        given = [torch.full((batch, HEADS, max(NEW), HEAD_DIM), math.nan) for _ in new]
        for target, source in zip(given, new):
            for b, part in enumerate(source.split(NEW)):
                target[b, :, : len(part)] = part.transpose(0, 1)
    caches = [torch.full((batch * PAGES + 1, HEADS, PAGE, HEAD_DIM), math.nan) for _ in range(2)]
    if paged:
        table = torch.randperm(batch * PAGES + 1)[: batch * PAGES].view(batch, PAGES).int()
        options["block_table"] = table.clone()
        options["block_table"][0, 2:] = -5  # 25 tokens need two pages
        options["block_table"][1] = 10**6
        options["block_table"][2, :3] = 10**6  # nothing is written before row 50
    else:
        caches = [x[:-1].view(batch, PAGES, HEADS, PAGE, HEAD_DIM).transpose(1, 2).flatten(2, 3) for x in caches]
        table = None
    if float8:
        caches = [x.to(torch.float8_e4m3fn) for x in caches]
        options |= {"k_scale": torch.tensor([0.01, 0.02]), "v_scale": torch.tensor(0.005)}
    return new, given, caches, options, table


def expected_rows(new, options, cos, sin, rotated):
    """(keys, values) of each sequence's new rows, (HEADS, rows, HEAD_DIM), in the order of the sequences."""
    found = []
    for b, (k, v) in enumerate(zip(*(x.split(NEW) for x in new))):
        first, rows = LENGTHS[b], min(NEW[b], PAGES * PAGE - LENGTHS[b])
        k, v = k[:rows].transpose(0, 1), v[:rows].transpose(0, 1)
        if rotated:
            k = apply_rope(k[None], cos[first : first + rows], sin[first : first + rows], rotary_dim=16)[0]
        if "k_scale" in options:
            k, v = (
                dequantise(quantise(x[None], s), s, F32)[0]
                for x, s in ((k, options["k_scale"]), (v, options["v_scale"]))
            )
        found.append((k, v))
    return found


@kernel_or_reference("reference", "triton")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("paged", "float8", "rotated"), [(False, False, True), (True, False, True), (True, True, True), (True, True, False)]
)
def test_rows_are_written_where_they_belong(packed, paged, float8, rotated, backend):
    new, given, caches, options, table = arguments(packed, paged, float8, rotated)
    cos, sin = rope_tables(PAGES * PAGE, 16)
    write(*given, *caches, cos, sin, **options, backend=backend)
    sequences = [gather_pages(x, table.long()) if paged else x for x in caches]
    scales = [options.get("k_scale"), options.get("v_scale")]
    for b, rows in enumerate(expected_rows(new, options, cos, sin, rotated)):
        for cache, scale, x in zip(sequences, scales, rows):
            cache = dequantise(cache, scale, F32) if float8 else cache
            part = slice(LENGTHS[b], LENGTHS[b] + x.shape[1])
            torch.testing.assert_close(cache[b, :, part], x, rtol=0.07 if float8 else 1e-5, atol=1e-6)
            if float8:  # another rounding may move a few to their neighbours
                assert bool(((cache[b, :, part] - x).abs() < 1e-6).float().mean() > 0.995) or x.numel() == 0
            rest = torch.cat((cache[b, :, : LENGTHS[b]], cache[b, :, part.stop :]), 1)
            assert bool(rest.isnan().all()), b
    if paged:  # a page of no sequence
        spare = torch.tensor(sorted(set(range(13)) - set(table.flatten().tolist())))
        assert all(bool(x.float()[spare].isnan().all()) for x in caches)


@kernel_or_reference("reference", "triton")
def test_a_page_outside_the_pool(backend):
    _, given, caches, options, _ = arguments(False, True, False, True)
    cos, sin = rope_tables(PAGES * PAGE, 16)
    options["block_table"][0, 1] = 13
    with pytest.raises(Exception, match="block_table must hold pages of the pool"):
        write(*given, *caches, cos, sin, **options, backend=backend)


def test_a_prompt_in_chunks_and_a_step_behind_it():
    """Chunks that are written first or with the call, then a token: the rows of attention to the whole prompt."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, heads, 45, 32) for heads in (4, 2, 2))
    cos, sin = rope_tables(64, 32)
    expected = rope_attention(q, k, v, cos, sin, True)
    pools = [torch.full((9, 2, 16, 32), math.nan) for _ in range(2)]
    table = torch.tensor([[7, 2, 5, 0]], dtype=torch.int32)
    for first, last in ((0, 20), (20, 44), (44, 45)):
        part, used = slice(first, last), torch.tensor([first], dtype=torch.int32)
        new = k[:, :, part], v[:, :, part]
        if first == 20:
            o = rope_attention_with_kvcache(
                q[:, :, part], *pools, cos, sin, *new, cache_seqlens=used, block_table=table
            )
        else:
            write_kvcache(*new, *pools, cos, sin, cache_seqlens=used, block_table=table)
            o = rope_attention_with_kvcache(
                q[:, :, part], *pools, cos, sin, cache_seqlens=used + (last - first), block_table=table
            )
        torch.testing.assert_close(o, expected[:, :, part])


@pytest.mark.parametrize("packed", [False, True])
def test_the_layout_bshd(packed):
    _, given, caches, options, _ = arguments(packed, True, False, True)
    cos, sin = rope_tables(PAGES * PAGE, 16)
    turned = [x.transpose(1, 2).contiguous() for x in caches]
    write_kvcache(*given, *caches, cos, sin, **options)
    given = given if packed else [x.transpose(1, 2).contiguous() for x in given]
    write_kvcache(*given, *turned, cos, sin, **options, layout="bshd")
    for x, y in zip(turned, caches):
        torch.testing.assert_close(x.transpose(1, 2), y, rtol=0, atol=0, equal_nan=True)


@interpreted
@pytest.mark.unpoisoned
def test_opcheck():
    _, given, caches, options, _ = arguments(False, False, False, True)
    caches, given = [x.nan_to_num() for x in caches], [x.nan_to_num() for x in given]
    cos, sin = rope_tables(PAGES * PAGE, 16)
    lengths = options["cache_seqlens"], options["new_lens"]
    flat = (*given, *caches, cos, sin, None, *lengths, None, None, None, 16, False, True)
    torch.library.opcheck(OPERATORS.write_kvcache.default, flat, test_utils=("test_schema", "test_faketensor"))
    versions = [x._version for x in caches]
    write(*given, *caches, cos, sin, **options, backend="triton")
    assert all(x._version > version for x, version in zip(caches, versions))


def test_nothing_to_write():
    cos, sin = rope_tables(32, 16)
    cache = torch.zeros(2, 1, 32, 16)
    write_kvcache(torch.zeros(2, 1, 0, 16), torch.zeros(2, 1, 0, 16), cache, cache.clone(), cos, sin)
    none = torch.zeros(0, 1, 32, 16)
    write_kvcache(none, none, none.clone(), none.clone(), cos, sin)
    assert not stored(cache).any()


@interpreted
def test_nan_stays_in_float8():
    """Random verification found 384 in its place, by the interpreter."""
    torch.manual_seed(0)
    k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    v[0, 1, 3, 2:5] = k[0, 0, 4, 0] = math.nan
    caches = [torch.zeros(1, 2, 16, 16).to(torch.float8_e4m3fn) for _ in range(2)]
    expected = [x.clone() for x in caches]
    cos, sin = rope_tables(16, 16)
    start = torch.zeros(1, dtype=torch.int32)
    for found, backend in ((caches, "triton"), (expected, "reference")):
        write(k, v, *found, cos, sin, cache_seqlens=start, backend=backend)
    for cache, reference in zip(caches, expected):
        assert torch.equal(cache.float().isnan(), reference.float().isnan())
        assert bool(cache.float().isnan().any())
