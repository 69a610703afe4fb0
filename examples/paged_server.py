"""A small server on a pool of pages: admit, prefill in chunks, decode, share prefixes, shift contexts, evict.

    python examples/paged_server.py                seconds, on a CPU or a GPU

One attention layer with random weights stands in for a model: a token is a row of an embedding, and what attention
gives for the last one chooses the next. Keys are kept raw, and rotated when they are read, by the row in which they
lie. So a sequence that has filled its row of the block table drops its oldest page behind the first one and goes on: a
*shift* moves entries of the table, and no key. (The first page stays: attention sinks, Xiao et al. 2023.)

Requests come with a common system prompt, whose whole pages are computed once and shared by all. What a request needs
is handed out page by page; one that finds no free page is evicted and starts again later. ``--check`` serves each
request alone as well, in contiguous memory of its own, and compares the tokens.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fused_rope_attn import rope_attention_with_kvcache, rope_tables

HEADS, HEADS_KV, HEAD_DIM, VOCABULARY = 8, 2, 64, 1000


class Layer:
    """Projections of one attention layer, with weights that are equal for equal device and dtype."""

    def __init__(self, device: str, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(0)
        width = HEADS * HEAD_DIM

        def weight(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=generator) / rows**0.5).to(device, dtype)

        self.embedding = weight(VOCABULARY, width) * VOCABULARY**0.5
        self.projections = [weight(width, heads * HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV)]
        self.unembedding = weight(width, VOCABULARY)

    def project(self, tokens: Tensor) -> list[Tensor]:
        """q, k and v (B, H, N, D) of tokens (B, N)."""
        x = self.embedding[tokens]
        return [(x @ w).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in self.projections]

    def next_token(self, o: Tensor) -> Tensor:
        """The likeliest token (B,) behind the last position of o (B, H, N, D)."""
        return (o[:, :, -1].flatten(1) @ self.unembedding).argmax(-1)


@dataclass
class Request:
    """A prompt, what has been generated, and the pages that hold it."""

    prompt: list[int]
    wanted: int
    generated: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    rows: int = 0  # of its pages, in use
    shared: int = 0  # the first of its pages, which are other requests' as well

    @property
    def is_prefilled(self) -> bool:
        return bool(self.generated)


class Server:
    """At most ``batch`` requests at a time on a pool of ``num_pages`` pages, each with ``max_pages`` at most."""

    def __init__(self, layer: Layer, num_pages: int, page_size: int, max_pages: int, batch: int, chunk: int):
        self.layer, self.page_size, self.max_pages = layer, page_size, max_pages
        self.batch, self.chunk = batch, chunk
        like = layer.embedding
        # In memory (num_pages, page_size, HKV, D): layout="bshd" below.
        self.pools = [like.new_zeros(num_pages, page_size, HEADS_KV, HEAD_DIM) for _ in range(2)]
        self.free = deque(range(num_pages))
        self.owners = [0] * num_pages
        self.tables = rope_tables(max_pages * page_size, HEAD_DIM, device=like.device)
        self.prefixes: dict[tuple[int, ...], int] = {}  # the tokens up to the end of a page, and the page
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.evictions = self.shifts = self.reused = 0

    def attend(self, requests: list[Request], tokens: Tensor) -> Tensor:
        """The token behind each of these requests' ``tokens`` (B, N), which are written into their pages."""
        q, k, v = (x.transpose(1, 2) for x in self.layer.project(tokens))
        table = torch.full((len(requests), self.max_pages), -1, dtype=torch.int32)
        for i, request in enumerate(requests):
            table[i, : len(request.pages)] = torch.tensor(request.pages)
        rows = torch.tensor([request.rows for request in requests], dtype=torch.int32)
        o = rope_attention_with_kvcache(
            q,
            *self.pools,
            *self.tables,
            k,
            v,
            cache_seqlens=rows.to(q.device),
            block_table=table.to(q.device),
            cache_is_rotated=False,
            layout="bshd",
        )
        for request in requests:
            request.rows += tokens.shape[1]
        return self.layer.next_token(o.transpose(1, 2))

    def find_room(self, request: Request, count: int) -> bool:
        """Pages for ``count`` more tokens; False where none is free."""
        if request.is_prefilled and request.rows + count > self.max_pages * self.page_size:
            self.release(request.pages.pop(1))  # every later row, and its position, moves up by a page
            request.rows -= self.page_size
            request.shared = min(request.shared, 1)
            self.shifts += 1
        while len(request.pages) * self.page_size < request.rows + count:
            if not self.free and not self.forget_prefix():
                return False
            page = self.free.popleft()
            self.owners[page] += 1
            request.pages.append(page)
        return True

    def release(self, page: int) -> None:
        self.owners[page] -= 1
        if self.owners[page] == 0:
            self.free.append(page)

    def forget_prefix(self) -> bool:
        """Give back a page that only the table of prefixes holds; False where there is none."""
        for tokens, page in reversed(self.prefixes.items()):
            if self.owners[page] == 1:
                del self.prefixes[tokens]
                self.release(page)
                return True
        return False

    def admit(self, request: Request) -> None:
        """Begin with the pages of the prompt that somebody has computed already; the last token is always computed."""
        size = self.page_size
        for end in range(size, len(request.prompt), size):
            page = self.prefixes.get(tuple(request.prompt[:end]))
            if page is None:
                break
            self.owners[page] += 1
            request.pages.append(page)
            request.rows += size
            self.reused += size
        request.shared = len(request.pages)
        self.running.append(request)

    def prefill(self, request: Request) -> bool:
        """The next chunk of a prompt; False where there is no room."""
        part = request.prompt[request.rows : request.rows + self.chunk]
        if not self.find_room(request, len(part)):
            return False
        tokens = torch.tensor([part], device=self.pools[0].device)
        following = self.attend([request], tokens)
        for i in range(request.shared, request.rows // self.page_size):  # whole pages can be shared from now on
            key = tuple(request.prompt[: (i + 1) * self.page_size])
            if key not in self.prefixes:
                self.prefixes[key] = request.pages[i]
                self.owners[request.pages[i]] += 1
        if request.rows == len(request.prompt):
            request.generated.append(int(following))
        return True

    def evict(self, request: Request, *, finished: bool) -> None:
        """Take the pages of a request away; one that is not finished starts again later."""
        for page in request.pages:
            self.release(page)
        request.pages, request.rows, request.shared = [], 0, 0
        self.running.remove(request)
        if not finished:
            request.generated = []
            self.waiting.append(request)
            self.evictions += 1

    def step(self) -> None:
        """Admit what fits, prefill one chunk of each prompt, and one token for all others together."""
        while self.waiting and len(self.running) < self.batch:
            self.admit(self.waiting.popleft())
        decoding = [request for request in self.running if request.is_prefilled]
        for request in [request for request in self.running if not request.is_prefilled]:
            if not self.prefill(request):
                self.evict(request, finished=False)
        for request in list(decoding):
            if not self.find_room(request, 1):
                decoding.remove(request)
                self.evict(request, finished=False)
        if decoding:
            last = torch.tensor([[request.generated[-1]] for request in decoding], device=self.pools[0].device)
            for request, token in zip(decoding, self.attend(decoding, last).tolist()):
                request.generated.append(token)
        for request in list(self.running):
            if len(request.generated) >= request.wanted:
                self.evict(request, finished=True)


def alone(layer: Layer, request: Request, page_size: int, max_pages: int) -> list[int]:
    """What the request generates in a contiguous cache of raw keys of its own, whose rows a shift moves."""
    capacity, like = max_pages * page_size, layer.embedding
    caches = [like.new_zeros(1, HEADS_KV, capacity, HEAD_DIM) for _ in range(2)]
    tables = rope_tables(capacity, HEAD_DIM, device=like.device)
    tokens, used, generated = request.prompt, 0, []
    while len(generated) < request.wanted:
        if used + len(tokens) > capacity:
            for cache in caches:
                cache[:, :, page_size : used - page_size] = cache[:, :, 2 * page_size : used].clone()
            used -= page_size
        q, k, v = layer.project(torch.tensor([tokens], device=like.device))
        o = rope_attention_with_kvcache(
            q,
            *caches,
            *tables,
            k,
            v,
            cache_seqlens=torch.tensor([used], dtype=torch.int32, device=like.device),
            cache_is_rotated=False,
        )
        used += len(tokens)
        generated.append(int(layer.next_token(o)))
        tokens = generated[-1:]
    return generated


def serve(
    requests: int = 24,
    num_pages: int = 36,
    page_size: int = 16,
    max_pages: int = 6,
    batch: int = 8,
    chunk: int = 24,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Server, list[Request], float]:
    """Serve random requests behind a common system prompt; returns (server, requests, seconds)."""
    generator = torch.Generator().manual_seed(1)

    def words(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    system = words(2 * page_size + 3)
    queue = [
        Request(system + words(1 + int(torch.randint(3 * page_size, (), generator=generator))), 4 + 7 * (i % 9))
        for i in range(requests)
    ]
    server = Server(Layer(device, dtype), num_pages, page_size, max_pages, batch, chunk)
    server.waiting.extend(queue)
    begin = time.perf_counter()
    while server.waiting or server.running:
        server.step()
    return server, queue, time.perf_counter() - begin


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=24, help="how many come at once")
    parser.add_argument("--check", action="store_true", help="compare with each request alone")
    given = parser.parse_args()
    setting = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    with torch.no_grad():
        server, queue, seconds = serve(given.requests, device=setting[0], dtype=setting[1])
        tokens = sum(len(request.generated) for request in queue)
        print(f"{given.requests} requests, {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")
        print(f"{server.reused} rows of prompts shared, {server.shifts} shifts, {server.evictions} evictions")
        if given.check:
            same = [alone(server.layer, r, server.page_size, server.max_pages) == r.generated for r in queue]
            print(f"{sum(same)} of {len(same)} requests generate what they generate alone")
