"""Caches in pages and in float8: pages that two sequences share, those outside the pool, and refusals."""

import math

import pytest
import torch

from fused_rope_attn import plan_with_kvcache, rope_attention_with_kvcache, write_kvcache
from tests.support.dtypes import F16, F32
from tests.support.generation import make_inputs
from tests.support.internals import with_kvcache, write
from tests.support.operators import kernel_or_reference
from verification.matrix import step

PAGED = step("pages", (4, 2), 2, 48, 16, (30, 0), page_size=16)
FLOAT8 = step("float8", (4, 2), 2, 40, 16, (30, 0), float8="head")


def arguments(check=PAGED, **changes):
    names = "q k_cache v_cache cos sin k v cache_seqlens sinks block_table k_scale v_scale".split()
    return dict(zip(names, make_inputs(check, F32))) | changes


@kernel_or_reference("reference", "triton")
@pytest.mark.parametrize("wrong", [9, -1, 2**31 - 1])
@pytest.mark.parametrize(("sequence", "page"), [(0, 0), (0, 1), (1, 0)])
def test_a_page_outside_the_pool(sequence, page, wrong, backend):
    """The second sequence needs its first page only to write."""
    given = arguments()
    assert given["k_cache"].shape[0] == 9
    given["block_table"][sequence, page] = wrong
    before = [given[name].clone() for name in ("k_cache", "v_cache")]
    with pytest.raises(Exception, match="block_table must hold pages of the pool"):
        with_kvcache(**given, backend=backend)
    kept = [i for i in range(9) if i not in given["block_table"][:, :2].flatten().tolist()]
    for name, x in zip(("k_cache", "v_cache"), before):
        torch.testing.assert_close(given[name][kept], x[kept], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("appends", [True, False])
def test_pages_of_keys_that_do_not_exist_are_not_looked_up(appends):
    """A key before ``kv_starts`` may be on a page outside the pool, or be NaN on the page of the first one."""
    plain = step("pages", (4, 2), 2, 48, 16, (40, 20), page_size=16, append=appends)
    given = arguments(plain, kv_starts=torch.tensor([21, 20], dtype=torch.int32))
    expected = with_kvcache(
        **given | {name: given[name].clone() for name in ("k_cache", "v_cache")}, backend="reference"
    )
    table = given["block_table"]
    for name in ("k_cache", "v_cache"):
        given[name][table[0, 1].item(), :, :5] = math.nan
    table[0, 0] = -1
    table[1, 0] = 10**6
    found = with_kvcache(**given, backend="triton")
    torch.testing.assert_close(found, expected)
    assert torch.isfinite(found[0][0]).all() and (appends or not found[0][1].any())


@kernel_or_reference("reference", "triton")
def test_two_sequences_share_a_prefix(backend):
    given = arguments()
    given["cache_seqlens"] = torch.tensor([30, 20], dtype=torch.int32)
    table = given["block_table"]
    spare = next(i for i in range(9) if i not in table[0].tolist())
    for name in ("k_cache", "v_cache"):
        given[name][spare] = given[name][table[0, 1]]
    table[1, 0], table[1, 1] = table[0, 0], spare
    alone = [arguments()[name] for name in ("k_cache", "v_cache")]
    for pool, source in zip(alone, (given["k_cache"], given["v_cache"])):
        pool.copy_(source)
    o, lse = with_kvcache(**given, backend=backend)
    for b in (0, 1):
        part = {name: given[name][b : b + 1] for name in ("q", "k", "v", "cache_seqlens", "block_table")}
        one = dict(given, **part, k_cache=alone[0].clone(), v_cache=alone[1].clone())
        expected = with_kvcache(**one, backend=backend)
        torch.testing.assert_close((o[b : b + 1], lse[b : b + 1]), expected)


@pytest.mark.parametrize("check", [PAGED, FLOAT8], ids=lambda check: check.name)
def test_the_layout_bshd(check):
    given, turned = arguments(check), arguments(check, layout="bshd")
    for name in ("q", "k_cache", "v_cache", "k", "v"):
        turned[name] = turned[name].transpose(1, 2).contiguous()
    o = rope_attention_with_kvcache(**given)
    torch.testing.assert_close(rope_attention_with_kvcache(**turned).transpose(1, 2), o)
    for name in ("k_cache", "v_cache"):
        x, y = turned[name].transpose(1, 2).float(), given[name].float()
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    assert plan_with_kvcache(**turned) == plan_with_kvcache(**given)


def test_new_tokens_saturate():
    """Values above float8's largest number times the scale become that, and NaN stays NaN."""
    given = arguments(FLOAT8, k_scale=torch.tensor([0.01]), v_scale=torch.tensor(0.01))
    given["v"][0, 0, 0, :4] = torch.tensor([1e6, -1e6, math.inf, math.nan])
    rope_attention_with_kvcache(**given)
    row = given["v_cache"][0, 0, 30, :4].float()
    assert row[:3].tolist() == [448.0, -448.0, 448.0] and bool(row[3].isnan())


@kernel_or_reference("reference", "triton")
@pytest.mark.unpoisoned
def test_compiles_to_one_graph(backend):
    """The step writes its pools, and a prompt is written, in a compiled graph too."""
    torch._dynamo.reset()

    def run(given):
        pools = {name: given[name] for name in ("k_cache", "v_cache", "cos", "sin", "cache_seqlens", "block_table")}
        write(given["k"], given["v"], **pools, backend=backend)
        later = given | {"cache_seqlens": given["cache_seqlens"] + 2}
        return with_kvcache(**later, backend=backend)

    eager, compiled = arguments(), arguments()
    for given in (eager, compiled):
        del given["k_scale"], given["v_scale"], given["sinks"]
        given["block_table"] = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
        given |= {name: given[name].nan_to_num() for name in ("k_cache", "v_cache")}
    expected = run(eager)
    results = torch.compile(run, fullgraph=True, backend="aot_eager")(compiled)
    torch.testing.assert_close(results, expected)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(compiled[name], eager[name])
        assert bool(eager[name][1, :, 30 - 16 : 34 - 16].any())


def empty(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype)


POOL = empty(10, 2, 16, 16)
HALF_A_PAGE_LATER = POOL.as_strided((9, 2, 16, 16), POOL.stride(), 256)


@pytest.mark.parametrize("axis", [0, 1, 4])
def test_one_pool_for_both_caches(axis):
    """Keys and values may take turns in one allocation, as pools (num_pages, 2, ...) hold them."""
    given = {name: x for name, x in arguments().items() if name not in ("q", "sinks", "k_scale", "v_scale")}
    pools = torch.stack((given["k_cache"], given["v_cache"]), axis).unbind(axis)
    write_kvcache(**given)
    write_kvcache(**(given | dict(zip(("k_cache", "v_cache"), pools))))
    for pool, name in zip(pools, ("k_cache", "v_cache")):
        assert torch.equal(pool.nan_to_num(7.0), given[name].nan_to_num(7.0))


@pytest.mark.parametrize(
    ("check", "changes", "error", "message"),
    [
        (PAGED, {"block_table": [[0]]}, TypeError, "block_table must be a torch.Tensor, but is list"),
        (PAGED, {"block_table": empty(2, 3)}, TypeError, "block_table must be int32, but is float32"),
        (PAGED, {"block_table": empty(3, 3, dtype=torch.int32)}, ValueError,
         "block_table must have shape (B, pages) with B = 2, but has (3, 3)"),
        (PAGED, {"block_table": empty(6, dtype=torch.int32)}, ValueError, "block_table must have shape (B, pages)"),
        (PAGED, {"block_table": empty(2, 3, dtype=torch.int32).to("meta")}, ValueError, "block_table must be on q's"),
        (PAGED, {"block_table": empty(2, 4, dtype=torch.int32)}, ValueError,
         "cos must have a row for each of block_table's 64 positions, but has 48 rows"),
        (PAGED, {"k_cache": empty(9, 2, 8, 16), "v_cache": empty(9, 2, 8, 16)}, ValueError,
         "k_cache must have pages of at least 16 rows, but has 8"),
        (PAGED, {"k_cache": empty(0, 2, 16, 16), "v_cache": empty(0, 2, 16, 16)}, ValueError, "at least one page"),
        (PAGED, {"k_cache": empty(9, 2, 16)}, ValueError, "k_cache must have shape (num_pages, HKV, page_size, D)"),
        (PAGED, {"v_cache": empty(9, 2, 32, 16)}, ValueError, "with page_size = 16 of k_cache, but has (9, 2, 32, 16)"),
        (PAGED, {"k_cache": empty(9, 3, 16, 16), "v_cache": empty(9, 3, 16, 16), "k": None, "v": None}, ValueError,
         "k_cache has 3 heads"),
        (PAGED, {"k_cache": empty(9, 2, 16, 24), "v_cache": empty(9, 2, 16, 24)}, ValueError,
         "k_cache must have shape (num_pages, HKV, page_size, D) with D = 16 of q, but has (9, 2, 16, 24)"),
        (PAGED, {"k_cache": empty(9, 2, 16, 16, dtype=F16)}, TypeError, "k_cache must have q's dtype float32 or"),
        (PAGED, {"k_cache": POOL, "v_cache": POOL}, ValueError, "v_cache must not overlap k_cache in memory, but is"),
        (PAGED, {"k_cache": POOL[:9], "v_cache": HALF_A_PAGE_LATER}, ValueError, "but begins 256 elements after it in"),
        (PAGED, {"k_scale": torch.ones(1)}, ValueError, "k_scale must be None unless the caches are float8"),
        (FLOAT8, {"v_cache": empty(2, 2, 40, 16)}, TypeError, "v_cache must have k_cache's dtype float8_e4m3fn"),
        (FLOAT8, {"k_scale": 0.5}, TypeError, "k_scale must be a torch.Tensor, but is float 0.5"),
        (FLOAT8, {"v_scale": torch.ones(2, dtype=F16)}, TypeError, "v_scale must be float32, but is float16"),
        (FLOAT8, {"v_scale": torch.ones(3)}, ValueError,
         "v_scale must have shape (1,) or (HKV,) with HKV = 2, but has (3,)"),
        (FLOAT8, {"k_cache": empty(1, 2, 40, 16).to(torch.float8_e4m3fn).expand(2, -1, -1, -1)}, ValueError,
         "k_cache must not be expanded"),
        (FLOAT8, {"k_scale": torch.ones(2, requires_grad=True)}, ValueError, "k_scale must not require a gradient"),
        (FLOAT8, {"k": empty(2, 2, 2, 16, dtype=F16)}, TypeError, "k must have q's dtype float32, but is float16"),
        (FLOAT8, {"k_cache": empty(3, 2, 40, 16).to(torch.float8_e4m3fn),
                  "v_cache": empty(3, 2, 40, 16).to(torch.float8_e4m3fn)}, ValueError, "B = 2 of q, but has (3,"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)  # fmt: skip
def test_refusals(check, changes, error, message):
    with pytest.raises(error) as caught:
        rope_attention_with_kvcache(**arguments(check, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": empty(2, 2, 3)}, ValueError, "k must have shape (B, HKV, N, D), but has 3 dimensions: (2, 2, 3)"),
        ({"v": empty(2, 2, 3, 16)}, ValueError,
         "v must have shape (B, HKV, N, D) with N = 2 of k, but has (2, 2, 3, 16)"),
        ({"v": empty(2, 2, 2, 16, dtype=F16)}, TypeError, "v must have k's dtype float32, but is float16"),
        ({"k": empty(2, 2, 2, 16, dtype=torch.int32)}, TypeError, "k must be float16, bfloat16 or float32, but"),
        ({"v_cache": None}, TypeError, "v_cache must be a torch.Tensor, but is NoneType"),
        ({"cache_is_rotated": 1}, TypeError, "cache_is_rotated must be a bool, but is int 1"),
        ({"new_lens": empty(2)}, TypeError, "new_lens must be int32, but is float32"),
        ({"cache_seqlens": empty(3, dtype=torch.int32)}, ValueError, "cache_seqlens must have shape (B,) with B = 2"),
        ({"cu_seqlens": empty(3, dtype=torch.int32)}, ValueError, "k must have shape (T, HKV, D), but has 4"),
        ({"cu_seqlens": empty(1, dtype=torch.int32), "k": empty(2, 2, 16), "v": empty(2, 2, 16)}, ValueError,
         "cu_seqlens must have shape (B+1,) with B >= 1, but has (1,)"),
        ({"cu_seqlens": empty(3), "k": empty(2, 2, 16), "v": empty(2, 2, 16)}, TypeError, "cu_seqlens must be int32"),
        ({"cu_seqlens": empty(3, dtype=torch.int32), "new_lens": empty(2, dtype=torch.int32)}, ValueError,
         "new_lens must be None where cu_seqlens is given"),
        ({"k": empty(2, 4, 2, 16), "v": empty(2, 4, 2, 16)}, ValueError, "HKV = 4 of k, but has (9, 2, 16, 16)"),
        ({"block_table": None}, ValueError, "k_cache must have one entry for each of 2 sequences, but has 9"),
        ({"k": empty(2, 2, 2, 16).requires_grad_()}, ValueError, "k must not require a gradient"),
        ({"k_cache": POOL, "v_cache": POOL}, ValueError, "v_cache must not overlap k_cache in memory, but is k_cache"),
        ({"k_cache": HALF_A_PAGE_LATER, "v_cache": POOL[:9]}, ValueError, "but begins -256 elements after it in one"),
        ({"layout": "sbhd"}, ValueError, "layout must be 'bhsd' or 'bshd', but is 'sbhd'"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)  # fmt: skip
def test_refusals_of_write_kvcache(changes, error, message):
    given = arguments()
    given = {name: x for name, x in given.items() if name not in ("q", "sinks", "k_scale", "v_scale")} | changes
    with pytest.raises(error) as caught:
        write_kvcache(**given)
    assert message in str(caught.value)


def test_pages_of_keys_and_values_take_turns():
    """transformers stores the values of a page one page after its keys, and uses every second number."""
    pool = torch.zeros(9, 2, 16, 16)
    keys, values = pool[:8], pool[1:]
    q = new = torch.ones(1, 2, 1, 16)
    table = torch.tensor([[4, 2]], dtype=torch.int32)
    cos, sin, ends = torch.ones(32, 8), torch.zeros(32, 8), torch.tensor([17], dtype=torch.int32)
    o = rope_attention_with_kvcache(q, keys, values, cos, sin, new, 2 * new, cache_seqlens=ends, block_table=table)
    expected = 2 / (1 + 17 / math.exp(4.0))  # 17 keys of zeros with values of zeros, and the new one
    torch.testing.assert_close(o, torch.full_like(o, expected))
    assert torch.equal(pool.nonzero()[:, [0, 2]].unique(dim=0), torch.tensor([[2, 1], [3, 1]]))
