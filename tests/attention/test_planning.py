"""The kernels that a call gets, and the reason: sm_90 or portable ones. Runs on tensors without memory."""

import dataclasses

import pytest
import torch

from fused_rope_attn import plan, rope_attention
from fused_rope_attn.attention import configs
from fused_rope_attn.attention.hopper import configs as hopper_configs
from tests.support.dtypes import F16, F32, F64
from tests.support.internals import backend_of, plan_of
from tests.support.planning import call, kinds

# A length of each bucket of the tables.
LENGTHS = {"tiny": 512, "short": 1024, "medium": 4096, "long": 4097}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (300, 300)], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 72, 96, 128])
def test_auto_takes_what_the_tables_say(arch, head_dim, heads, causal):
    """And the explicit backend takes the rows of every length."""
    for bucket, length in LENGTHS.items():
        given = call(length, head_dim=head_dim, heads=heads, causal=causal, batch=32)
        chosen, explicit = plan(**given), plan(**given, backend="hopper", strategy="prepass")
        shape = (head_dim, causal, bucket, heads[0] != heads[1])
        rows = hopper_configs.forward_row(*shape), hopper_configs.backward_row(*shape)
        expected = "".join("H" if bucket in row.least_work else "P" for row in rows)
        assert kinds(chosen) == expected and chosen.backend == ("hopper" if expected[0] == "H" else "triton")
        assert ("made for this card" in chosen.reason) == ("H" in expected) and "sm_90" in chosen.reason
        assert kinds(explicit) == "HH" and explicit.strategy == "prepass" and "asked for" in explicit.reason
        found = zip("HH" + expected, (explicit.forward, explicit.backward, chosen.forward, chosen.backward), 2 * rows)
        assert all(config == row.config for kind, config, row in found if kind == "H")


def test_shared_heads_have_rows_of_their_own():
    shared, own = (hopper_configs.backward_row(128, True, "medium", gqa) for gqa in (True, False))
    assert shared != own


