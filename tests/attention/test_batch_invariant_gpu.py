"""The same bits of a row in any batch, pack, chunk and cache, on a GPU. ``python -m verification --random N --family
pairs`` draws more pairs."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import rope_attention, rope_attention_with_kvcache, rope_tables
from fused_rope_attn.generation import planning as generation_planning
from tests.support.dtypes import BF16, F16, F32
from tests.support.internals import forget_calls, write
from tests.support.places import needs_sm_90
from verification.calls import Machine, dtype_name
from verification.search import command_of
from verification.strategies import FAMILIES, draw
from verification.workers import run_check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=needs_sm_90)])
@pytest.mark.parametrize(
    ("head_dim", "dtype", "norms"), [(64, BF16, 0.0), (96, F16, 0.0), (128, F16, None), (256, BF16, None)], ids=str
)
def test_rows_have_the_same_bits(backend, head_dim, dtype, norms):
    machine, family = Machine.of("cuda"), FAMILIES["pairs"]
    key = backend, head_dim, dtype_name(dtype), norms
    drawn = draw(family.prototypes(replace(machine, dtypes=("float16",), backends=("triton",))), *key)
    fixed = {"dtype": dtype, "head_dim": head_dim, "rotary_dim": head_dim // 2, "variants": ((backend, "auto"),)}
    for name in ("table_dtype", "sinks_dtype", "norm_dtype"):  # q's or float32
        fixed[name] = dtype if getattr(drawn, name) is F16 else F32
    prototype = replace(drawn, **fixed, norms=norms, rotated=drawn.rotated or norms is not None)
    for number in range(4):  # a call compiles for seconds
        call = draw(family.calls_of(prototype, machine), *key, number)
        outcome = run_check(call, machine)
        assert outcome.findings and not outcome.failures, (command_of(call, machine), outcome.failures)


@pytest.mark.parametrize(
    "least_units",
    [pytest.param(1, id="one loop", marks=needs_sm_90), pytest.param(1 << 30, id="split", marks=needs_sm_90)],
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_both_ways_of_an_ordered_step(least_units, tokens, monkeypatch):
    """A step of 8 query heads for each key head, in pages, of sequences of different lengths."""
    kept = generation_planning.ordered_config
    monkeypatch.setattr(
        generation_planning, "ordered_config", lambda problem: replace(kept(problem), least_units=least_units)
    )
    forget_calls()
    generator = torch.Generator(device="cuda").manual_seed(tokens)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(BF16)

    length, pages = 700, 48
    q, k, v = normal(2, 16, length, 128), normal(2, 2, length, 128), normal(2, 2, length, 128)
    cos, sin = rope_tables(16 * pages, 128, device="cuda")
    options = {"return_lse": True, "batch_invariant": True}
    expected, expected_lse = rope_attention(q, k, v, cos, sin, True, **options)
    pool_k, pool_v = (normal(2 * pages, 2, 16, 128) for _ in range(2))
    table = torch.randperm(2 * pages, generator=generator, device="cuda").int().view(2, pages)
    done = torch.tensor([length - tokens, 300], dtype=torch.int32, device="cuda")
    none = torch.zeros_like(done)
    write(k, v, pool_k, pool_v, cos, sin, cache_seqlens=none, block_table=table, rotary_dim=128, interleaved=False)
    rows = [torch.arange(int(x), int(x) + tokens, device="cuda") for x in done]
    q, k, v = (torch.stack([x[b, :, r] for b, r in enumerate(rows)]) for x in (q, k, v))
    given = {"cache_seqlens": done, "block_table": table}
    o, lse = rope_attention_with_kvcache(q, pool_k, pool_v, cos, sin, k, v, **given, **options)
    forget_calls()
    for b, r in enumerate(rows):
        assert torch.equal(o[b], expected[b, :, r]) and torch.equal(lse[b], expected_lse[b, :, r]), b
