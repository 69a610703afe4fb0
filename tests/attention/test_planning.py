"""The kernels that a call gets, and the reason: sm_90 or portable ones. Runs on tensors without memory."""

import dataclasses

import pytest
import torch

from fused_rope_attn import plan
from fused_rope_attn.attention import configs
from fused_rope_attn.attention.hopper import configs as hopper_configs
from tests.support.dtypes import F16, F32
from tests.support.internals import plan_of
from tests.support.planning import HOPPER, LENGTHS, PORTABLE, call, kinds


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
@pytest.mark.parametrize("bucket", LENGTHS)
@pytest.mark.parametrize("head_dim", [16, 64, 72, 96, 128])
def test_auto_takes_what_the_tables_say(arch, head_dim, bucket, heads, causal):
    chosen = plan(**call(LENGTHS[bucket], head_dim=head_dim, heads=heads, causal=causal, batch=32))
    shape = (head_dim, causal, bucket, heads[0] != heads[1])
    rows = hopper_configs.forward_row(*shape), hopper_configs.backward_row(*shape)
    expected = [HOPPER[i] if bucket in row.least_work else PORTABLE[i] for i, row in enumerate(rows)]
    assert kinds(chosen) == tuple(expected)
    assert chosen.backend == ("hopper" if expected[0] is HOPPER[0] else "triton")
    assert ("made for this card" in chosen.reason) == (HOPPER[0] in expected or HOPPER[1] in expected)
    assert "sm_90" in chosen.reason
    assert chosen.strategy in ("inline", "prepass")


def test_what_is_remembered_cannot_be_changed(arch):
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan(**call()).reason = ""


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (300, 300)], ids=str)
def test_shared_heads_have_rows_of_their_own(arch, heads):
    chosen = plan(**call(heads=heads, backend="hopper"))
    shape = (128, True, "medium", heads[0] != heads[1])
    assert chosen.forward == hopper_configs.forward_row(*shape).config
    assert chosen.backward == hopper_configs.backward_row(*shape).config
    shared, own = (hopper_configs.backward_row(128, True, "medium", gqa) for gqa in (True, False))
    assert shared != own


def test_the_accumulator_is_read_in_groups_of_eight_rows():
    with pytest.raises(ValueError, match="post_rows must be a multiple of 8, but is 4"):
        configs.HopperBackwardConfig(post_rows=4)


def test_a_forward_configuration_says_when_values_are_awaited():
    with pytest.raises(ValueError, match="values must be one of .*'before weights'.* but is 'first'"):
        configs.HopperForwardConfig(128, values="first")


def test_one_reason_for_both_passes_is_said_once(arch):
    reason = plan(**call(2048, head_dim=64, causal=False)).reason
    assert reason.startswith("sm_90 kernels: ") and reason.count("made for this card") == 1


def test_the_longer_length_counts(arch):
    assert plan(**call(64, 8192, heads=(64, 8), batch=64)).backend == "hopper"
    assert plan(**call(100)).backend == "triton"


@pytest.mark.parametrize("bucket", LENGTHS)
@pytest.mark.parametrize("head_dim", [16, 40, 64, 72, 128])
@pytest.mark.parametrize("strategy", ["auto", "prepass"])
def test_the_explicit_backend_serves_every_length(arch, head_dim, bucket, strategy):
    options = {"backend": "hopper", "strategy": strategy}
    chosen = plan(**call(LENGTHS[bucket], head_dim=head_dim, dtype=F16, **options))
    assert kinds(chosen) == HOPPER and chosen.backend == "hopper" and chosen.strategy == "prepass"
    assert "asked for" in chosen.reason
    assert kinds(plan(**call(1, 1, head_dim=head_dim, batch=1, heads=(1, 1), **options))) == HOPPER


@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("strategy", ["inline", "prepass", "auto"])
def test_the_other_choices_are_what_they_were(arch, backend, strategy):
    chosen = plan(**call(backend=backend, strategy=strategy))
    portable = backend == "triton" or strategy == "inline"
    assert kinds(chosen) == (PORTABLE if portable else HOPPER)
    assert chosen.strategy == ("prepass" if strategy == "auto" else strategy)
    if backend == "auto" and strategy == "inline":
        assert "'inline'" in chosen.reason and "hopper" in chosen.reason


