"""On a GPU: cu_seqlens that cannot be leave no row as the memory was, and trip an assertion where it is asked for."""

import math
import os
import subprocess
import sys

import pytest
import torch

from fused_rope_attn import rope_attention_varlen
from tests.support.dtypes import BF16
from tests.support.gpu import is_sm_90
from tests.support.paths import ROOT

pytestmark = pytest.mark.gpu

TOKENS = 700
WRONG = ([12, 300, 700], [0, 500, 300], [300, 200, 200], [0, 300, 720], [0, -4, 700])
_ASSERTS = """
import torch
from fused_rope_attn import rope_attention_varlen
q = torch.randn(700, 4, 64, device="cuda", dtype=torch.bfloat16)
table = torch.ones(700, 32, device="cuda")
ends = torch.tensor([0, 500, 300], dtype=torch.int32, device="cuda")
rope_attention_varlen(q, q, q, table, table, ends, ends, 700, 700, True, backend="triton")
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("wrong", ["q", "k", "both"])
@pytest.mark.parametrize("ends", WRONG, ids=str)
def test_every_row_is_written(ends, wrong, backend):
    """Fresh memory is NaN here: o and the gradients are 0, lse is -inf."""
    if backend == "hopper" and not is_sm_90():
        pytest.skip("needs an sm_90 GPU")
    q, k, v, do = (torch.randn(TOKENS, heads, 128, device="cuda", dtype=BF16) for heads in (8, 2, 2, 8))
    table = torch.randn(TOKENS, 64, device="cuda")
    good = torch.tensor([0, 300, TOKENS], dtype=torch.int32, device="cuda")
    bad = torch.tensor(ends, dtype=torch.int32, device="cuda")
    ends_q, ends_k = bad if wrong in ("q", "both") else good, bad if wrong in ("k", "both") else good
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = rope_attention_varlen(
        *leaves, table, table, ends_q, ends_k, TOKENS, TOKENS, True, backend=backend, return_lse=True
    )
    for x in (o, *torch.autograd.grad(o, leaves, do)):
        assert not bool(x.any())
    assert bool((lse == -math.inf).all())


def test_an_assertion_can_be_asked_for():
    """In a process of its own, because the assertion ends the use of the GPU."""
    result = subprocess.run(
        [sys.executable, "-c", _ASSERTS],
        env=os.environ | {"TRITON_DEBUG": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    # The text of the assertion is lost if the process ends before the driver prints it.
    assert "device-side assert" in result.stderr
