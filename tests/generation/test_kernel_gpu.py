"""The generation step on a GPU: every dtype against float64, graphs, streams, compile, and unusual lengths."""

import pytest
import torch

from fused_rope_attn import rope_attention_with_kvcache, rope_tables
from tests.support.dtypes import BF16, F16, F32
from tests.support.generation import hold, make_inputs
from tests.support.gpu import no_synchronisation
from verification.matrix import DECODE, step

pytestmark = pytest.mark.gpu
SEQUENCES = step("sequences", (32, 8), 1, 2048, 128, (1000, 0, 2000, 3))


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("check", DECODE, ids=lambda check: check.name)
def test_against_float64(check, dtype):
    failures = [result for result in hold(check, dtype, "cuda") if not result.ok]
    assert not failures, failures


class Step:
    """Tensors of one sequence of steps: ``step()`` appends a token to each sequence and counts on the device."""

    def __init__(self, rotated=True, seed=0):
        torch.manual_seed(seed)
        inputs = make_inputs(SEQUENCES, BF16, "cuda")
        self.q, self.k, self.v = inputs.q, inputs.k, inputs.v
        self.caches = [x.clone() for x in inputs[1:3]]
        self.tables = inputs.cos, inputs.sin
        self.lens = inputs.cache_seqlens.clone()
        self.rotated = rotated

    def __call__(self):
        o, lse = rope_attention_with_kvcache(
            self.q,
            *self.caches,
            *self.tables,
            self.k,
            self.v,
            cache_seqlens=self.lens,
            cache_is_rotated=self.rotated,
            return_lse=True,
        )
        self.lens += 1
        return o, lse


def captured(step):
    """A graph of one step and its outputs; a warm-up on copies compiles what it launches."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    kept = [x.clone() for x in (*step.caches, step.lens)]
    stream.wait_stream(torch.cuda.current_stream())  # the step counts up what is being copied
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    for x, y in zip((*step.caches, step.lens), kept):
        x.copy_(y)
    with torch.cuda.graph(graph, stream=stream):
        out = step()
    return graph, out


@pytest.mark.parametrize("rotated", [True, False])
def test_a_graph_is_replayed_while_lengths_grow(rotated):
    eager, replayed = Step(rotated), Step(rotated)
    graph, out = captured(replayed)
    for _ in range(60):  # past the end of the third cache
        expected = eager()
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(out, expected))
    assert bool((out[0][2] == 0).all()) and bool((out[0][0] != 0).any())
    for x, y in zip((*eager.caches, eager.lens), (*replayed.caches, replayed.lens)):
        assert torch.equal(x.view(torch.int16) if x.dtype is BF16 else x, y.view(torch.int16) if y.dtype is BF16 else y)


def test_two_graphs_and_eager_calls_at_once():
    """Nothing is shared between calls: no counter that two of them could count in."""
    steps = [Step(), Step(), Step()]
    alone = Step()
    expected = [tuple(x.clone() for x in alone()) for _ in range(40)]
    graphs = [captured(step) for step in steps[:2]]
    streams = [torch.cuda.Stream() for _ in range(3)]
    kept = [[], [], []]
    torch.cuda.synchronize()
    for _ in range(40):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if i < 2:
                    graphs[i][0].replay()
                    kept[i].append(tuple(x.clone() for x in graphs[i][1]))
                else:
                    kept[i].append(steps[2]())
    torch.cuda.synchronize()
    for results in kept:
        assert all(torch.equal(x, y) for result, wanted in zip(results, expected) for x, y in zip(result, wanted))


def test_no_sync():
    step = Step()
    step()
    with no_synchronisation():
        for _ in range(3):
            step()


def test_reruns_are_equal_and_capacity_does_not_matter():
    """100 equal runs; in a cache 16 times as large the same within rounding, and not slower by its size."""
    inputs = make_inputs(SEQUENCES, BF16, "cuda")
    cos, sin = rope_tables(16 * 2048, 128, device="cuda")

    def run(k_cache, v_cache):
        return rope_attention_with_kvcache(
            inputs.q, k_cache, v_cache, cos, sin, inputs.k, inputs.v, cache_seqlens=inputs.cache_seqlens
        )

    first = run(*inputs[1:3])
    assert all(torch.equal(first, run(*inputs[1:3])) for _ in range(100))
    large = [torch.full((4, 8, 16 * 2048, 128), float("nan"), dtype=BF16, device="cuda") for _ in range(2)]
    for x, y in zip(large, inputs[1:3]):
        x[:, :, :2048] = y
    torch.testing.assert_close(run(*large), first, rtol=2e-2, atol=2e-2)


def test_compile():
    torch._dynamo.reset()
    eager, compiled = Step(), Step()

    @torch.compile(fullgraph=True)
    def run(q, k_cache, v_cache, k, v, lens):
        return 2 * rope_attention_with_kvcache(q, k_cache, v_cache, *compiled.tables, k, v, cache_seqlens=lens)

    for _ in range(3):
        expected = 2 * eager()[0]
        out = run(compiled.q, *compiled.caches, compiled.k, compiled.v, compiled.lens)
        compiled.lens += 1
        assert torch.equal(out, expected)
    for x, y in zip(eager.caches, compiled.caches):
        assert torch.equal(x.view(torch.int16), y.view(torch.int16))


def test_another_stream():
    expected = Step()()
    stream = torch.cuda.Stream()
    step = Step()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        step.lens += 0  # after the sleep
        out = step()
    stream.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(out, expected))
