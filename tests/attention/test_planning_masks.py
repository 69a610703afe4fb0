"""The kernels that masked and packed calls get."""

import dataclasses

import pytest
import torch

from fused_rope_attn import plan
from fused_rope_attn.attention import configs, planning
from fused_rope_attn.attention.hopper import configs as hopper_configs
from fused_rope_attn.attention.portable import configs as portable_configs
from tests.support.internals import plan_of
from tests.support.planning import HOPPER, PORTABLE, call, kinds


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("names", [("query_starts",), ("query_ends",), ("query_starts", "query_ends")])
def test_intervals_take_the_sm_90_kernels(arch, head_dim, names):
    bounds = torch.empty((1, 4096), dtype=torch.int32, device="meta")
    chosen = plan(**call(4096, head_dim=head_dim, heads=(32, 8), causal=False), **dict.fromkeys(names, bounds))
    assert kinds(chosen) == HOPPER and chosen.saves_rotated


@pytest.mark.parametrize("backend", ["auto", "hopper"])
def test_wide_packed_sequences_take_the_sm_90_kernels(arch, backend):
    chosen = packed_plan(8, 65536, 8192, heads=(8, 8), head_dim=256, backend=backend)
    assert kinds(chosen) == HOPPER and chosen.saves_rotated


def test_packed_calls_are_planned_by_their_longest_sequence(arch):
    """Not by the tokens of the whole batch; whatever other masks there are."""
    for masks in ({"window": None, "softcap": 0.0}, {"window": (100, 0), "softcap": 5.0}):
        long, short = (
            packed_plan(8, 1 << 16, longest, heads=(8, 8), head_dim=64, backend="triton", **masks)
            for longest in (1 << 16, 300)
        )
        assert long.forward == portable_configs.forward_config("sm_90", 2, 64, "prepass", "long", True)
        assert short.forward == portable_configs.forward_config("sm_90", 2, 64, "prepass", "tiny", True)
        assert long.forward != short.forward
    few = {"sequences": 8, "tokens": 4096, "heads": (8, 8), "head_dim": 64}
    assert packed_plan(**few, longest=2).strategy == "inline"  # 2**21 * 2 at most
    assert packed_plan(**few, longest=4096).strategy == "prepass"


def packed_plan(sequences, tokens, longest, tokens_k=None, heads=(32, 8), backend="auto", strategy="auto", **changes):
    """Return the operators' own plan for `rope_attention_varlen` with so many sequences and tokens."""
    given = call(tokens, tokens_k, batch=1, heads=heads, backend=backend, strategy=strategy, **changes)
    ends = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    return plan_of(given, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen=longest)


def test_packed_calls_take_the_sm_90_kernels(arch):
    """Measured: 64 of 16 to 4096 tokens, 256 of 512, 32 of 4096 and 1 of 32768 are faster there in both passes."""
    for sequences, tokens, longest in ((64, 145930, 4096), (256, 131072, 512), (32, 131072, 4096), (1, 32768, 32768)):
        chosen = packed_plan(sequences, tokens, longest)
        assert kinds(chosen) == HOPPER and chosen.backend == "hopper", (sequences, tokens, longest)
        assert kinds(packed_plan(sequences, tokens, longest, backend="triton")) == PORTABLE
        assert kinds(packed_plan(sequences, tokens, longest, deterministic=True)) == HOPPER
        inline = packed_plan(sequences, tokens, longest, strategy="inline")
        assert kinds(inline) == PORTABLE and inline.strategy == "inline"
    # A short sequence alone is no work for them forward; many are.
    assert kinds(packed_plan(2, 512, 256)) == (PORTABLE[0], HOPPER[1])
    assert kinds(packed_plan(1, 200, 200, heads=(1, 1))) == PORTABLE


