"""Two ways to the same rows: attention to whole sequences, and to parts, packs, padded batches and caches of them."""

import random
from dataclasses import dataclass, field

import torch

from fused_rope_attn import rope_attention, rope_attention_varlen, rope_attention_with_kvcache
from tests.support.internals import write


@dataclass
class Drawn:
    """Whole causal sequences q (B, HQ, N, D), k and v (B, HKV, N, D), with tables, options, and their o and lse."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    options: dict = field(default_factory=dict)

    @property
    def length(self):
        return self.q.shape[2]

    def attend(self, tensors, *tables, **masks):
        return rope_attention(*tensors, *tables, True, return_lse=True, batch_invariant=True, **masks, **self.options)

    def whole(self):
        return self.attend((self.q, self.k, self.v), self.cos, self.sin)


def drawn(seed, device, dtype, head_dim, longest, backend, features=None):
    """Draw a call; ``features`` replaces its options and their random choice, so that few kernels serve many pairs."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    group, heads_kv, batch = draw.choice([1, 2, 4]), draw.choice([1, 2]), draw.choice([1, 2, 3])
    length, rotary_dim = draw.randrange(2, longest), draw.choice([head_dim, head_dim // 2])

    def normal(*shape):
        return torch.randn(shape, device=device).to(dtype)

    options = {"backend": backend, "interleaved": draw.random() < 0.5, "rotary_dim": rotary_dim}
    if draw.random() < 0.3:
        options["window"] = (draw.randrange(1, length), draw.choice([0, -1]))
    if draw.random() < 0.2:
        options["softcap"] = 20.0
    if draw.random() < 0.3:
        options["sinks"] = normal(group * heads_kv)
    if draw.random() < 0.4:
        options |= {"q_norm": normal(head_dim), "k_norm": normal(head_dim), "norm_offset": draw.choice([0.0, 1.0])}
    if features is not None:
        rotary_dim = head_dim if features == "plain" else head_dim // 2
        options = {"backend": backend, "interleaved": features == "norms", "rotary_dim": rotary_dim}
        if features == "norms":
            options |= {"q_norm": normal(head_dim), "k_norm": normal(head_dim), "sinks": normal(group * heads_kv)}
        if features == "masks":
            options |= {"softcap": 20.0, "window": (draw.randrange(1, length), 0)}
    angles = torch.rand(length, rotary_dim // 2, device=device) * 6.3
    q = normal(batch, group * heads_kv, length, head_dim)
    k, v = (normal(batch, heads_kv, length, head_dim) for _ in range(2))
    return Drawn(q, k, v, angles.cos(), angles.sin(), options), draw


def alone(call, draw):
    """One sequence of the batch, and its first rows."""
    b, end = draw.randrange(call.q.shape[0]), draw.randrange(1, call.length + 1)
    parts = [x[b : b + 1, :, :end] for x in (call.q, call.k, call.v)]
    return call.attend(parts, call.cos, call.sin), (slice(b, b + 1), slice(0, end))


def last_rows(call, draw):
    """The last rows against all keys, with further keys that do not exist."""
    count, more = draw.randrange(1, call.length + 1), draw.randrange(100)
    k, v = (
        torch.cat((x, torch.full_like(x[:, :, :1], torch.nan).expand(-1, -1, more, -1)), 2) for x in (call.k, call.v)
    )
    lens = torch.full((call.q.shape[0],), call.length, dtype=torch.int32, device=call.q.device)
    tables = [torch.cat((x, x.new_zeros(more, x.shape[1]))) for x in (call.cos, call.sin)]
    first = call.length - count
    return call.attend((call.q[:, :, first:], k, v), *tables, kv_lens=lens), (slice(None), slice(first, None))


def padded(x, before):
    return torch.cat((torch.full_like(x[:, :, :1], torch.nan).expand(-1, -1, before, -1), x), 2)


def later_tables(call, before, after=0):
    """Tables with ``before`` other rows before those of the call, and ``after`` past them."""
    return [
        torch.cat((torch.rand(before, x.shape[1], device=x.device), x, x.new_zeros(after, x.shape[1])))
        for x in (call.cos, call.sin)
    ]


def starts(call, before):
    return torch.full((call.q.shape[0],), before, dtype=torch.int32, device=call.q.device)


def left_padded(call, draw):
    before = draw.randrange(1, 200)
    tensors = [padded(x, before) for x in (call.q, call.k, call.v)]
    o, lse = call.attend(tensors, *later_tables(call, before), kv_starts=starts(call, before))
    return (o[:, :, before:], lse[:, :, before:]), (slice(None), slice(None))


def packed(call, draw):
    """Every sequence between others of random lengths."""
    lengths = []
    for _ in range(call.q.shape[0]):
        lengths += [draw.randrange(call.length + 1), call.length]
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    cu = torch.tensor(ends, dtype=torch.int32, device=call.q.device)
    streams = []
    for x in (call.q, call.k, call.v):
        stream = torch.randn(ends[-1], x.shape[1], x.shape[3], device=x.device).to(x.dtype)
        for b, sequence in enumerate(x):
            stream[ends[2 * b + 1] : ends[2 * b + 2]] = sequence.transpose(0, 1)
        streams.append(stream)
    o, lse = rope_attention_varlen(
        *streams,
        call.cos,
        call.sin,
        cu,
        cu,
        call.length,
        call.length,
        True,
        return_lse=True,
        batch_invariant=True,
        **call.options,
    )
    rows = [slice(ends[2 * b + 1], ends[2 * b + 2]) for b in range(call.q.shape[0])]
    o, lse = torch.stack([o[r].transpose(0, 1) for r in rows]), torch.stack([lse[:, r] for r in rows])
    return (o, lse), (slice(None), slice(None))


def cached(call, draw):
    """A step of some tokens after the others are in a cache: contiguous or paged, rotated or raw, padded or not."""
    batch, heads_kv, _, head_dim = call.k.shape
    count, before = draw.randrange(1, min(call.length, 70) + 1), draw.choice([0, 0, draw.randrange(100)])
    done, page = call.length - count, draw.choice([None, 16, 48, 128])
    has_norms = "q_norm" in call.options
    rotated = has_norms or draw.random() < 0.5
    rows = call.length + before + draw.randrange(90)
    given = {"cache_is_rotated": rotated}
    if page is None:
        shape = (batch, heads_kv, rows, head_dim)
    else:
        pages = -(-rows // page)
        rows, shape = pages * page, (batch * pages, heads_kv, page, head_dim)
        given["block_table"] = torch.randperm(batch * pages, device=call.q.device).int().view(batch, pages)
    caches = [torch.full(shape, torch.nan, device=call.q.device).to(call.q.dtype) for _ in range(2)]
    tables = later_tables(call, before, rows - before - call.length)
    others = {**call.options, "backend": "triton"}  # that fill the cache: sm_90 kernels have no other steps
    options = {name: others[name] for name in ("rotary_dim", "interleaved", "backend")}
    if done:
        first = starts(call, before)
        if has_norms:  # by a step, because a write takes keys that are normed already
            rope_attention_with_kvcache(
                call.q[:, :, :done],
                *caches,
                *tables,
                call.k[:, :, :done],
                call.v[:, :, :done],
                cache_seqlens=first,
                **given,
                **others,
            )
        else:
            write(call.k[:, :, :done], call.v[:, :, :done], *caches, *tables, cache_seqlens=first, **given, **options)
    if before:
        given["kv_starts"] = starts(call, before)
    found = rope_attention_with_kvcache(
        call.q[:, :, done:],
        *caches,
        *tables,
        call.k[:, :, done:],
        call.v[:, :, done:],
        cache_seqlens=starts(call, before + done),
        return_lse=True,
        batch_invariant=True,
        **given,
        **call.options,
    )
    return found, (slice(None), slice(done, None))


WAYS = (alone, last_rows, left_padded, packed, cached)


def differing_rows(call, way, draw):
    """Return how many rows of o and lse have other bits than those of the whole sequences."""
    o, lse = call.whole()
    (found, found_lse), (b, rows) = way(call, draw)
    same = (found == o[b, :, rows]).all(-1) & (found_lse == lse[b, :, rows])
    assert same.numel() > 0
    return int((~same).sum())
