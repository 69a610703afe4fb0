"""Which kernels a call gets, and why: the sm_90 backend beside the portable kernels. Runs on tensors without memory."""

import dataclasses

import pytest
import torch

from fused_rope_attn import plan, rope_attention
from fused_rope_attn.attention import configs, ops, planning
from fused_rope_attn.runtime import device
from fused_rope_attn.testing import Case, make_inputs, run_reference

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HOPPER = (configs.HopperForwardConfig, configs.HopperBackwardConfig)
PORTABLE = (configs.ForwardConfig, configs.BackwardConfig)
# A length in each bucket.
LENGTHS = {"tiny": 512, "short": 1024, "medium": 4096, "long": 4097}


@pytest.fixture
def arch(monkeypatch):
    """Every tensor is on a GPU of the architecture that this function was last given; sm_90 before that."""

    def set_arch(name):
        monkeypatch.setattr(device, "arch", lambda where: name)

    set_arch("sm_90")
    return set_arch


@pytest.fixture
def tables(monkeypatch):
    """Replace the sm_90 backend's rows: one for all calls and each pass, taken by "auto" in the buckets given."""

    def set_tables(forward, backward):
        for name, row, auto in (
            ("HOPPER_FORWARD", configs.HOPPER_FORWARD[-1], forward),
            ("HOPPER_BACKWARD", configs.HOPPER_BACKWARD[-1], backward),
        ):
            monkeypatch.setattr(
                configs, name, (dataclasses.replace(row, auto=auto, note=f"{name} row", much_work=False),)
            )
        planning._plan.cache_clear()

    yield set_tables
    planning._plan.cache_clear()


