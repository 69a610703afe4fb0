"""Chunks of prompts that the sm_90 kernels of attention run on a contiguous copy of their keys, against float64."""

from dataclasses import replace

import pytest
import torch

from fused_rope_attn import plan_with_kvcache, rope_attention_with_kvcache
from tests.support.calls import assert_right
from tests.support.dtypes import BF16
from tests.support.gpu import capture
from verification.calls import Machine
from verification.matrix import step

pytestmark = pytest.mark.gpu
CHUNK = step("", (32, 8), 300, 4096, 128, (900, 0), dtype=BF16, variants=(("auto", "auto"),))
CASES = {
    "contiguous": {},
    "pages of 16": {"page_size": 16},
    "float8 in pages of 64": {"page_size": 64, "float8": "head"},
    "raw keys in pages": {"page_size": 16, "rotated": False},
    "float8, raw": {"float8": "head", "rotated": False, "page_size": 32},
    "masks": {"page_size": 16, "kv_starts": (70, 0), "sinks": True, "softcap": 20.0},
    "window": {"page_size": 16, "window": (130, 0)},
    "norms": {"page_size": 16, "norms": 0.0},
    "norms, raw": {"rotated": False, "norms": 0.0},
    "no room": {"page_size": 16, "lengths": (3900, 4096)},
    "no room, contiguous": {"lengths": (3900, 5000)},
    "read only": {"page_size": 16, "append": False, "lengths": (900, 200)},
    "part of the columns": {"page_size": 16, "head_dim": 120, "rotary_dim": 64, "interleaved": True},
    "narrow": {"page_size": 16, "head_dim": 64},
    "in two pieces of columns": {"page_size": 16, "head_dim": 96},
    "wide": {"page_size": 16, "head_dim": 256},
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
