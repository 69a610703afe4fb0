"""The problems of attention that are measured, and the groups that select them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from bench.suite import SHORT_DTYPES, length_name
from fused_rope_attn import masks
from verification.testing import Case

# Kinds of masks that are compared.
MASKS = ("window", "packed")


@dataclass(frozen=True)
class BenchCase:
    """A named problem.

    family: what stays equal along a plot's axis of lengths. kind: "plain", "host", "norm", "corope", "unsplit" or one
    of ``MASKS`` or ``INTERVALS``; it chooses the providers (``providers.table``) and what is measured.
    """

    name: str
    family: str
    groups: tuple[str, ...]
    case: Case
    kind: str = "plain"

    @property
    def shape(self) -> str:
        """Return ``B2 H32/8 N4096 D128 causal bf16``, then the mask or the norms, as the committed rows have it."""
        c = self.case
        heads = f"{c.heads_q}/{c.heads_kv}" if c.heads_q != c.heads_kv else str(c.heads_q)
        mask = "causal" if c.causal else "full"
        words = [f"B{c.batch} H{heads} N{c.len_q} D{c.head_dim} {mask} {SHORT_DTYPES[c.dtype]}"]
        if c.window is not None:
            words.append("window={},{}".format(*c.window))
        if c.norms is not None:
            words += [f"norms={c.norms:g}", f"{SHORT_DTYPES[c.norm_dtype]}-norms"]
        if c.intervals is not None:
            words.append(f"intervals={self.name}")
        elif c.seqlens is not None:
            lengths = [n for n, _ in c.seqlens]
            words.append(f"packed={len(lengths)}x{min(lengths)}..{max(lengths)}")
        return " ".join(words)

    def flops(self, part: str) -> float:
        """Return the matrix-product FLOPs of a pass: 4 B HQ NQ NK D forward, 2.5 times that backward.

        Half of it when causal. The rotation counts nothing.
        """
        c = self.case
        forward = 4.0 * c.batch * c.heads_q * c.len_q * c.len_k * c.head_dim * (0.5 if c.causal else 1.0)
        return forward * {"fwd": 1.0, "fwd_grad": 1.0, "bwd": 2.5, "both": 3.5}[part]


def _case(family, batch, heads_q, heads_kv, length, head_dim, *groups, kind="plain", **options) -> BenchCase:
    options = {"causal": True, "dtype": torch.bfloat16, "norm_dtype": torch.bfloat16} | options
    case = Case(batch, heads_q, heads_kv, length, length, head_dim, **options)
    return BenchCase(f"{family}-{length_name(length)}", family, groups, case, kind)


# The eight shapes at which the target is stated.
TABLE = tuple("Small-512 Small-1K Llama7B-2K Llama7B-4K Llama70B-1K Llama3-8B-4K Llama3-8B-16K Long-64K".split())

# The group "nineteen": the shapes of the project that inspired this one. The batch is 2 for the Llamas as published,
# and 1 from the length on at which one sequence fills the card (16K at 32 heads, 4K at 64).
_CASES = (
    *(_case("Small", 4, 8, 8, n, 64, "nineteen", "small") for n in (512, 1024, 2048, 4096, 8192)),
    *(_case("Llama7B", 2, 32, 32, n, 128, "nineteen", "llama7b") for n in (512, 1024, 2048, 4096, 8192)),
    _case("Llama7B", 1, 32, 32, 16384, 128, "nineteen", "llama7b"),
    *(_case("Llama70B", 2, 64, 64, n, 128, "nineteen", "llama70b") for n in (512, 1024, 2048)),
    *(_case("Llama70B", 1, 64, 64, n, 128, "nineteen", "llama70b") for n in (4096, 8192)),
    _case("Llama3-8B", 2, 32, 8, 4096, 128, "gqa"),
    _case("Llama3-8B", 1, 32, 8, 16384, 128, "gqa"),
    # Phi-3-mini and Gemma-7B: head dimensions that fill no power of two, and the largest.
    *(_case("Phi3", 2, 32, 32, n, 96, "d96") for n in (1024, 4096)),
    *(_case("Gemma", 2, 16, 16, n, 256, "d256") for n in (1024, 4096)),
    # No mask: encoders, diffusion transformers.
    _case("Small-full", 4, 8, 8, 1024, 64, "full", causal=False),
    *(_case("Llama7B-full", 2, 32, 32, n, 128, "full", causal=False) for n in (1024, 4096)),
    # The long ones last: a run that is interrupted has then covered the most cases.
    *(
        _case("Long", 1, heads, heads, n, 128, "nineteen", "long")
        for heads, n in ((16, 32768), (8, 65536), (4, 131072))
    ),
)
PLAIN: tuple[BenchCase, ...] = tuple(
    replace(case, groups=(*case.groups, "all", "table" if case.name in TABLE else "others")) for case in _CASES
)

# The heads of one GPU: of eight that share Llama 3 70B by tensor parallelism, of four that share 8B, and all of 8B.
FEW_HEADS: tuple[BenchCase, ...] = (
    *(_case("Llama3-70B-TP8", 1, 8, 1, n, 128, "few-heads") for n in (1024, 2048, 4096, 8192)),
    *(_case("Llama3-8B-TP4", 1, 8, 2, n, 128, "few-heads") for n in (2048, 4096, 8192)),
    *(_case("Llama3-8B-B1", 1, 32, 8, n, 128, "few-heads") for n in (512, 1024, 2048)),
)

# Groups of 5 to 16 query heads to a key head: Qwen2.5 7B and 32B, Llama 3 70B and 405B.
LARGE_GROUPS: tuple[BenchCase, ...] = (
    _case("Qwen2.5-7B", 2, 28, 4, 4096, 128, "large-groups"),
    _case("Qwen2.5-7B", 1, 28, 4, 8192, 128, "large-groups"),
    _case("Qwen2.5-32B", 2, 40, 8, 4096, 128, "large-groups"),
    _case("Llama3-70B", 8, 64, 8, 1024, 128, "large-groups"),
    *(_case("Llama3-70B", 1, 64, 8, n, 128, "large-groups") for n in (4096, 8192, 16384)),
    _case("Llama3-405B", 1, 128, 8, 4096, 128, "large-groups"),
)

# Small enough that the GPU waits for the host at every call: what is measured is Python, dispatch and launches.
HOST = BenchCase("Host", "Host", ("host",), Case(1, 4, 4, 128, 128, 64, dtype=torch.bfloat16), "host")


def mixed_lengths(count: int, shortest: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Return ``count`` lengths, uniform between the two; both extremes occur."""
    generator = random.Random(seed)
    lengths = [shortest, longest, *(generator.randint(shortest, longest) for _ in range(count - 2))]
    generator.shuffle(lengths)
    return tuple(lengths)


