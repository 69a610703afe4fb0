"""On a GPU: cu_seqlens that cannot be leave no row as the memory was, and trip an assertion where it is asked for."""

import math
import os
import subprocess
import sys

import pytest
import torch

from fused_rope_attn import rope_attention_varlen
from tests.support.dtypes import BF16
from tests.support.paths import ROOT
from tests.support.places import both_backends

pytestmark = pytest.mark.gpu
TOKENS = 700


@both_backends
@pytest.mark.parametrize("ends", [[12, 300, 700], [0, 500, 300], [300, 200, 200], [0, 300, 720], [0, -4, 700]], ids=str)
def test_every_row_is_written(ends, chosen):
    """Fresh memory is NaN here: o and the gradients are 0, lse is -inf. The ends of q, of k, and of both are wrong."""
    leaves = [torch.randn(TOKENS, heads, 128, device="cuda", dtype=BF16).requires_grad_() for heads in (8, 2, 2)]
    table = torch.randn(TOKENS, 64, device="cuda")
    good, bad = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 300, TOKENS], ends))
    for both in ((bad, good), (good, bad), (bad, bad)):
        given = (*leaves, table, table, *both, TOKENS, TOKENS, True)
        o, lse = rope_attention_varlen(*given, **chosen, return_lse=True)
        for x in (o, *torch.autograd.grad(o, leaves, torch.randn_like(o))):
            assert not bool(x.any())
        assert bool((lse == -math.inf).all())


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