def test_short_packed_sequences_stay_portable(arch):
    """Shorter than half a tile on average, empty ones included: 4096 of 16 are slower on the sm_90 kernels."""
    chosen = packed_plan(4096, 65536, 16)
    assert kinds(chosen) == PORTABLE and "less than 64 tokens on average" in chosen.reason
    least = 1024 * hopper_configs.LEAST_MEAN_LENGTH
    assert kinds(packed_plan(1024, least, 4096)) == HOPPER
    assert kinds(packed_plan(1025, least, 4096)) == PORTABLE
    assert kinds(packed_plan(1025, 4000, 4096, tokens_k=least + 64)) == HOPPER  # the longer length counts
    assert kinds(packed_plan(4096, 65536, 16, backend="hopper")) == HOPPER


def test_masked_calls_have_tiles_of_their_own(arch):
    plain, masked = (portable_configs.backward_config("sm_90", 2, 64, "long", m) for m in (False, True))
    given = call(8192, head_dim=64, backend="triton")
    assert plan(**given, window=(9, 0)).backward == masked != plain
    assert plan(**given).backward == plain


MASKS = {
    "window": (4, 0),
    "softcap": 5.0,
    "sinks": torch.empty(8, device="meta"),
    "kv_starts": torch.empty(2, dtype=torch.int32, device="meta"),
    "kv_lens": torch.empty(2, dtype=torch.int32, device="meta"),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_sm_90_kernels_serve_masks(arch, tables, name):
    """If the tables prefer them, and always if they are asked for."""
    tables(("long",), ("long",))
    given = call(8192, batch=2, **{name: MASKS[name]})
    assert kinds(plan(**given, backend="hopper")) == HOPPER
    assert kinds(plan(**given)) == HOPPER


def test_a_window_is_less_work(arch, tables, monkeypatch):
    """Multiply-adds are counted for the keys that a query sees, at most."""
    tables(("long",), ("long",))
    row = dataclasses.replace(hopper_configs.FORWARD[0], least_work={"long": 2**33})
    monkeypatch.setattr(hopper_configs, "FORWARD", (row,))
    given = call(8192, heads=(1, 1), batch=1)
    keys = 2**33 // (8192 * 128)  # as many as make it much
    for window, causal, expected in (
        (None, True, HOPPER[0]),
        ((keys, 0), True, HOPPER[0]),
        ((keys - 2, 0), True, PORTABLE[0]),
        ((keys - 2, -1), True, PORTABLE[0]),
        ((keys - 2, -1), False, HOPPER[0]),
        ((keys // 2 - 1, keys // 2 - 1), False, PORTABLE[0]),
        ((keys // 2, keys // 2), False, HOPPER[0]),
    ):
        chosen = plan(**given | {"causal": causal}, window=window)
        assert type(chosen.forward) is expected, (window, causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (0, 0), (2, 1), (1, 0), (-1, 2), (2, -1), (-1, -1), (100, 0)], ids=str)
def test_keys_that_a_query_sees(window, causal):
    """The bound holds for every position of the query."""
    left, right = (-1, -1) if window is None else window

    def sees(query, key):
        before, behind = query - key, key - query
        return (left < 0 or before <= left) and (behind <= 0 if causal else right < 0 or behind <= right)

    expected = max(sum(sees(query, key) for key in range(9)) for query in range(9))
    assert planning.visited_keys(9, causal, window) == expected


def test_packed_sequences_of_every_width(arch):
    for head_dim in (64, 128, 136, 256):
        assert kinds(packed_plan(32, 131072, 4096, head_dim=head_dim, backend="hopper")) == HOPPER, head_dim


def test_how_much_a_window_leaves_of_packed_sequences(arch, tables, monkeypatch):
    """Work is counted from the longest sequence on: two short ones are little, however many tokens there are."""
    tables(configs.BUCKETS, ())
    least_work = dict.fromkeys(configs.BUCKETS, 2**33)
    row = dataclasses.replace(hopper_configs.FORWARD[0], least_work=least_work)
    monkeypatch.setattr(hopper_configs, "FORWARD", (row,))
    longest = 2**33 // (1 << 14) // 128
    few = {"sequences": 8, "tokens": 1 << 14, "heads": (1, 1)}
    assert type(packed_plan(**few, longest=longest).forward) is HOPPER[0]
    assert type(packed_plan(**few, longest=longest // 2).forward) is PORTABLE[0]