def packed(case: Case, lengths: tuple[int, ...]) -> Case:
    """Return a case of packed sequences."""
    total = sum(lengths)
    return replace(case, batch=1, len_q=total, len_k=total, seqlens=tuple((n, n) for n in lengths))


_LLAMA = Case(2, 32, 8, 4096, 4096, 128, dtype=torch.bfloat16)
MASKED: tuple[BenchCase, ...] = tuple(
    BenchCase(kind, kind, ("masks", kind), case, kind)
    for kind, case in (
        ("window", replace(_LLAMA, batch=1, len_q=32768, len_k=32768, window=(1024, 0))),
        ("packed", packed(_LLAMA, mixed_lengths(64, 16, 4096))),
    )
)


def zipf_lengths(count: int, total: int, seed: int = 0) -> tuple[int, ...]:
    """Return lengths of documents, proportional to 1, 1/2, 1/3, ..., in a random order; their sum is ``total``."""
    weights = [1 / rank for rank in range(1, count + 1)]
    lengths = [int(total * weight / sum(weights)) for weight in weights]
    lengths[0] += total - sum(lengths)
    random.Random(seed).shuffle(lengths)
    return tuple(lengths)


_DOCUMENTS = zipf_lengths(64, 32768)
# The nodes of a tree of four levels, three after each, as paths from the root; their order is depth-first.
_PATHS = sorted(path for level in range(4) for path in product(range(3), repeat=level))
_PARENTS = [_PATHS.index(path[:-1]) if path else -1 for path in _PATHS]
_PIECE = torch.arange(8192) // 256  # text and images alternate
# Tokens, and a function of them to query_starts and query_ends, and of trees to positions.
_BY_INTERVALS: dict[str, tuple[int, Callable[[int], Sequence[torch.Tensor]]]] = {
    "documents": (32768, lambda n: masks.documents(torch.tensor((0, *_DOCUMENTS)).cumsum(0), n)),
    "prefix": (12288, lambda n: masks.prefix_tree([-1] + [0] * 8, [4096] + [1024] * 8)),
    "tree": (10240, lambda n: masks.prefix_tree(_PARENTS, [256] * len(_PARENTS))),
    "image-blocks": (8192, lambda n: masks.bidirectional_blocks(torch.where(_PIECE % 2 == 1, _PIECE, -1)[None])),
    "chunks": (32768, lambda n: masks.chunks(8192, n)),
    "causal-4K": (4096, lambda n: masks.chunks(n, n)),
    "causal-16K": (16384, lambda n: masks.chunks(n, n)),
}


