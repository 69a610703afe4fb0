"""`plan_with_kvcache`: what a generation step runs, said before it runs and without writing the caches."""

import pytest
import torch

from fused_rope_attn import plan_with_kvcache, rope_attention_with_kvcache
from fused_rope_attn.attention.configs import HopperForwardConfig
from fused_rope_attn.generation import configs
from fused_rope_attn.generation.launch import can_copy
from fused_rope_attn.generation.planning import configured
from fused_rope_attn.generation.problem import StepTensors
from fused_rope_attn.runtime import device


def step_arguments(where="meta", dtype=torch.bfloat16):
    """Positional and keyword arguments of a step of two sequences."""
    q = torch.zeros(2, 8, 1, 64, device=where, dtype=dtype)
    k_cache, v_cache = (torch.zeros(2, 2, 40, 64, device=where, dtype=dtype) for _ in range(2))
    table = torch.zeros(40, 32, device=where)
    new = torch.ones(2, 2, 1, 64, device=where, dtype=dtype)
    lengths = torch.zeros(2, device=where, dtype=torch.int32)
    return (q, k_cache, v_cache, table, table, new, new), {"cache_seqlens": lengths}


@pytest.mark.parametrize("rotated", [True, False])
def test_it_names_the_configuration_of_the_table(monkeypatch, rotated):
    monkeypatch.setattr(device, "arch", lambda where: "sm_90")
    arguments, options = step_arguments()
    chosen = plan_with_kvcache(*arguments, **options, cache_is_rotated=rotated)
    assert chosen.backend == "triton" and chosen.backward is None
    assert chosen.forward == configs.decode("sm_90", 2, 64, rotated)
    keys = "cached keys are read as they are" if rotated else "cached keys are rotated in the loop"
    assert chosen.reason == f"portable kernels: there are no others for a generation step; {keys}"
    other = configs.DecodeConfig(16, 1, 1)
    with configured(other):
        assert plan_with_kvcache(*arguments, **options, cache_is_rotated=rotated).forward == other
    assert plan_with_kvcache(*arguments, **options, cache_is_rotated=rotated).forward != other


def test_the_reference_is_named_and_nothing_is_written(monkeypatch):
    monkeypatch.setattr(device, "arch", lambda where: "cpu")
    arguments, options = step_arguments("cpu", torch.float32)
    chosen = plan_with_kvcache(*arguments, **options)
    assert chosen.backend == "reference" and chosen.reason
    assert not arguments[1].any() and not arguments[2].any()


def test_it_refuses_what_the_call_refuses():
    arguments, options = step_arguments("cpu", torch.float32)
    for function in (plan_with_kvcache, rope_attention_with_kvcache):
        with pytest.raises(ValueError, match=r"^kv_starts must have shape \(B,\) with B = 2"):
            function(*arguments, **options, kv_starts=torch.zeros(3, dtype=torch.int32))


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
        ({"dtype": torch.float32}, False),
    ],
)
def test_steps_with_the_bits_of_training(monkeypatch, changes, is_ordered):
    """On sm_90 a step goes through the keys in the order of the sm_90 forward, if its kernels can copy the cache."""
    monkeypatch.setattr(device, "arch", lambda where: "sm_90")
    made = {"tokens": 1, "dtype": torch.bfloat16, "rotary_dim": 40} | changes

    def tensor(heads, length):
        return torch.empty(2, heads, length, 40, device="meta", dtype=made["dtype"])

    table = torch.empty(100, made["rotary_dim"] // 2, device="meta")
    new = (tensor(2, made["tokens"]) for _ in range(2))
    chosen = plan_with_kvcache(
        tensor(8, made["tokens"]),
        tensor(2, 50),
        tensor(2, 50),
        table,
        table,
        *new,
        cache_seqlens=torch.empty(2, device="meta", dtype=torch.int32),
        batch_invariant=True,
        **{name: made[name] for name in ("rotary_dim", "interleaved", "cache_is_rotated") if name in made},
    )
    assert isinstance(chosen.forward, configs.OrderedConfig) == is_ordered, chosen.reason
    assert "batch_invariant" in chosen.reason


def test_only_rows_of_whole_words_of_16_bytes_are_copied_in_order():
    cache = torch.zeros(2, 2, 40, 64, dtype=torch.bfloat16)
    given = StepTensors(*[None] * 8)._replace(k_cache=cache, v_cache=cache)
    assert can_copy(given)
    wide = torch.zeros(2, 2, 40, 68, dtype=torch.bfloat16)
    for other in (cache.transpose(2, 3)[:, :, :40], wide[..., :64], wide[..., 1:65]):
        assert not can_copy(given._replace(v_cache=other))
        assert not can_copy(given._replace(k_cache=other))


@pytest.mark.parametrize(
    ("changes", "is_copied"),
    [
        ({}, True),
        ({"tokens": 256}, False),
        ({"causal": False}, False),
        ({"capacity": 1 << 19}, False),
        ({"dtype": torch.float32}, False),
    ],
)
def test_large_chunks_are_attentions(monkeypatch, changes, is_copied):
    """On sm_90, with tiles of queries for most multiprocessors, and caches that are not too large for a copy."""
    monkeypatch.setattr(device, "arch", lambda where: "sm_90")
    monkeypatch.setattr(device, "num_sms", lambda where: 132)
    made = {"tokens": 512, "causal": True, "capacity": 1 << 15, "dtype": torch.bfloat16} | changes

    def tensor(heads, length):
        return torch.empty(1, heads, length, 128, device="meta", dtype=made["dtype"])

    caches = [tensor(8, made["capacity"]) for _ in range(2)]
    new = [tensor(heads, made["tokens"]) for heads in (32, 8, 8)]
    table = torch.empty(made["capacity"], 64, device="meta")
    lengths = torch.empty(1, device="meta", dtype=torch.int32)
    chosen = plan_with_kvcache(new[0], *caches, table, table, *new[1:], cache_seqlens=lengths, causal=made["causal"])
    assert (chosen.backend == "hopper") == is_copied
    assert ("contiguous copy" in chosen.reason) == is_copied
    assert isinstance(chosen.forward, HopperForwardConfig) == is_copied
