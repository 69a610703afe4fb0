"""The kernels on a GPU: bfloat16, realistic shapes, and what only a device has: streams, graphs, several cards.

Every new combination of dtype, head dimension and flags compiles four kernels, so that the cases share a few. Run with
`pytest -m gpu`; about three minutes on an H200, most of it compilation.
"""

import math
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from fused_rope_attn import plan, rope_attention
from fused_rope_attn.testing import Case, Inputs, Results, compare, make_inputs, run_op, run_reference

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
both = pytest.mark.parametrize("strategy", ["inline", "prepass"])
# The work horse of the tests that are not about shapes: odd lengths, GQA, one compilation for all of them.
HORSE = Case(2, 8, 2, 333, 700, 128, dtype=BF16)


def hold(case, inputs, out):
    ref64, eager = run_reference(inputs, case, torch.float64), run_reference(inputs, case)
    for name in Results._fields:
        result = compare(
            name, getattr(out, name), getattr(ref64, name), getattr(eager, name), grad=name[0] == "d", dtype=case.dtype
        )
        assert result.ok, f"{case.name}: {result}"


def gradients(function, inputs):
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    o = function(q, k, v)
    o.backward(inputs.do.to(o.dtype))
    return [o.detach(), q.grad, k.grad, v.grad]


def equal(xs, ys):
    assert all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


INLINE, PREPASS = ("inline",), ("prepass",)
BOTH = ("inline", "prepass")


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        pytest.param(case, strategy, id=f"{case.name} {strategy}")
        for case, strategies in (
            (HORSE, BOTH),
            (replace(HORSE, len_q=1), BOTH),
            (replace(HORSE, len_q=700, len_k=333), BOTH),
            (replace(HORSE, batch=1, heads_q=6, heads_kv=3, len_q=1000, len_k=1000), BOTH),
            (replace(HORSE, len_q=1024, len_k=1024), BOTH),
            (replace(HORSE, tables="yarn", extra_rows=100, table_batch=True), BOTH),
            (replace(HORSE, causal=False), BOTH),
            (replace(HORSE, rotary_dim=64, full_width=True, interleaved=True, tables="random"), BOTH),
            (replace(HORSE, table_dtype=BF16, full_width=True), PREPASS),
            (Case(2, 4, 4, 1000, 1000, 64, dtype=F16), BOTH),
            (Case(2, 4, 1, 600, 600, 96, dtype=BF16, layout="odd"), INLINE),
            (Case(1, 4, 2, 500, 600, 256, dtype=BF16), PREPASS),
            (Case(2, 3, 1, 100, 200, 40, dtype=F16, rotary_dim=10, causal=False, layout="expanded"), INLINE),
            (Case(2, 4, 2, 300, 400, 64, dtype=F32, tables="random"), BOTH),
            (Case(1, 2, 1, 200, 200, 128, dtype=F32, causal=False), PREPASS),
        )
        for strategy in strategies
    ],
)
def test_against_float64(case, strategy):
    inputs = make_inputs(case, "cuda")
    before = [x.clone() for x in inputs]
    out = run_op(inputs, case, backend="triton", strategy=strategy)
    equal(before, inputs)
    hold(case, inputs, out)


