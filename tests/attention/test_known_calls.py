"""A call that was seen before is not examined again, and one that differs in anything is."""

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from fused_rope_attn import rope_attention
from fused_rope_attn.attention import api, ops
from tests.support.attention import assert_equal
from tests.support.marks import interpreted
from verification.attention import AttentionCheck
from verification.calls import refusal
from verification.refusals import MUTATIONS
from verification.testing import Case, make_inputs

pytestmark = interpreted
INPUTS = make_inputs(Case(1, 2, 1, 16, 16, 16, seed=3))
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


def test_a_known_call_gives_what_an_examined_one_gives(examined):
    """A call is known with its gradients and without, and for other tensors of the same signature."""
    others = make_inputs(Case(1, 2, 1, 16, 16, 16, seed=4))
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


def test_a_known_call_in_the_other_layout(examined):
    """Its sizes are those of a call in the first layout with heads for positions: both are examined."""
    swapped = INPUTS._replace(**{name: getattr(INPUTS, name).transpose(1, 2) for name in ("q", "k", "v")})
    call()
    for _ in range(3):
        o, lse = call(swapped, layout="bshd", return_lse=True)
        assert o.shape == (1, 16, 2, 16) and lse.shape == (1, 2, 16) and torch.equal(o.transpose(1, 2), call())
    assert len(examined) == 2


DIFFERENT = {
    "causal": {"causal": False},
    "scale": {"softmax_scale": 0.5},
    "cap": {"softcap": 2.0},
    "window": {"window": (4, 0)},
    "sinks": {"sinks": torch.ones(2)},
    "strategy": {"strategy": "inline"},
    "norms": NORMS,
    "norms of another dtype": NORMS | {"q_norm": NORMS["q_norm"].half()},
    "norms with an offset": NORMS | {"norm_offset": 1.0},
    "norms with an eps": NORMS | {"norm_eps": 0.5},
    "lens": {"kv_lens": torch.tensor([7], dtype=torch.int32)},
    "query_starts": {"query_starts": torch.zeros((1, 16), dtype=torch.int32)},
    "query_ends": {"query_ends": torch.full((1, 16), 9, dtype=torch.int32)},
    "tables": {"inputs": make_inputs(Case(1, 2, 1, 16, 16, 16, rotary_dim=8))},
    "dtype": {"inputs": make_inputs(Case(1, 2, 1, 16, 16, 16, dtype=torch.float32))},
    "length": {"inputs": make_inputs(Case(1, 2, 1, 15, 16, 16))},
}


@pytest.mark.parametrize("options", DIFFERENT.values(), ids=DIFFERENT)
def test_another_call_is_examined(examined, options):
    call()
    first = call(**options)
    assert len(examined) == 2 and torch.equal(call(**options), first) and len(examined) == 2


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
                finding = refusal("triton", mutation.name, function, illegal, mutation.error, mutation.words)
                assert finding.found.ok, finding.found
    call()
    for options, match in (({"causal": np.True_}, "causal"), ({"window": (True, False)}, "window"),
                           ({"strategy": ["auto"]}, "strategy"), ({"softcap": False}, "softcap")):  # fmt: skip
        with pytest.raises(TypeError, match=match):
            call(**options)


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
