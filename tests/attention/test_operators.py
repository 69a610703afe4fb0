"""The operators as PyTorch sees them: dispatcher, torch.compile, autocast, checkpointing, refusals, planning."""

import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fused_rope_attn
from fused_rope_attn import plan, rope_attention, rope_attention_varlen, rope_tables
from fused_rope_attn.generation.api import _with_kvcache
from fused_rope_attn.runtime.device import is_interpreted
from fused_rope_attn.testing import Case, make_inputs, run_op, run_reference

interpreted = pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1; on a GPU see test_gpu.py")
both = pytest.mark.parametrize("strategy", ["inline", "prepass"])
# B = 2, HQ = 2.
MASKS = {
    "window": (3, 0),
    "softcap": 20.0,
    "sinks": torch.tensor([0.5, -0.5]),
    "kv_starts": torch.tensor([0, 2], dtype=torch.int32),
    "kv_lens": torch.tensor([9, 5], dtype=torch.int32),
}
SMALL = Case(2, 2, 1, 7, 9, 16, dtype=torch.float32)


def leaves(inputs, wanted="qkv"):
    return [x.detach().clone().requires_grad_(name in wanted) for name, x in zip("qkv", inputs[:3])]


def gradients(function, inputs):
    q, k, v = leaves(inputs)
    o = function(q, k, v)
    o.backward(inputs.do.to(o.dtype))
    return [o.detach(), q.grad, k.grad, v.grad]


def close(xs, ys, tolerance=1e-5):
    for x, y in zip(xs, ys, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@interpreted
@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    ("full_width", "layout", "strategy"),
    [(False, "bnhd", "inline"), (True, "bnhd", "prepass"), (True, "bhnd", "inline"), (False, "bhnd", "prepass")],
)
def test_opcheck(layout, full_width, strategy):
    inputs = make_inputs(Case(1, 2, 1, 5, 7, 16, layout=layout, full_width=full_width, dtype=torch.float32))
    q, k, v, cos, sin, do = inputs
    options = (True, 0.25, 16, False, strategy, "triton", False)
    operators = torch.ops.fused_rope_attn
    o, lse = operators.attention_forward(q, k, v, cos, sin, *options)
    torch.library.opcheck(operators.attention_forward.default, (q, k, v, cos, sin, *options))
    torch.library.opcheck(
        operators.attention_forward.default,
        (*leaves(inputs), cos, sin, *options),
        test_utils="test_aot_dispatch_dynamic",
    )
    torch.library.opcheck(operators.attention_backward.default, (do, q, k, v, o, lse, cos, sin, *options))


@interpreted
@pytest.mark.unpoisoned
@both
def test_fake_tensors_match_the_real_ones(strategy):
    """Shapes, dtypes and strides, for layouts and empties that opcheck above does not see."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for case in (
        Case(2, 4, 2, 5, 7, 24, layout="odd"),
        Case(2, 4, 2, 5, 7, 24, layout="expanded"),
        Case(2, 1, 1, 5, 7, 16),
        Case(0, 2, 1, 5, 7, 16),
        Case(2, 2, 1, 0, 7, 16),
        Case(2, 2, 1, 5, 0, 16),
    ):
        inputs = make_inputs(case)
        real = run_op(inputs, case, backend="triton", strategy=strategy)
        with FakeTensorMode() as mode:
            fake_inputs = type(inputs)(*(mode.from_tensor(x) for x in inputs))
            fake = run_op(fake_inputs, case, backend="triton", strategy=strategy)
        for name, x, y in zip(real._fields, real, fake):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride()), (case.name, name)


@interpreted
@pytest.mark.unpoisoned
@both
def test_compile_with_dynamic_lengths(strategy):
    """One graph for all lengths, forward and backward, equal to eager."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(q, k, v, cos, sin):
        return rope_attention(2 * q, k, v, cos, sin, True, backend="triton", strategy=strategy) + 1

    first = None
    for len_q, len_k in ((5, 9), (7, 12), (11, 17), (6, 33)):
        inputs = make_inputs(Case(1, 2, 1, len_q, len_k, 16, dtype=torch.float32))
        tables = inputs.cos, inputs.sin
        options = {"backend": "triton", "strategy": strategy}
        eager = gradients(lambda q, k, v: rope_attention(2 * q, k, v, *tables, True, **options) + 1, inputs)  # noqa: B023
        close(gradients(lambda q, k, v: compiled(q, k, v, *tables), inputs), eager)  # noqa: B023
        first = first or counter.frame_count
    assert counter.frame_count == first
    # Beside the graph with the operator there may be an empty one, from a constant that planning asks for.
    assert sum("attention_forward" in graph.code for graph in counter.graphs) == 1