@both
@pytest.mark.parametrize(("batch", "len_q", "len_k"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_empty(batch, len_q, len_k, strategy):
    case = replace(HORSE, batch=batch, len_q=len_q, len_k=len_k)
    inputs = make_inputs(case, "cuda")
    hold(case, inputs, run_op(inputs, case, backend="triton", strategy=strategy))


def test_auto_takes_the_kernels():
    inputs = make_inputs(HORSE, "cuda")
    chosen = plan(*inputs[:5], True)
    assert chosen.backend != "reference" and chosen.reason and chosen.forward is not None
    same = {"backend": chosen.backend, "strategy": chosen.strategy}
    assert torch.equal(
        run_op(inputs, HORSE, backend="auto", grads=False).o, run_op(inputs, HORSE, grads=False, **same).o
    )


@both
def test_a_hundred_reruns_are_bitwise_equal(strategy):
    inputs = make_inputs(HORSE, "cuda")
    first = run_op(inputs, HORSE, backend="triton", strategy=strategy)
    for _ in range(100):
        equal(run_op(inputs, HORSE, backend="triton", strategy=strategy), first)
    equal(run_op(inputs, HORSE, backend="triton", strategy=strategy, deterministic=True), first)


def test_true_float32_unless_tf32_is_allowed():
    strategy, case = "prepass", Case(2, 4, 2, 300, 400, 64, dtype=F32, tables="random")
    inputs = make_inputs(case, "cuda")
    exact = run_op(inputs, case, backend="triton", strategy=strategy)
    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        rounded = run_op(inputs, case, backend="triton", strategy=strategy)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    for x, y in zip(exact, rounded):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    assert not torch.equal(exact.o, rounded.o)
    equal(run_op(inputs, case, backend="triton", strategy=strategy), exact)


@both
@pytest.mark.parametrize("logit", [-1e4, -2.45e5, 1e4])
def test_extreme_logits(logit, strategy):
    """Scores far from zero, exact in bfloat16: a clamped maximum would silence every head."""
    case = replace(HORSE, len_q=300, len_k=300)
    inputs = make_inputs(case, "cuda")
    q, k = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k)
    q[..., 0], k[..., 0] = 1.0, 1.0
    ones, zeros = torch.ones_like(inputs.cos), torch.zeros_like(inputs.sin)
    case = replace(case, softmax_scale=logit)
    inputs = inputs._replace(q=q, k=k, cos=ones, sin=zeros)
    out = run_op(inputs, case, backend="triton", strategy=strategy)
    torch.testing.assert_close(out.lse, logit + torch.arange(1, 301, device="cuda").log().expand(2, 8, 300))
    mean = inputs.v.double().cumsum(2) / torch.arange(1, 301, device="cuda")[:, None]
    torch.testing.assert_close(out.o.double(), mean.repeat_interleave(4, 1), rtol=4e-2, atol=4e-2)
    assert all(bool(torch.isfinite(x).all()) for x in out)


def graphed(inputs, **options):
    """Static inputs, the captured graph, and what it writes. Warmed up the way PyTorch's notes on CUDA graphs say."""
    static = Inputs(*(x.detach().clone() for x in inputs))
    q, k, v = (x.requires_grad_() for x in static[:3])

    def step():
        o = rope_attention(q, k, v, static.cos, static.sin, True, **options)
        return o, *torch.autograd.grad(o, (q, k, v), static.do)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return static, graph, captured


@pytest.mark.parametrize("strategy", ["auto", "inline", "prepass"])
@pytest.mark.parametrize("length", [64, 700])
def test_cuda_graph(length, strategy):
    """Captured once, replayed with new data. At 64 `auto` takes what it takes for launch-bound calls."""
    case = replace(HORSE, len_q=length, len_k=length)
    static, graph, captured = graphed(make_inputs(case, "cuda"), strategy=strategy)
    for seed in (1, 2):
        fresh = make_inputs(replace(case, seed=seed), "cuda")
        with torch.no_grad():
            for old, new in zip(static, fresh):
                old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        lse = run_op(fresh, case, backend="triton", strategy=strategy).lse
        hold(case, fresh, Results(captured[0].detach(), lse, *captured[1:]))


def test_no_synchronisation_and_no_hidden_copies():
    inputs = make_inputs(HORSE, "cuda")
    for strategy in ("inline", "prepass"):
        run_op(inputs, HORSE, backend="triton", strategy=strategy)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_op(inputs, HORSE, backend="triton", strategy=strategy)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def run_with_late_inputs(inputs, case, **options):
    """`run_op` on a side stream on which q, k and v appear late: a launch on the default stream sees NaN before."""
    late = Inputs(*(torch.full_like(x, math.nan) for x in inputs[:3]), inputs.cos, inputs.sin, inputs.do)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for x, y in zip(late[:3], inputs[:3]):
            x.copy_(y)
        out = run_op(late, case, **options)
    side.synchronize()
    return out


def gradients_from_another_thread(inputs, **options):
    """dq, dk and dv of a causal call whose backward pass runs in a thread of its own."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, **options)
    failures = []

    def backward():
        try:
            o.backward(inputs.do)
        except BaseException as error:  # pytest sees none of what happens in a thread
            failures.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert not failures, failures
    return q.grad, k.grad, v.grad


@both
def test_other_streams(strategy):
    inputs = make_inputs(HORSE, "cuda")
    expected = run_op(inputs, HORSE, backend="triton", strategy=strategy)
    equal(run_with_late_inputs(inputs, HORSE, backend="triton", strategy=strategy), expected)


@both
def test_backward_from_another_thread(strategy):
    inputs = make_inputs(HORSE, "cuda")
    expected = run_op(inputs, HORSE, backend="triton", strategy=strategy)
    equal(gradients_from_another_thread(inputs, backend="triton", strategy=strategy), expected[2:])


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
@both
def test_a_second_device(strategy):
    """Tensors on cuda:1 while cuda:0 is current, forward, backward and from another thread."""
    inputs = make_inputs(HORSE, "cuda:0")
    expected = run_op(inputs, HORSE, backend="triton", strategy=strategy)
    there = Inputs(*(x.to("cuda:1") for x in inputs))
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        out = run_op(there, HORSE, backend="triton", strategy=strategy)
        assert all(x.device == torch.device("cuda:1") for x in out)
        equal([x.to("cuda:0") for x in out], expected)
    q, k, v, cos, sin, _ = there
    with pytest.raises(ValueError, match="^k must be on q's device cuda:1, but is on cuda:0"):
        rope_attention(q, inputs.k, v, cos, sin, True)
    with pytest.raises(ValueError, match="^cos must be on q's device cuda:1, but is on cpu"):
        rope_attention(q, k, v, cos.cpu(), sin, True)


def test_devices_must_agree():
    q, k, v, cos, sin, _ = make_inputs(HORSE, "cuda")
    with pytest.raises(ValueError, match="^cos must be on q's device cuda:0, but is on cpu"):
        rope_attention(q, k, v, cos.cpu(), sin, True)
    with pytest.raises(ValueError, match="^v must be on q's device cuda:0, but is on cpu"):
        rope_attention(q, k, v.cpu(), cos, sin, True)


@pytest.mark.unpoisoned
def test_compile():
    """Inductor, full graph, one compilation for all lengths, with what it may fuse before and after the operator."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")

    def block(q, k, v, cos, sin):
        return 0.5 * rope_attention(2.0 * q, k, v, cos, sin, True, backend="triton", strategy="prepass")

    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=True)
    count = None
    for len_q, len_k in ((333, 700), (200, 600), (64, 1000)):
        case = replace(HORSE, len_q=len_q, len_k=len_k)
        inputs = make_inputs(case, "cuda")
        tables = inputs.cos, inputs.sin
        eager = gradients(lambda q, k, v: block(q, k, v, *tables), inputs)  # noqa: B023
        for x, y in zip(gradients(lambda q, k, v: compiled(q, k, v, *tables), inputs), eager):  # noqa: B023
            torch.testing.assert_close(x, y)
        count = count or counter.frame_count
    assert counter.frame_count == count


