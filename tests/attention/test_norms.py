"""The norms of q and k in attention as users and PyTorch see them: oracles, gradients, what is saved, compilation."""

import math
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from fused_rope_attn import plan, rope_attention, rope_attention_varlen, rope_tables
from tests.support.attention import assert_equal, packed_case
from tests.support.dtypes import F16, F32, F64
from tests.support.internals import OPERATORS, operator_arguments, plan_of
from tests.support.marks import both_strategies, ignore_overflow, interpreted
from tests.support.operators import Record
from tests.support.planning import call
from tests.support.rotation import assert_close, normal
from verification.testing import Case, make_inputs, norms_of, reference_attention, run_op

pytestmark = ignore_overflow

CASE = Case(1, 2, 1, 7, 9, 16, dtype=F32, norms=1.0, norm_eps=1e-3)
NAMES = ("q", "k", "v", "q_norm", "k_norm")


def given(case=CASE, wanted=NAMES, dtype=None):
    """Return (q, k, v and the norms' weights by name, with gradients for ``wanted``; the call's other arguments)."""
    inputs, norms = make_inputs(case), norms_of(case)
    tensors = dict(zip(NAMES, (*inputs[:3], norms.pop("q_norm"), norms.pop("k_norm"))))
    tensors = {
        name: x.detach().to(dtype or x.dtype).clone().requires_grad_(name in wanted) for name, x in tensors.items()
    }
    return tensors, {"cos": inputs.cos, "sin": inputs.sin, "causal": True, **norms}


def gradients(o, tensors):
    leaves = [x for x in tensors.values() if x.requires_grad]
    return torch.autograd.grad((o * normal(*o.shape, seed=7).to(o.dtype)).sum(), leaves)


@pytest.mark.parametrize("options", [{}, {"kv_starts": [1, 0], "kv_lens": [5, 2]}, {"window": (2, 0)}], ids=str)
def test_gradcheck(options):
    """Also of queries that see nothing, and of keys that do not exist."""
    options = {name: torch.tensor(x, dtype=torch.int32) if "kv" in name else x for name, x in options.items()}
    leaves = [normal(2, heads, n, 6, seed=i).requires_grad_() for i, (heads, n) in enumerate(((2, 3), (1, 5), (1, 5)))]
    leaves += [normal(6, seed=5 + i).requires_grad_() for i in range(2)]
    cos, sin = normal(2, 5, 2, seed=3)

    def run(q, k, v, q_norm, k_norm):
        return reference_attention(
            q,
            k,
            v,
            cos,
            sin,
            True,
            softmax_scale=0.6,
            rotary_dim=4,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=1e-2,
            norm_offset=0.5,
            **options,
        )[0]

    assert torch.autograd.gradcheck(run, leaves) and torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


def norm_of_transformers(name):
    """The norm of a model of transformers, over 16 columns with eps 1e-3."""
    pytest.importorskip("transformers")
    if name == "qwen3":
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm as Norm
    else:
        from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm as Norm
    return Norm(16, eps=1e-3)


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=interpreted), "reference"])
@pytest.mark.parametrize(("name", "offset"), [("qwen3", 0.0), ("gemma3", 1.0)])
def test_transformers(name, offset, backend):
    """The models' own norms and rotation, and PyTorch's attention: outputs and all gradients, in float32."""
    norms = [norm_of_transformers(name) for _ in range(2)]
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    for i, norm in enumerate(norms):
        norm.weight.data.copy_(normal(16, seed=4 + i))
    q, k, v = (normal(2, 7, heads, 16, seed=i).float().requires_grad_() for i, heads in enumerate((4, 2, 2)))
    cos, sin = (torch.cat((t, t), -1)[None] for t in rope_tables(7, 16))
    turned = apply_rotary_pos_emb(*(norm(x).transpose(1, 2) for norm, x in zip(norms, (q, k))), cos, sin)
    expected = scaled_dot_product_attention(*turned, v.transpose(1, 2), is_causal=True, enable_gqa=True)
    weights = [norm.weight for norm in norms]
    o = rope_attention(
        q,
        k,
        v,
        cos,
        sin,
        True,
        q_norm=weights[0],
        k_norm=weights[1],
        norm_eps=1e-3,
        norm_offset=offset,
        layout="bshd",
        backend=backend,
    ).transpose(1, 2)
    leaves, do = (q, k, v, *weights), normal(*o.shape, seed=7).float()
    found = (o, *torch.autograd.grad(o, leaves, do))
    for x, y in zip(found, (expected, *torch.autograd.grad(expected, leaves, do)), strict=True):
        assert_close(x.detach(), y.detach().to(F64), 1e-5)


