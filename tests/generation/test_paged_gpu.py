"""Paged caches on a GPU: graphs that outlive lengths and tables, pages outside the pool, and no synchronisation."""

import math
import subprocess
import sys

import pytest
import torch

from tests.support.gpu import no_synchronisation
from tests.support.paged import PAGES, Server
from tests.support.paths import ROOT

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("float8", [False, True])
def test_a_graph_is_replayed_while_lengths_and_tables_change(float8):
    eager, replayed = Server(float8), Server(float8)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        replayed()  # compiles; writes the row that the first step writes again
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = replayed()
    for step in range(20):
        expected = eager()
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(out, expected)), step
        assert bool(out[1].isfinite().all())
        eager.advance(step)
        replayed.advance(step)
    for x, y in zip(eager.pools, replayed.pools):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_pages_are_where_the_table_says():
    """The same numbers in other pages give the same bits."""
    one, other = Server(), Server()
    expected = one()
    table = one.table.flatten().long()
    shuffled = torch.randperm(64, device="cuda")
    for pool, source in zip(other.pools, Server().pools):
        pool.fill_(math.nan)
        pool[shuffled[: table.numel()]] = source[table]
    other.table = shuffled[: table.numel()].view(2, PAGES).int()
    assert all(torch.equal(x, y) for x, y in zip(other(), expected))


def test_no_sync():
    server = Server()
    server()
    with no_synchronisation():
        server()


OUTSIDE = """
import torch
from tests.support.paged import Server

server = Server({float8})
server.table[0, {page}] = {entry}
server()
torch.cuda.synchronize()
print("no assertion")
"""


@pytest.mark.parametrize(
    ("float8", "page", "entry"), [(False, 0, 64), (False, 1, -1), (True, 2, 10**9), (False, 3, 10**9)]
)
def test_a_page_outside_the_pool(float8, page, entry):
    """The first sequence has 37 keys: its pages 0 to 2 are needed, the last of them for the new token as well."""
    program = OUTSIDE.format(float8=float8, page=page, entry=entry)
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    if page < 3:
        assert result.returncode != 0 and "device-side assert" in result.stderr, result.stderr[-2000:]
        assert "block_table must hold pages of the pool" in result.stdout + result.stderr
    else:
        assert "no assertion" in result.stdout, result.stderr[-2000:]
