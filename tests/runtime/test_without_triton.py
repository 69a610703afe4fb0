"""Without Triton (macOS, Windows) the package imports and the reference serves every public function."""

import pytest

from tests.support.paths import python

# Python raises ModuleNotFoundError for a module, and for everything below it, if its entry in sys.modules is None.
PROGRAM = """
import sys
sys.modules["triton"] = None
import torch
import fused_rope_attn
from fused_rope_attn.env import environment
from verification.calls import Machine
from verification.strategies import FAMILIES, draw

for name in fused_rope_attn.__all__:
    getattr(fused_rope_attn, name)
assert not any(name.startswith("triton.") for name in sys.modules)
machine = Machine("cpu", "", ("float32",), ("reference",))
for family in FAMILIES.values():
    for seed in range(6):
        call = draw(family.calls_of(draw(family.prototypes(machine), seed), machine), seed)
        wrong = [finding for finding in call.run(machine) if not finding.ok]
        assert not wrong, (call, wrong)
assert environment()["plan"].get("backend") == "reference"

# The message does not say that there is no GPU, because a user would then look for one in vain.
q, (cos, sin) = torch.randn(1, 2, 5, 32), fused_rope_attn.rope_tables(5, 32)
for backend in ("triton", "hopper"):
    try:
        fused_rope_attn.rope_attention(q, q, q, cos, sin, backend=backend)
    except RuntimeError as error:
        assert "the package triton, which is not installed" in str(error), error
    else:
        raise AssertionError(f"{backend}: no error")
chosen = fused_rope_attn.plan(q, q, q, cos, sin)
assert chosen.backend == "reference" and chosen.reason, chosen
"""


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_without_triton(interpret):
    """Random calls of every family against float64; kernels say what is missing, and the plan goes without."""
    result = python("-c", PROGRAM, TRITON_INTERPRET=interpret, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
