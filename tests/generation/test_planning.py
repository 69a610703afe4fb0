"""Plans of generation steps by `plan_with_kvcache`, which writes nothing; configurations."""

import itertools

import pytest
import torch

from fused_rope_attn import plan_with_kvcache, rope_attention_with_kvcache
from fused_rope_attn.attention.configs import ARCHS, HopperForwardConfig
from fused_rope_attn.attention.planning import HEAD_DIM_STEP, MAX_HEAD_DIM, MIN_HEAD_DIM
from fused_rope_attn.generation import configs
from fused_rope_attn.generation.launch import can_copy, row_block, tile_alignment
from fused_rope_attn.generation.planning import configured, reads_cache_once
from fused_rope_attn.generation.problem import StepTensors
from fused_rope_attn.runtime import device
from tests.support.dtypes import BF16, F32


@pytest.fixture
def on_sm_90(monkeypatch):
    monkeypatch.setattr(device, "arch", lambda where: "sm_90")
    monkeypatch.setattr(device, "num_sms", lambda where: 132)


def step_of(batch=2, heads=(8, 2), tokens=1, capacity=50, head_dim=40, dtype=BF16, where="meta", **options):
    def zeros(count, length):
        return torch.zeros(batch, count, length, head_dim, device=where, dtype=dtype)

    table = torch.zeros(capacity, options.get("rotary_dim", head_dim) // 2, device=where)
    given = {"q": zeros(heads[0], tokens), "k": zeros(heads[1], tokens) + 1, "v": zeros(heads[1], tokens) + 1}
    given |= {"k_cache": zeros(heads[1], capacity), "v_cache": zeros(heads[1], capacity), "cos": table, "sin": table}
    return given | {"cache_seqlens": torch.zeros(batch, device=where, dtype=torch.int32)} | options


@pytest.mark.parametrize("rotated", [True, False])
def test_it_names_the_configuration_of_the_table(on_sm_90, rotated):
    given = step_of(head_dim=64, cache_is_rotated=rotated)
    chosen = plan_with_kvcache(**given)
    assert chosen.backend == "triton" and chosen.backward is None
    assert chosen.forward == configs.decode("sm_90", 2, 64, rotated)
    keys = "cached keys are read as they are" if rotated else "cached keys are rotated in the loop"
    assert chosen.reason == f"portable kernels: there are no others for a generation step; {keys}"
    other = configs.DecodeConfig(16, 1, 1)
    with configured(other):
        assert plan_with_kvcache(**given).forward == other
    assert plan_with_kvcache(**given).forward != other


def test_the_reference_is_named_and_nothing_is_written(monkeypatch):
    monkeypatch.setattr(device, "arch", lambda where: "cpu")
    given = step_of(where="cpu", dtype=F32)
    chosen = plan_with_kvcache(**given)
    assert chosen.backend == "reference" and chosen.reason
    assert not given["k_cache"].any() and not given["v_cache"].any()
    for function in (plan_with_kvcache, rope_attention_with_kvcache):
        with pytest.raises(ValueError, match=r"^kv_starts must have shape \(B,\) with B = 2"):
            function(**given, kv_starts=torch.zeros(3, dtype=torch.int32))


@pytest.mark.parametrize(
    ("changes", "is_ordered"),
    [
        ({}, True),
        ({"tokens": 16}, True),
        ({"tokens": 17}, False),  # 68 query rows of a key head
        ({"cache_is_rotated": False}, False),
        ({"rotary_dim": 20}, True),
        ({"rotary_dim": 18}, False),  # members of a pair are nine columns apart
        ({"rotary_dim": 18, "interleaved": True}, True),
        ({"dtype": F32}, False),
    ],
)
def test_steps_with_the_bits_of_training(on_sm_90, changes, is_ordered):
    """On sm_90 a step goes through the keys in the order of the sm_90 forward, if its kernels can copy the cache."""
    chosen = plan_with_kvcache(**step_of(batch_invariant=True, **changes))
    assert isinstance(chosen.forward, configs.OrderedConfig) == is_ordered, chosen.reason
    assert "batch_invariant" in chosen.reason


@pytest.mark.parametrize(
    ("changes", "is_copied"),
    [({}, True), *((x, False) for x in ({"tokens": 256}, {"causal": False}, {"capacity": 1 << 19}, {"dtype": F32}))],
)
def test_large_chunks_are_attentions(on_sm_90, changes, is_copied):
    """On sm_90, with tiles of queries for most multiprocessors, and caches that are not too large for a copy."""
    sizes = {"batch": 1, "heads": (32, 8), "tokens": 512, "capacity": 1 << 15, "head_dim": 128}
    chosen = plan_with_kvcache(**step_of(**sizes | changes))
    assert (chosen.backend == "hopper") == is_copied
    assert ("contiguous copy" in chosen.reason) == is_copied
    assert isinstance(chosen.forward, HopperForwardConfig) == is_copied


def test_only_rows_of_whole_words_of_16_bytes_are_copied_in_order():
    cache = torch.zeros(2, 2, 40, 64, dtype=BF16)
    given = StepTensors(*[None] * 8)._replace(k_cache=cache, v_cache=cache)
    assert can_copy(given)
    wide = torch.zeros(2, 2, 40, 68, dtype=BF16)
    for other in (cache.transpose(2, 3)[:, :, :40], wide[..., :64], wide[..., 1:65]):
        assert not can_copy(given._replace(v_cache=other))
        assert not can_copy(given._replace(k_cache=other))


def test_tiles_of_keys_and_blocks_of_query_rows():
    pages = ((None, 64, True), (64, 64, False), (128, 64, True), (16, 64, True), (16, 64, False), (48, 64, True))
    assert [tile_alignment(*given) for given in pages] == [1, 64, 64, 16, 1, 1]
    assert [row_block(rows) for rows in (1, 16, 17, 33, 64, 65, 1000)] == [16, 16, 32, 64, 64, 64, 64]


def test_configurations_for_every_call():
    head_dims = range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP)
    for arch, *given in itertools.product(
        (*ARCHS, "interpreter"), (2, 4), head_dims, (True, False), (None, 16, 64), (True, False)
    ):
        assert configs.decode(arch, *given).pdl == (arch in ("sm_90", "sm_100", "sm_120"))


def test_few_queries():
    """A single token, or no more rows of queries that share their keys than a program holds; none are a few."""
    few, many = [(2, 32), (2, 3), (0, 128), (1, 128), (16, 4), (64, 1)], [(17, 4), (2, 33)]
    assert all(reads_cache_once(*given) for given in few) and not any(reads_cache_once(*given) for given in many)
