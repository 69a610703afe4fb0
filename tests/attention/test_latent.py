"""Multi-head latent attention: what models compute, the kernels that run, and DeepSeek's widths on a GPU."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fused_rope_attn import plan_mla, rope_attention_mla
from fused_rope_attn.rotation.reference import rotate
from tests.support.attention import assert_equal
from tests.support.dtypes import BF16, F64
from tests.support.gpu import assert_alike, capture, peak_bytes
from tests.support.internals import go_through_the_dispatcher
from tests.support.marks import cases, interpreted
from tests.support.operators import Record
from tests.support.places import both_backends, check_on_gpu, only_sm_90
from tests.support.planning import kinds
from verification.testing import LatentCase, make_latent_inputs, run_latent_op


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("window", [None, (4, 0)])
def test_the_reference_is_what_models_compute(interleaved, window):
    """Concatenate, expand and attend, as DeepSeek's code does: values and gradients."""
    case = LatentCase(2, 3, 3, 9, 12, 16, interleaved=interleaved, window=window, tables="random", dtype=F64)
    inputs = make_latent_inputs(case)
    out = run_latent_op(inputs, case, backend="reference")
    distance = torch.arange(9)[:, None] + 3 - torch.arange(12)
    mask = (distance >= 0) & (distance <= (window or (99, 0))[0])
    leaves = [x.detach().requires_grad_() for x in inputs[:5]]
    q_nope, q_rope, k_nope, k_rope, v = leaves
    q_rot, k_rot = (
        rotate(x, *(t[-x.shape[2] :].to(F64) for t in (inputs.cos, inputs.sin)), interleaved=interleaved)
        for x in (q_rope, k_rope)
    )
    q, k = torch.cat((q_nope, q_rot), -1), torch.cat((k_nope, k_rot.expand(-1, case.heads_q, -1, -1)), -1)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case.scale)
    for x, y in zip((out[0], *out[2:]), [o, *torch.autograd.grad(o, leaves, inputs.do)], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


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
        assert kinds(found) == "HH" and "made for this card" in found.reason and found.saves_rotated
    widths = "must have 128, 64, 128 columns for backend='hopper', but have 128, 64, 112"
    for rows, options, reason in (
        (meta_rows(columns=(128, 64, 112)), {}, widths),
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
@pytest.mark.parametrize(
    ("name", "changes"), [("q_rope", {"head_dim": 80}), ("q_nope", {"nope": 40}), ("v", {"value": 144})]
)
def test_an_explicit_backend_says_which_widths_it_serves(name, changes):
    inputs = make_latent_inputs(LatentCase(1, 2, 2, 5, 5, **({"head_dim": 16} | changes)))[:7]
    with pytest.raises(NotImplementedError, match=f"{name} must have a number of columns that is a multiple of 16"):
        rope_attention_mla(*inputs, backend="triton")
    assert plan_mla(*inputs).backend == "reference" and rope_attention_mla(*inputs).isfinite().all()


# On a GPU.

DEEPSEEK = LatentCase(2, 6, 6, 333, 700, 64, nope=128, value=128, interleaved=True, tables="random", dtype=BF16)
PACKED = replace(
    DEEPSEEK, batch=1, len_q=650, len_k=710, lse_gradient=True,
    seqlens=((300, 300), (0, 0), (1, 1), (20, 0), (129, 129), (0, 30), (200, 250)),
)  # fmt: skip
PADDED = replace(DEEPSEEK, kv_starts=(0, 300), kv_lens=(700, 650), lse_gradient=True)
NO_MASKS = dict.fromkeys(("window", "kv_starts", "kv_lens", "seqlens"))
KINDS = {
    "causal": NO_MASKS | {"causal": True},
    "masks": NO_MASKS | {"window": (7, -1), "kv_starts": (), "kv_lens": ()},
    "packed": NO_MASKS | {"seqlens": ()},
    "packed, a window": NO_MASKS | {"causal": False, "window": (7, 7), "seqlens": ()},
}


@both_backends
@pytest.mark.parametrize("kind", KINDS)
def test_random_calls(kind, chosen):
    chosen = {"backend": chosen["backend"]}
    check_on_gpu(chosen, "mla", kind, **KINDS[kind], head_dim=64, nope=128, value=128, table_batch=False)


@both_backends
@cases(DEEPSEEK, PADDED, PACKED, replace(DEEPSEEK, len_q=2048, len_k=2048, heads_q=16, heads_kv=16))
def test_a_hundred_reruns_are_bitwise_equal(case, chosen):
    """Rows that do not exist, and those of the first packed sequence, may hold NaN, and reach nothing else."""
    inputs, others = make_latent_inputs(case, "cuda"), make_latent_inputs(replace(case, seed=1), "cuda")
    backend = chosen["backend"]
    first = run_latent_op(inputs, case, backend=backend, deterministic=True)
    for _ in range(100):
        # Leave other numbers in the memory that the next run's workspaces get: a kernel may begin before another ends.
        run_latent_op(others, case, backend=backend)
        assert_equal(first, run_latent_op(inputs, case, backend=backend))
    if case not in (PADDED, PACKED):
        return
    for x in (inputs.k_nope, inputs.k_rope, inputs.v):
        x[-1, :, :300] = float("nan")
        if case is PADDED:
            x[-1, :, 650:] = float("nan")
    kept = slice(300 if case is PACKED else None, None)
    assert_equal(*([x[:, :, kept] for x in of] for of in (first, run_latent_op(inputs, case, backend=backend))))


@only_sm_90
@cases(DEEPSEEK, PADDED, PACKED)
def test_backward_of_saved_and_of_given_queries(case, chosen, monkeypatch):
    """An eager forward pass saves q_rope rotated. Traced calls save what the caller gave."""
    inputs = make_latent_inputs(case, "cuda")
    o, _, *gradients = run_latent_op(inputs, case, **chosen)
    go_through_the_dispatcher(monkeypatch)
    found_o, _, *found = run_latent_op(inputs, case, **chosen)
    assert_alike((found_o, *found), (o, *gradients))


@only_sm_90
def test_the_operator_of_saved_queries(chosen):
    """A mode that watches operators sees one. Its fake results have the layout of the real ones."""
    inputs = make_latent_inputs(DEEPSEEK, "cuda")
    leaves = [x.detach().requires_grad_() for x in inputs[:5]]
    o = rope_attention_mla(*leaves, *inputs[5:7], True, interleaved=True, **chosen)
    expected = torch.autograd.grad(o, leaves, inputs.do, retain_graph=True)
    with Record() as record, torch.enable_grad():
        assert_equal(torch.autograd.grad(o, leaves, inputs.do, create_graph=True), expected)
    ((function, arguments),) = [x for x in record.calls if "attention_backward" in str(x[0])]
    torch.library.opcheck(function, arguments, test_utils="test_faketensor")


@both_backends
def test_a_graph_and_inductor_have_the_results_of_eager(chosen):
    torch._dynamo.reset()
    inputs = make_latent_inputs(DEEPSEEK, "cuda")

    def attention(*rows):
        return rope_attention_mla(*rows, *inputs[5:7], True, interleaved=True, backend=chosen["backend"])

    def step(function=attention):
        leaves = [x.detach().requires_grad_() for x in inputs[:5]]
        o = function(*leaves)
        return [o.detach(), *torch.autograd.grad(o, leaves, inputs.do)]

    graph, captured = capture(step)
    for x in captured:
        x.zero_()
    graph.replay()
    assert_equal(captured, step())
    assert_alike(step(torch.compile(attention, fullgraph=True)), step())


@both_backends
def test_no_tensor_of_all_columns_or_all_heads_is_allocated(chosen):
    """Forward allocates o, lse and the rotated shared head, and no more than a rounding of the allocator beyond."""
    inputs = make_latent_inputs(LatentCase(1, 32, 32, 2048, 2048, 64, nope=128, value=128, dtype=BF16), "cuda")
    for _ in range(3):  # compile, record, replay
        with peak_bytes() as taken, torch.no_grad():
            o, lse = rope_attention_mla(*inputs[:7], True, return_lse=True, backend=chosen["backend"])
    assert taken[0] <= o.numel() * 2 + lse.numel() * 4 + 2048 * 64 * 2 + (1 << 20)
