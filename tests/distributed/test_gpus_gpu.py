"""Context parallelism on 2 and 4 GPUs by NCCL: bits of one GPU, float64, repeats, delays, streams, graphs, compiled
calls, memory.

One test for each number of GPUs, which runs all checks in one pool of processes and names all that fail: of many tests
every worker of ``pytest -n`` would begin a pool of its own on the same GPUs.
"""

from dataclasses import replace

import pytest
import torch

from tests.support import context_parallel as programs
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


def numbers(pool, members):
    for case, options in (*NUMBERS, (EVEN, {"sharding": dealt(len(members))})):
        parts = pool.results(attend, case, members, "cuda", options, ranks=members)
        programs.judge(case, joined(parts, options.get("sharding", "zigzag")), options.get("total_len"), "cuda")


def memory(pool, members):
    """Forward holds K and V of all ranks, and one more copy of their parts; backward their gradients in float32."""
    keys = 2 * LONG.len_k * LONG.heads_kv * LONG.head_dim * 2 / 2**20
    queries = LONG.len_q * LONG.heads_q * LONG.head_dim * 2 / 2**20 / len(members)
    for forward, backward in pool.results(programs.memory, LONG, members, ranks=members):
        assert forward <= 3.5 * keys + 3 * queries, (forward, keys, queries)
        assert backward <= 9 * keys + 8 * queries, (backward, keys, queries)


def checks_of(members):
    """(a program or check, what it is given): every rank of a program returns True, or several of them."""
    for case, sharding in BITS:
        sharding = dealt(len(members)) if sharding == "dealt" else sharding
        yield programs.has_bits_of_one_gpu, case, members, sharding, False
        yield programs.has_bits_of_one_gpu, replace(case, len_q=1840, len_k=1840), members, sharding, True
    yield (numbers,)
    yield programs.repeats, LONG, members, 20, 60.0, False
    yield programs.repeats, SHORT, members, 1000, 30.0, True
    yield programs.late_inputs, LONG, members
    yield (memory,)
    yield programs.graph, LONG, members
    yield programs.compiled, SHORT, members


@pytest.mark.parametrize("size", [2, 4])
def test_several_gpus(size):
    if size > GPUS:
        pytest.skip(f"needs {size} GPUs, and here are {GPUS}")
    members, failures = tuple(range(size)), []
    pool = Ranks(size, "nccl")
    try:
        for program, *given in checks_of(members):
            try:
                if not given:
                    program(pool, members)
                    continue
                for rank, found in enumerate(pool.results(program, *given, ranks=members)):
                    assert all([found] if isinstance(found, bool) else found), f"rank {rank}: {found}"
            except TimeoutError:
                raise
            except Exception as error:
                failures.append(f"{program.__name__} {given}: {type(error).__name__}: {error}")
    finally:
        pool.close()
    assert not failures, "\n".join(failures)