@pytest.mark.parametrize(("forward", "backward"), [(True, False), (False, True), (True, True), (False, False)])
def test_each_pass_is_decided_alone(arch, tables, forward, backward):
    tables(("medium",) if forward else (), ("medium",) if backward else ())
    chosen = plan(**call(4096))
    assert kinds(chosen) == ((HOPPER if forward else PORTABLE)[0], (HOPPER if backward else PORTABLE)[1])
    assert chosen.backend == ("hopper" if forward else "triton")
    assert ("made for this card" in chosen.reason) == (forward or backward)
    assert ("for medium sequences" in chosen.reason) == (not (forward and backward))
    if forward != backward:
        first = "sm_90" if forward else "portable"
        second = "sm_90" if backward else "portable"
        assert f"forward, {first} kernels" in chosen.reason and f"backward, {second} kernels" in chosen.reason
    assert kinds(plan(**call(8192))) == PORTABLE
    assert kinds(plan(**call(8192, backend="hopper"))) == HOPPER


def test_deterministic_gradients_are_the_sm_90_kernels(arch, tables):
    for backend in ("auto", "hopper"):
        for options in ({"deterministic": True}, {"batch_invariant": True}):
            chosen = plan(**call(backend=backend, **options))
            assert kinds(chosen) == HOPPER and chosen.backend == "hopper"
            assert "deterministic=True" in chosen.reason and "in the order of the key blocks" in chosen.reason
        assert chosen.backward == plan(**call(backend=backend)).backward
        starts = {"kv_starts": torch.empty(2, dtype=torch.int32, device="meta")}
        assert kinds(plan(**call(backend=backend, deterministic=True), **starts)) == HOPPER
        chosen = plan(**call(backend=backend, batch_invariant=True), **starts)
        assert kinds(chosen) == (HOPPER[0], PORTABLE[1]) and "not from kv_starts" in chosen.reason
    portable = plan(**call(backend="triton", deterministic=True))
    assert portable == plan(**call(backend="triton")) and "deterministic" not in portable.reason
    tables(("medium",), ())
    assert "deterministic" not in plan(**call(deterministic=True)).reason  # nothing to replace


@pytest.mark.parametrize("head_dim", [136, 192, 256])
def test_wide_heads(arch, head_dim):
    auto = plan(**call(8192, head_dim=head_dim))
    for chosen in (auto, plan(**call(8192, head_dim=head_dim, backend="hopper"))):
        assert kinds(chosen) == HOPPER and chosen.backend == "hopper"
        # 227 KB of shared memory hold 64 keys in two stages next to 128 rows of Q and half of those of O.
        assert (chosen.forward.block_n, chosen.forward.stages) == (64, 2)
    assert "made for this card" in auto.reason
    assert kinds(plan(**call(8192, head_dim=head_dim, deterministic=True))) == HOPPER
    for changes in ({"backend": "triton"}, {"dtype": F32}):
        assert kinds(plan(**call(**{"head_dim": head_dim} | changes))) == PORTABLE
    with pytest.raises(NotImplementedError, match="^q must have a head dim .* from 16 to 256 .*hopper.* but has 264"):
        plan(**call(head_dim=264, backend="hopper"))


def test_launch_bound_calls_stay_portable(arch):
    """However long the sequence: (1, 4/4, 1, 4096, 128) is over before a second launch."""
    chosen = plan(**call(1, 4096, heads=(4, 4), batch=1))
    assert chosen.backend == "triton" and chosen.strategy == "inline" and "so little work" in chosen.reason
    assert plan(**call(1, 4096, heads=(4, 4), batch=1, backend="hopper")).strategy == "prepass"


# (B, HQ, HKV, N, D), and whether the sm_90 forward has work enough there.
TIMED = [
    (2, 8, 8, 512, 64, False),
    (4, 8, 8, 512, 64, True),
    (1, 4, 4, 1024, 64, False),
    (1, 8, 8, 1024, 64, True),
    (1, 2, 2, 2048, 64, False),
    (1, 4, 4, 2048, 64, True),
    (1, 1, 1, 2048, 96, False),
    (1, 2, 2, 2048, 96, True),
    (1, 4, 4, 512, 128, True),
    (1, 2, 2, 1024, 128, False),
    (1, 4, 4, 1024, 128, True),
    (1, 2, 2, 2048, 128, False),
    (1, 4, 4, 2048, 128, True),
    (1, 8, 4, 1024, 256, True),
]