@pytest.mark.unpoisoned
def test_compile_with_cuda_graphs():
    torch._dynamo.reset()
    inputs = make_inputs(HORSE, "cuda")

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def compiled(q, k, v, cos, sin):
        return rope_attention(q, k, v, cos, sin, True, backend="triton", strategy="prepass")

    q, k, v, cos, sin, _ = inputs
    expected = rope_attention(q, k, v, cos, sin, True, backend="triton", strategy="prepass")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(q, k, v, cos, sin), expected)


def test_autocast():
    """float32 activations under autocast: q, k, v are cast, the tables stay float32, gradients are float32 again."""
    dtype = BF16
    inputs = make_inputs(replace(HORSE, dtype=F32), "cuda")
    low = inputs._replace(q=inputs.q.to(dtype), k=inputs.k.to(dtype), v=inputs.v.to(dtype))

    def run(q, k, v):
        return rope_attention(q, k, v, inputs.cos, inputs.sin, True, deterministic=True)

    with torch.autocast("cuda", dtype):
        q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
        o = run(q, k, v)
    o.backward(inputs.do.to(dtype))
    assert o.dtype == dtype and q.grad.dtype == k.grad.dtype == v.grad.dtype == F32
    expected = gradients(run, low)
    for x, y in zip((o.detach(), q.grad, k.grad, v.grad), expected):
        assert torch.equal(x.to(dtype), y)