def call(len_q=4096, len_k=None, head_dim=128, dtype=BF16, heads=(8, 8), batch=2, where="meta", **changes):
    """Arguments of `plan` and `rope_attention`, (B, N, H, D) views as models have them."""
    len_k = len_q if len_k is None else len_k

    def tensor(h, n):
        return torch.empty(batch, n, h, head_dim, dtype=dtype, device=where).transpose(1, 2)

    table = torch.empty(len_k, head_dim // 2, device=where)
    q, k, v = tensor(heads[0], len_q), tensor(heads[1], len_k), tensor(heads[1], len_k)
    return {"q": q, "k": k, "v": v, "cos": table, "sin": table, "causal": True} | changes


def kinds(chosen):
    return type(chosen.forward), type(chosen.backward)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
@pytest.mark.parametrize("bucket", LENGTHS)
@pytest.mark.parametrize("head_dim", [16, 64, 72, 96, 128])
def test_auto_takes_what_the_tables_say(arch, head_dim, bucket, heads, causal):
    chosen = plan(**call(LENGTHS[bucket], head_dim=head_dim, heads=heads, causal=causal, batch=16))
    shape = (head_dim, causal, bucket, heads[0] != heads[1])
    rows = configs.hopper_forward(*shape), configs.hopper_backward(*shape)
    expected = [HOPPER[i] if bucket in row.auto else PORTABLE[i] for i, row in enumerate(rows)]
    assert kinds(chosen) == tuple(expected)
    assert chosen.backend == ("hopper" if expected[0] is HOPPER[0] else "triton")
    assert rows[0].note in chosen.reason and ("sm_90" in chosen.reason)
    assert chosen.strategy in ("inline", "prepass")


def test_the_longer_length_counts(arch):
    assert plan(**call(1, 8192, heads=(64, 8), batch=64)).backend == "hopper"
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
    assert "HOPPER_FORWARD row" in chosen.reason and "HOPPER_BACKWARD row" in chosen.reason
    if forward != backward:
        first = "sm_90" if forward else "portable"
        second = "sm_90" if backward else "portable"
        assert f"forward, {first} kernels" in chosen.reason and f"backward, {second} kernels" in chosen.reason
    assert kinds(plan(**call(8192))) == PORTABLE
    assert kinds(plan(**call(8192, backend="hopper"))) == HOPPER


def test_deterministic_gradients_are_the_portable_kernels(arch, tables):
    for backend in ("auto", "hopper"):
        chosen = plan(**call(backend=backend, deterministic=True))
        assert kinds(chosen) == (HOPPER[0], PORTABLE[1]) and chosen.backend == "hopper"
        assert chosen.backward.strategy == "prepass"
        assert "deterministic=True" in chosen.reason and "any order" in chosen.reason
    portable = plan(**call(backend="triton", deterministic=True))
    assert portable == plan(**call(backend="triton")) and "deterministic" not in portable.reason
    tables(("medium",), ())
    assert "deterministic" not in plan(**call(deterministic=True)).reason  # nothing to replace


@pytest.mark.parametrize("head_dim", [136, 192, 256])
def test_wide_heads(arch, head_dim):
    auto = plan(**call(8192, head_dim=head_dim))
    for chosen in (auto, plan(**call(8192, head_dim=head_dim, backend="hopper"))):
        assert kinds(chosen) == HOPPER and chosen.backend == "hopper"
        # 64 keys in two stages are what 227 KB of shared memory hold beside 128 rows of Q and half of those of O.
        assert (chosen.forward.block_n, chosen.forward.stages) == (64, 2)
    assert configs.hopper_forward(head_dim, True, "long", False).note in auto.reason
    assert kinds(plan(**call(8192, head_dim=head_dim, deterministic=True))) == (HOPPER[0], PORTABLE[1])
    for changes in ({"backend": "triton"}, {"dtype": F32}):
        assert kinds(plan(**call(**{"head_dim": head_dim} | changes))) == PORTABLE
    with pytest.raises(NotImplementedError, match="^q must have a head dim .* from 16 to 256 .*hopper.* but has 264"):
        plan(**call(head_dim=264, backend="hopper"))


@pytest.mark.parametrize("backend", ["auto", "hopper"])
def test_wide_packed_sequences_have_a_forward_alone(arch, backend):
    q, k, v = (torch.empty(1, 8, 65536, 256, dtype=torch.bfloat16, device="meta") for _ in range(3))
    chosen = planning.plan_for(q, k, v, True, "auto", backend, False, "cu_seqlens_q", 8192, None, 8)
    assert kinds(chosen) == (HOPPER[0], PORTABLE[1])
    assert "backward, portable kernels: the sm_90 ones have no backward pass for packed" in chosen.reason


def test_launch_bound_calls_stay_portable(arch):
    """However long the sequence: (1, 4/4, 1, 4096, 128) is over before a second launch."""
    chosen = plan(**call(1, 4096, heads=(4, 4), batch=1))
    assert chosen.backend == "triton" and chosen.strategy == "inline" and "so little work" in chosen.reason
    assert plan(**call(1, 4096, heads=(4, 4), batch=1, backend="hopper")).strategy == "prepass"


def test_the_persistent_forward_wants_tiles_to_spare(arch):
    """Measured: (2, 64/64, 1024, 128) is faster there, (1, 32/8, 1024, 128) is not; backward both are."""
    assert kinds(plan(**call(1024, heads=(64, 64), batch=2))) == HOPPER
    few = plan(**call(1024, heads=(32, 8), batch=1))
    assert kinds(few) == (PORTABLE[0], HOPPER[1]) and "too little work" in few.reason


def test_rows_may_ask_for_much_work(arch, tables, monkeypatch):
    """Then "auto" takes them from so many multiply-adds on; the explicit backend takes them always."""
    tables(("medium",), ("medium",))
    monkeypatch.setattr(configs, "HOPPER_FORWARD", (dataclasses.replace(configs.HOPPER_FORWARD[0], much_work=True),))
    below = configs.MUCH_WORK // (4096 * 4096 * 128) - 1  # heads
    little, much = call(4096, heads=(below, below), batch=1), call(4096, heads=(below + 1, below + 1), batch=1)
    assert kinds(plan(**little)) == (PORTABLE[0], HOPPER[1]) and "too little work" in plan(**little).reason
    assert kinds(plan(**much)) == kinds(plan(**little, backend="hopper")) == HOPPER


def odd_strides(x):
    return torch.empty(*x.shape[:3], x.shape[3] + 1, dtype=x.dtype, device=x.device)[..., :-1]


def columns_apart(x):
    return torch.empty(*x.shape[:3], 2 * x.shape[3], dtype=x.dtype, device=x.device)[..., ::2]


def expanded(x):
    return torch.empty(1, *x.shape[1:], dtype=x.dtype, device=x.device).expand(x.shape)


def refusals():
    """(what is changed, error, pattern): what the sm_90 kernels do not serve, and the portable ones do."""
    return [
        ({"dtype": F32}, NotImplementedError, "^q must be float16 or bfloat16 for backend='hopper', but is .*float32"),
        ({"head_dim": 264}, NotImplementedError, "^q must have a head dim .* from 16 to .*hopper.* but has 264"),
        ({"strategy": "inline"}, NotImplementedError, "^strategy must be .*'prepass' .*hopper.* but is 'inline'"),
        ({"len_k": 0}, NotImplementedError, "^k must have at least one position .*hopper.* but has 0"),
    ]


@pytest.mark.parametrize(("changes", "error", "pattern"), refusals(), ids=lambda x: str(x)[:30])
def test_refusals(arch, changes, error, pattern):
    given = call(**changes)
    for function in (plan, rope_attention):
        with pytest.raises(error, match=pattern):
            function(**given, backend="hopper")
    chosen = plan(**given)  # "auto" takes something else and says why
    assert chosen.backend in ("triton", "reference")
    assert ("hopper" in chosen.reason and "but" in chosen.reason) or chosen.backend == "reference"


def test_refusals_of_what_no_kernel_serves(arch):
    for changes, pattern in (({"head_dim": 20}, "multiple of 8 .*20"), ({"dtype": torch.float64}, "float64")):
        with pytest.raises(NotImplementedError, match=f"^q .*{pattern}"):
            plan(**call(**changes), backend="hopper")
        assert plan(**call(**changes)).backend == "reference"


@pytest.mark.parametrize("name", ["sm_80", "sm_89", "sm_100", "sm_120", "gfx942", "cpu", "interpreter"])
def test_other_machines(arch, name):
    arch(name)
    given = call()
    for function in (plan, rope_attention):
        with pytest.raises(RuntimeError, match=f"^backend='hopper' needs an sm_90 GPU .* but q is on {name}"):
            function(**given, backend="hopper")
    if name != "cpu":
        chosen = plan(**given)
        assert chosen.backend == "triton" and "sm_90" in chosen.reason and name in chosen.reason


@pytest.mark.parametrize("layout", [odd_strides, columns_apart, expanded])
def test_v_that_the_tma_cannot_address(arch, layout):
    given = call(batch=2)
    given["v"] = layout(given["v"])
    with pytest.raises(NotImplementedError, match="^v must have adjacent columns .*hopper.* but has strides"):
        plan(**given, backend="hopper")
    chosen = plan(**given)
    assert kinds(chosen) == PORTABLE and "v must have" in chosen.reason
    for name in ("q", "k"):  # these are read through pointers
        given = call(batch=2)
        given[name] = layout(given[name])
        assert plan(**given, backend="hopper") == plan(**call(batch=2), backend="hopper")
    given = call(len_q=0, len_k=64)  # nothing is read
    given["v"] = layout(given["v"])
    assert plan(**given, backend="hopper").backend == "hopper"


def test_the_address_of_v_counts(arch):
    given = call(200, where="cpu", batch=1, backend="hopper")
    assert kinds(plan(**given)) == HOPPER
    v = given["v"]
    given["v"] = torch.empty(v.numel() + 1, dtype=BF16)[1:].as_strided(v.shape, v.stride())
    with pytest.raises(NotImplementedError, match=r"^v must have .* address 16 n \+ 2"):
        plan(**given)
    with pytest.raises(NotImplementedError, match=r"^v must have .* address 16 n \+ 2"):
        rope_attention(**given)


def test_a_size_of_one_has_no_stride(arch):
    given = call(batch=1, heads=(1, 1))
    v = given["v"]
    given["v"] = torch.empty_strided(v.shape, (3, 5, v.stride(2), 1), dtype=BF16, device="meta")
    assert kinds(plan(**given, backend="hopper")) == HOPPER


def test_plans_are_remembered_and_ignore_the_exact_length(arch):
    def chosen(n, **changes):
        given = call(n, **changes)
        return planning.plan_for(given["q"], given["k"], given["v"], True, "auto", "auto", False)

    assert chosen(3000) is chosen(3001) is chosen(4096)
    assert chosen(3000) is not chosen(4097)
    arch("sm_80")  # elsewhere nobody asks where v lies
    given = call(2000)
    assert planning.plan_for(given["q"], given["k"], None, True, "auto", "auto", False).backend == "triton"


def test_plan_under_autocast_knows_how_the_cast_v_will_lie(arch):
    """A cast makes a new tensor, aligned and dense, whatever the strides of the old one were."""
    given = call(200, where="cpu", dtype=F32, batch=2, backend="hopper")
    with torch.autocast("cpu", BF16):
        assert kinds(plan(**given)) == HOPPER
        assert kinds(plan(**given | {"v": odd_strides(given["v"])})) == HOPPER
        assert kinds(plan(**given | {"v": given["v"].to(BF16)})) == HOPPER
        with pytest.raises(NotImplementedError, match="^v must have"):
            plan(**given | {"v": odd_strides(given["v"].to(BF16))})
    with pytest.raises(NotImplementedError, match="^q must be float16 or bfloat16"):
        plan(**given)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("through_the_dispatcher", [False, True])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_the_operators_take_the_planned_kernels(arch, monkeypatch, backend, through_the_dispatcher, deterministic):
    """With launchers that write down who was called and compute nothing of their own."""
    case = Case(1, 2, 1, 20, 20, 16, dtype=F16)
    inputs = make_inputs(case)
    expected = run_reference(inputs, case)
    seen = []

    def launcher(name, results):
        def launch(*tensors, causal, softmax_scale, rotary_dim, interleaved, config):
            assert (causal, softmax_scale, rotary_dim, interleaved) == (True, 0.25, 16, False)
            seen.append((name, type(config)))
            return tuple(x.clone() for x in results)

        return launch

    monkeypatch.setattr(ops, "attention_forward", launcher("portable forward", expected[:2]))
    monkeypatch.setattr(ops, "attention_backward", launcher("portable backward", expected[2:]))
    doors = launcher("sm_90 forward", expected[:2]), launcher("sm_90 backward", expected[2:])
    monkeypatch.setattr(ops, "_hopper", lambda: doors)
    if through_the_dispatcher:
        monkeypatch.setattr(ops, "_is_plain", lambda *tensors: False)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend=backend, deterministic=deterministic)
    gradients = torch.autograd.grad(o, (q, k, v), inputs.do)
    assert all(torch.equal(x, y) for x, y in zip((o, *gradients), (expected.o, *expected[2:])))
    hopper = (True, not deterministic) if backend == "hopper" else (False, False)
    assert seen == [
        ("sm_90 forward", HOPPER[0]) if hopper[0] else ("portable forward", PORTABLE[0]),
        ("sm_90 backward", HOPPER[1]) if hopper[1] else ("portable backward", PORTABLE[1]),
    ]