# A call, the kernels of both passes, and words of the reason.
PLANS = [
    (call(64, 8192, heads=(64, 8), batch=64), "HH", "made for this card"),  # the longer length counts
    (call(100), "PP", "launch-bound"),
    (call(2048, head_dim=64, causal=False), "HH", "sm_90 kernels: they are made for this card; K is rotated once"),
    (call(1, 1, batch=1, heads=(1, 1), backend="hopper", dtype=F16), "HH", "asked for"),
    (call(batch=1, heads=(1, 1), backend="hopper"), "HH", "asked for"),
    (call(backend="triton"), "PP", "asked for"),
    (call(backend="triton", strategy="inline"), "PP", "strategy asked for"),
    (call(strategy="prepass"), "HH", "strategy asked for"),
    (call(strategy="inline"), "PP", "strategy must be 'auto' or 'prepass' for backend='hopper', but is 'inline'"),
    # However long the sequence, one query is over before a second launch.
    (call(1, 4096, heads=(4, 4), batch=1), "PP", "so little work that one launch less"),
    (call(1, 4096, heads=(4, 4), batch=1, backend="hopper"), "HH", "rotated once"),
    # Forward only, whatever the work; packed sequences are counted on average instead.
    (call(63, 8192, heads=(64, 64), batch=8), "PH", "fewer than 64 queries"),
    (call(64, 8192, heads=(64, 64), batch=8), "HH", "made for this card"),
    (call(63, 8192, heads=(64, 64), batch=8, backend="hopper"), "HH", "asked for"),
    (call(63, 8192, heads=(64, 64), batch=8, batch_invariant=True), "HH", "with batch_invariant they depend on dtype"),
    *((call(8192, head_dim=d, **options), "HH", words) for d in (136, 192, 256) for options, words in (
        ({}, "made for this card"), ({"backend": "hopper"}, "asked for"), ({"deterministic": True}, "deterministic"))),
    (call(8192, head_dim=256, dtype=F32), "PP", "but is torch.float32"),
    # A head dim of 96 takes the time of one of 128: this is as much work as the threshold asks for.
    *((call(1024, heads=(32, 32), head_dim=d), "HH", "made for this card") for d in (96, 128)),
    *((call(backend=backend, **{option: True}), "HH", "deterministic=True, .* in the order of the key blocks")
      for backend in ("auto", "hopper") for option in ("deterministic", "batch_invariant")),
    (call(deterministic=True, kv_starts=torch.empty(2, dtype=torch.int32, device="meta")), "HH", "key blocks"),
    *((call(backend=backend, batch_invariant=True, kv_starts=torch.empty(2, dtype=torch.int32, device="meta")), "HP",
       "not from kv_starts") for backend in ("auto", "hopper")),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected", "words"), PLANS, ids=lambda x: str(x)[:20] if type(x) is str else "")
def test_plans(arch, given, expected, words):
    chosen = plan(**given)
    assert kinds(chosen) == expected and chosen.backend == ("hopper" if expected[0] == "H" else "triton")
    assert all(part in chosen.reason for part in words.split(" .* ")), chosen.reason
    assert chosen.reason.count("made for this card") <= 1
    if given["q"].shape[-1] > 128 and expected == "HH":
        # 227 KB of shared memory hold 64 keys in two stages next to 128 rows of Q and half of those of O.
        assert (chosen.forward.block_n, chosen.forward.stages) == (64, 2)


def test_deterministic_gradients_change_no_configuration(arch, tables):
    assert plan(**call(deterministic=True)).backward == plan(**call()).backward
    portable = plan(**call(backend="triton", deterministic=True))
    assert portable == plan(**call(backend="triton")) and "deterministic" not in portable.reason
    tables(("medium",), ())
    assert "deterministic" not in plan(**call(deterministic=True)).reason  # nothing to replace


@pytest.mark.parametrize(("forward", "backward"), [(True, False), (False, True), (True, True), (False, False)])
def test_each_pass_is_decided_alone(arch, tables, forward, backward):
    tables(("medium",) if forward else (), ("medium",) if backward else ())
    chosen = plan(**call(4096))
    assert kinds(chosen) == "PH"[forward] + "PH"[backward]
    assert ("made for this card" in chosen.reason) == (forward or backward)
    assert ("for medium sequences" in chosen.reason) == (not (forward and backward))
    if forward != backward:
        first, second = ("sm_90", "portable") if forward else ("portable", "sm_90")
        assert f"forward, {first} kernels" in chosen.reason and f"backward, {second} kernels" in chosen.reason
    assert kinds(plan(**call(8192))) == "PP" and kinds(plan(**call(8192, backend="hopper"))) == "HH"


# (batch, heads of q, of k, length, head dim), and whether the sm_90 forward has work enough there: it wants tiles to
# spare.
TIMED = [
    ((2, 8, 8, 512, 64), False), ((4, 8, 8, 512, 64), True),
    ((1, 4, 4, 1024, 64), False), ((1, 8, 8, 1024, 64), True),
    ((1, 2, 2, 2048, 64), False), ((1, 4, 4, 2048, 64), True),
    ((1, 1, 1, 2048, 96), False), ((1, 2, 2, 2048, 96), True),
    ((1, 4, 4, 512, 128), True),
    ((1, 2, 2, 1024, 128), False), ((1, 4, 4, 1024, 128), True),
    ((1, 2, 2, 2048, 128), False), ((1, 4, 4, 2048, 128), True),
    ((1, 8, 4, 1024, 256), True),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "wins"), TIMED, ids=str)