def test_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    inputs = make_inputs(HORSE, "cuda")

    def run(q, k, v):
        return rope_attention(q, k, v, inputs.cos, inputs.sin, True, deterministic=True)

    for use_reentrant in (False, True):
        equal(gradients(lambda q, k, v: checkpoint(run, q, k, v, use_reentrant=use_reentrant), inputs),  # noqa: B023
              gradients(run, inputs))  # fmt: skip


@both
def test_expanded_and_strided_gradients(strategy):
    inputs = make_inputs(HORSE, "cuda")
    ones = torch.ones((), dtype=BF16, device="cuda").expand(inputs.q.shape)
    turned = inputs.do.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    for do in (ones, turned):
        case_inputs = inputs._replace(do=do)
        hold(HORSE, case_inputs, run_op(case_inputs, HORSE, backend="triton", strategy=strategy))
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend="triton", strategy=strategy).sum().backward()
    expected = run_op(inputs._replace(do=ones), HORSE, backend="triton", strategy=strategy)
    equal((q.grad, k.grad, v.grad), expected[2:])


def test_alignment_is_not_remembered():
    """Equal shapes and strides, another alignment: a launch prepared for aligned pointers must not serve both."""
    strategy, case = "prepass", replace(HORSE, layout="bhnd")
    inputs = make_inputs(case, "cuda")
    expected = run_op(inputs, case, backend="triton", strategy=strategy)

    def misaligned(x):
        return torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)

    for name in ("k", "v", "cos"):
        shifted = inputs._replace(**{name: misaligned(getattr(inputs, name))})
        for x, y in zip(run_op(shifted, case, backend="triton", strategy=strategy), expected):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
        equal(run_op(inputs, case, backend="triton", strategy=strategy), expected)


