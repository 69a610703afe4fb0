"""Bounds of keys and of packed sequences that cannot be, and that the host cannot read, are harmless."""

import math
import os
import subprocess
import sys

import pytest
import torch

import fused_rope_attn as package
from fused_rope_attn import rope_attention, rope_attention_varlen
from tests.support.attention import packed
from tests.support.dtypes import BF16, F32
from tests.support.internals import ARGUMENT_OF_MAX_LOGIT, OPERATORS, operator_arguments
from tests.support.marks import STRATEGIES, ignore_overflow, interpreted
from tests.support.operators import assert_close, kernel_or_reference
from tests.support.paths import ROOT
from tests.support.places import both_backends
from verification.testing import Case, make_inputs, reference_attention

pytestmark = ignore_overflow


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("name", ["apply_rope", "apply_rope_qk", "write_kvcache"])
def test_the_host_refuses_wrong_ends(name):
    """Ends before the last token are legal; tests/attention/test_validation.py has attention's refusals."""
    x, tables, pool = torch.randn(20, 2, 16), torch.randn(2, 32, 8), torch.randn(2, 2, 32, 16)
    given = {"apply_rope": (x,), "apply_rope_qk": (x, x), "write_kvcache": (x, x, pool, pool.clone())}[name]
    options = {} if name == "write_kvcache" else {"layout": "thd"}
    getattr(package, name)(*given, *tables, cu_seqlens=int32([0, 7, 13]), **options)
    with pytest.raises(ValueError, match="^cu_seqlens must end at or before .*'s 20 tokens, but ends at 21"):
        getattr(package, name)(*given, *tables, cu_seqlens=int32([0, 11, 21]), **options)


PACKED = packed((9, 5, 6), dtype=F32, sinks=True)


@interpreted
@pytest.mark.parametrize("strategy", [*STRATEGIES, "reference"])
@pytest.mark.parametrize("wrong", [(8,), (9,), (8, 9)], ids=["q", "k", "both"])
@pytest.mark.parametrize("ends", [[3, 9, 14, 20], [0, 14, 9, 20], [0, 9, 14, 27]], ids=str)
def test_no_row_is_one_of_a_sequence_where_ends_are_wrong(ends, wrong, strategy):
    """Call the operators and the reference, because the public function refuses such CPU tensors. Fresh memory is NaN
    here: every row must be 0, and none as the memory was."""
    inputs = make_inputs(PACKED)
    arguments = operator_arguments(inputs, PACKED, strategy="auto" if strategy == "reference" else strategy)
    for place in wrong:
        assert arguments[place].tolist() == [0, 9, 14, 20]
        arguments[place] = int32(ends)
    if strategy == "reference":
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        options = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), arguments[8:10])) | {"softmax_scale": 0.3}
        options |= {"rotary_dim": 16, "return_max_logit": True}
        o, lse, max_logit = reference_attention(*leaves, inputs.cos, inputs.sin, True, **options)
        gradients = torch.autograd.grad(o, leaves, inputs.do)
    else:
        arguments[ARGUMENT_OF_MAX_LOGIT] = True
        o, lse, max_logit = OPERATORS.attention_forward(*arguments)
        gradients = OPERATORS.attention_backward(inputs.do, o, lse, False, *arguments)[:4]
    assert max_logit.shape == (3, PACKED.heads_q)
    assert bool((lse == -math.inf).all()) and bool((max_logit == -math.inf).all())
    assert not any(bool(x.any()) for x in (o, *gradients))


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


@both_backends
@pytest.mark.parametrize("ends", [[12, 300, 700], [0, 500, 300], [300, 200, 200], [0, 300, 720], [0, -4, 700]], ids=str)
def test_every_row_is_written_on_a_gpu(ends, chosen):
    """The ends of q, of k, and of both are wrong."""
    leaves = [torch.randn(700, heads, 128, device="cuda", dtype=BF16).requires_grad_() for heads in (8, 2, 2)]
    table = torch.randn(700, 64, device="cuda")
    good, bad = (int32(x).cuda() for x in ([0, 300, 700], ends))
    for both in ((bad, good), (good, bad), (bad, bad)):
        o, lse = rope_attention_varlen(*leaves, table, table, *both, 700, 700, True, **chosen, return_lse=True)
        assert not any(bool(x.any()) for x in (o, *torch.autograd.grad(o, leaves, torch.randn_like(o))))
        assert bool((lse == -math.inf).all())


@pytest.mark.gpu
def test_an_assertion_can_be_asked_for():
    """In a process of its own, because the assertion ends the use of the GPU."""
    program = """
import torch
from fused_rope_attn import rope_attention_varlen
q = torch.randn(700, 4, 64, device="cuda", dtype=torch.bfloat16)
table = torch.ones(700, 32, device="cuda")
ends = torch.tensor([0, 500, 300], dtype=torch.int32, device="cuda")
rope_attention_varlen(q, q, q, table, table, ends, ends, 700, 700, True, backend="triton")
torch.cuda.synchronize()
"""
    environment = os.environ | {"TRITON_DEBUG": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    # The text of the assertion is lost if the process ends before the driver prints it.
    assert result.returncode != 0 and "device-side assert" in result.stderr