def test_the_persistent_forward_wants_work(arch, sizes, wins):
    batch, heads_q, heads_kv, length, head_dim = sizes
    chosen = plan(**call(length, head_dim=head_dim, heads=(heads_q, heads_kv), batch=batch))
    assert kinds(chosen)[0] == "PH"[wins]
    assert ("too little work" in chosen.reason.partition("; backward")[0]) is not wins


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: configs.HopperBackwardConfig(post_rows=4), "post_rows must be a multiple of 8, but is 4"),
        (lambda: configs.HopperForwardConfig(128, values="first"), "values must be one of .*weights.* but is 'first'"),
        # Plans are remembered for a level of work: another amount would be compared with too little.
        *((lambda name=name, x=x: dataclasses.replace(hopper_configs.FORWARD[0], **{name: x}),
           rf"{name} must be one of \(0, .*\), but is 1024")
          for name, x in (("least_work", {"tiny": 1024}), ("from_work", 1024))),
    ],
)  # fmt: skip
def test_wrong_rows_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("head_dim", "causal", "heads"), [(64, True, 16), (64, False, 16), (96, False, 8)])
def test_few_tiles_of_long_sequences_have_two_warpgroups(arch, head_dim, causal, heads):
    for number, consumers in ((heads - 1, 2), (heads, 3)):
        chosen = plan(**call(8192, head_dim=head_dim, heads=(number, number), batch=1, causal=causal))
        assert (chosen.backend, chosen.forward.consumers) == ("hopper", consumers)


def test_levels_of_work():
    for below, level in zip((0, *configs.WORK_LEVELS), configs.WORK_LEVELS):
        assert configs.work_level(level) == configs.work_level(level + 1) == level
        assert level == 0 or configs.work_level(level - 1) == below


def test_plans_are_remembered_and_ignore_the_exact_length(arch):
    """And norms, because whatever rotates the queries norms them."""
    chosen = [plan_of(call(n)) for n in (3000, 3000, 3001, 4096)]
    assert chosen[0] is chosen[1] and chosen[0] == chosen[2] == chosen[3]
    assert plan_of(call(3000, norm_eps=1e-6, norm_offset=0.0)) == chosen[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen[0].reason = ""


# (change, the backend that "auto" takes, the error of backend="hopper").
LIMITS = [
    ({"dtype": F32}, "triton", "^q must be float16 or bfloat16 for backend='hopper', but is .*float32"),
    ({"dtype": F64}, "reference", "^q must be float16 or bfloat16 for backend='hopper', but is .*float64"),
    ({"head_dim": 264}, "reference", "^q must have a head dim that is a multiple of 8 from 16 to 256 .* but has 264"),
    ({"head_dim": 20}, "reference", "^q must have a head dim that is a multiple of 8 from 16 to 256 .* but has 20"),
    ({"strategy": "inline"}, "triton", "^strategy must be .*'prepass' .*hopper.* but is 'inline'"),
    ({"len_k": 0}, "triton", "^k must have at least one position .*hopper.* but has 0"),
]


@pytest.mark.parametrize(("changes", "instead", "pattern"), LIMITS, ids=lambda x: str(x)[:30])
def test_limits_of_the_sm_90_kernels(arch, changes, instead, pattern):
    """An explicit choice names them, and "auto" gives them as its reason."""
    given = call(**changes)
    for function in (plan, rope_attention):
        with pytest.raises(NotImplementedError, match=pattern):
            function(**given, backend="hopper")
    chosen = plan(**given)
    assert chosen.backend == instead and "but" in chosen.reason


def test_what_a_traced_graph_knows_is_refused_at_once(arch):
    """Before the operator, which the graph runs much later, and by the operator itself."""
    for refused in (
        lambda: backend_of(call(len_k=0), backend="hopper"),
        lambda: plan_of(call(len_k=0, backend="hopper")),
    ):
        with pytest.raises(NotImplementedError, match="^k must have at least one position"):
            refused()
    for length, backend in ((1, "hopper"), (0, "auto")):
        assert backend_of(call(len_k=length), backend=backend) == (backend, "")


@pytest.mark.parametrize("name", ["sm_80", "sm_89", "sm_100", "sm_120", "gfx942", "cpu", "interpreter"])
def test_other_machines(arch, name):
    arch(name)
    for function in (plan, rope_attention):
        with pytest.raises(RuntimeError, match=f"^backend='hopper' needs an sm_90 GPU .* but q is on {name}"):
            function(**call(), backend="hopper")
    if name != "cpu":
        chosen = plan(**call())
        assert chosen.backend == "triton" and "sm_90" in chosen.reason and name in chosen.reason