@pytest.mark.unpoisoned
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_compile_asks_nothing_that_a_graph_does_not_know(arch, monkeypatch, backend):
    """One graph for lengths of every bucket: which kernels run is decided when it runs."""
    from torch._dynamo.testing import CompileCounterWithBackend

    seen = []

    def launch(q, k, v, cos, sin, *, config, **options):
        seen.append(type(config))
        return q.clone(), q.new_zeros(q.shape[:3], dtype=torch.float32)

    monkeypatch.setattr(ops, "attention_forward", launch)
    monkeypatch.setattr(ops, "_hopper", lambda: (launch, None))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(q, k, v, cos, sin):
        return rope_attention(q, k, v, cos, sin, True, backend=backend) + 1

    first = None
    for length in (200, 700, 3000, 5000):
        given = call(length, head_dim=16, batch=1, heads=(2, 1), where="cpu")
        arguments = [given[name].fill_(1) for name in ("q", "k", "v", "cos", "sin")]
        assert torch.equal(compiled(*arguments), arguments[0] + 1)
        first = first or counter.frame_count
    assert counter.frame_count == first
    assert set(seen) == {HOPPER[0] if backend == "hopper" else PORTABLE[0]}


def test_packed_calls_are_planned_by_their_longest_sequence(arch):
    """Not by the tokens of the whole batch; whatever other masks there are."""
    many = call(1 << 16, batch=1, head_dim=64)
    for masks in ({"window": None, "softcap": 0.0}, {"window": (100, 0), "softcap": 5.0}):
        feature = planning.mask_feature(*masks.values(), None, None, None, cu_seqlens=many["q"])
        assert feature == "cu_seqlens_q"
        qkv = (many["q"], many["k"], many["v"], True, "auto", "triton", False, feature)
        long, short = planning.plan_for(*qkv, 1 << 16), planning.plan_for(*qkv, 300)
        assert long.forward == configs.forward("sm_90", 2, 64, "prepass", True, "long", False, True)
        assert short.forward == configs.forward("sm_90", 2, 64, "prepass", True, "tiny", False, True)
        assert long.forward != short.forward
    few = [x[:, :, :4096] for x in (many["q"], many["k"], many["v"])]
    assert planning.plan_for(*few, True, "auto", "auto", False, feature, 2).strategy == "inline"  # 2**21 * 2 at most
    assert planning.plan_for(*few, True, "auto", "auto", False, feature, 4096).strategy == "prepass"