@pytest.mark.unpoisoned
@pytest.mark.parametrize("backend", ["auto", "reference", pytest.param("triton", marks=interpreted)])
def test_compile_recompiles_once_for_lengths_that_change(backend):
    """Without `dynamic=True`: the first change of the length makes it dynamic, and that is the last compilation."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(q, k, v, cos, sin):
        return rope_attention(q, k, v, cos, sin, True, backend=backend)

    for n in (9, 12, 17, 33):
        q, k, v, cos, sin, _ = make_inputs(Case(1, 2, 1, n, n, 16, dtype=torch.float32))
        close([compiled(q, k, v, cos, sin)], [rope_attention(q, k, v, cos, sin, True, backend=backend)])
    assert counter.frame_count <= 2


@pytest.mark.unpoisoned
def test_compile_serves_every_feature_through_auto():
    torch._dynamo.reset()
    inputs = make_inputs(Case(2, 2, 1, 7, 9, 16, dtype=torch.float32, interleaved=True, full_width=True))

    def run(q, k, v, sinks, starts, lens):
        return rope_attention(
            q, k, v, inputs.cos, inputs.sin, True, interleaved=True, window=(3, 0), softcap=20.0, sinks=sinks,
            kv_starts=starts, kv_lens=lens, return_lse=True,
        )  # fmt: skip

    arguments = *inputs[:3], MASKS["sinks"], MASKS["kv_starts"], MASKS["kv_lens"]
    o, lse = torch.compile(run, fullgraph=True, backend="aot_eager")(*arguments)
    expected, expected_lse = run(*arguments)
    close([o, lse], [expected, expected_lse])


def kernel_or_reference(*names):
    marks = {"triton": interpreted, "reference": ()}
    return pytest.mark.parametrize("backend", [pytest.param(name, marks=marks[name]) for name in names])


@kernel_or_reference("triton", "reference")
@pytest.mark.parametrize("mixed", [False, True])
def test_autocast(backend, mixed):
    """q, k and v are cast to autocast's dtype, tables stay float32, gradients come back in the inputs' dtypes."""
    inputs = make_inputs(SMALL)
    inputs = inputs._replace(q=inputs.q.half().float(), k=inputs.k.half().float(), v=inputs.v.half().float())
    k = inputs.k.half() if mixed else inputs.k
    q, k, v = leaves(inputs._replace(k=k))
    with torch.autocast("cpu", torch.float16):
        o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend=backend)
    assert o.dtype == torch.float16
    half = inputs._replace(q=inputs.q.half(), k=inputs.k.half(), v=inputs.v.half())
    expected = gradients(lambda q, k, v: rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend=backend), half)
    got = torch.autograd.grad(o, (q, k, v), inputs.do.half())
    assert [x.dtype for x in got] == [q.dtype, k.dtype, v.dtype]
    close([o.detach(), *(x.half() for x in got)], expected, 1e-3)


def test_plan_under_autocast_sees_the_cast_inputs():
    q = torch.randn(1, 2, 8, 32)
    k, v = torch.randn(1, 2, 8, 32, dtype=torch.float16), torch.randn(1, 2, 8, 32)
    cos, sin = torch.randn(8, 16), torch.randn(8, 16)
    with torch.autocast("cpu", torch.float16):
        assert plan(q, k, v, cos, sin, True, backend="triton").forward is not None
    with pytest.raises(TypeError, match="^k must have q's dtype"):
        plan(q, k, v, cos, sin, True, backend="triton")


def test_autocast_bfloat16_takes_the_reference():
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    with torch.autocast("cpu", torch.bfloat16):
        o = rope_attention(q, k, v, cos, sin, True)
        assert plan(q, k, v, cos, sin, True).backend == "reference"
    assert o.dtype == torch.bfloat16


def test_autocast_leaves_float64_alone():
    inputs = make_inputs(SMALL)
    q, k, v = (x.double() for x in inputs[:3])
    with torch.autocast("cpu", torch.bfloat16):
        assert rope_attention(q, k, v, inputs.cos, inputs.sin, True).dtype == torch.float64


@kernel_or_reference("triton", "reference")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(backend, use_reentrant):
    inputs = make_inputs(SMALL)

    def plain(q, k, v):
        return rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend=backend)

    saved = gradients(lambda q, k, v: checkpoint(plain, q, k, v, use_reentrant=use_reentrant), inputs)
    close(saved, gradients(plain, inputs), 0.0)


@interpreted
@both
@pytest.mark.parametrize("through", ["q", "k", "v", "do"])
def test_double_backward_raises(through, strategy):
    inputs = make_inputs(SMALL)
    q, k, v = leaves(inputs)
    do = inputs.do.detach().clone().requires_grad_()
    o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend="triton", strategy=strategy)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do, create_graph=True)
    assert dq.requires_grad and dk.requires_grad and dv.requires_grad
    with pytest.raises((NotImplementedError, RuntimeError), match="double backward"):
        torch.autograd.grad(dq.sum() + dk.sum() + dv.sum(), {"q": q, "k": k, "v": v, "do": do}[through])


def test_double_backward_of_the_reference_is_exact():
    inputs = make_inputs(Case(1, 2, 1, 2, 3, 4, dtype=torch.float64, table_dtype=torch.float64))

    def run(q, k, v):
        return rope_attention(q, k, v, inputs.cos, inputs.sin, True)

    assert torch.autograd.gradgradcheck(run, leaves(inputs))


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
@pytest.mark.parametrize("name", ["cos", "sin"])
def test_tables_have_no_gradient(name, backend):
    inputs = make_inputs(SMALL)
    table = {name: getattr(inputs, name).clone().requires_grad_()}
    q, k, v, cos, sin, _ = inputs._replace(**table)
    with pytest.raises(ValueError, match=f"^{name} must not require a gradient"):
        rope_attention(q, k, v, cos, sin, True, backend=backend)


def test_what_the_sm_90_kernels_do_not_serve():
    """float32, of packed sequences too, and the generation step, which has a kernel of its own."""
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    cu_q, cu_k = (torch.tensor([0, x.shape[2]], dtype=torch.int32) for x in (q, k))
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    with pytest.raises(NotImplementedError, match="^q must be float16 or bfloat16 for backend='hopper'"):
        rope_attention_varlen(*packed, cos, sin, cu_q, cu_k, 7, 9, True, backend="hopper")
    lengths = torch.tensor([9, 5], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="^cache_seqlens .*hopper.*portable"):
        _with_kvcache(q, k, v, cos, sin, cache_seqlens=lengths, backend="hopper")


@interpreted
@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    ("names", "strategy"),
    [(("window",), "inline"), (("sinks",), "prepass"), (tuple(MASKS), "inline"), (tuple(MASKS), "prepass")],
    ids=lambda x: x if isinstance(x, str) else ",".join(x),
)
def test_opcheck_with_masks(names, strategy):
    """Also that the gradient of the sinks comes through autograd, the dispatcher and a traced graph."""
    inputs = make_inputs(SMALL)
    q, k, v, cos, sin, do = inputs
    given = {name: MASKS[name] for name in names}
    sinks = given.get("sinks")
    tensors = [sinks, given.get("kv_starts"), given.get("kv_lens"), None, None]
    masks = (*tensors, *given.get("window", (-1, -1)), given.get("softcap", 0.0), 0)
    options = (True, 0.25, 16, False, strategy, "triton", False)
    operators = torch.ops.fused_rope_attn
    o, lse = operators.attention_forward(q, k, v, cos, sin, *options, *masks)
    torch.library.opcheck(operators.attention_forward.default, (q, k, v, cos, sin, *options, *masks))
    torch.library.opcheck(operators.attention_backward.default, (do, q, k, v, o, lse, cos, sin, *options, *masks))
    if sinks is not None:
        masks = (sinks.clone().requires_grad_(), *masks[1:])
    torch.library.opcheck(
        operators.attention_forward.default,
        (*leaves(inputs), cos, sin, *options, *masks),
        test_utils="test_aot_dispatch_dynamic",
    )


@interpreted
@pytest.mark.unpoisoned
def test_compile_with_masks_equals_eager():
    torch._dynamo.reset()
    inputs = make_inputs(SMALL)
    window, softcap = MASKS["window"], MASKS["softcap"]

    def run(q, k, v, sinks, starts, lens):
        return rope_attention(
            q, k, v, inputs.cos, inputs.sin, True, window=window, softcap=softcap, sinks=sinks, kv_starts=starts,
            kv_lens=lens, backend="triton",
        )  # fmt: skip

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        q, k, v = leaves(inputs)
        sinks = MASKS["sinks"].clone().requires_grad_()
        o = function(q, k, v, sinks, MASKS["kv_starts"], MASKS["kv_lens"])
        results.append([o.detach(), *torch.autograd.grad(o, (q, k, v, sinks), inputs.do)])
    close(*results, 0.0)


@interpreted
@pytest.mark.parametrize("plain", [True, False])
def test_only_sinks_require_a_gradient(plain, monkeypatch):
    from fused_rope_attn.attention import ops

    if not plain:
        monkeypatch.setattr(ops, "_is_plain", lambda *tensors: False)
    q, k, v, cos, sin, do = make_inputs(SMALL)
    gradients = []
    for backend in ("reference", "triton"):
        sinks = MASKS["sinks"].clone().requires_grad_()
        o = rope_attention(q, k, v, cos, sin, True, sinks=sinks, backend=backend)
        gradients += torch.autograd.grad(o, sinks, do)
    close(gradients[:1], gradients[1:])


@interpreted
def test_double_backward_through_sinks_raises():
    inputs = make_inputs(SMALL)
    q, k, v = leaves(inputs)
    sinks = MASKS["sinks"].clone().requires_grad_()
    o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, sinks=sinks, backend="triton")
    (dsinks,) = torch.autograd.grad(o, sinks, inputs.do, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match="double backward"):
        torch.autograd.grad(dsinks.sum(), q)


@pytest.mark.parametrize("names", [*((name,) for name in MASKS), tuple(MASKS)], ids=",".join)
def test_auto_always_runs(names):
    inputs = make_inputs(SMALL)
    extras = {name: MASKS[name] for name in names}
    arguments = (inputs.cos, inputs.sin, True)
    chosen = plan(*inputs[:3], *arguments, **extras)
    assert chosen.backend == "reference" and chosen.reason
    auto = gradients(lambda q, k, v: rope_attention(q, k, v, *arguments, **extras), inputs)
    close(auto, gradients(lambda q, k, v: rope_attention(q, k, v, *arguments, backend="reference", **extras), inputs))
    assert not torch.equal(auto[0], rope_attention(*inputs[:3], *arguments))


def test_sinks_are_differentiable():
    q, k, v, cos, sin, do = make_inputs(SMALL)
    sinks = MASKS["sinks"].clone().requires_grad_()
    rope_attention(q, k, v, cos, sin, True, sinks=sinks).backward(do)
    assert sinks.grad.shape == (2,) and bool((sinks.grad != 0).all())


@pytest.mark.parametrize(
    ("changes", "error", "pattern"),
    [
        ({"head_dim": 20}, NotImplementedError, "^q .*multiple of 8 from 16 to 256.*20"),
        ({"head_dim": 8}, NotImplementedError, "^q .*multiple of 8 from 16 to 256.*8"),
        ({"head_dim": 264}, NotImplementedError, "^q .*multiple of 8 from 16 to 256.*264"),
        ({"dtype": torch.float64}, NotImplementedError, "^q .*float64"),
    ],
    ids=str,
)
@pytest.mark.parametrize("choice", [{"backend": "triton"}, {"strategy": "inline"}], ids=str)
@interpreted
def test_explicit_choices_never_fall_back(changes, error, pattern, choice):
    case = Case(**({"batch": 1, "heads_q": 1, "heads_kv": 1, "len_q": 3, "len_k": 3, "head_dim": 16} | changes))
    q, k, v, cos, sin, _ = make_inputs(case)
    for function in (rope_attention, plan):
        with pytest.raises(error, match=pattern):
            function(q, k, v, cos, sin, True, **choice)
    assert rope_attention(q, k, v, cos, sin, True).shape == q.shape  # "auto" serves it
    assert plan(q, k, v, cos, sin, True).backend == "reference"


def test_backends_that_this_machine_cannot_run():
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    for function in (rope_attention, plan):
        with pytest.raises((NotImplementedError, RuntimeError), match="hopper"):
            function(q, k, v, cos, sin, True, backend="hopper")
        with pytest.raises(ValueError, match="strategy.*reference"):
            function(q, k, v, cos, sin, True, backend="reference", strategy="inline")


def test_triton_on_cpu_needs_the_interpreter():
    program = """
