"""Context shifting with raw keys: drop the oldest tokens of a cache and go on, without recomputing the ones that stay.

    python examples/context_shift.py          seconds, on a CPU or a GPU

A model that reads a stream runs out of positions. Streaming keeps the first few tokens (attention sinks, Xiao et al.
2023), drops the oldest of the others, and moves those that stay to the front. Rotated keys would have to be turned back
and forth, or recomputed; a cache of raw keys only has its rows moved, because a key is rotated by the row in which it
lies when it is read. Below, one attention layer reads 300 tokens through a cache of 64 rows. The first output after a
shift is compared with that of a cache which is written anew: every kept key rotated for its new row, from the start.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from fused_rope_attn import apply_rope, rope_attention_with_kvcache, rope_tables

HEADS, HEADS_KV, HEAD_DIM = 8, 2, 64
ROWS, SINKS, DROP = 64, 4, 24  # rows of the cache, first tokens that stay, tokens that a shift drops


def shift(cache: Tensor, used: int) -> None:
    """Drop the DROP oldest of the ``used`` tokens of ``cache`` (1, HKV, ROWS, D) behind the first SINKS."""
    cache[:, :, SINKS : used - DROP] = cache[:, :, SINKS + DROP : used].clone()


def stream(length: int = 300, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[int, float]:
    """Read ``length`` random tokens; returns the number of shifts and the largest difference from recomputation."""
    generator = torch.Generator(device).manual_seed(0)

    def tokens(heads: int) -> Tensor:
        return torch.randn(1, heads, length, HEAD_DIM, generator=generator, device=device).to(dtype)

    q, k, v = tokens(HEADS), tokens(HEADS_KV), tokens(HEADS_KV)
    cos, sin = rope_tables(ROWS, HEAD_DIM, device=device)
    raw_k, cache_v = (torch.zeros(1, HEADS_KV, ROWS, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    kept: list[int] = []  # the tokens in the cache, for the comparison only
    shifts, worst = 0, 0.0
    for i in range(length):
        shifted = len(kept) == ROWS
        if shifted:
            for cache in (raw_k, cache_v):
                shift(cache, ROWS)
            kept = kept[:SINKS] + kept[SINKS + DROP :]
            shifts += 1

        now = slice(i, i + 1)
        used = torch.tensor([len(kept)], dtype=torch.int32, device=device)
        o = rope_attention_with_kvcache(
            q[:, :, now],
            raw_k,
            cache_v,
            cos,
            sin,
            k[:, :, now],
            v[:, :, now],
            cache_seqlens=used,
            cache_is_rotated=False,
        )

        if shifted:  # what it costs otherwise: the keys that stayed, rotated anew for the rows that they have now
            rotated_k, fresh_v = torch.zeros_like(raw_k), torch.zeros_like(cache_v)
            rotated_k[:, :, : len(kept)] = apply_rope(k[:, :, kept], cos, sin)
            fresh_v[:, :, : len(kept)] = v[:, :, kept]
            expected = rope_attention_with_kvcache(
                q[:, :, now], rotated_k, fresh_v, cos, sin, k[:, :, now], v[:, :, now], cache_seqlens=used
            )
            worst = max(worst, float((o - expected).abs().max()))
        kept.append(i)
    return shifts, worst


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=300, help="tokens of the stream")
    length = parser.parse_args().length
    on_gpu = torch.cuda.is_available()
    setting = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    shifts, worst = stream(length, *setting)
    print(f"{shifts} shifts of a cache of {ROWS} rows in {length} tokens, on {setting[0]} in {setting[1]}")
    print(f"largest difference from recomputing the rotated keys: {worst:.2g}")