def packed_plan(sequences, tokens, longest, tokens_k=None, heads=(32, 8), backend="auto", strategy="auto", **changes):
    """What `rope_attention_varlen` runs for so many sequences and tokens: the operators' own plan."""
    given = call(tokens, tokens_k, batch=1, heads=heads, **changes)
    ends = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    options = (True, 0.1, given["q"].shape[3], False, strategy, backend, changes.get("deterministic", False))
    masks = (None, None, None, ends, ends, -1, -1, 0.0, longest)
    chosen, keywords = ops._launcher(given["q"], given["k"], given["v"], (*options, *masks))
    assert keywords["masks"].packed
    return chosen


def test_packed_calls_take_the_sm_90_kernels(arch):
    """Measured: 64 of 16 to 4096 tokens, 256 of 512, 32 of 4096 and 1 of 32768 are faster there in both passes."""
    for sequences, tokens, longest in ((64, 145930, 4096), (256, 131072, 512), (32, 131072, 4096), (1, 32768, 32768)):
        chosen = packed_plan(sequences, tokens, longest)
        assert kinds(chosen) == HOPPER and chosen.backend == "hopper", (sequences, tokens, longest)
        assert kinds(packed_plan(sequences, tokens, longest, backend="triton")) == PORTABLE
        assert kinds(packed_plan(sequences, tokens, longest, deterministic=True)) == (HOPPER[0], PORTABLE[1])
        inline = packed_plan(sequences, tokens, longest, strategy="inline")
        assert kinds(inline) == PORTABLE and inline.strategy == "inline"
    # A short sequence alone is no work for them forward; many are.
    assert kinds(packed_plan(2, 1024, 512)) == (PORTABLE[0], HOPPER[1])
    assert kinds(packed_plan(1, 200, 200, heads=(1, 1))) == PORTABLE