def _with_intervals(name: str, length: int, intervals: Any) -> BenchCase:
    seqlens = tuple((n, n) for n in _DOCUMENTS) if name == "documents" else None
    case = replace(_LLAMA, batch=1, len_q=length, len_k=length, causal=False, intervals=intervals, seqlens=seqlens)
    return BenchCase(name, name, ("intervals", name), case, name)


INTERVALS = tuple(_BY_INTERVALS)
BY_INTERVALS = tuple(_with_intervals(name, *row) for name, row in _BY_INTERVALS.items())

COROPE: tuple[BenchCase, ...] = (
    *(_case("CoRoPE", 1, 32, 8, n, 128, "corope", kind="corope") for n in (1024, 4096, 8192)),
    _case("CoRoPE-MQA", 1, 16, 1, 8192, 128, "corope", kind="corope"),
)

# The same bits in any batch, by ours and by rivals that never split keys.
UNSPLIT: tuple[BenchCase, ...] = tuple(
    _case(f"Unsplit-D{head_dim}-B{batch}", batch, 32, 8, length, head_dim, "same-bits", kind="unsplit")
    for head_dim in (64, 128)
    for batch, length in ((1, 1024), (1, 4096), (8, 4096), (1, 16384), (1, 65536))
)

CASES: tuple[BenchCase, ...] = (*PLAIN, *FEW_HEADS, *LARGE_GROUPS, HOST, *MASKED, *BY_INTERVALS, *COROPE, *UNSPLIT)


def _normed(family: str, batch: int, heads_q: int, heads_kv: int, length: int, head_dim: int) -> BenchCase:
    offset = float(family.startswith("Gemma3"))  # what the model adds to the weights
    return _case(family, batch, heads_q, heads_kv, length, head_dim, "norm", kind="norm", norms=offset)


# Qwen3-8B has the heads of Llama3-8B. Those with a stated target are first, because a run may be interrupted.
NORMED: tuple[BenchCase, ...] = (
    *(_normed("Qwen3-0.6B", 4, 16, 8, n, 128) for n in (2048, 4096)),
    *(_normed("Qwen3-8B", 2, 32, 8, n, 128) for n in (2048, 4096)),
    _normed("Qwen3-0.6B", 4, 16, 8, 1024, 128),
    _normed("Qwen3-8B", 2, 32, 8, 1024, 128),
    _normed("Gemma3-1B", 4, 4, 1, 4096, 256),
    _normed("Gemma3-4B", 2, 8, 4, 4096, 256),
    _normed("Gemma3-1B", 4, 4, 1, 1024, 256),
    _normed("Gemma3-4B", 2, 8, 4, 1024, 256),
    _normed("Qwen3-8B", 1, 32, 8, 16384, 128),
)
