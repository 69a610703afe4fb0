"""The kernels that a call gets, and the reason; ``plan`` of every function; explicit choices, which run or say why not.

Most tests are on tensors without memory, on the machine of the fixture ``arch``.
"""

import dataclasses
import math

import pytest
import torch

import fused_rope_attn as package
from fused_rope_attn import apply_rope, plan, plan_varlen, rope_attention
from fused_rope_attn.attention import configs, planning
from fused_rope_attn.attention.hopper import configs as hopper_configs
from fused_rope_attn.attention.portable import configs as portable_configs
from tests.support.dtypes import F16, F32, F64
from tests.support.internals import backend_of, plan_of
from tests.support.marks import interpreted
from tests.support.operators import SMALL, Record, public_calls
from tests.support.planning import call, kinds, packed_call
from tools.jobs import int32, meta
from verification.testing import make_inputs

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


MASKS = {"window": (4, 0), "softcap": 5.0, "sinks": meta(8), "kv_starts": int32(2), "kv_lens": int32(2),
         "query_starts": int32(1, 8192), "query_ends": int32(2, 8192)}  # fmt: skip
# A call, the kernels of both passes, and words of the reason.
PLANS = [
    (call(64, 8192, heads=(64, 8), batch=64), "HH", "made for this card"),  # the longer length counts
    (call(100), "PP", "launch-bound"),
    (call(2048, head_dim=64, causal=False), "HH", "sm_90 kernels: they are made for this card; K is rotated once"),
    (call(1, 1, batch=1, heads=(1, 1), backend="hopper", dtype=F16), "HH", "asked for"),
    (call(backend="triton"), "PP", "asked for"),
    (call(backend="triton", strategy="inline"), "PP", "strategy asked for"),
    (call(strategy="prepass"), "HH", "strategy asked for"),
    (call(strategy="inline"), "PP", "strategy must be 'auto' or 'prepass' for backend='hopper', but is 'inline'"),
    (call(8192, causal=False, cos=None, sin=None), "HH", "q and k are read as they are given"),
    (call(8192, 4096, causal=False, cos=None, sin=None, kv_lens=int32(2)), "HH", "q and k are read as they are given"),
    # However long the sequence, one query is over before a second launch.
    (call(1, 4096, heads=(4, 4), batch=1), "PP", "so little work that one launch less"),
    # Forward only, whatever the work; packed sequences are counted on average instead.
    (call(63, 8192, heads=(64, 64), batch=8), "PH", "fewer than 64 queries"),
    (call(63, 8192, heads=(64, 64), batch=8, batch_invariant=True), "HH", "with batch_invariant they depend on dtype"),
    *((call(8192, head_dim=d, **options), "HH", words) for d in (136, 192, 256) for options, words in (
        ({}, "made for this card"), ({"backend": "hopper"}, "asked for"), ({"deterministic": True}, "deterministic"))),
    # A head dim of 96 takes the time of one of 128: this is as much work as the threshold asks for.
    *((call(1024, heads=(32, 32), head_dim=d), "HH", "made for this card") for d in (96, 128)),
    # The forward wants tiles to spare: of batches, heads and columns.
    (call(512, head_dim=64, batch=4), "HP", "made for this card"),
    (call(2048, head_dim=128, heads=(2, 2), batch=1), "PH", "too little work"),
    *((call(backend=backend, **{option: True}), "HH", "deterministic=True, .* in the order of the key blocks")
      for backend in ("auto", "hopper") for option in ("deterministic", "batch_invariant")),
    (call(deterministic=True, kv_starts=int32(2)), "HH", "key blocks"),
    *((call(backend=backend, batch_invariant=True, kv_starts=int32(2)), "HP", "not from kv_starts")
      for backend in ("auto", "hopper")),
    *((call(8192, causal=False, backend=backend, **{name: mask}), "HH", "sm_90")
      for name, mask in MASKS.items() for backend in ("auto", "hopper")),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected", "words"), PLANS, ids=lambda x: str(x)[:20] if type(x) is str else "")
def test_plans(arch, given, expected, words):
    chosen = plan(**given)
    assert kinds(chosen) == expected and chosen.backend == ("hopper" if expected[0] == "H" else "triton")
    assert all(part in chosen.reason for part in words.split(" .* ")), chosen.reason
    assert chosen.reason.count("made for this card") <= 1 and (
        expected != "HH" or chosen.saves_rotated == (given["cos"] is not None)
    )
    if given["q"].shape[-1] > 128 and expected == "HH":
        # 227 KB of shared memory hold 64 keys in two stages next to 128 rows of Q and half of those of O.
        assert (chosen.forward.block_n, chosen.forward.stages) == (64, 2)


def test_deterministic_gradients(arch, tables):
    """Asked for by the option or by torch, they change no configuration, and need other kernels of the sm_90 alone."""
    for planned, given in ((plan, call(heads=(16, 4))), (plan_varlen, packed_call(2, 8192, 4096, heads=(16, 4)))):
        free, asked = planned(**given), planned(**given, deterministic=True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            found = planned(**given)
        finally:
            torch.use_deterministic_algorithms(False)
        assert found == asked != free == planned(**given) and type(asked.backward) is type(free.backward)
        assert "torch.use_deterministic_algorithms" in found.reason and "deterministic" not in free.reason
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


def test_levels_of_work():
    for below, level in zip((0, *configs.WORK_LEVELS), configs.WORK_LEVELS):
        assert configs.work_level(level) == configs.work_level(level + 1) == level
        assert level == 0 or configs.work_level(level - 1) == below


def test_plans_are_remembered_and_ignore_the_exact_length(arch):
    """And norms, because whatever rotates the queries norms them."""
    chosen = [plan_of(call(n)) for n in (3000, 3000, 3001, 4096)]
    assert chosen[0] is chosen[1] and chosen[0] == chosen[2] == chosen[3]
    assert plan_of(call(3000, norm_eps=1e-6, norm_offset=0.0)) == chosen[0]


# (change, the backend that "auto" takes, the errors of explicit choices).
NARROW = "^q must have a head dim that is a multiple of 8 from 16 to 256 .* but has "
LIMITS = [
    ({"dtype": F32}, "triton", {"hopper": "^q must be float16 or bfloat16 for backend='hopper', but is .*float32"}),
    ({"dtype": F64}, "reference", {
        "hopper": "^q must be float16 or bfloat16 for backend='hopper', but is .*float64",
        "triton": "^q must be float16, bfloat16 or float32 for the Triton kernels, but is torch.float64"}),
    *(({"head_dim": n}, "reference", {"hopper": NARROW + str(n), "triton": rf"^q .*multiple of 8 from 16 to 256.*{n}"})
      for n in (8, 20, 264)),
    ({"strategy": "inline"}, "triton", {"hopper": "^strategy must be .*'prepass' .*hopper.* but is 'inline'"}),
    ({"len_k": 0}, "triton", {"hopper": "^k must have at least one position .*hopper.* but has 0"}),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "instead", "errors"), LIMITS, ids=lambda x: str(x)[:30])
def test_limits_of_the_kernels(arch, changes, instead, errors):
    """An explicit choice names them, also that of a strategy, and "auto" gives them as its reason."""
    given = call(**changes)
    for backend, pattern in errors.items():
        for choice in ({"backend": backend}, *[{"strategy": "inline"}] * (backend == "triton")):
            for function in (plan, rope_attention):
                with pytest.raises(NotImplementedError, match=pattern):
                    function(**given, **choice)
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


@pytest.mark.parametrize("name", ["sm_80", "sm_100", "gfx942", "cpu", "interpreter"])
def test_other_machines(arch, name):
    arch(name)
    for function in (plan, rope_attention):
        with pytest.raises(RuntimeError, match=f"^backend='hopper' needs an sm_90 GPU .* but q is on {name}"):
            function(**call(), backend="hopper")
    chosen = plan(**call())
    if name != "cpu":
        assert chosen.backend == "triton" and "sm_90" in chosen.reason and name in chosen.reason
        return
    assert chosen.backend == "reference"
    for choice in ({"backend": "triton"}, {"strategy": "prepass"}):
        for function in (plan, rope_attention):
            with pytest.raises(RuntimeError, match="q is on cpu.*TRITON_INTERPRET=1|TRITON_INTERPRET=1.*q is on cpu"):
                function(**call(), **choice)


# Masked and packed calls.


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
      for sizes in ((64, 145930, 4096), (256, 131072, 512), (1, 32768, 32768))
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
    assert plan(**given, window=(-1, -1)).backward == plain  # which hides nothing


def test_a_window_is_less_work(arch, least_work):
    """Multiply-adds are counted for the keys that a query sees, at most."""
    keys = 2**33 // (8192 * 128)  # as many as make it much
    for window, causal, expected in (
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
    left, right = (99 if side == -1 else side for side in window or (-1, -1))
    right = 0 if causal else right
    expected = max(sum(i - left <= j <= i + right for j in range(9)) for i in range(9))
    assert planning.visited_keys(9, causal, window) == expected


# The plan of every function, and choices on this machine.


@interpreted
@pytest.mark.parametrize("choice", [{"backend": "triton"}, {"strategy": "prepass", "window": (3, 0)}], ids=str)
def test_what_a_plan_says_runs(choice):
    given = *make_inputs(SMALL)[:5], True
    none, chosen = plan(*given), plan(*given, **choice)
    assert none.backend == "reference" and none.strategy is None and "CPU" in none.reason
    assert isinstance(chosen, package.Plan) and chosen.backend == "triton" and chosen.backward is not None
    assert chosen.forward.strategy == chosen.strategy == choice.get("strategy", "inline")
    with Record() as record:
        rope_attention(*given, **choice)
    assert any("attention_forward" in operator for operator in record.operators)


@interpreted
@pytest.mark.parametrize("name", public_calls(*make_inputs(SMALL)[:5]))
def test_one_plan_for_every_function(name):
    """The plan of a call that is known too, and the call after the plan runs."""
    function, (positional, options) = getattr(package, name), public_calls(*make_inputs(SMALL)[:5])[name]
    function(*positional, **options, backend="triton")
    with Record() as record:
        found = plan(function, *positional, **options, backend="triton")
    assert all(x.startswith(("aten.transpose", "aten.unsqueeze")) for x in record.operators)
    assert found.backend == "triton" and found.forward is not None
    own = getattr(package, name.replace("rope_attention", "plan"))
    for planned in (lambda *given, **named: plan(function, *given, **named), own):
        assert planned(*positional, **options, backend="triton") == found
    assert own(*positional, **options).backend == "reference"
    assert isinstance(function(*positional, **options, backend="triton"), torch.Tensor)
    # A backend that this machine cannot run, or that has no such kernels.
    pattern = "^cache_seqlens .*hopper.*portable" if "kvcache" in name else "hopper"
    with pytest.raises((NotImplementedError, RuntimeError), match=pattern):
        function(*positional, **options, backend="hopper")


def test_a_plan_that_raises_leaves_calls_as_they_are():
    positional = make_inputs(SMALL)[:5]
    with pytest.raises(ValueError, match="softmax_scale must be finite"):
        plan(*positional, softmax_scale=math.inf)
    assert isinstance(rope_attention(*positional), torch.Tensor)


def test_other_functions_have_no_plan():
    """They do not run either."""
    x, table = torch.ones(1, 1, 4, 8), torch.zeros(4, 4)
    with pytest.raises(TypeError, match="^function must be one of rope_attention, .*, but is apply_rope$"):
        plan(apply_rope, x, table, table, out=x)
    assert bool((x == 1).all())