def test_the_reference_of_packed_sequences_is_that_of_each():
    case = packed_case(CASE, [5, 0, (3, 9)], behind=(2, 1))
    out = run_op(make_inputs(case), case, backend="reference")
    first = replace(CASE, len_q=5, len_k=5)
    inputs = make_inputs(case)
    alone = run_op(
        inputs._replace(**{name: getattr(inputs, name)[:, :, :5] for name in ("q", "k", "v", "do")}),
        first,
        backend="reference",
    )
    torch.testing.assert_close(out.o[:, :, :5], alone.o)
    torch.testing.assert_close(out.dk[:, :, :5], alone.dk)
    assert out.dq_norm.abs().sum() > 0 and out.dk_norm.abs().sum() > 0


@interpreted
@both_strategies
def test_gradients_of_what_is_wanted(strategy):
    """Whatever takes a gradient gets the same one; one weight alone takes one, too."""
    whole, options = given()
    expected = dict(
        zip(NAMES, gradients(rope_attention(**whole, **options, backend="triton", strategy=strategy), whole))
    )
    for wanted in (("q_norm",), ("k", "k_norm"), ("v",)):
        tensors, _ = given(wanted=wanted)
        o = rope_attention(**tensors, **options, backend="triton", strategy=strategy)
        assert_equal(gradients(o, tensors), [expected[name] for name in NAMES if name in wanted])


@interpreted
def test_what_is_saved():
    """q and k twice, as they came and as the products take them, and the weights."""
    tensors, options = given()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = rope_attention(**tensors, **options, backend="triton", strategy="prepass")
    storages = {x.untyped_storage().data_ptr() for x in saved}
    known = {x.untyped_storage().data_ptr() for x in (*tensors.values(), o, options["cos"], options["sin"])}
    assert known <= storages and len(storages - known) == 3  # q and k normed and rotated, lse


@interpreted
def test_weights_gradients_are_the_same_every_time():
    """Several programs add up parts of them."""
    case = replace(CASE, len_q=70, len_k=70, heads_q=1)
    tensors, options = given(case)
    first, again = (gradients(rope_attention(**tensors, **options, backend="triton"), tensors) for _ in range(2))
    assert_equal(first, again)


@interpreted
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_padding_may_hold_anything(backend):
    """NaN in keys that do not exist and in queries that see none reaches nothing, the weights' gradients included."""
    case = replace(CASE, batch=2, len_q=9, kv_starts=(0, 4), kv_lens=(9, 7))
    clean, soiled = make_inputs(case), make_inputs(case)
    for x in (soiled.k, soiled.v):
        x[1, :, :4], x[1, :, 7:] = math.nan, math.inf
    soiled.q[1, :, :6] = math.nan  # positions -2 to 3
    out, expected = (run_op(inputs, case, backend=backend) for inputs in (soiled, clean))
    assert_equal((*out, out.dq_norm, out.dk_norm), (*expected, expected.dq_norm, expected.dk_norm))


@interpreted
@both_strategies
def test_rows_of_zeros(strategy):
    """Without eps: no NaN anywhere, scores of zero."""
    case = replace(CASE, norm_eps=0.0, norms=0.0)
    inputs = make_inputs(case)
    inputs.q[:, :, 3], inputs.k[:, :, 2] = 0.0, 0.0
    out = run_op(inputs, case, backend="triton", strategy=strategy)
    expected = run_op(inputs, case, backend="reference")
    for x, y in zip((*out, out.dq_norm, out.dk_norm), (*expected, expected.dq_norm, expected.dk_norm)):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize("strategy", ["inline", "prepass"])
def test_a_row_that_is_not_finite_stays_in_its_row(strategy):
    case = replace(CASE, len_q=9)
    clean, soiled = make_inputs(case), make_inputs(case)
    soiled.q[0, 0, 4, 3] = math.inf
    out, expected = (run_op(inputs, case, backend="triton", strategy=strategy) for inputs in (soiled, clean))
    others = [i for i in range(9) if i != 4]
    for x, y in ((out.o, expected.o), (out.dq, expected.dq)):
        assert x[0, 0, 4].isnan().all() and torch.equal(x[0, 0, others], y[0, 0, others])
        assert torch.equal(x[0, 1], y[0, 1])


@interpreted
@pytest.mark.unpoisoned
def test_opcheck():
    inputs = make_inputs(CASE)
    arguments = operator_arguments(inputs, CASE, strategy="prepass")
    forward, backward = OPERATORS.attention_forward.default, OPERATORS.attention_backward.default
    o, lse, _ = forward(*arguments)
    torch.library.opcheck(forward, arguments)
    torch.library.opcheck(backward, (inputs.do, o, lse, False, *arguments))
    leaves = [
        x.detach().clone().requires_grad_() if i < 3 or x is not None and x.shape == (16,) else x
        for i, x in enumerate(arguments[:14])
    ]
    torch.library.opcheck(forward, (*leaves, *arguments[14:]), test_utils="test_aot_dispatch_dynamic")


