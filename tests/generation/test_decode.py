"""The generation step in Triton's interpreter against float64, its reference, its operator and its refusals."""

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from fused_rope_attn import rope_attention, rope_attention_with_kvcache, rope_tables
from fused_rope_attn.attention import reference
from fused_rope_attn.attention.configs import ARCHS
from fused_rope_attn.attention.planning import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM
from fused_rope_attn.generation import configs, planning
from fused_rope_attn.generation.api import run_step
from fused_rope_attn.generation.kernel import sequence_of, tiles_before
from fused_rope_attn.generation.launch import row_block
from fused_rope_attn.runtime.device import is_interpreted
from verification.decode import CHECKS, DecodeCheck, hold, make_inputs, run_kernels, run_reference

interpreted = pytest.mark.skipif(
    not is_interpreted(), reason="needs TRITON_INTERPRET=1; on a GPU see test_decode_gpu.py"
)
quiet = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
F16, F32, F64 = torch.float16, torch.float32, torch.float64
SMALL = tuple(check for check in CHECKS if check.scale == "small")
PLAIN = DecodeCheck("plain", (4, 2), 2, 40, 16, (30, 0))
TINY = DecodeCheck("tiny", (2, 1), 1, 20, 16, (17,))  # for what runs a call many times


def named(*checks):
    return pytest.mark.parametrize("check", [pytest.param(check, id=check.name) for check in checks])


@interpreted
@quiet
@named(*SMALL)
def test_float32(check):
    failures = [result for result in hold(check, F32) if not result.ok]
    assert not failures, failures


@interpreted
@quiet
@named(*(check for check in SMALL if check.interleaved or not check.rotated or check.sinks))
def test_float16(check):
    failures = [result for result in hold(check, F16) if not result.ok]
    assert not failures, failures


@interpreted
@quiet
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(("programs", "least", "parts"), [(1, 1, 2), (3, 1, 1), (4, 3, 2), (100, 1, 4), (100, 1, 32)])
def test_any_number_of_shares(programs, least, parts, rotated, monkeypatch):
    """From one program that does everything to one for each tile, and a head's parts added in one step or in many."""
    config = replace(
        configs.decode("interpreter", 4, 16, rotated), programs_per_sm=programs, least_tiles=least, combine_parts=parts
    )
    monkeypatch.setattr(planning, "_override", config)
    check = DecodeCheck("shares", (2, 1), 2, 90, 16, (85, 0, 16, 40), rotated=rotated, window=(60, 0), sinks=True)
    failures = [result for result in hold(check, F32) if not result.ok]
    assert not failures, failures


@interpreted
def test_a_wrong_row_is_noticed(monkeypatch):
    """The checks can fail: a key rotated by its neighbour's angle, a key left out, a row written that is not new."""
    import verification.decode as checks

    right = run_kernels

    def shifted(check, inputs):
        return right(check, inputs._replace(cos=inputs.cos.roll(1, 0), sin=inputs.sin.roll(1, 0)))

    def forgetful(check, inputs):
        return right(replace(check, window=(28, 0)), inputs)

    def careless(check, inputs):
        out = right(check, inputs)
        inputs.v_cache[0, 0, 3, 0] += 1
        return out

    for wrong, tensors in ((shifted, {"o", "lse", "k_cache"}), (forgetful, {"o", "lse"}), (careless, {"v_cache"})):
        monkeypatch.setattr(checks, "run_kernels", wrong)
        assert {result.tensor for result in hold(PLAIN, F32) if not result.ok} == tensors, wrong


@interpreted
def test_only_the_new_rows_of_a_larger_buffer_are_written():
    """Tokens without a place in the cache go nowhere, also where there is memory behind the last sequence."""
    check = DecodeCheck("full", (2, 1), 4, 20, 16, (18, 20, 50))
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
    check = DecodeCheck("long", (2, 1), 1, 40, 16, (37,))
    inputs = make_inputs(check, F16)
    ref64, eager = run_reference(check, inputs, F64), run_reference(check, inputs, F16)
    caches = []
    for cache in inputs[1:3]:
        far = torch.empty(40 * 2**26, dtype=F16).as_strided((1, 1, 40, 16), (40 * 2**26, 16, 2**26, 1))
        caches.append(far.copy_(cache))
    o, _ = run_kernels(check, inputs._replace(k_cache=caches[0], v_cache=caches[1]))
    torch.testing.assert_close(o.double(), ref64[0], atol=4 * float((eager[0] - ref64[0]).abs().max()), rtol=0)
    assert torch.equal(caches[1][0, 0, 37], inputs.v[0, 0, 0])