import torch, fused_rope_attn
x, t = torch.zeros(1, 1, 4, 16), torch.zeros(4, 8)
for choice in ({"backend": "triton"}, {"strategy": "prepass"}):
    for function in (fused_rope_attn.rope_attention, fused_rope_attn.plan):
        try:
            function(x, x, x, t, t, True, **choice)
        except RuntimeError as error:
            assert "TRITON_INTERPRET=1" in str(error) and "cpu" in str(error), error
        else:
            raise SystemExit("it ran")
assert fused_rope_attn.plan(x, x, x, t, t).backend == "reference"
fused_rope_attn.rope_attention(x, x, x, t, t)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


class Record(TorchDispatchMode):
    """Every operator that reaches the dispatcher."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators.append(str(function))
        return function(*args, **(kwargs or {}))


@interpreted
@pytest.mark.parametrize(
    "choice", [{}, {"backend": "triton"}, {"strategy": "inline"}, {"strategy": "prepass"}], ids=str
)
def test_plan_explains_and_launches_nothing(choice):
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    with Record() as record:
        chosen = plan(q, k, v, cos, sin, True, **choice)
    assert record.operators == []
    assert isinstance(chosen, fused_rope_attn.Plan) and isinstance(chosen.reason, str) and chosen.reason
    if not choice:
        assert chosen.backend == "reference" and chosen.strategy is None and "CPU" in chosen.reason
        return
    assert chosen.backend == "triton" and chosen.forward is not None and chosen.backward is not None
    if "strategy" in choice:
        assert chosen.forward.strategy == chosen.backward.strategy == chosen.strategy == choice["strategy"]
    with Record() as record:
        rope_attention(q, k, v, cos, sin, True, **choice)
    assert any("attention_forward" in operator for operator in record.operators)


def test_plans_ignore_the_exact_length():
    def chosen(n):
        q, k, v, cos, sin, _ = make_inputs(Case(1, 1, 1, n, n, 16))
        return plan(q, k, v, cos, sin, True, backend="triton")

    if is_interpreted():
        assert chosen(100) is not None and chosen(100) == chosen(101)


@kernel_or_reference("triton", "reference")
def test_inference_mode(backend):
    q, k, v, cos, sin, _ = make_inputs(SMALL)
    expected = rope_attention(q, k, v, cos, sin, True, backend=backend)
    with torch.inference_mode():
        q, k, v, cos, sin, _ = make_inputs(SMALL)
        assert torch.equal(rope_attention(q, k, v, cos, sin, True, backend=backend), expected)


@interpreted
def test_nothing_is_computed_for_an_unused_output():
    q, k, v = leaves(make_inputs(SMALL))
    inputs = make_inputs(SMALL)
    o, _ = rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend="triton", return_lse=True)
    (o * 0).sum().backward()
    assert bool((q.grad == 0).all())
    with Record() as record:
        rope_attention(*make_inputs(SMALL)[:3], inputs.cos, inputs.sin, True, backend="triton")
    assert not any("attention_backward" in operator for operator in record.operators)


@interpreted
def test_saved_tensors_are_the_inputs_and_no_copies():
    q, k, v = leaves(make_inputs(SMALL))
    inputs = make_inputs(SMALL)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend="triton", strategy="prepass")
    storages = {x.untyped_storage().data_ptr() for x in saved}
    given = {x.untyped_storage().data_ptr() for x in (q, k, v, o, inputs.cos, inputs.sin)}
    assert given <= storages and len(storages - given) == 1  # lse


@interpreted
def test_in_place_changes_of_inputs_are_noticed():
    q, k, v = leaves(make_inputs(SMALL))
    inputs = make_inputs(SMALL)
    o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend="triton")
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@interpreted
def test_the_kernels_agree_with_the_reference_through_the_public_function():
    inputs = make_inputs(SMALL)
    run = {
        backend: gradients(
            lambda q, k, v: rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend=backend),  # noqa: B023
            inputs,
        )
        for backend in ("triton", "reference")
    }
    close(run["triton"], run["reference"], 1e-4)
    eager = run_reference(inputs, SMALL)
    close(run["reference"], [eager.o, eager.dq, eager.dk, eager.dv], 1e-5)


def test_rope_tables():
    cos, sin = rope_tables(7, 6)
    assert cos.shape == sin.shape == (7, 3) and cos.dtype == sin.dtype == torch.float32
    for position in range(7):
        for i in range(3):
            angle = torch.tensor(position / 10000.0 ** (2 * i / 6), dtype=torch.float64)
            torch.testing.assert_close(cos[position, i], angle.cos().float(), rtol=0, atol=1e-7)
            torch.testing.assert_close(sin[position, i], angle.sin().float(), rtol=0, atol=1e-7)
    far, _ = rope_tables(1, 2, positions=torch.tensor([131071]))
    torch.testing.assert_close(far[0, 0], torch.tensor(131071.0, dtype=torch.float64).cos().float())
    again, _ = rope_tables(7, 6, positions=torch.arange(7), device="cpu")
    assert torch.equal(again, cos)
    slow, _ = rope_tables(7, 6, base=1e6)
    assert not torch.equal(slow, cos)
    assert rope_tables(0, 4)[0].shape == (0, 2)


@pytest.mark.parametrize(
    ("error", "name", "arguments", "options"),
    [
        (TypeError, "seq_len", (7.0, 6), {}),
        (TypeError, "rotary_dim", (7, True), {}),
        (ValueError, "seq_len", (-1, 6), {}),
        (ValueError, "rotary_dim", (7, 5), {}),
        (ValueError, "rotary_dim", (7, 0), {}),
        (ValueError, "base", (7, 6), {"base": 0.0}),
        (ValueError, "base", (7, 6), {"base": float("nan")}),
        (ValueError, "positions", (7, 6), {"positions": torch.arange(6)}),
    ],
)
def test_rope_tables_refuses(error, name, arguments, options):
    with pytest.raises(error, match=f"^{name} "):
        rope_tables(*arguments, **options)
