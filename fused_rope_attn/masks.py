"""Masks as one interval of query rows for each key, for ``query_starts`` and ``query_ends`` of ``rope_attention``.

Key ``j`` is visible to the rows ``query_starts[b, j] <= i < query_ends[b, j]``. Every function returns int32 tensors,
``(1, N)`` or ``(B, N)``, for N queries over the same N keys. FlashMask (arXiv 2410.01359) has such columns too. Two
masks hold together by the larger of their starts and the smaller of their ends::

    starts, ends = masks.documents(cu_seqlens, length)
    more_starts, more_ends = masks.chunks(8192, length, device=q.device)
    starts, ends = torch.maximum(starts, more_starts), torch.minimum(ends, more_ends)

All of them are for ``causal=False``: where a mask is causal, its intervals begin with the key's own row.

Values that no mask has, for example documents that overlap, are a ValueError on a CPU. On a GPU, and in graphs of
torch.compile and torch.export, the host does not wait to read them, and an assertion on the device fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fused_rope_attn.runtime.checks import check_ends, check_int, shown
from fused_rope_attn.runtime.forms import Form
from fused_rope_attn.runtime.registration import is_plain

__all__ = ["bidirectional_blocks", "chunks", "documents", "from_dense", "prefix_lm", "prefix_tree"]
Intervals = tuple[Tensor, Tensor]


def documents(cu_seqlens: Tensor, length: int | None = None) -> Intervals:
    """Return the intervals of documents that are packed into one row, each causal.

    Args:
        cu_seqlens: ``(documents + 1,)`` int32 or int64: document ``d`` is the tokens ``[cu[d], cu[d + 1])``; it begins
            with 0, never falls, and ends at or before N.
        length: N. Tokens after the last document see nothing and are not seen. None takes the end of the last document
            and reads cu_seqlens from the device, which synchronises.

    Returns:
        query_starts and query_ends, ``(1, N)`` int32 each on the device of cu_seqlens.

    Raises:
        TypeError, ValueError: wrong type, dtype, shape or range.
    """
    _check_ints("cu_seqlens", cu_seqlens, "documents+1")
    if cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape (documents+1,), but has {shown(cu_seqlens.shape)}")
    known = cu_seqlens if length is not None else cu_seqlens.cpu()
    length = int(known[-1]) if length is None else _length(length)
    if check_ends("cu_seqlens", known, length, "the row") is None:
        are_ends = (known[0] == 0) & (known[1:] >= known[:-1]).all() & (known[-1] <= length)
        torch._assert_async(are_ends, "cu_seqlens must begin with 0, never fall, and end at or before the last token")
    token = torch.arange(length, dtype=torch.int32, device=cu_seqlens.device)
    last = cu_seqlens[1:].int().contiguous()
    # The documents that end at or before a token are the documents before its own.
    document = torch.searchsorted(last, token, right=True)
    ends = torch.cat((last, last.new_zeros(1)))[document]
    return token[None], ends[None]


def prefix_tree(
    parents: Sequence[int] | Tensor, lengths: Sequence[int] | Tensor, *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the intervals of a tree of token sequences: a token sees its own node and the nodes above it, causally.

    For example a prompt of 4 tokens with two answers of 2 and 3 tokens is ``prefix_tree([-1, 0, 0], [4, 2, 3])``.

    Args:
        parents: the node that each node follows, -1 for a root. Nodes are in depth-first order: the nodes below a node
            follow it without a gap. There may be several roots.
        lengths: the number of tokens of each node, 0 or more.
        device: of the results.

    Returns:
        query_starts, query_ends ``(1, N)`` int32, and positions ``(1, N)`` int64: every token's distance from its root,
        to index the tables with, ``cos[positions]``. N is the sum of the lengths.

    Raises:
        TypeError, ValueError: wrong type or shape, or nodes that are not in depth-first order.
    """
    above, sizes = _host_ints("parents", parents), _host_ints("lengths", lengths)
    if len(above) != len(sizes):
        raise ValueError(f"lengths must have one number for each of {len(above)} parents, but has {len(sizes)}")
    ends, first_positions = [0] * len(sizes), [0] * len(sizes)
    path: list[int] = []  # the last node and the nodes above it
    token = 0
    for node, (parent, size) in enumerate(zip(above, sizes)):
        if size < 0:
            raise ValueError(f"lengths must be 0 or more, but lengths[{node}] is {size}")
        if parent != -1 and parent not in path:
            raise ValueError(
                f"parents must be in depth-first order, but parents[{node}] is {parent}, which is neither -1 nor node "
                f"{node - 1} nor above it"
            )
        while path and path[-1] != parent:
            ends[path.pop()] = token
        path.append(node)
        if parent != -1:
            first_positions[node] = first_positions[parent] + sizes[parent]
        token += size
    for node in path:
        ends[node] = token
    count = torch.tensor(sizes, dtype=torch.int64)
    first = count.cumsum(0) - count
    own, query_ends, first_position = (
        torch.repeat_interleave(x, count) for x in (first, torch.tensor(ends), torch.tensor(first_positions))
    )
    row = torch.arange(token)
    found = row.int(), query_ends.int(), (row - own + first_position).long()
    starts, last, positions = (x[None].to(device) for x in found)
    return starts, last, positions


