"""The same bits of a row in any batch, pack, chunk and cache, on a GPU. ``SAME_BITS_PAIRS`` asks for more pairs."""

import os
import random

import pytest

from tests.support.dtypes import BF16, F16
from tests.support.hopper import needs_sm_90
from tests.support.same_bits import WAYS, differing_rows, drawn

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=needs_sm_90)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
def test_rows_have_the_same_bits(backend, head_dim, dtype):
    longest = random.Random(head_dim)
    for seed in range(int(os.environ.get("SAME_BITS_PAIRS", 10))):
        most = longest.choice([100, 1000, 1000, 4000, 20000])
        call, draw = drawn(seed, "cuda", dtype, head_dim, most, backend)
        for way in WAYS:
            assert differing_rows(call, way, draw) == 0, (seed, way.__name__, call.q.shape, call.options)
