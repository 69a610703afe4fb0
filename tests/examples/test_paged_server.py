"""examples/paged_server.py: requests that share prefixes, shift their contexts and are evicted."""

import pytest
import torch

from examples.paged_server import alone, serve


def test_requests_generate_what_they_generate_alone():
    with torch.no_grad():
        server, queue, _ = serve(10, num_pages=14)
        assert server.reused > 0 and server.shifts > 0 and server.evictions > 0
        assert all(alone(server.layer, request, 16, 6) == request.generated for request in queue)
    kept = set(server.prefixes.values())
    assert sorted([*server.free, *kept]) == list(range(14)) and sum(server.owners) == len(kept)


def test_a_request_needs_no_more_than_the_pool():
    with torch.no_grad():
        server, queue, _ = serve(3, num_pages=7, batch=3)
    assert all(len(request.generated) == request.wanted for request in queue)


@pytest.mark.gpu
def test_on_a_gpu():
    with torch.no_grad():
        server, queue, _ = serve(12, num_pages=14, device="cuda", dtype=torch.bfloat16)
    assert server.evictions > 0 and all(len(request.generated) == request.wanted for request in queue)
