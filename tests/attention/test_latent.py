"""Multi-head latent attention on any machine: reference, layouts, errors, plans, autocast, compile, checkpointing."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from fused_rope_attn import plan_mla, plan_mla_varlen, rope_attention_mla, rope_attention_mla_varlen
from fused_rope_attn.attention.configs import HopperBackwardConfig
from tests.support.dtypes import BF16, F16, F32
from tests.support.marks import interpreted
from verification.testing import LatentCase, make_latent_inputs, run_latent_op, run_latent_reference

CASE = LatentCase(2, 3, 9, 12, dtype=F32)
backends = pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=interpreted)])


def rotated(x, cos, sin, *, interleaved):
    """Rotate all columns of x by the last rows of the tables."""
    cos, sin = cos[-x.shape[2] :].to(x.dtype), sin[-x.shape[2] :].to(x.dtype)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pairs = first * cos - second * sin, first * sin + second * cos
    return torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)


def as_models_do(inputs, case, mask):
    """Concatenate, expand and attend, in the dtype of the inputs."""
    q_nope, q_rope, k_nope, k_rope, v = inputs[:5]
    tables = {"cos": inputs.cos, "sin": inputs.sin, "interleaved": case.interleaved}
    k_rope = rotated(k_rope, **tables).expand(-1, case.heads, -1, -1)
    q, k = torch.cat((q_nope, rotated(q_rope, **tables)), -1), torch.cat((k_nope, k_rope), -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case.scale)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("window", [None, (4, 0)])
def test_the_reference_is_what_models_compute(interleaved, window):
    case = LatentCase(2, 3, 9, 12, interleaved=interleaved, window=window, dtype=torch.float64)
    inputs = make_latent_inputs(case)
    out = run_latent_op(inputs, case, backend="reference")
    distance = torch.arange(9)[:, None] + 3 - torch.arange(12)
    mask = (distance >= 0) & (distance <= (window or (99, 0))[0])
    leaves = [x.detach().requires_grad_() for x in inputs[:5]]
    o = as_models_do(inputs._replace(**dict(zip(inputs._fields, leaves))), case, mask)
    exact = [o, *torch.autograd.grad(o, leaves, inputs.do)]
    for x, y in zip((out.o, *out[2:]), exact, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_gradcheck_of_the_reference():
    case = LatentCase(1, 2, 4, 5, 6, 4, 3, lse_gradient=True, dtype=torch.float64)
    inputs = make_latent_inputs(case)
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:5]]

    def function(*rows):
        return rope_attention_mla(*rows, inputs.cos, inputs.sin, True, return_lse=True)

    assert torch.autograd.gradcheck(function, leaves)


@backends
def test_packed_sequences_are_separate_calls(backend):
    case = LatentCase(1, 2, 14, 17, seqlens=((5, 6), (0, 2), (9, 9)), lse_gradient=True, dtype=F32)
    inputs = make_latent_inputs(case)
    out = run_latent_op(inputs, case, backend=backend)
    starts = [(0, 0), *itertools.accumulate(case.seqlens, lambda x, y: (x[0] + y[0], x[1] + y[1]))]
    for (first_q, first_k), (len_q, len_k) in zip(starts, case.seqlens):
        q, k = slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        rows = [x[:, :, q if i in (0, 1) else k] for i, x in enumerate(inputs[:5])]
        part = inputs._replace(**dict(zip(inputs._fields, rows)), do=inputs.do[:, :, q], dlse=inputs.dlse[:, :, q])
        one = LatentCase(1, 2, len_q, len_k, lse_gradient=True, dtype=F32)
        expected = run_latent_reference(part, one)
        for name, x, y in zip(out._fields, out, expected):
            of_rows = k if name in ("dk_nope", "dk_rope", "dv") else q
            torch.testing.assert_close(x[:, :, of_rows], y, rtol=1e-4, atol=1e-5, msg=name)


@backends
def test_layouts_have_the_same_numbers_and_memory_order(backend):
    inputs = make_latent_inputs(CASE)
    given = [x.detach().transpose(1, 2).requires_grad_() for x in inputs[:5]]
    o, lse = rope_attention_mla(*given, *inputs[5:7], True, layout="bshd", return_lse=True, backend=backend)
    o.backward(inputs.do.transpose(1, 2))
    out = run_latent_op(inputs, CASE, backend=backend)
    assert o.is_contiguous() and o.shape == (2, 9, 3, 48) and lse.shape == (2, 3, 9)
    for x, y in zip((o.transpose(1, 2), *[x.grad.transpose(1, 2) for x in given]), (out.o, *out[2:]), strict=True):
        assert torch.equal(x, y)


GIVEN = dict(zip(("q_nope", "q_rope", "k_nope", "k_rope", "v", "cos", "sin"), make_latent_inputs(CASE)[:7]))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q_nope": None}, TypeError, "q_nope must be a torch.Tensor, but is NoneType"),
        ({"k_rope": GIVEN["k_rope"][:, 0]}, ValueError, r"k_rope must have shape \(B, 1, NK, R\), but has 3 dim"),
        ({"v": GIVEN["v"].half()}, TypeError, "v must have q_rope's dtype float32, but is float16"),
        ({"q_rope": GIVEN["q_rope"].int()}, TypeError, "q_rope must be float16, bfloat16 or float32, but is int32"),
        (
            {"k_rope": GIVEN["k_rope"].expand(-1, 3, -1, -1)},
            ValueError,
            r"k_rope must have shape \(B, 1, NK, R\), but has \(2, 3, 12, 16\)",
        ),
        ({"k_nope": GIVEN["k_nope"][:, :2]}, ValueError, r"k_nope must have shape .* with H = 3 of q_rope, but has"),
        ({"k_nope": GIVEN["k_nope"][..., :-1]}, ValueError, "k_nope must have shape .* with DN = 32 of q_nope"),
        ({"v": GIVEN["v"][:, :, :-1]}, ValueError, "v must have shape .* with NK = 12 of k_rope"),
        ({"q_rope": GIVEN["q_rope"][..., :-1]}, ValueError, "k_rope must have shape .* with R = 15 of q_rope"),
        ({"cos": GIVEN["cos"][:, :5]}, ValueError, "sin must have cos's shape"),
        ({"cos": GIVEN["cos"][:9], "sin": GIVEN["sin"][:9]}, ValueError, "a row for each of k_rope's 12 positions"),
        ({"kv_lens": torch.tensor([3, 4])}, TypeError, "kv_lens must be int32"),
        ({"window": (1,)}, ValueError, "window must have two elements"),
        ({"layout": "sbhd"}, ValueError, "layout must be 'bhsd' or 'bshd'"),
        ({"causal": 1}, TypeError, "causal must be a bool"),
        ({"softmax_scale": float("inf")}, ValueError, "softmax_scale must be finite"),
        ({"sinks": torch.zeros(3)}, TypeError, r"rope_attention_mla\(\) does not take 'sinks'"),
        ({"strategy": "inline"}, TypeError, r"rope_attention_mla\(\) does not take 'strategy'"),
        ({"backend": "hopper"}, (NotImplementedError, RuntimeError), "hopper"),
    ],
)
def test_errors_name_the_argument(changes, error, message):
    for function in (rope_attention_mla, plan_mla):
        with pytest.raises(error, match=message):
            function(**(GIVEN | changes))


def meta_rows(heads=16, length=4096, columns=(128, 64, 128)):
    """Return the arguments of a call without memory: a query head has columns[0] + columns[1] columns, v columns[2]."""
    nope, rope, value = columns
    widths = ((heads, nope), (heads, rope), (heads, nope), (1, rope), (heads, value))
    rows = (torch.empty(1, length, h, width, dtype=BF16, device="meta").transpose(1, 2) for h, width in widths)
    table = torch.empty(length, rope // 2, device="meta")
    return (*rows, table, table)


def test_auto_takes_the_sm_90_kernels_at_the_widths_of_deepseek(arch):
    for options in ({}, {"deterministic": True}, {"kv_lens": torch.empty(1, dtype=torch.int32, device="meta")}):
        found = plan_mla(*meta_rows(), True, **options)
        assert found.backend == "hopper" and "made for this card" in found.reason
        assert isinstance(found.backward, HopperBackwardConfig) and found.saves_rotated
    for rows, options, reason in (
        (
            meta_rows(columns=(128, 64, 112)),
            {},
            "must have 128, 64, 128 columns for backend='hopper', but have 128, 64, 112",
        ),
        (meta_rows(), {"softmax_scale": -0.1}, "softmax_scale must be positive for backend='hopper'"),
        (meta_rows(), {"softmax_scale": 0.0}, "softmax_scale must be positive for backend='hopper'"),
        (meta_rows(heads=1, length=512), {}, "a launch-bound call"),
    ):
        found = plan_mla(*rows, True, **options)
        assert found.backend == "triton" and reason in found.reason
        if "hopper" in reason:
            with pytest.raises(NotImplementedError, match=reason.split(",")[0]):
                plan_mla(*rows, True, **options, backend="hopper")
    arch("sm_80")
    with pytest.raises(RuntimeError, match="needs an sm_90 GPU"):
        plan_mla(*meta_rows(), True, backend="hopper")


@interpreted
def test_an_explicit_backend_says_which_widths_it_serves():
    for case, name in (
        (LatentCase(1, 2, 5, 5, rope=80), "q_rope"),
        (LatentCase(1, 2, 5, 5, nope=40), "q_nope"),
        (LatentCase(1, 2, 5, 5, value=144), "v"),
    ):
        inputs = make_latent_inputs(case)
        with pytest.raises(NotImplementedError, match=f"{name} must have a number of columns that is a multiple of 16"):
            rope_attention_mla(*inputs[:7], backend="triton")
        assert plan_mla(*inputs[:7]).backend == "reference" and rope_attention_mla(*inputs[:7]).shape[3] == case.value


def test_errors_of_packed_calls():
    case = LatentCase(1, 2, 5, 5, dtype=F32)
    rows = [x[0].transpose(0, 1) for x in make_latent_inputs(case)[:5]]
    tables, ends = make_latent_inputs(case)[5:7], torch.tensor([0, 5], dtype=torch.int32)
    assert plan_mla_varlen(*rows, *tables, ends, ends, 5, 5, True).backend == "reference"
    for changes, message in (
        ({"k_rope": rows[3].unsqueeze(0)}, r"k_rope must have shape \(T_k, 1, R\), but has 4"),
        ({"cu_seqlens_q": ends + 1}, "cu_seqlens_q must begin with 0"),
        ({"cu_seqlens_k": ends + torch.tensor([0, 1], dtype=torch.int32)}, "end at or before k_rope's 5 tokens"),
        ({"max_seqlen_k": 4}, "at least the longest sequence of k_rope, 5"),
        ({"max_seqlen_k": 6}, "cos must have a row for each of k_rope's 6 positions"),
    ):
        names = ("q_nope", "q_rope", "k_nope", "k_rope", "v", "cos", "sin", "cu_seqlens_q", "cu_seqlens_k")
        given = dict(zip(names, (*rows, *tables, ends, ends))) | {"max_seqlen_q": 5, "max_seqlen_k": 5} | changes
        with pytest.raises(ValueError, match=message):
            rope_attention_mla_varlen(**given)


@backends
def test_double_backward_and_forward_mode_raise(backend):
    inputs = make_latent_inputs(CASE)
    leaves = [x.detach().requires_grad_() for x in inputs[:5]]
    o = rope_attention_mla(*leaves, *inputs[5:7], True, backend=backend)
    with pytest.raises(NotImplementedError, match="double backward"):
        first = torch.autograd.grad(o.sum(), leaves, create_graph=True)
        torch.autograd.grad(first[0].sum(), leaves)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: rope_attention_mla(x, *inputs[1:7], True, backend=backend), (inputs[0],), (inputs[0],))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_autocast_casts_the_five_tensors_and_no_table(dtype):
    inputs = make_latent_inputs(CASE)
    with torch.autocast("cpu", dtype=dtype):
        o = rope_attention_mla(*inputs[:7], True)
        assert plan_mla(*inputs[:7], True).backend == "reference"
    expected = rope_attention_mla(*[x.to(dtype) for x in inputs[:5]], *inputs[5:7], True)
    assert o.dtype == dtype and torch.equal(o, expected)


@pytest.mark.unpoisoned
@backends
def test_compile_gives_one_graph_with_the_numbers_of_eager(backend):
    torch._dynamo.reset()
    inputs = make_latent_inputs(CASE)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*rows):
        return rope_attention_mla(*rows, *inputs[5:7], True, interleaved=True, return_lse=True, backend=backend)

    def run(function):
        leaves = [x.detach().requires_grad_() for x in inputs[:5]]
        o, lse = function(*leaves)
        return [o.detach(), lse.detach(), *torch.autograd.grad(o.sum() + lse.sum(), leaves)]

    expected = run(
        lambda *rows: rope_attention_mla(*rows, *inputs[5:7], True, interleaved=True, return_lse=True, backend=backend)
    )
    for x, y in zip(run(compiled), expected, strict=True):
        torch.testing.assert_close(x, y)
        assert x.stride() == y.stride()


@backends
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(backend, reentrant):
    inputs = make_latent_inputs(CASE)
    leaves = [x.detach().requires_grad_() for x in inputs[:5]]
    o = torch.utils.checkpoint.checkpoint(
        lambda *rows: rope_attention_mla(*rows, *inputs[5:7], True, backend=backend), *leaves, use_reentrant=reentrant
    )
    found = [o.detach(), *torch.autograd.grad(o, leaves, inputs.do)] if not reentrant else None
    if reentrant:
        o.backward(inputs.do)
        found = [o.detach(), *[x.grad for x in leaves]]
    out = run_latent_op(inputs, CASE, backend=backend)
    assert all(torch.equal(x, y) for x, y in zip(found, (out.o, *out[2:]), strict=True))