@triton.jit
def schedule_kernel(lens_ptr, total_ptr, found_ptr, B, NQ, S, left, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """The total of tiles, and for each tile its sequence and the tiles before that, by both functions."""
    total, _ = tiles_before(0, lens_ptr, None, B, NQ, S, left, True, BLOCK_N, BLOCK_B)
    tl.store(total_ptr, total)
    for tile in range(total):
        batch, before = sequence_of(tile, lens_ptr, None, B, NQ, S, left, True, BLOCK_N, BLOCK_B)
        _total, again = tiles_before(batch, lens_ptr, None, B, NQ, S, left, True, BLOCK_N, BLOCK_B)
        tl.store(found_ptr + 3 * tile, batch)
        tl.store(found_ptr + 3 * tile + 1, before)
        tl.store(found_ptr + 3 * tile + 2, again)


@interpreted
@pytest.mark.parametrize("left", [None, 5])
@pytest.mark.parametrize("count", [1, 3, 4, 11])
def test_every_tile_finds_its_sequence(count, left):
    """More sequences than one step looks at, empty ones, and a window."""
    lens = torch.tensor([0, 9, 33, 8, 16, 0, 0, 17, 1, 40, 99], dtype=torch.int32)[:count]
    total, found = torch.zeros(1, dtype=torch.int32), torch.full((100, 3), -1, dtype=torch.int32)
    schedule_kernel[(1,)](lens, total, found, count, 1, 40, left, BLOCK_N=8, BLOCK_B=4)
    keys = lens.clamp(max=40) if left is None else lens.clamp(max=min(left, 40))
    tiles = ((keys + 7) // 8).clamp(min=1)
    assert int(total) == int(tiles.sum())
    expected = torch.repeat_interleave(torch.arange(count), tiles)
    before = tiles.cumsum(0) - tiles
    assert torch.equal(found[: int(total), 0].long(), expected)
    assert torch.equal(found[: int(total), 1].long(), before[expected])
    assert torch.equal(found[: int(total), 2].long(), before[expected])


def test_blocks_of_query_rows():
    assert [row_block(rows) for rows in (1, 16, 17, 33, 64, 65, 1000)] == [16, 16, 32, 64, 64, 64, 64]


# The reference.


def rows_of(inputs, check, rotated):
    """float64 caches with the new tokens in their places, written one by one, and the lengths afterwards."""
    k_cache, v_cache = (x.double().clone() for x in inputs[1:3])
    lens = inputs.cache_seqlens.clone()
    for b, length in enumerate(check.lengths):
        for i in range(check.len_q):
            k = inputs.k[b, :, i].double()
            if rotated:
                position = slice(length + i, length + i + 1)
                k = reference.rotate(
                    k[:, None], inputs.cos[position].double(), inputs.sin[position].double(),
                    interleaved=check.interleaved,
                )[:, 0]  # fmt: skip
            k_cache[b, :, length + i] = k
            v_cache[b, :, length + i] = inputs.v[b, :, i].double()
        lens[b] = length + check.len_q
    return k_cache, v_cache, lens


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_the_reference_is_attention_to_the_written_cache(interleaved, causal):
    """With raw keys it is ``rope_attention`` with ``kv_lens``, and with rotated keys the same."""
    check = DecodeCheck("", (4, 2), 3, 40, 16, (30, 2), rotated=False, interleaved=interleaved, causal=causal,
                        window=(8, 1), sinks=True, softcap=3.0)  # fmt: skip
    inputs = make_inputs(check, F64)
    k_cache, v_cache, lens = rows_of(inputs, check, rotated=False)
    expected = rope_attention(
        inputs.q, k_cache, v_cache, inputs.cos, inputs.sin, causal, interleaved=interleaved, window=(8, 1),
        sinks=inputs.sinks, softcap=3.0, kv_lens=lens, return_lse=True, backend="reference",
    )  # fmt: skip
    raw = run_reference(check, inputs, F64)
    torch.testing.assert_close(raw[:2], expected)
    torch.testing.assert_close(raw[2:], (k_cache, v_cache), equal_nan=True, rtol=0, atol=0)
    turned = reference.rotate(
        inputs.k_cache, inputs.cos.double(), inputs.sin.double(), interleaved=interleaved
    )  # fmt: skip
    rotated = run_reference(replace(check, rotated=True), inputs._replace(k_cache=turned), F64)
    torch.testing.assert_close(rotated[:2], expected)
    k_cache, _, _ = rows_of(inputs._replace(k_cache=turned), check, rotated=True)
    torch.testing.assert_close(rotated[2], k_cache, equal_nan=True)


def test_without_new_tokens_the_queries_stand_at_the_end():
    check = replace(PLAIN, append=False, rotated=False, lengths=(30, 1))
    inputs = make_inputs(check, F64)
    o, lse, k_cache, v_cache = run_reference(check, inputs, F64)
    expected = rope_attention(
        *inputs[:5], True, kv_lens=inputs.cache_seqlens, return_lse=True, backend="reference"
    )  # fmt: skip
    torch.testing.assert_close((o, lse), expected)
    assert bool((o[1, :, 0] == 0).all()) and bool((lse[1, :, 0] == -math.inf).all())  # before position 0
    torch.testing.assert_close((k_cache, v_cache), inputs[1:3], equal_nan=True, rtol=0, atol=0)


def test_token_by_token_is_all_at_once():
    """Generation of a causal sequence gives the rows of attention to all of it, with both kinds of cache."""
    torch.manual_seed(0)
    length, heads_q, heads_kv, head_dim = 12, 4, 2, 16
    q = torch.randn(2, heads_q, length, head_dim, dtype=F64)
    k, v = torch.randn(2, 2, heads_kv, length, head_dim, dtype=F64)
    cos, sin = rope_tables(20, head_dim)
    whole = rope_attention(q, k, v, cos, sin, True)
    for rotated in (True, False):
        k_cache, v_cache = torch.full((2, 2, heads_kv, 20, head_dim), math.nan, dtype=F64)
        lens = torch.zeros(2, dtype=torch.int32)
        for start, step in ((0, 5), *((n, 1) for n in range(5, length))):
            part = slice(start, start + step)
            o = rope_attention_with_kvcache(
                q[:, :, part], k_cache, v_cache, cos, sin, k[:, :, part], v[:, :, part], cache_seqlens=lens,
                cache_is_rotated=rotated,
            )  # fmt: skip
            torch.testing.assert_close(o, whole[:, :, part])
            assert bool((lens == start).all())
            lens += step


# The public function and the operator.


@interpreted
def test_inputs_stay_and_autograd_sees_the_caches_change():
    inputs = make_inputs(PLAIN, F32)
    kept = [x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.cos, inputs.sin, inputs.cache_seqlens)]
    versions = [x._version for x in inputs[1:3]]
    run_kernels(PLAIN, inputs)
    now = (inputs.q, inputs.k, inputs.v, inputs.cos, inputs.sin, inputs.cache_seqlens)
    assert all(torch.equal(x, y) for x, y in zip(kept, now))
    assert all(x._version > version for x, version in zip(inputs[1:3], versions))
    versions = [x._version for x in inputs[1:3]]
    run_kernels(replace(PLAIN, append=False), inputs._replace(k=None, v=None))
    assert versions == [x._version for x in inputs[1:3]]


@interpreted
def test_inference_mode():
    with torch.inference_mode():
        failures = [result for result in hold(PLAIN, F32) if not result.ok]
    assert not failures, failures


@interpreted
@pytest.mark.parametrize("empty", ["batch", "queries", "capacity"])
def test_nothing_to_do(empty):
    batch, len_q, capacity = (0 if empty == what else 2 for what in ("batch", "queries", "capacity"))
    q = torch.randn(batch, 4, len_q, 16)
    k_cache, v_cache = torch.randn(2, batch, 2, capacity, 16)
    cos, sin = rope_tables(8, 16)
    lens = torch.zeros(batch, dtype=torch.int32)
    for backend in ("reference", "triton"):
        o, lse = run_step(
            q, k_cache, v_cache, cos, sin, cache_seqlens=lens, return_lse=True, backend=backend
        )  # fmt: skip
        assert o.shape == q.shape and lse.shape == q.shape[:3]
        assert bool((o == 0).all()) and bool((lse == -math.inf).all())


@interpreted
@quiet
def test_kernels_and_reference_agree_on_padded_prompts():
    """Keys before ``kv_starts`` do not exist, not even NaN."""
    inputs = make_inputs(PLAIN, F32)
    starts = torch.tensor([20, 0], dtype=torch.int32)
    inputs.v_cache[0, :, :20] = math.nan
    results = []
    for backend in ("reference", "triton"):
        q, k_cache, v_cache, cos, sin, k, v, lens, _ = (x if x is None else x.clone() for x in inputs)
        results.append(
            run_step(
                q,
                k_cache,
                v_cache,
                cos,
                sin,
                k,
                v,
                cache_seqlens=lens,
                kv_starts=starts,
                return_lse=True,
                backend=backend,
            )  # fmt: skip
        )
    torch.testing.assert_close(*results)


OPERATOR = torch.ops.fused_rope_attn.attention_with_kvcache.default


@interpreted
@pytest.mark.unpoisoned
@pytest.mark.parametrize("append", [True, False])
def test_opcheck(append):
    check = replace(TINY, append=append, sinks=True)
    q, k_cache, v_cache, cos, sin, k, v, lens, sinks = make_inputs(check, F32)
    k_cache, v_cache = (x.nan_to_num() for x in (k_cache, v_cache))
    options = (True, True, 0.25, 16, False, -1, -1, 0.0)
    torch.library.opcheck(OPERATOR, (q, k_cache, v_cache, cos, sin, k, v, lens, None, sinks, *options))


@interpreted
@pytest.mark.unpoisoned
def test_compile_writes_the_caches():
    torch._dynamo.reset()
    inputs = make_inputs(TINY, F32)

    def step(q, k_cache, v_cache, k, v, lens):
        o, lse = run_step(
            2 * q, k_cache, v_cache, inputs.cos, inputs.sin, k, v, cache_seqlens=lens, return_lse=True,
            backend="triton",
        )  # fmt: skip
        return o + 1, lse, k_cache.nan_to_num().sum()

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        caches = [x.clone() for x in inputs[1:3]]
        out = [
            function(inputs.q, *caches, inputs.k, inputs.v, lens)
            for lens in (inputs.cache_seqlens, torch.ones(1).int())
        ]
        results.append([*out, *caches])
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(results[0][2].nan_to_num(), inputs.k_cache.nan_to_num())


def test_compile_of_the_reference():
    torch._dynamo.reset()
    inputs = make_inputs(PLAIN, F32)

    def step(q, k_cache, v_cache, k, v, lens):
        return rope_attention_with_kvcache(
            q, k_cache, v_cache, inputs.cos, inputs.sin, k, v, cache_seqlens=lens, return_lse=True
        )  # fmt: skip

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        caches = [x.clone() for x in inputs[1:3]]
        results.append([*function(inputs.q, *caches, inputs.k, inputs.v, inputs.cache_seqlens), *caches])
    torch.testing.assert_close(*results, equal_nan=True)


def test_autocast_casts_the_new_tokens():
    inputs = make_inputs(PLAIN, torch.bfloat16)
    wide = [x.float() for x in (inputs.q, inputs.k, inputs.v)]
    with torch.autocast("cpu", torch.bfloat16):
        o = rope_attention_with_kvcache(
            wide[0], *inputs[1:5], *wide[1:], cache_seqlens=inputs.cache_seqlens
        )  # fmt: skip
    assert o.dtype == torch.bfloat16 and bool(o.isfinite().all())


def test_configurations_for_every_call():
    for arch in (*ARCHS, "interpreter"):
        for head_dim in range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP):
            for element_size in (2, 4):
                for rotated in (True, False):
                    config = configs.decode(arch, element_size, head_dim, rotated)
                    assert config.pdl == (arch in ("sm_90", "sm_100", "sm_120"))
    assert all(row.note for row in configs.DECODE)