def bytes_of(*tensors):
    """Rounded up to the allocator's blocks."""
    return sum(-(-x.numel() * x.element_size() // 512) * 512 for x in tensors)


@contextmanager
def peak_bytes():
    """A list that receives the most bytes asked for at one time, above what was there before. Bytes asked for, not
    handed out: a block of the cache that is up to 1 MiB too large is handed out whole."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base, peak = torch.cuda.memory_stats()["requested_bytes.all.current"], []
    yield peak
    peak.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] - base)


@pytest.mark.unpoisoned
@pytest.mark.parametrize(("layout", "strategy"), [("bnhd", "inline"), ("bnhd", "prepass"), ("odd", "prepass")])
def test_memory(layout, strategy):
    """No copy of a strided input, K and V not expanded to the query heads, no score matrix."""
    case = Case(1, 32, 2, 1000, 1000, 128, dtype=BF16, layout=layout)
    inputs = make_inputs(case, "cuda")
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    for _ in range(2):  # the second time nothing is compiled
        with peak_bytes() as forward:
            o = rope_attention(q, k, v, inputs.cos, inputs.sin, True, backend="triton", strategy=strategy)
        with peak_bytes() as backward:
            results = torch.autograd.grad(o, (q, k, v), inputs.do)
    lse = torch.empty(1, 32, 1000, device="cuda")
    rotated = strategy == "prepass"
    assert forward[0] <= bytes_of(o, lse) + rotated * bytes_of(k) + 4096
    assert backward[0] <= bytes_of(*results, lse, lse) + rotated * bytes_of(q, k) + 4096


@pytest.mark.unpoisoned
@both
def test_more_than_two_to_the_31_elements(strategy):
    """All of q, k, v and the outputs are larger, and there are more than 65535 heads; both ends against float64."""
    free, _ = torch.cuda.mem_get_info()
    if free < 60 << 30:
        pytest.skip(f"needs 60 GiB of free device memory, has {free >> 30}")
    case = Case(66000, 4, 4, 64, 64, 128, dtype=BF16)
    inputs = make_inputs(case, "cuda")
    assert inputs.q.numel() > 2**31 and inputs.k.numel() > 2**31
    out = run_op(inputs, case, backend="triton", strategy=strategy)
    for part in (slice(0, 2), slice(32767, 32769), slice(-2, None)):
        some = replace(case, batch=2)
        some_inputs = Inputs(*(x[part] for x in inputs[:3]), inputs.cos, inputs.sin, inputs.do[part])
        hold(some, some_inputs, Results(*(x[part] for x in out)))
    del inputs, out
    torch.cuda.empty_cache()


@pytest.mark.unpoisoned
@both
def test_strides_beyond_two_to_the_31(strategy):
    """Rows of one tile, heads, and batches: strides that fit 32 bits, offsets that do not."""
    free, _ = torch.cuda.mem_get_info()
    if free < 20 << 30:
        pytest.skip(f"needs 20 GiB of free device memory, has {free >> 30}")
    storage = torch.empty(2**32 + 2**20, dtype=BF16, device="cuda")
    for shape, strides in (
        ((1, 5, 5, 128), (2**20, 2**30, 128, 1)),
        ((5, 1, 5, 128), (2**30, 2**20, 128, 1)),
        ((1, 1, 5, 128), (2**20, 2**20, 2**30, 1)),
    ):
        case = Case(shape[0], shape[1], shape[1], 5, 5, 128, dtype=BF16, layout="bhnd")
        inputs = make_inputs(case, "cuda")
        expected = run_op(inputs, case, backend="triton", strategy=strategy)
        for name in ("q", "k", "v", "do"):
            far = storage.as_strided(shape, strides)
            far.copy_(getattr(inputs, name))
            out = run_op(inputs._replace(**{name: far}), case, backend="triton", strategy=strategy)
            for x, y in zip(out, expected):
                torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    del storage, far
    torch.cuda.empty_cache()


def test_poisoned_memory_is_poisoned_here_too():
    assert bool(torch.empty(1000, device="cuda").isnan().all())


def test_double_backward_raises():
    inputs = make_inputs(HORSE, "cuda")
    q = inputs.q.detach().requires_grad_()
    o = rope_attention(q, inputs.k, inputs.v, inputs.cos, inputs.sin, True)
    (dq,) = torch.autograd.grad(o, q, inputs.do, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match="double backward"):
        dq.sum().backward()


def test_every_mask_at_once_without_a_sync():
    q, k, v, cos, sin, do = make_inputs(replace(HORSE, dtype=F32), "cuda")
    sinks = torch.randn(8, device="cuda")
    lens = torch.tensor([700, 450], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 60], dtype=torch.int32, device="cuda")
    options = {"window": (128, 0), "softcap": 20.0}
    chosen = plan(q, k, v, cos, sin, True, sinks=sinks, kv_lens=lens, kv_starts=starts, **options)
    assert chosen.backend == "triton", chosen.reason
    q = q.detach().requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, lse = rope_attention(
            q, k, v, cos, sin, True, sinks=sinks, kv_lens=lens, kv_starts=starts, return_lse=True, **options
        )
        o.backward(do)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    here, here_lse = rope_attention(
        *(x.detach().cpu() for x in (q, k, v, cos, sin)), True, sinks=sinks.cpu(), kv_lens=lens.cpu(),
        kv_starts=starts.cpu(), return_lse=True, **options,
    )  # fmt: skip
    torch.testing.assert_close(o.detach().cpu(), here, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.cpu(), here_lse, rtol=1e-4, atol=1e-5)
