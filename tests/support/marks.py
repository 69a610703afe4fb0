"""Marks that many test modules use: where a test can run, over what it is repeated, which warnings say nothing."""

import pytest

from fused_rope_attn.runtime.device import is_interpreted

# Tests of the portable kernels on CPU tensors. The *_gpu.py files next to them hold the same kernels on a GPU.
interpreted = pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1")
# NumPy warns of the rows and columns of a tile that are out of bounds; their values are never stored.
ignore_overflow = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

STRATEGIES = ("inline", "prepass")
both_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def cases(*rows):
    """Repeat a test for these cases (``verification.testing.Case``, or any other with a name)."""
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in rows])
