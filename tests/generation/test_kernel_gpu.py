"""The generation step on a GPU: long caches and chunks against float64, graphs, streams, compile, pages."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import plan_with_kvcache, rope_attention_with_kvcache
from fused_rope_attn.generation.reference import stored
from tests.support.calls import assert_right
from tests.support.dtypes import BF16
from tests.support.generation import CACHES, arguments
from tests.support.gpu import capture
from tests.support.internals import with_kvcache
from tests.support.paths import python
from verification.calls import Machine, same_bits
from verification.matrix import DECODE, step

pytestmark = pytest.mark.gpu
# Random calls have up to 40 sequences and tokens, and up to 20,000 keys in pages of 64.
LARGE = [check for check in DECODE if check.batch > 40 or check.len_q > 40 or check.len_k > 20000
         or (check.page_size or 0) > 64]  # fmt: skip
KINDS = {"contiguous": {}, "raw": {"rotated": False}, "pages": {"page_size": 16},
         "float8": {"page_size": 16, "float8": "head"}}  # fmt: skip


@pytest.mark.parametrize("check", LARGE, ids=lambda check: check.name)
def test_large_calls(check):
    assert_right(replace(check, dtype=BF16), Machine.of("cuda"))


@pytest.mark.parametrize("dtype", (torch.float32, BF16))
@pytest.mark.parametrize("check", [check for check in DECODE if check.float8 and check.head_dim == 16])
def test_narrow_float8(check, dtype):
    """Triton 3.6 lays 16 joined and split columns out for 32, and its assembler lost a use of rounded keys."""
    assert_right(replace(check, dtype=dtype), Machine.of("cuda"))


class Step:
    """A call appends a token to each sequence and counts on the device. All entries of a table are in the pool."""

    def __init__(self, kind="contiguous"):
        self.check = step("steps", (32, 8), 1, 1024, 128, (500, 0, 1000, 3), **KINDS[kind])
        self.given = arguments(self.check, BF16, "cuda")
        self.given["cache_is_rotated"] = self.check.rotated
        table, pages = self.given["block_table"], len(self.given["k_cache"])
        if table is not None:
            missing = table >= pages
            unused = torch.tensor(sorted(set(range(pages)) - set(table.flatten().tolist())), device="cuda").int()
            table[missing], self.spare = unused[: int(missing.sum())], unused[-1].item()

    def __call__(self):
        out = with_kvcache(**self.given)
        self.given["cache_seqlens"] += 1
        return out

    def move_a_page(self):
        table = self.given["block_table"]
        for name in CACHES:
            stored(self.given[name])[self.spare] = stored(self.given[name])[table[0, 1].item()]
        table[0, 1] = self.spare

    def changing(self):
        return [self.given[name] for name in (*CACHES, "cache_seqlens")]


def captured(step):
    """Return a graph of one step, and its outputs; the changes of calls before are taken back."""
    kept = [x.clone() for x in step.changing()]
    graph, out = capture(step)
    for x, y in zip(step.changing(), kept):
        x.copy_(y)
    return graph, out


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_replayed_while_lengths_and_tables_change(kind):
    eager, replayed = Step(kind), Step(kind)
    graph, out = captured(replayed)
    for i in range(40):  # past the end of the third cache
        expected = eager()
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(out, expected)), i
        if eager.check.page_size and i == 20:
            eager.move_a_page(), replayed.move_a_page()
    assert bool((out[0][2] == 0).all()) and bool((out[0][0] != 0).any())
    assert all(same_bits(x, y) for x, y in zip(eager.changing(), replayed.changing()))


def test_two_graphs_and_eager_calls_at_once():
    """Nothing is shared between calls: no counter that two of them could count in."""
    steps, alone = [Step(), Step(), Step()], Step()
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


def test_reruns_are_equal():
    given = arguments(Step().check, BF16, "cuda")
    first = with_kvcache(**given)
    assert all(torch.equal(x, y) for _ in range(100) for x, y in zip(first, with_kvcache(**given)))


def test_compile():
    torch._dynamo.reset()
    eager, compiled = Step(), Step()
    run = torch.compile(lambda given: 2 * with_kvcache(**given)[0], fullgraph=True)
    for _ in range(3):
        expected = 2 * eager()[0]
        assert torch.equal(run(compiled.given), expected)
        compiled.given["cache_seqlens"] += 1
    assert all(same_bits(x, y) for x, y in zip(eager.changing(), compiled.changing()))


@pytest.mark.parametrize(("kind", "page", "entry"), [("pages", 0, 10**6), ("pages", 30, -1), ("float8", 31, 10**9),
                                                     ("pages", 32, 10**9)])  # fmt: skip
def test_a_page_outside_the_pool(kind, page, entry):
    """The first sequence has 500 keys: its pages 0 to 31 are needed, the last of them for the new token as well."""
    program = f"""
import torch
from tests.generation.test_kernel_gpu import Step
step = Step({kind!r})
step.given["block_table"][0, {page}] = {entry}
step()
torch.cuda.synchronize()
print("no assertion")
"""
    result = python("-c", program)
    if page < 32:
        assert result.returncode != 0 and "device-side assert" in result.stderr, result.stderr[-2000:]
        assert "block_table must hold pages of the pool" in result.stdout + result.stderr
    else:
        assert "no assertion" in result.stdout, result.stderr[-2000:]


# Chunks of prompts that the sm_90 kernels of attention run on a contiguous copy of their keys.
CHUNK = step("", (32, 8), 300, 4096, 128, (900, 0), dtype=BF16, variants=(("auto", "auto"),))
CASES = {
    "contiguous": {},
    "float8 in pages of 64": {"page_size": 64, "float8": "head"},
    "raw keys in pages": {"page_size": 16, "rotated": False},
    "float8, raw": {"float8": "head", "rotated": False, "page_size": 32},
    "masks": {"page_size": 16, "kv_starts": (70, 0), "sinks": True, "softcap": 20.0},
    "norms, a window, two pieces of columns": {"page_size": 16, "norms": 0.0, "window": (130, 0), "head_dim": 96},
    "norms, raw": {"rotated": False, "norms": 0.0},
    "no room, narrow": {"page_size": 16, "lengths": (3900, 4096), "head_dim": 64},
    "no room, contiguous": {"lengths": (3900, 5000)},
    "read only, wide": {"page_size": 16, "append": False, "lengths": (900, 200), "head_dim": 256},
    "part of the columns": {"page_size": 16, "head_dim": 120, "rotary_dim": 64, "interleaved": True},
}


@pytest.mark.parametrize("name", CASES)
def test_a_chunk(name):
    check = replace(CHUNK, **CASES[name])
    if "copy" not in plan_with_kvcache(**check.arguments("cuda")[1]).reason:
        pytest.skip("this card does not run it on a copy")
    assert_right(check, Machine.of("cuda"))


def test_a_graph_of_a_chunk_is_replayed_while_lengths_change():
    _, given = replace(CHUNK, page_size=16, lengths=(900, 40)).arguments("cuda")
    run = lambda: rope_attention_with_kvcache(**given)[0]  # noqa: E731
    expected = run().clone()
    graph, out = capture(run)
    graph.replay()
    assert torch.equal(out, expected)
    given["cache_seqlens"].copy_(torch.tensor((880, 40), dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, run()) and bool(out.isfinite().all())