@pytest.mark.parametrize("batch, heads_q, heads_kv, length, head_dim, wins", TIMED, ids=str)
def test_the_persistent_forward_wants_tiles_to_spare(arch, batch, heads_q, heads_kv, length, head_dim, wins):
    chosen = plan(**call(length, head_dim=head_dim, heads=(heads_q, heads_kv), batch=batch))
    assert kinds(chosen)[0] is (HOPPER if wins else PORTABLE)[0]
    assert ("too little work" in chosen.reason.partition("; backward")[0]) is not wins


@pytest.mark.parametrize("len_q, few", [(63, True), (64, False)])
def test_few_queries_leave_tiles_empty(arch, len_q, few):
    """Forward only, whatever the work; packed sequences are counted on average instead."""
    arguments = call(len_q, 8192, heads=(64, 64), batch=8)
    chosen = plan(**arguments)
    assert kinds(chosen) == (PORTABLE[0] if few else HOPPER[0], HOPPER[1])
    assert ("fewer than 64 queries" in chosen.reason) is few
    assert kinds(plan(**arguments, backend="hopper")) == kinds(plan(**arguments, batch_invariant=True)) == HOPPER


@pytest.mark.parametrize("power", [31, 33])
def test_rows_may_ask_for_work(arch, tables, monkeypatch, power):
    """Then "auto" takes them from so many multiply-adds on; the explicit backend takes them always."""
    tables(("medium",), ("medium",))
    row = dataclasses.replace(hopper_configs.FORWARD[0], least_work={"medium": 2**power})
    monkeypatch.setattr(hopper_configs, "FORWARD", (row,))
    below = 2**power // (2048 * 2048 * 128) - 1  # heads
    little, much = call(2048, heads=(below, below), batch=1), call(2048, heads=(below + 1, below + 1), batch=1)
    assert kinds(plan(**little)) == (PORTABLE[0], HOPPER[1])
    assert f"too little work for the sm_90 ones, which need 2**{power} multiply-adds" in plan(**little).reason
    assert kinds(plan(**much)) == kinds(plan(**little, backend="hopper")) == HOPPER


def test_a_row_asks_for_a_level_of_work():
    """Plans are remembered for a level of work, so that another amount would be compared with too little."""
    with pytest.raises(ValueError, match=r"least_work must be one of \(0, .*\), but is 1024"):
        dataclasses.replace(hopper_configs.FORWARD[0], least_work={"tiny": 1024})
    with pytest.raises(ValueError, match=r"from_work must be one of \(0, .*\), but is 1024"):
        dataclasses.replace(hopper_configs.FORWARD[0], from_work=1024)


@pytest.mark.parametrize(
    ("head_dim", "causal", "heads", "consumers"),
    [
        (64, True, 15, 2),
        (64, True, 16, 3),
        (64, False, 15, 2),
        (64, False, 16, 3),
        (96, False, 7, 2),
        (96, False, 8, 3),
    ],
)
def test_few_tiles_of_long_sequences_have_two_warpgroups(arch, head_dim, causal, heads, consumers):
    chosen = plan(**call(8192, head_dim=head_dim, heads=(heads, heads), batch=1, causal=causal))
    assert (chosen.backend, chosen.forward.consumers) == ("hopper", consumers)


@pytest.mark.parametrize("level", configs.WORK_LEVELS)
def test_levels_of_work(level):
    index = configs.WORK_LEVELS.index(level)
    assert configs.work_level(level) == configs.work_level(level + 1) == level
    assert index == 0 or configs.work_level(level - 1) == configs.WORK_LEVELS[index - 1]


def test_padded_columns_are_work_too(arch):
    """A head dim of 96 takes the time of one of 128: (2, 32/32, 1024, 96) is as much work as the threshold asks for."""
    narrow, padded = (plan(**call(1024, heads=(32, 32), batch=2, head_dim=d)) for d in (96, 128))
    assert kinds(narrow) == kinds(padded) == HOPPER


def test_plans_are_remembered_and_ignore_the_exact_length(arch):
    def chosen(n, **changes):
        return plan_of(call(n, **changes))

    assert chosen(3000) is chosen(3000)
    assert chosen(3000) == chosen(3001) == chosen(4096)
