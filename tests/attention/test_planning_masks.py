"""The kernels that masked and packed calls get."""

import dataclasses

import pytest
import torch

from fused_rope_attn import plan, plan_varlen
from fused_rope_attn.attention import configs, planning
from fused_rope_attn.attention.hopper import configs as hopper_configs
from fused_rope_attn.attention.portable import configs as portable_configs
from tests.support.planning import call, kinds, packed_call


@pytest.fixture
def least_work(tables, monkeypatch):
    """Let the sm_90 forward ask for 2**33 multiply-adds in every bucket, the backward for none."""
    tables(configs.BUCKETS, configs.BUCKETS)
    row = dataclasses.replace(hopper_configs.FORWARD[0], least_work=dict.fromkeys(configs.BUCKETS, 2**33))
    monkeypatch.setattr(hopper_configs, "FORWARD", (row,))


# Packed calls (sequences, tokens, the longest), the kernels of both passes, and whether rotated q and k are saved: up
# to 128 columns the sm_90 forward stores tiles, which the portable backward of packed sequences cannot read.
LEAST = 1024 * hopper_configs.LEAST_MEAN_LENGTH
PACKED = [
    # Measured: faster on the sm_90 kernels in both passes.
    *((packed_call(*sizes, **options), expected, True)
      for sizes in ((64, 145930, 4096), (256, 131072, 512), (32, 131072, 4096), (1, 32768, 32768))
      for options, expected in (({}, "HH"), ({"backend": "triton"}, "PP"), ({"deterministic": True}, "HH"))),
    (packed_call(64, 145930, 4096, strategy="inline"), "PP", False),
    # A short sequence alone is no work for them forward; many are.
    (packed_call(2, 512, 256), "PH", True),
    (packed_call(1, 200, 200, heads=(1, 1)), "PP", False),
    # Shorter than half a tile on average, empty ones included, are slower on the sm_90 kernels.
    (packed_call(4096, 65536, 16), "PP", True),
    (packed_call(4096, 65536, 16, backend="hopper"), "HH", True),
    (packed_call(1024, LEAST, 4096), "HH", True),
    (packed_call(1025, LEAST, 4096), "PP", True),
    (packed_call(1025, 4000, 4000, tokens_k=LEAST + 64), "HH", True),  # the longer length counts
    *((packed_call(32, 131072, 4096, head_dim=d, backend="hopper"), "HH", True) for d in (64, 136, 256)),
    (packed_call(8, 65536, 8192, heads=(8, 8), head_dim=256), "HH", True),
    *((packed_call(1, 2000, 2000, heads=(2, 1), head_dim=d, backend="hopper", deterministic=x), "HH", True)
      for d in (128, 256) for x in (False, True)),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected", "saves_rotated"), PACKED, ids=lambda x: x if type(x) is str else "")
def test_packed_calls(arch, given, expected, saves_rotated):
    chosen = plan_varlen(**given)
    assert kinds(chosen) == expected and chosen.saves_rotated is saves_rotated
    assert ("less than 64 tokens on average" in chosen.reason) is (len(given["cu_seqlens_q"]) > 1025
                                                                   and expected == "PP")  # fmt: skip


def test_packed_calls_are_planned_by_their_longest_sequence(arch, least_work):
    """Not by the tokens of the whole batch; whatever other masks there are."""
    few = {"heads": (8, 8), "head_dim": 64, "backend": "triton"}
    for masks in ({}, {"window": (100, 0), "softcap": 5.0}):
        for longest, bucket in ((1 << 16, "long"), (300, "tiny")):
            chosen = plan_varlen(**packed_call(8, 1 << 16, longest, **few, **masks))
            assert chosen.forward == portable_configs.forward_config("sm_90", 2, 64, "prepass", bucket, True)
    for longest, strategy in ((2, "inline"), (4096, "prepass")):  # 2**21 * 2 at most
        assert plan_varlen(**packed_call(8, 4096, longest, **few)).strategy == strategy
    longest = 2**33 // (1 << 14) // 128
    for length, expected in ((longest, "HH"), (longest // 2, "PH")):
        assert kinds(plan_varlen(**packed_call(8, 1 << 14, length, heads=(1, 1)))) == expected


def test_masked_calls_have_tiles_of_their_own(arch):
    plain, masked = (portable_configs.backward_config("sm_90", 2, 64, "long", m) for m in (False, True))
    given = call(8192, head_dim=64, backend="triton")
    assert plan(**given, window=(9, 0)).backward == masked != plain == plan(**given).backward


def meta(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


MASKS = {"window": (4, 0), "softcap": 5.0, "sinks": meta(8, dtype=torch.float32), "kv_starts": meta(2),
         "kv_lens": meta(2), "query_starts": meta(1, 8192), "query_ends": meta(2, 8192)}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_the_sm_90_kernels_serve_masks(arch, tables, name):
    """If the tables prefer them, and always if they are asked for."""
    tables(("long",), ("long",))
    for backend in ("auto", "hopper"):
        chosen = plan(**call(8192, causal=False, backend=backend, **{name: MASKS[name]}))
        assert kinds(chosen) == "HH" and chosen.saves_rotated


def test_a_window_is_less_work(arch, least_work):
    """Multiply-adds are counted for the keys that a query sees, at most."""
    keys = 2**33 // (8192 * 128)  # as many as make it much
    for window, causal, expected in (
        (None, True, "HH"),
        ((keys, 0), True, "HH"),
        ((keys - 2, 0), True, "PH"),
        ((keys - 2, -1), True, "PH"),
        ((keys - 2, -1), False, "HH"),
        ((keys // 2 - 1, keys // 2 - 1), False, "PH"),
        ((keys // 2, keys // 2), False, "HH"),
    ):
        given = call(8192, heads=(1, 1), batch=1, causal=causal, window=window)
        chosen = plan(**given)
        assert kinds(chosen) == expected and kinds(plan(**given, backend="hopper")) == "HH", window
        little = "too little work for the sm_90 ones, which need 2**33 multiply-adds"
        assert (little in chosen.reason) is (expected == "PH")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (0, 0), (2, 1), (1, 0), (-1, 2), (2, -1), (-1, -1), (100, 0)], ids=str)
def test_keys_that_a_query_sees(window, causal):
    """The bound holds for every position of the query."""
    left, right = (-1, -1) if window is None else window

    def sees(query, key):
        past, later = query - key, key - query
        return (left < 0 or past <= left) and (later <= 0 if causal else right < 0 or later <= right)

    expected = max(sum(sees(query, key) for key in range(9)) for query in range(9))
    assert planning.visited_keys(9, causal, window) == expected
