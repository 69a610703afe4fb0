"""A call that was seen before is not examined again, and one that differs in anything is. On a GPU its launches are
replayed, and give what they give when every launch is made anew."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from fused_rope_attn import rope_attention
from fused_rope_attn.attention import api, ops
from fused_rope_attn.runtime.launch import Launch
from tests.support.attention import assert_equal
from tests.support.dtypes import F32
from tests.support.gpu import ODD_LENGTHS, assert_alike, misaligned
from tests.support.marks import interpreted
from tests.support.places import INLINE, ON_SM_90, PREPASS, needs_sm_90
from verification.attention import AttentionCheck
from verification.calls import refusal
from verification.refusals import MUTATIONS
from verification.testing import Case, make_inputs, masks_of, norms_of

CASE = Case(1, 2, 1, 16, 16, 16, seed=3)
INPUTS = make_inputs(CASE)
NORMS = {"q_norm": torch.full((16,), 2.0), "k_norm": torch.ones(16)}


@pytest.fixture
def examined(monkeypatch):
    """A list that grows with every call that is examined; nothing is known at first."""
    ops.forget()
    seen, describe = [], api.describe_call
    monkeypatch.setattr(api, "describe_call", lambda *a, **options: seen.append(options) or describe(*a, **options))
    yield seen
    ops.forget()


def call(inputs=INPUTS, causal=True, **options):
    return rope_attention(*inputs[:5], causal, **{"backend": "triton", **options})


@interpreted
def test_a_known_call_gives_what_an_examined_one_gives(examined):
    others = make_inputs(replace(CASE, seed=4))
    expected, found = call(others), []
    assert not torch.equal(expected, call())
    for _ in range(3):
        q, k, v = (x.detach().clone().requires_grad_() for x in others[:3])
        o = call(others._replace(q=q, k=k, v=v))
        assert torch.equal(o, expected) and torch.equal(call(others), expected)
        found.append(torch.autograd.grad(o, (q, k, v), others.do))
    assert len(examined) == 1 and all(bool(x.any()) for x in found[0])
    assert_equal(found[0] + found[0], found[1] + found[2])
    for _ in range(2):
        assert_equal(call(others, return_lse=True)[:1], [expected])
    assert len(examined) == 2


@interpreted
def test_a_known_call_in_the_other_layout(examined):
    """Its sizes are those of a call in the first layout with heads for positions: both are examined."""
    swapped = INPUTS._replace(**{name: getattr(INPUTS, name).transpose(1, 2) for name in ("q", "k", "v")})
    call()
    for _ in range(3):
        o, lse = call(swapped, layout="bshd", return_lse=True)
        assert o.shape == (1, 16, 2, 16) and lse.shape == (1, 2, 16) and torch.equal(o.transpose(1, 2), call())
    assert len(examined) == 2


DIFFERENT = [
    {"causal": False}, {"softmax_scale": 0.5}, {"softcap": 2.0}, {"window": (4, 0)}, {"sinks": torch.ones(2)},
    {"strategy": "inline"}, NORMS, NORMS | {"q_norm": NORMS["q_norm"].half()}, NORMS | {"norm_offset": 1.0},
    NORMS | {"norm_eps": 0.5}, {"kv_lens": torch.tensor([7], dtype=torch.int32)},
    {"query_starts": torch.zeros((1, 16), dtype=torch.int32)},
    {"query_ends": torch.full((1, 16), 9, dtype=torch.int32)},
    *({"inputs": make_inputs(replace(CASE, **x))} for x in ({"rotary_dim": 8}, {"dtype": F32}, {"len_q": 15})),
]  # fmt: skip


@interpreted
@pytest.mark.parametrize("options", DIFFERENT, ids=lambda x: ", ".join(x))
def test_another_call_is_examined(examined, options):
    call()
    first = call(**options)
    assert len(examined) == 2 and torch.equal(call(**options), first) and len(examined) == 2


@interpreted
def test_a_wrong_call_is_refused_next_to_a_known_one(examined):
    """The right calls that these are mistaken for, by equality of Python values, are known."""
    right = AttentionCheck(1, 2, 1, 16, 16, 16, window=(1, 0), sinks=True, norms=0.0)
    function, given = right.arguments("cpu")
    given |= {"backend": "triton"}
    function(**given)
    with forward_ad.dual_level():
        for mutation in MUTATIONS:
            if mutation.applies(given):
                illegal = given | mutation.change(given)
                finding = refusal(mutation.name, function, illegal, mutation.error, mutation.words)
                assert finding.ok, finding
    for options in ({"causal": np.True_}, {"strategy": ["auto"]}, {"softcap": False}):
        call()
        with pytest.raises(TypeError, match=next(iter(options))):
            call(**options)


@interpreted
def test_what_torch_is_told_counts(examined):
    call()
    torch.use_deterministic_algorithms(True)
    try:
        call()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(examined) == 2
    with torch.autocast("cpu", torch.float16):
        assert call().dtype == torch.float16
    assert len(examined) == 3


PLAIN = Case(1, 4, 4, 128, 128, 64)
# (case, options): after the calls that are recorded, none of these launches a kernel by itself.
REPLAYED = {
    "inline": (PLAIN, INLINE),
    "pre-pass": (ODD_LENGTHS, PREPASS),
    "lengths": (replace(ODD_LENGTHS, kv_lens=(400, 500)), {"backend": "triton"}),
    "norms": (replace(PLAIN, norms=0.0), {"backend": "triton"}),
    "chosen": (PLAIN, {}),
    "sm_90": (ODD_LENGTHS, ON_SM_90),
    "sm_90, a narrow window": (replace(ODD_LENGTHS, window=(40, 0)), ON_SM_90),
    "sm_90, wide heads": (replace(ODD_LENGTHS, head_dim=192), ON_SM_90),
    "sm_90, norms": (replace(ODD_LENGTHS, norms=1.0), ON_SM_90),
}


@pytest.mark.parametrize(
    ("case", "chosen"),
    [pytest.param(*of, id=name, marks=needs_sm_90 if of[1] is ON_SM_90 else pytest.mark.gpu)
     for name, of in REPLAYED.items()],
)  # fmt: skip
def test_replays_give_what_launches_give(case, chosen, monkeypatch):
    """Also with gradients of o of other strides, and with saved tensors that hooks have moved: other calls."""

    def make(seed):
        inputs = make_inputs(replace(case, seed=seed), "cuda")
        options = masks_of(case, "cuda") | norms_of(case, "cuda") | chosen

        def step(do=inputs.do):
            alone = rope_attention(*inputs[:5], True, **options)
            q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
            o, lse = rope_attention(q, k, v, inputs.cos, inputs.sin, True, return_lse=True, **options)
            return o.detach(), lse, *torch.autograd.grad(o, (q, k, v), do), alone

        return step, inputs.do

    compare = assert_equal if chosen.get("backend") == "triton" else assert_alike
    steps = [make(seed) for seed in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(ops, "find", lambda *arguments: None)
        expected = [[x.clone() for x in step()] for step, _ in steps]
    for _ in range(3):
        steps[0][0]()
    with monkeypatch.context() as patched:
        patched.setattr(Launch, "__call__", None)
        for seed in (1, 2, 0, 1):
            compare(steps[seed][0](), expected[seed])
    step, do = steps[1]
    apart = do.repeat_interleave(2, -1)[..., ::2]
    for other in (do.transpose(1, 2).contiguous().transpose(1, 2), apart, misaligned(do)):
        for _ in range(4):
            assert_alike(step(other), expected[1])
    for unpack in (misaligned, torch.Tensor.contiguous):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            assert_alike(step(), expected[1])
    ops.forget()
