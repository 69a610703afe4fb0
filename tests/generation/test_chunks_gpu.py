"""Chunks of prompts that the sm_90 kernels of attention run on a contiguous copy of their keys, against float64."""

import math

import pytest
import torch

from fused_rope_attn import plan_with_kvcache, rope_attention_with_kvcache, rope_tables
from fused_rope_attn.generation import reference
from fused_rope_attn.generation.problem import StepTensors, describe_step
from fused_rope_attn.generation.reference import quantise, stored
from tests.support.dtypes import BF16
from tests.support.internals import generation_planning
from tests.support.paged import pages_of
from verification import testing

pytestmark = pytest.mark.gpu

BATCH, HEADS, TOKENS, CAPACITY = 2, (32, 8), 300, 4096
LENGTHS = (900, 0)


def chunk(
    head_dim=128,
    page=None,
    float8=False,
    rotated=True,
    appends=True,
    lengths=LENGTHS,
    capacity=CAPACITY,
    masked=False,
    norms=False,
    rotary_dim=None,
    interleaved=False,
    window=None,
):
    """(arguments, options) of ``rope_attention_with_kvcache``; unneeded numbers are NaN, or an entry outside the
    pool."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(heads, length):
        return torch.randn(BATCH, length, heads, head_dim, generator=generator, device="cuda", dtype=BF16)

    q, k, v = (normal(heads, TOKENS).transpose(1, 2) for heads in (HEADS[0], HEADS[1], HEADS[1]))
    caches = [normal(HEADS[1], capacity).transpose(1, 2) for _ in range(2)]
    tables = rope_tables(capacity, rotary_dim or head_dim, device="cuda")
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    options = {
        "cache_seqlens": lens,
        "cache_is_rotated": rotated,
        "interleaved": interleaved,
        "window": window,
        "rotary_dim": rotary_dim or head_dim,
    }
    starts = torch.zeros_like(lens)
    if masked:
        starts = torch.tensor((70, 0), dtype=torch.int32, device="cuda")
        options |= {
            "kv_starts": starts,
            "sinks": torch.randn(HEADS[0], generator=generator, device="cuda"),
            "softcap": 20.0,
        }
    if norms:
        weights = torch.rand(2, head_dim, generator=generator, device="cuda") + 0.5
        options |= {"q_norm": weights[0], "k_norm": weights[1]}
    first = torch.maximum(starts, lens - (TOKENS if not appends else 0) - window[0]) if window else starts
    position = torch.arange(capacity, device="cuda")
    unseen = (position < first[:, None]) | (position >= lens[:, None])
    for cache in caches:
        cache.masked_fill_(unseen[:, None, :, None], math.nan)
    if float8:
        scale = torch.rand(HEADS[1], generator=generator, device="cuda") * 0.01 + 0.01
        caches = [quantise(x, scale) for x in caches]
        options |= {"k_scale": scale, "v_scale": scale.flip(0)}
    if page is not None:
        *caches, table = pages_of(*caches, page)
        pages = unseen.unflatten(1, (-1, page))
        # New tokens need pages too.
        written = (position >= lens[:, None]) & (position < lens[:, None] + (TOKENS if appends else 0))
        unneeded = (pages & ~written.unflatten(1, (-1, page))).all(2)
        options["block_table"] = torch.where(unneeded, 10**6, table)
    return [q, *caches, *tables, *((k, v) if appends else (None, None))], options


CASES = {
    "contiguous": {},
    "pages of 16": {"page": 16},
    "float8 in pages of 64": {"page": 64, "float8": True},
    "raw keys in pages": {"page": 16, "rotated": False},
    "float8, raw": {"float8": True, "rotated": False, "page": 32},
    "masks": {"page": 16, "masked": True},
    "window": {"page": 16, "window": (130, 0)},
    "norms": {"page": 16, "norms": True},
    "norms, raw": {"rotated": False, "norms": True},
    "no room": {"page": 16, "lengths": (3900, 4096)},
    "no room, contiguous": {"lengths": (3900, 5000)},
    "read only": {"page": 16, "appends": False, "lengths": (900, 200)},
    "part of the columns": {"page": 16, "head_dim": 120, "rotary_dim": 64, "interleaved": True},
    "narrow": {"page": 16, "head_dim": 64},
    "in two pieces of columns": {"page": 16, "head_dim": 96},
    "wide": {"page": 16, "head_dim": 256},
}


@pytest.mark.parametrize("name", CASES)
def test_a_chunk_is_within_tolerance(name):
    arguments, options = chunk(**CASES[name])
    if "copy" not in plan_with_kvcache(*arguments, **options).reason:
        pytest.skip("this card does not run it on a copy")
    results = []
    for dtype in (torch.float64, BF16):
        copies = [x if x is None or x.dtype == torch.float8_e4m3fn else x.to(dtype, copy=True) for x in arguments]
        copies[1:3] = [stored(x).clone().view(x.dtype) if x.element_size() == 1 else x for x in copies[1:3]]
        copies[3:5] = [x.to(dtype) if dtype == torch.float64 else x for x in arguments[3:5]]
        wanted = {"causal": True, "softmax_scale": arguments[0].shape[3] ** -0.5} | options
        wanted |= {"norm_eps": 1e-6, "norm_offset": 0.0} if "q_norm" in options else {}
        tensors = StepTensors(*copies, **{name: wanted.pop(name) for name in StepTensors._fields if name in wanted})
        results.append(reference.attention_with_kvcache(describe_step(tensors, **wanted), tensors))
    o, lse = rope_attention_with_kvcache(*arguments, **options, return_lse=True)
    (wanted_o, wanted_lse), (eager, _) = results
    held = testing.compare("o", o, wanted_o, eager, grad=False, dtype=BF16)
    assert held.ok, held.detail
    dead = wanted_lse == -math.inf
    assert torch.equal(lse == -math.inf, dead)
    assert bool(((lse - wanted_lse)[~dead].abs() < 0.02).all())
    assert not bool(o[dead].any())


@pytest.mark.parametrize("name", ["contiguous", "pages of 16"])
def test_a_chunk_writes_what_a_step_writes(name):
    """The caches are those of the step's own kernel, but for the last bit of a rotated key."""
    arguments, options = chunk(**CASES[name])
    others, _ = chunk(**CASES[name])
    rope_attention_with_kvcache(*arguments, **options)
    config = generation_planning.configs.decode("sm_90", 2, 128, True, chunk=True)
    with generation_planning.configured(config):
        rope_attention_with_kvcache(*others, **options)
    for x, y in zip(arguments[1:3], others[1:3]):
        torch.testing.assert_close(x, y, rtol=2**-7, atol=1e-5, equal_nan=True)


def test_a_graph_of_a_chunk_is_replayed_while_lengths_change():
    arguments, options = chunk(page=16, lengths=(900, 40))
    lens, table = options["cache_seqlens"], options["block_table"]
    run = lambda: rope_attention_with_kvcache(*arguments, **options)  # noqa: E731
    expected = run().clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    graph.replay()
    assert torch.equal(out, expected)
    lens.copy_(torch.tensor((880, 40), dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, run())
    assert bool(out.isfinite().all()) and table is options["block_table"]
