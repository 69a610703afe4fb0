"""Context parallelism on 2 and 4 GPUs by NCCL: bits of one GPU, float64, repeats, delays, streams, graphs, compiled
calls, memory.

One test for each number of GPUs, which runs all checks in one pool of processes and names all that fail: of many tests
every worker of ``pytest -n`` would begin a pool of its own on the same GPUs.
"""

import random
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fused_rope_attn import rope_attention
from fused_rope_attn.distributed import plan_varlen_cp
from tests.support.attention import assert_equal
from tests.support.context_parallel import Shard, judge
from tests.support.dtypes import BF16
from verification.context_parallel import attend, joined
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


def dealt(size):
    """A sharding of four chunks for each of P = ``size`` ranks, some of them adjacent."""
    return "dealt:" + ",".join(str((rank + turn) % size) for turn in range(4) for rank in range(size))


def has_bits_of_one_gpu(case, ranks, sharding, batch_invariant):
    """This rank's rows of o and lse have the bits of one GPU's call of the whole sequence."""
    shard = Shard(case, ranks, "cuda", sharding)
    options = {"return_lse": True, "batch_invariant": batch_invariant}
    found = shard(*shard.qkv, **options)
    whole = rope_attention(*shard.inputs[:5], case.causal, window=case.window, **options)
    assert_equal(found, map(shard.cut, whole))


def repeats(case, ranks, most, seconds, late):
    """Runs of both passes have the same bits: ``most`` of them, or fewer if so many seconds end before.

    late: one rank is late at random, on the host and on the GPU, and dq and dk, which are not asked to be
    deterministic, may differ.
    """
    shard, generator, start = Shard(case, ranks, "cuda"), random.Random(3), time.monotonic()
    first, wrong = None, torch.zeros((), device="cuda")
    for done in range(most):
        if done % 50 == 0:
            over = torch.tensor(float(time.monotonic() - start > seconds), device="cuda")
            dist.all_reduce(over, dist.ReduceOp.MAX, group=shard.group)
            if over.item():
                break
        chosen, microseconds = generator.randrange(len(ranks)), generator.choice((0, 0, 0, 50, 500, 2000))
        if late and chosen == shard.group.rank():
            time.sleep(microseconds * 1e-6)
            torch.cuda._sleep(1000 * microseconds)
        found = shard.both(deterministic=not late)
        found = found[::3] if late else found
        first = first or found
        for x, y in zip(first, found):
            wrong += (x != y).any()
    assert wrong == 0


def late_inputs(case, ranks):
    """Late inputs of a side stream are waited for, and results are those of the default stream."""
    shard, side = Shard(case, ranks, "cuda"), torch.cuda.Stream()
    expected = shard.both(deterministic=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late = [torch.full_like(x, float("nan")) for x in shard.qkv]
        torch.cuda._sleep(50_000_000)
        for x, y in zip(late, shard.qkv):
            x.copy_(y)
        found = shard.both(qkv=[x.detach().requires_grad_() for x in late], deterministic=True)
    side.synchronize()
    assert_equal(found, expected)


def graph(case, ranks):
    """A forward pass captured in a CUDA graph gives the eager one's bits, with other inputs."""
    shard = Shard(case, ranks, "cuda")
    static, side = [x.detach().clone() for x in shard.qkv], torch.cuda.Stream()
    with torch.no_grad():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                shard(*static)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        dist.barrier(shard.group)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            o = shard(*static)
        for x in static:
            x.mul_(0.5)
        captured.replay()
        assert torch.equal(o, shard(*static))


def compiled(case, ranks):
    """Graphs of whole calls, compiled for both passes, give the eager bits; packed, several plans."""
    shard = Shard(case, ranks, "cuda")

    def attend(q, k, v):
        return shard(q, k, v, deterministic=True)

    def attend_packed(q, k, v, plan):
        return shard.packed(plan, q, k, v)

    ends = [[0, case.len_k // n, case.len_k] for n in (3, 2)]
    plans = [plan_varlen_cp(each, group=shard.group, device="cuda") for each in ends]
    for function, *more in ((attend,), *((attend_packed, plan) for plan in plans)):
        graphs = torch.compile(function, fullgraph=True)
        assert_equal(*(shard.both(lambda *qkv, call=call: call(*qkv, *more)) for call in (graphs, function)))  # noqa: B023


def memory(case, ranks):
    """Forward holds K and V of all ranks, and one more copy of their parts; backward their gradients in float32."""
    shard = Shard(case, ranks, "cuda")
    shard.both()  # compiles
    keys, queries = (2 * case.head_dim * x for x in (2 * case.len_k * case.heads_kv, case.len_q * case.heads_q))
    queries /= len(ranks)
    kept = []
    for run, most in (
        (lambda: shard(*shard.qkv), 3.5 * keys + 3 * queries),
        (lambda: torch.autograd.grad(kept[0], shard.qkv, shard.do), 9 * keys + 8 * queries),
    ):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        kept.append(run())
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - base <= most, (keys, queries)


def numbers(pool, members):
    for case, options in (*NUMBERS, (EVEN, {"sharding": dealt(len(members))})):
        parts = pool.results(attend, case, members, "cuda", options, ranks=members)
        judge(case, joined(parts, options.get("sharding", "zigzag")), options.get("total_len"), "cuda")


def checks_of(members):
    """(a program, or ``numbers``, and what it is given); a program raises on the rank where something is wrong."""
    for case, sharding in BITS:
        sharding = dealt(len(members)) if sharding == "dealt" else sharding
        yield has_bits_of_one_gpu, case, members, sharding, False
        yield has_bits_of_one_gpu, replace(case, len_q=1840, len_k=1840), members, sharding, True
    yield (numbers,)
    yield repeats, LONG, members, 20, 60.0, False
    yield repeats, SHORT, members, 1000, 30.0, True
    yield late_inputs, LONG, members
    yield memory, LONG, members
    yield graph, LONG, members
    yield compiled, SHORT, members


@pytest.mark.parametrize("size", [2, 4])
def test_several_gpus(size):
    if size > GPUS:
        pytest.skip(f"needs {size} GPUs, and here are {GPUS}")
    members, failures = tuple(range(size)), []
    with closing(Ranks(size, "nccl")) as pool:
        for program, *given in checks_of(members):
            try:
                pool.results(program, *given, ranks=members) if given else numbers(pool, members)
            except TimeoutError:
                raise
            except Exception as error:
                failures.append(f"{program.__name__} {given}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)
