"""Wrong values on a GPU trip an assertion on the device, which ends the process's CUDA context."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from fused_rope_attn import masks

def function(x):
    return {call}


right, wrong = torch.tensor({right}, device="cuda"), torch.tensor({wrong}, device="cuda")
torch.cuda.set_sync_debug_mode("error")
function(right)
print("did not wait")
function(wrong)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("call", "right", "wrong"),
    [
        ("masks.documents(x, 9)", [0, 4, 9], [5, 4, 3]),
        ("masks.prefix_lm(x, 9)", [3, 9], [3, -1]),
        ("masks.bidirectional_blocks(x[None])", [0, 0, 1], [0, 1, 0]),
    ],
)
def test_wrong_values(call, right, wrong):
    command = [sys.executable, "-c", PROGRAM.format(call=call, right=right, wrong=wrong)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "did not wait" in done.stdout and done.returncode != 0
    assert "device-side assert" in done.stderr