@interpreted
@pytest.mark.unpoisoned
def test_compile():
    """One graph for all lengths, forward and backward, equal to eager, in which a rotated copy is saved."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(q, k, v, cos, sin, q_norm, k_norm, **options):
        return rope_attention(2 * q, k, v, cos, sin, q_norm=q_norm, k_norm=k_norm, backend="triton", **options) + 1

    frames = []
    for len_q, len_k in ((5, 9), (7, 12), (6, 33)):
        tensors, options = given(replace(CASE, len_q=len_q, len_k=len_k))
        found = compiled(**tensors, **options)
        eager = rope_attention(**tensors | {"q": 2 * tensors["q"]}, **options, backend="triton") + 1
        for x, y in zip((found, *gradients(found, tensors)), (eager, *gradients(eager, tensors)), strict=True):
            assert_close(x.detach(), y.detach().double(), 1e-5)
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1]


@interpreted
def test_a_backward_pass_through_the_dispatcher():
    """A mode sees one operator, which takes what was saved, and gives what the kernels give without it."""
    tensors, options = given()
    o = rope_attention(**tensors, **options, backend="triton", strategy="prepass")
    expected = torch.autograd.grad(o.square().sum(), list(tensors.values()), retain_graph=True)
    with Record() as record:
        found = torch.autograd.grad(o.square().sum(), list(tensors.values()), create_graph=True)
    assert [name for name in record.operators if "attention" in name] == ["fused_rope_attn.attention_backward.default"]
    assert_equal(found, expected)
    with pytest.raises(NotImplementedError, match="double backward"):
        found[3].sum().backward()


@interpreted
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    tensors, options = given()
    o = checkpoint(
        lambda *some: rope_attention(**dict(zip(NAMES, some)), **options, backend="triton"),
        *tensors.values(),
        use_reentrant=use_reentrant,
    )
    expected = gradients(rope_attention(**tensors, **options, backend="triton"), tensors)
    (o * normal(*o.shape, seed=7).to(o.dtype)).sum().backward()
    assert_equal([x.grad for x in tensors.values()], expected)


@interpreted
def test_autocast_leaves_the_weights_alone():
    tensors, options = given()
    with torch.autocast("cpu", F16):
        o = rope_attention(**tensors, **options, backend="triton")
    halves = {name: x.detach().to(F16) if name in "qkv" else x.detach() for name, x in tensors.items()}
    assert o.dtype == F16 and torch.equal(o, rope_attention(**halves, **options, backend="triton"))
    found = torch.autograd.grad(o.sum(), list(tensors.values()))
    assert all(x.dtype == F32 and x.abs().sum() > 0 for x in found)


@interpreted
def test_weights_without_unit_strides():
    tensors, options = given(wanted=())
    expected = rope_attention(**tensors, **options, backend="triton")
    apart = {name: x.repeat_interleave(2)[::2] if x.ndim == 1 else x for name, x in tensors.items()}
    assert torch.equal(rope_attention(**apart, **options, backend="triton"), expected)


@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_a_plan_of_sm_90_does_not_ask_for_norms(arch, head_dim):
    """Whoever rotates the queries norms them."""
    given = call(4096, head_dim=head_dim, backend="hopper")
    assert plan_of(given | {"norm_eps": 1e-6, "norm_offset": 0.0}) == plan_of(given)


def test_refusals_and_plan():
    tensors, options = given(wanted=())
    assert plan(**tensors, **options).backend == "reference"
    packed = {name: x[0, :, :7].transpose(0, 1) if x.ndim == 4 else x for name, x in tensors.items()}
    ends = torch.tensor([0, 7], dtype=torch.int32)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 7, "max_seqlen_k": 7}
    assert rope_attention_varlen(**packed, **lengths, **options).shape == (7, 2, 16)
    for function, right in ((rope_attention, tensors), (plan, tensors), (rope_attention_varlen, packed | lengths)):
        for wrong, error, match in (
            ({"k_norm": None}, ValueError, "k_norm must be given"),
            ({"q_norm": torch.ones(8)}, ValueError, r"q_norm must have shape \(D,\)"),
            ({"q_norm": torch.ones(16, dtype=F16)}, TypeError, "q_norm must be float32"),
            ({"norm_eps": -1.0}, ValueError, "norm_eps must be at least 0"),
        ):
            with pytest.raises(error, match=match):
                function(**right | options | wrong)
