"""Context parallelism on 2 and 4 GPUs by NCCL: bits of one GPU, float64, repeats, delays, streams, graphs, compiled
calls, memory.

One test for each number of GPUs, which runs all checks in one pool of processes and names all that fail: of many tests
every worker of ``pytest -n`` would begin a pool of its own on the same GPUs.
"""

from dataclasses import replace

import pytest
import torch

from tests.support import cp_gpu
from tests.support.context_parallel import judge
from tests.support.dtypes import BF16
from verification.context_parallel import attend, dealt, joined
from verification.ranks import Ranks
from verification.testing import Case

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]
# Few kernels, since every process compiles them; ``python -m verification --cp`` has all features.
LONG = Case(1, 8, 2, 8192, 8192, 128, dtype=BF16)
SHORT = replace(LONG, len_q=1024, len_k=1024)
EVEN = Case(1, 8, 2, 1024, 1024, 128, dtype=BF16, seqlens=tuple((n, n) for n in (1, 300, 0, 77, 616, 30)))
PACKED = Case(1, 8, 2, 1032, 1032, 128, dtype=BF16, seqlens=tuple((n, n) for n in (1, 300, 0, 77, 600, 30)))

BITS = [(LONG, "zigzag"), (LONG, "contiguous"), (LONG, "dealt"), (replace(LONG, window=(1000, 0)), "zigzag")]
NUMBERS = [
    (SHORT, {}),
    (SHORT, {"total_len": 801, "sharding": "contiguous"}),
    (replace(SHORT, heads_kv=4), {"method": "all_to_all"}),  # a head of keys for each rank
    (replace(SHORT, window=(100, 0), sinks=True), {}),
    # A rank gets two runs of keys from another one, which are not adjacent.
    (replace(SHORT, causal=False, window=(100, 100)), {}),
    (replace(SHORT, norms=1.0), {}),
    (PACKED, {}),
]


def bits(pool, members):
    uneven = [(replace(case, len_q=1840, len_k=1840), sharding, True) for case, sharding in BITS if case.causal]
    for case, sharding, invariant in [*((*row, False) for row in BITS), *uneven]:
        sharding = dealt(len(members)) if sharding == "dealt" else sharding
        for rank, same in enumerate(pool.results(cp_gpu.bits, case, members, sharding, invariant, ranks=members)):
            assert same == {"o": True, "lse": True}, f"{case.name} {sharding} {invariant}: rank {rank}: {same}"


def numbers(pool, members):
    for case, options in (*NUMBERS, (EVEN, {"sharding": dealt(len(members))})):
        parts = pool.results(attend, case, members, "cuda", options, ranks=members)
        judge(case, joined(parts, options.get("sharding", "zigzag")), options.get("total_len"), "cuda")


def repeats(pool, members):
    assert pool.results(cp_gpu.repeats, LONG, members, 20, ranks=members) == [[True] * 20] * len(members)


def a_late_rank(pool, members):
    for same, calls in pool.results(cp_gpu.delays, SHORT, members, 1000, 30.0, ranks=members):
        assert same and calls > 0


def late_inputs(pool, members):
    assert pool.results(cp_gpu.late_inputs, LONG, members, ranks=members) == [True] * len(members)


def graphs(pool, members):
    assert pool.results(cp_gpu.graph, LONG, members, ranks=members) == [True] * len(members)


def compiled(pool, members):
    for rank, same in enumerate(pool.results(cp_gpu.compiled, SHORT, members, ranks=members)):
        assert all(same.values()), f"rank {rank}: {same}"


def memory(pool, members):
    """Forward holds K and V of all ranks, and one more copy of their parts; backward their gradients in float32."""
    keys = 2 * LONG.len_k * LONG.heads_kv * LONG.head_dim * 2 / 2**20
    queries = LONG.len_q * LONG.heads_q * LONG.head_dim * 2 / 2**20 / len(members)
    for forward, backward in pool.results(cp_gpu.memory, LONG, members, ranks=members):
        assert forward <= 3.5 * keys + 3 * queries, (forward, keys, queries)
        assert backward <= 9 * keys + 8 * queries, (backward, keys, queries)


@pytest.mark.parametrize("size", [2, 4])
def test_several_gpus(size):
    if size > GPUS:
        pytest.skip(f"needs {size} GPUs, and here are {GPUS}")
    members, failures = tuple(range(size)), []
    pool = Ranks(size, "nccl")
    try:
        for check in (bits, numbers, repeats, a_late_rank, late_inputs, memory, graphs, compiled):
            try:
                check(pool, members)
            except TimeoutError:
                raise
            except Exception as error:
                failures.append(f"{check.__name__}: {type(error).__name__}: {error}")
    finally:
        pool.close()
    assert not failures, "\n".join(failures)