# Refusals: nothing is written before they are raised.


def call(**changes):
    q, k_cache, v_cache, cos, sin, k, v, lens, _ = make_inputs(PLAIN, F32)
    valid = {
        "q": q, "k_cache": k_cache.nan_to_num(), "v_cache": v_cache.nan_to_num(), "cos": cos, "sin": sin, "k": k,
        "v": v, "cache_seqlens": lens,
    }  # fmt: skip
    return rope_attention_with_kvcache(**(valid | changes))


def zeros(*shape, **options):
    return torch.zeros(shape, **options)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": None}, TypeError, "q must be a torch.Tensor, but is NoneType"),
        ({"cache_seqlens": 3}, TypeError, "cache_seqlens must be a torch.Tensor, but is int 3"),
        ({"cache_seqlens": zeros(2)}, TypeError, "cache_seqlens must be int32, but is float32"),
        ({"cache_seqlens": zeros(3, dtype=torch.int32)}, ValueError, "cache_seqlens must have shape (B,) = (2,)"),
        ({"k": None}, ValueError, "k must be given where v is"),
        ({"v": None}, ValueError, "v must be given where k is"),
        ({"k": zeros(2, 2, 3, 16)}, ValueError, "k must have shape (B, HKV, NQ, D) = (2, 2, 2, 16), but has"),
        ({"v": zeros(2, 4, 2, 16)}, ValueError, "v must have shape (B, HKV, NQ, D)"),
        ({"k_cache": zeros(2, 2, 40, 16).half()}, TypeError, "k_cache must have q's dtype float32, but is float16"),
        ({"v": zeros(2, 2, 2, 16).half()}, TypeError, "v must have q's dtype float32, but is float16"),
        ({"k_cache": zeros(2, 40, 16)}, ValueError, "k_cache must have shape (B, HKV, S_max, D), but has 3 dimensions"),
        ({"k_cache": zeros(1, 2, 40, 16)}, ValueError, "k_cache must have q's batch size 2, but has 1"),
        ({"v_cache": zeros(2, 2, 41, 16)}, ValueError, "v_cache must have k_cache's shape (2, 2, 40, 16)"),
        ({"k_cache": zeros(2, 3, 40, 16), "v_cache": zeros(2, 3, 40, 16)}, ValueError, "k_cache has 3 heads"),
        ({"k_cache": zeros(1, 2, 40, 16).expand(2, 2, 40, 16)}, ValueError, "k_cache must not be expanded"),
        ({"q": zeros(2, 4, 50, 16), "k": zeros(2, 2, 50, 16), "v": zeros(2, 2, 50, 16)}, ValueError, "S_max = 40"),
        ({"cos": zeros(39, 8), "sin": zeros(39, 8)}, ValueError, "cos must"),
        ({"rotary_dim": 3}, ValueError, "rotary_dim must be even"),
        ({"cache_is_rotated": 1}, TypeError, "cache_is_rotated must be a bool, but is int 1"),
        ({"causal": None}, TypeError, "causal must be a bool"),
        ({"softmax_scale": math.inf}, ValueError, "softmax_scale must be finite"),
        ({"softcap": -1.0}, ValueError, "softcap must be finite and positive"),
        ({"window": (1,)}, ValueError, "window must have two elements"),
        ({"sinks": zeros(3)}, ValueError, "sinks must have shape (HQ,) = (4,), but has (3,)"),
        ({"k": zeros(2, 2, 2, 16, device="meta")}, ValueError, "k must be on q's device cpu, but is on meta"),
        ({"q": zeros(2, 4, 2, 16).requires_grad_()}, ValueError, "q must not require a gradient"),
        ({"v_cache": zeros(2, 2, 40, 16).requires_grad_()}, ValueError, "v_cache must not require a gradient"),
        ({"sinks": zeros(4).requires_grad_()}, ValueError, "sinks must not require a gradient"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)  # fmt: skip
def test_refusals(changes, error, message):
    with pytest.raises(error) as caught:
        call(**changes)
    assert message in str(caught.value)


def test_parameters_are_welcome_without_gradients():
    sinks = torch.nn.Parameter(torch.zeros(4))
    with torch.no_grad():
        o = call(sinks=sinks)
    assert o.shape == (2, 4, 2, 16) and not o.requires_grad


def test_the_example_of_context_shifting():
    from examples.context_shift import stream

    shifts, worst = stream(120)
    assert shifts == 3 and worst < 1e-5