def test_short_packed_sequences_stay_portable(arch):
    """Shorter than half a tile on average, empty ones included: 4096 of 16 are slower on the sm_90 kernels."""
    chosen = packed_plan(4096, 65536, 16)
    assert kinds(chosen) == PORTABLE and "less than 64 tokens on average" in chosen.reason
    least = 1024 * configs.LEAST_MEAN_LENGTH
    assert kinds(packed_plan(1024, least, 4096)) == HOPPER
    assert kinds(packed_plan(1025, least, 4096)) == PORTABLE
    assert kinds(packed_plan(1025, 4000, 4096, tokens_k=least + 64)) == HOPPER  # the longer length counts
    assert kinds(packed_plan(4096, 65536, 16, backend="hopper")) == HOPPER


def test_masked_calls_have_tiles_of_their_own(arch):
    plain, masked = (configs.backward("sm_90", 2, 64, "prepass", True, "long", False, m) for m in (False, True))
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
    """Where the tables prefer them, and whenever they are asked for."""
    tables(("long",), ("long",))
    given = call(8192, batch=2, **{name: MASKS[name]})
    assert kinds(plan(**given, backend="hopper")) == HOPPER
    assert kinds(plan(**given)) == HOPPER


def test_a_window_is_less_work(arch, tables, monkeypatch):
    """Multiply-adds are counted for the keys that a query sees, at most."""
    tables(("long",), ("long",))
    monkeypatch.setattr(configs, "HOPPER_FORWARD", (dataclasses.replace(configs.HOPPER_FORWARD[0], much_work=True),))
    given = call(8192, heads=(1, 1), batch=1)
    keys = configs.MUCH_WORK // (8192 * 128)  # as many as make it much
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
    assert planning.visited_keys(3, True, (100, 0)) == 3
