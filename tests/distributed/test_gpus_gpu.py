"""Context parallelism on 2 and 4 GPUs by NCCL: bits of one GPU, float64, repeats, delays, streams, graphs, memory."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn.testing import Case
from tests.support import cp_features, cp_gpu
from tests.support.context_parallel import attend, joined, judge
from tests.support.dtypes import BF16, F16
from tests.support.ranks import Ranks

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]
SIZES = [2, 4] if GPUS >= 4 else [2]
LONG = Case(1, 8, 2, 8192, 8192, 128, dtype=BF16)
SMALL = Case(2, 8, 4, 1024, 1024, 64, dtype=BF16)
PACKED = Case(1, 8, 2, 1032, 1032, 128, dtype=BF16, seqlens=tuple((n, n) for n in (1, 300, 0, 77, 600, 30)))


@pytest.fixture(scope="module")
def gpus():
    pool = Ranks(4 if GPUS >= 4 else 2, "nccl")
    yield pool
    pool.close()


def members_of(size):
    return tuple(range(size))


BITS = [
    LONG,
    replace(LONG, window=(1000, 0)),
    replace(LONG, softcap=20.0, sinks=True),
    replace(LONG, head_dim=64, heads_kv=8, batch=2),
    replace(LONG, norms=0.0),
    replace(LONG, len_q=65536, len_k=65536, heads_q=4, heads_kv=1),
]


@pytest.mark.parametrize("sharding", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in BITS])
def test_bits_of_one_gpu(gpus, case, size, sharding):
    members = members_of(size)
    assert gpus.results(cp_gpu.bits, case, members, sharding, ranks=members) == [{"o": True, "lse": True}] * size


ROWS = [
    (SMALL, {}),
    (replace(SMALL, window=(100, 0), sinks=True), {"sharding": "contiguous"}),
    (replace(SMALL, dtype=F16, head_dim=128, softcap=5.0), {"total_len": 801}),
    (replace(SMALL, causal=False), {"local_tables": True}),
    (replace(SMALL, causal=False, window=(50, 30)), {}),
    (replace(SMALL, norms=1.0), {"deterministic": True}),
    (SMALL, {"method": "all_to_all"}),
    (replace(SMALL, head_dim=256, heads_kv=2), {}),
    (PACKED, {}),
    (replace(PACKED, head_dim=64, window=(64, 0), sinks=True), {}),
    (replace(PACKED, causal=False), {"sharding": "contiguous"}),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("case", "options"), ROWS, ids=[f"{case.name} {options}" for case, options in ROWS])
def test_numbers(gpus, case, options, size):
    members = members_of(size)
    parts = gpus.results(attend, case, members, "cuda", options, ranks=members)
    judge(case, joined(parts, options.get("sharding", "zigzag")), options.get("total_len"), "cuda")


@pytest.mark.parametrize("size", SIZES)
def test_repeats(gpus, size):
    members = members_of(size)
    assert gpus.results(cp_gpu.repeats, LONG, members, 20, ranks=members) == [[True] * 20] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_late_rank(gpus, size):
    members = members_of(size)
    for same, _ in gpus.results(cp_gpu.delays, SMALL, members, 1000, ranks=members):
        assert same


@pytest.mark.parametrize("size", SIZES)
def test_late_inputs(gpus, size):
    members = members_of(size)
    assert gpus.results(cp_gpu.late_inputs, LONG, members, ranks=members) == [True] * size


def test_graph(gpus):
    assert gpus.results(cp_gpu.graph, LONG, (0, 1), ranks=(0, 1)) == [True] * 2


@pytest.mark.parametrize("feature", ["compile", "checkpoint"])
def test_feature(gpus, feature):
    for expected, found in gpus.results(cp_features.plain_and, (0, 1), feature, "cuda", ranks=(0, 1)):
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_memory(gpus, size):
    """Forward holds K and V of all ranks, whose parts are copied once more; backward their gradients in float32."""
    members = members_of(size)
    keys = 2 * LONG.len_k * LONG.heads_kv * LONG.head_dim * 2 / 2**20
    queries = LONG.len_q * LONG.heads_q * LONG.head_dim * 2 / 2**20 / size
    for forward, backward in gpus.results(cp_gpu.memory, LONG, members, ranks=members):
        # o of the rank and of one piece; q rotated by the pre-pass, where it is.
        assert forward <= 3.5 * keys + 3 * queries, (forward, keys, queries)
        assert backward <= 9 * keys + 8 * queries, (backward, keys, queries)
