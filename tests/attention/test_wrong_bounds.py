"""Bounds of keys and of packed sequences that cannot be: refused where the host can read them, harmless elsewhere."""

import math

import pytest
import torch

from fused_rope_attn import apply_rope, apply_rope_qk, rope_attention, rope_attention_varlen, write_kvcache
from tests.support.attention import packed
from tests.support.dtypes import F32
from tests.support.internals import ARGUMENT_OF_MAX_LOGIT, OPERATORS, operator_arguments
from tests.support.marks import both_strategies, ignore_overflow, interpreted
from tests.support.operators import assert_close, kernel_or_reference
from verification.testing import Case, make_inputs, reference_attention

pytestmark = ignore_overflow

# cu_seqlens of 20 tokens, and the refusal that they get.
WRONG = (
    ([12, 8], "must begin with 0, but begins with 12"),
    ([3, 11, 20], "must begin with 0, but begins with 3"),
    ([0, 12, 8], "must never fall, but 8 follows 12"),
    ([0, -4, 20], "must never fall, but -4 follows 0"),
    ([0, 11, 21], "must end at or before .*'s 20 tokens, but ends at 21"),
)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def all_of_packed(ends):
    """Every public function that takes cu_seqlens, by that argument and the tensor that it divides."""
    x, pool = torch.randn(20, 2, 16), torch.randn(len(ends) - 1, 2, 32, 16)
    cos, sin = torch.randn(2, 32, 8)
    good, bad = int32([0] * (len(ends) - 1) + [20]), int32(ends)
    return {
        "cu_seqlens_q": lambda: rope_attention_varlen(x, x, x, cos, sin, bad, good, 20, 20),
        "cu_seqlens_k": lambda: rope_attention_varlen(x, x, x, cos, sin, good, bad, 3, 20),  # max_seqlen_q is no bound
        "cu_seqlens": lambda: apply_rope(x, cos, sin, layout="thd", cu_seqlens=bad),
        "cu_seqlens of two": lambda: apply_rope_qk(x, x, cos, sin, layout="thd", cu_seqlens=bad),
        "cu_seqlens of a cache": lambda: write_kvcache(x, x, pool, pool.clone(), cos, sin, cu_seqlens=bad),
    }


@pytest.mark.parametrize("function", all_of_packed([0, 20]))
def test_the_host_refuses_wrong_ends(function):
    for ends, message in WRONG:
        with pytest.raises(ValueError, match=f"^{function.partition(' ')[0]} {message}"):
            all_of_packed(ends)[function]()
    all_of_packed([0, 7, 13])[function]()  # ends before the last token are legal


PACKED = packed((9, 5, 6), dtype=F32, sinks=True)


def assert_nothing_is_seen(lse, max_logit, *others):
    assert bool((lse == -math.inf).all()) and bool((max_logit == -math.inf).all())
    assert not any(bool(x.any()) for x in others), "every row is 0, and none is left as the memory was"


@interpreted
@both_strategies
@pytest.mark.parametrize("wrong", [(8,), (9,), (8, 9)], ids=["q", "k", "both"])
@pytest.mark.parametrize(
    "ends", [[3, 9, 14, 20], [9, 5, 6, 0], [0, 14, 9, 20], [0, 9, 14, 27], [0, -2, 14, 20]], ids=str
)
def test_kernels_take_no_row_for_one_of_a_sequence_where_ends_are_wrong(ends, wrong, strategy):
    """Call the operators, because the public function refuses such CPU tensors. Fresh memory is NaN here."""
    inputs = make_inputs(PACKED)
    arguments = operator_arguments(inputs, PACKED, strategy=strategy)
    for place in wrong:
        assert arguments[place].tolist() == [0, 9, 14, 20]
        arguments[place] = int32(ends)
    arguments[ARGUMENT_OF_MAX_LOGIT] = True
    o, lse, max_logit = OPERATORS.attention_forward(*arguments)
    assert max_logit.shape == (3, PACKED.heads_q)
    gradients = OPERATORS.attention_backward(inputs.do, o, lse, False, *arguments)
    assert_nothing_is_seen(lse, max_logit, o, *gradients[:4])


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("ends", [ends for ends, _ in WRONG], ids=str)
def test_the_reference_does_so_too(ends, wrong):
    inputs = make_inputs(packed((20,), dtype=F32))
    given = [x.detach().requires_grad_() for x in inputs[:3]]
    both = [int32([0] * (len(ends) - 1) + [20])] * 2
    both[wrong] = int32(ends)
    options = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), both)) | {"return_max_logit": True}
    o, lse, max_logit = reference_attention(
        *given, inputs.cos, inputs.sin, True, softmax_scale=0.3, rotary_dim=16, **options
    )
    assert_nothing_is_seen(lse, max_logit, o, *torch.autograd.grad(o, given, inputs.do))


@kernel_or_reference("triton", "reference")
@pytest.mark.parametrize("causal", [True, False])
def test_lengths_of_keys_that_cannot_be_are_clamped(causal, backend):
    """Negative ones mean no keys, those beyond NK all of them: values, gradients, and no NaN."""
    inputs = make_inputs(Case(4, 2, 1, 5, 9, 16, dtype=F32, causal=causal))

    def run(lens, starts):
        given = [x.detach().clone().requires_grad_() for x in inputs[:3]]
        bounds = {"kv_lens": int32(lens), "kv_starts": int32(starts)}
        o, lse = rope_attention(*given, inputs.cos, inputs.sin, causal, **bounds, backend=backend, return_lse=True)
        return lse, o, *torch.autograd.grad(o, given, inputs.do)

    found = run([-1, -(2**31), 10, 2**31 - 1], [-7, 0, -(2**31), 0])
    assert_close(found, run([0, 0, 9, 9], [0, 0, 0, 0]), 0.0)
    assert not any(bool(x.isnan().any()) for x in found)
    for lse, *others in (found, run([9] * 4, [9, 2**31 - 1, 0, 0])):  # or keys begin after the last one
        assert bool((lse[:2] == -math.inf).all()) and not any(bool(x[:2].any()) for x in others)