def prefix_lm(prefix_lens: Tensor, length: int) -> Intervals:
    """Return the intervals of prefix language models: the first tokens see one another, the others are causal.

    Args:
        prefix_lens: ``(B,)`` int32 or int64, the number of tokens that see one another, between 0 and N.
        length: N.

    Returns:
        query_starts and query_ends, ``(B, N)`` int32 each on the device of prefix_lens.
    """
    _check_ints("prefix_lens", prefix_lens, "B")
    token = torch.arange(_length(length), dtype=torch.int32, device=prefix_lens.device)
    _check_values(
        (prefix_lens >= 0) & (prefix_lens <= length),
        lambda b: f"prefix_lens must be between 0 and length = {length}, but prefix_lens[{b}] is {prefix_lens[b]}",
        "prefix_lens must be between 0 and length",
    )
    starts = torch.where(token < prefix_lens[:, None], 0, token).int()
    return starts, torch.full_like(starts, length)


def bidirectional_blocks(block_ids: Tensor) -> Intervals:
    """Return the intervals of a causal sequence with blocks that see themselves both ways, such as images.

    Args:
        block_ids: ``(B, N)`` int32 or int64. Tokens with the same id of 0 or more, which must be adjacent, see one
            another; tokens with a negative id are causal.

    Returns:
        query_starts and query_ends, ``(B, N)`` int32 each on the device of block_ids.
    """
    _check_ints("block_ids", block_ids, "B N")
    length = block_ids.shape[1]
    begins = torch.ones_like(block_ids, dtype=torch.bool)
    begins[:, 1:] = (block_ids[:, 1:] != block_ids[:, :-1]) | (block_ids[:, 1:] < 0)
    blocks = torch.where(begins, block_ids, -1).sort(1).values  # the id of each run; equal ids are now adjacent
    _check_values(
        ((blocks[:, 1:] != blocks[:, :-1]) | (blocks[:, 1:] < 0)).all(1),
        lambda b: f"block_ids must have equal ids of 0 or more next to one another, but row {b} has not",
        "block_ids must have equal ids of 0 or more next to one another",
    )
    token = torch.arange(length, dtype=torch.int32, device=block_ids.device)
    starts = torch.where(begins, token, 0)
    starts = starts.cummax(1).values if length else starts
    return starts.int(), torch.full_like(starts, length, dtype=torch.int32)


def chunks(chunk: int, length: int, *, device: torch.device | str | None = None) -> Intervals:
    """Return the intervals of attention that is causal within chunks of ``chunk`` tokens, as in Llama 4.

    Args:
        chunk: 1 or more; the last chunk may be shorter.
        length: N.
        device: of the results.

    Returns:
        query_starts and query_ends, ``(1, N)`` int32 each.
    """
    if check_int("chunk", chunk) < 1:
        raise ValueError(f"chunk must be 1 or more, but is {chunk}")
    token = torch.arange(_length(length), device=device)
    ends = ((token // chunk + 1) * chunk).clamp(max=length)
    return token.int()[None], ends.int()[None]


def from_dense(mask: Tensor) -> Intervals | None:
    """Return the intervals that are exactly a dense mask; None if there are none. Synchronises with the device once.

    Args:
        mask: ``(B, 1, NQ, NK)`` or ``(B, HQ, NQ, NK)`` bool, True where a query sees a key.

    Returns:
        query_starts and query_ends, ``(B, NK)`` int32 each; both are 0 for a key that no query sees. None if the heads
        differ, or if the rows that see some key are not adjacent.

    Raises:
        TypeError, ValueError: not a boolean tensor of four dimensions.
    """
    Form("B 1 NQ NK | B HQ NQ NK", torch.bool).check("mask", mask, "mask", mask, {})
    starts, ends, is_exact = intervals_of_dense(mask)
    return (starts, ends) if is_exact else None


def intervals_of_dense(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query_starts and query_ends ``(B, NK)`` of a checked mask, and a bool tensor () whether they are exact.

    Do not wait for the device.
    """
    if 0 in mask.shape:
        starts = torch.zeros((mask.shape[0], mask.shape[3]), dtype=torch.int32, device=mask.device)
        return starts, starts.clone(), torch.ones((), dtype=torch.bool, device=mask.device)
    sees = mask[:, 0]
    first = sees.view(torch.uint8).argmax(1)  # of equal rows the first; 0 if no row sees the key
    ends = first + sees.sum(1)
    begins = (sees[:, 1:] & ~sees[:, :-1]).sum(1) + sees[:, 0]
    is_exact = (begins <= 1).all()
    if mask.shape[1] > 1:
        is_exact = is_exact & (mask == mask[:, :1]).all()
    return first.int(), ends.int(), is_exact


def _length(length: int) -> int:
    if check_int("length", length) < 0:
        raise ValueError(f"length must be 0 or more, but is {length}")
    return length


def _check_ints(name: str, x: Tensor, form: str) -> None:
    """Raise unless ``x`` is a tensor of integers of this ``Form``."""
    Form(form, torch.int32, torch.int64).check(name, x, name, x, {})


def _check_values(holds: Tensor, refusal: Callable[[int], str], message: str) -> None:
    """Raise ValueError unless all of holds (B,) bool are True. Where the host cannot read it, assert on the device.

    refusal: returns the message for the first index that is False. message: that of the assertion.
    """
    if holds.device.type != "cpu" or not is_plain(holds):
        torch._assert_async(holds.all(), message)
    elif not holds.all():
        raise ValueError(refusal(int(holds.int().argmin())))


def _host_ints(name: str, values: Sequence[int] | Tensor) -> list[int]:
    """Return the integers of a list or of a tensor (nodes,)."""
    if isinstance(values, Tensor):
        _check_ints(name, values, "nodes")
        return values.tolist()
    return [check_int(f"{name}[{i}]", value) for i, value in enumerate(values)]
