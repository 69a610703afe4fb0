"""What a batch's padding and packing mean to all layers of a decoder: found once per forward pass, on the device.

transformers hands each layer a mask whose form depends on the attention implementation. This file reads what the model
itself is given, a 2-D padding mask, position ids or cu_seqlens, before any mask is built of it.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from fused_rope_attn import cu_seqlens_from_position_ids
from fused_rope_attn.integrations.transformers.conventions import Convention
from fused_rope_attn.integrations.transformers.obstacles import (
    asked_is_causal,
    is_blind,
    is_causal,
    layer_of,
    obstacle,
    refuse_what_nobody_computes,
    uses_flash,
    uses_masks_by_default,
)
from fused_rope_attn.integrations.transformers.pages import PagedPass, obstacle_to_pages
from fused_rope_attn.integrations.transformers.shards import Shared
from fused_rope_attn.integrations.transformers.state import PATCH, state_of
from fused_rope_attn.runtime.device import is_capturing

PAST_NAMES = ("past_key_values", "layer_past", "past_key_value")
_PACKED_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Kept:
    """What the layers of one forward pass keep for each other. Lives as long as the pass's Batch does, and no longer.

    tables: by what they are made of, which they keep alive, so that its id stays its own.
    unturned: by device, tables of one row that turn nothing.
    """

    # No dict: a plain object passes through what takes containers apart to move the tensors in them.
    __slots__ = ("tables", "unturned")

    def __init__(self) -> None:
        self.tables: dict[tuple, Any] = {}
        self.unturned: dict[torch.device, Any] = {}


class Batch(NamedTuple):
    """A tuple, so that gradient checkpointing, torch.compile and accelerate's hooks take it for what it is.

    original: why this batch needs the modules' own forward; "" where it does not.
    kv_starts: (B,) int32, first key of left-padded rows; None where no row is padded on the left.
    kv_lens: (B,) int32, tokens after this pass, no fewer than any layer of the cache then has keys; None where the
        cache is empty before it.
    cached: (B,) int32, tokens before this pass, where attention may write StaticLayers, or with ``rows`` DynamicLayers,
        itself; None where it may not, and where there are none.
    rows: tokens before this pass, where attention may write DynamicLayers itself; None where it may not.
    cu_seqlens: (sequences + 1,) int32 of packed sequences, through all rows of the batch; None where there are none.
    max_seqlen: bound of their lengths.
    longest: (max_seqlen,) int64: the tokens of the longest of them, whose table rows serve all.
    declared: cu_seqlens hold in passes with a cache, too: those that position ids mean do not.
    kept: None where every layer works for itself.
    causal: False for bidirectional attention.
    inclusive_window: a bidirectional window of w reaches keys at distance w, too; else w - 1, as a causal one.
    shared: of a shard of sequences that several ranks share; all else but ``kept`` and ``causal`` then says nothing.
    rotates_first: the sequences in cu_seqlens have table rows of their own: q and k are rotated before attention.
    paged: of a pass of continuous batching; all else but ``kept`` then says nothing.
    """

    original: str = ""
    kv_starts: Tensor | None = None
    kv_lens: Tensor | None = None
    cached: Tensor | None = None
    rows: int | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    longest: Tensor | None = None
    declared: bool = False
    kept: Kept | None = None
    causal: bool = True
    inclusive_window: bool = False
    rotates_first: bool = False
    shared: Shared | None = None
    paged: PagedPass | None = None


PLAIN = Batch()


def describe(attentions: list[nn.Module], config: Any, given: dict[str, Any]) -> Batch:
    """What `given`, the arguments of a decoder's forward by their names, mean to its attention modules.

    Synchronises with the device at most once, and not at all in a decoding step whose prompt has been described, under
    torch.compile, or where neither padding nor positions are given. Under torch.compile a padding mask is taken to
    have no holes.
    """
    refuse_what_nobody_computes(attentions, given)
    causal = is_causal(attentions, config, given)
    if given.get("cache") is not None:
        reason = obstacle_to_pages(attentions, config, given, causal)
        return Batch(reason) if reason else Batch(paged=PagedPass(given), kept=Kept())
    reason = obstacle(attentions, config, given, causal)
    if reason:
        return Batch(reason)
    tokens = given.get("input_ids")
    tokens = given["inputs_embeds"] if tokens is None else tokens
    size, length = tokens.shape[:2]
    past = given.get("past_key_values")
    # Not the cache's first layer, which in hybrid models may be another kind's.
    seen = 0 if past is None else tokens_seen(past, layer_of(attentions[0]))
    # A bidirectional model attends to the rows of a static cache that nobody has written yet, too.
    if not causal and (seen != 0 or past is not None and any(isinstance(x, StaticLayer) for x in past.layers)):
        return Batch("bidirectional attention with a cache that holds tokens, or is static,")
    convention = state_of(attentions[0], PATCH).convention
    batch = _masked(given, tokens, seen, past, bool(causal), config, convention)
    if batch.original:
        return batch
    if not causal:
        batch = _bidirectional(batch, config, given)
    return _with_cache(batch, past, given, 0 if batch.declared else seen, size, length, tokens.device)


def describe_layer(module: nn.Module, given: dict[str, Any], more: bool) -> Batch:
    """What `given`, the keywords of an attention module's forward, mean to it, where no decoder has called it.

    more: there is a cache, or arguments without a name. A mask, which has some implementation's form, and a cache,
    whose padding nobody knows, are left to the module's own forward.
    """
    refuse_what_nobody_computes([module], given)
    if more or given.get("attention_mask") is not None:
        return Batch("a layer called with masks or caches and without its model")
    causal = is_causal([module], module.config, given)
    reason = obstacle([module], module.config, given, causal)
    if not reason and not uses_masks_by_default(module.config):
        reason = "a layer called without a mask, which hides no key from eager attention,"
    window = state_of(module, PATCH).convention.window(module)
    if not reason and window is not None and not uses_flash(module.config):
        reason = "a layer with a window called without a mask, which alone shows it to SDPA,"
    if reason:
        return Batch(reason)
    return PLAIN if causal else _bidirectional(PLAIN, module.config, given)


def _bidirectional(batch: Batch, config: Any, given: dict[str, Any]) -> Batch:
    # If `is_causal` of the call or the config says so, transformers' masks reach one key further than otherwise.
    inclusive = asked_is_causal(config, given) is False and not uses_flash(config)
    return batch._replace(causal=False, inclusive_window=inclusive)


def _masked(
    given: dict[str, Any], tokens: Tensor, seen: int | None, past: Cache | None, causal: bool, config: Any,
    convention: Convention,
) -> Batch:  # fmt: skip
    """The batch as its padding mask, its cu_seqlens or its position ids have it."""
    size, length = tokens.shape[:2]
    mask, position_ids = given.get("attention_mask"), given.get("position_ids")
    if all(given.get(name) is not None for name in _PACKED_NAMES):
        if seen != 0:
            return Batch("cu_seq_lens with a cache that holds tokens")
        batch = _packed(given["cu_seq_lens_q"].flatten().int(), int(given["max_length_q"]), tokens)
        return batch if position_ids is None else _with_positions(batch, position_ids)
    if mask is not None:
        if seen is not None and mask.shape[1] != seen + length:
            return Batch("an attention_mask that has not one column for every key")
        mask = mask.to(tokens.device)
        return _padded(mask, past, length) if causal else _padded_both_ways(mask)
    # flash-attention finds documents by the position ids of a single row. Other attention gets them in masks. Those of
    # `is_causal=False` know nothing of documents, nor do those of models that leave positions out.
    in_masks = convention.documents_in_masks and asked_is_causal(config, given) is not False
    heeded = size == 1 if uses_flash(config) else in_masks
    places = None if position_ids is None else convention.text_positions(position_ids)
    if not heeded or places is None or past is not None or length == 1:
        return PLAIN
    batch = _packed_by_position(places.expand(size, -1), tokens)
    # The places of tokens of images are not what they are rotated by.
    return batch if places is position_ids else batch._replace(rotates_first=True)


def _with_cache(
    batch: Batch, past: Cache | None, given: dict[str, Any], seen: int | None, size: int, length: int,
    device: torch.device,
) -> Batch:  # fmt: skip
    """A batch with what its cache means to it; ``seen`` as in ``tokens_seen``."""
    # Graphs, of either kind, are run again: what the host keeps from layer to layer and step to step is not for them.
    alone = torch.compiler.is_compiling() or is_capturing(device)
    if not alone:
        batch = batch._replace(kept=Kept())
    if past is None:
        return batch
    may_write = may_be_written(past)
    if may_write and not alone and any(type(layer) is DynamicLayer for layer in past.layers):
        batch = batch._replace(rows=seen)
    if seen == 0 and not _reused(past) or batch.declared:
        return batch
    kv_lens = _lengths(past, given, seen, size, length, device)
    written = (StaticLayer,) if batch.rows is None else (StaticLayer, DynamicLayer)
    may_write = may_write and any(type(layer) in written for layer in past.layers)
    return batch._replace(kv_lens=kv_lens, cached=kv_lens - length if may_write else None)


def _reused(past: Cache | None) -> bool:
    """Layers that are reset keep their memory, and those that count on the device may hold tokens then."""
    return past is not None and any(isinstance(layer, StaticLayer) and layer.is_initialized for layer in past.layers)


def tokens_seen(past: Cache, layer_idx: int) -> int | None:
    """How many tokens the cache has seen; None where only the device knows."""
    if layer_idx >= len(past.layers):
        return 0
    layer = past.layers[layer_idx]
    if isinstance(layer, StaticLayer):
        if not layer.is_initialized:
            return 0
        # transformers 5 counts by a tensor and, in sliding layers, by an int too; 4.57 in sliding layers by an int.
        count = getattr(layer, "cumulative_length_int", getattr(layer, "cumulative_length", None))
        return count if isinstance(count, int) else None
    return layer.get_seq_length()


# Of a cache: the shape of the mask described last, and whether a row of it is padded on the left. Only where the mask
# had no holes and its last column was full: what generation appends to it is full too.
_described: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _padded(mask: Tensor, past: Cache | None, length: int) -> Batch:
    """A padding mask (B, keys), 0 for tokens that do not exist.

    Keys after a row's last token need no mask: causal attention hides them from all tokens there are.
    """
    present = mask != 0
    if is_blind(mask):
        return Batch(kv_starts=_starts(present))
    shape, left = _described.get(past, (None, None)) if past is not None else (None, None)
    if length != 1 or shape != (mask.shape[0], mask.shape[1] - 1):
        starts = _starts(present)
        steps = present[:, 1:] & ~present[:, :-1]
        holes = steps.sum(1) + present[:, 0] > 1
        left, holes, full = torch.stack(((starts > 0).any(), holes.any(), present[:, -1].all())).tolist()
        if past is not None and (holes or not full):
            _described.pop(past, None)
        elif past is not None:
            _described[past] = (tuple(mask.shape), left)
        if holes:
            return Batch("an attention_mask with holes")
        return Batch(kv_starts=starts) if left else PLAIN
    _described[past] = (tuple(mask.shape), left)
    return Batch(kv_starts=_starts(present)) if left else PLAIN


def _padded_both_ways(mask: Tensor) -> Batch:
    """A padding mask (B, keys) of bidirectional attention, to which padding behind a row's tokens is no more hidden
    than padding before them: the tokens of every row become one sequence, and the padding between two rows another."""
    present = mask != 0
    size, length = present.shape
    starts = _starts(present)
    ends = torch.where(present.any(1), length - present.flip(1).int().argmax(1), length).int()
    if not is_blind(mask):
        holes, full = torch.stack(((present.sum(1) != ends - starts).any(), present.all())).tolist()
        if holes:
            return Batch("an attention_mask with holes")
        if full:
            return PLAIN
    rows = torch.arange(size, dtype=torch.int32, device=mask.device)[:, None] * length
    limits = (torch.stack((starts, ends), 1) + rows).flatten()
    cu_seqlens = torch.nn.functional.pad(torch.nn.functional.pad(limits, (1, 0)), (0, 1), value=size * length)
    return Batch(cu_seqlens=cu_seqlens, max_seqlen=2 * length, declared=True, rotates_first=True)


def _starts(present: Tensor) -> Tensor:
    """(B,) int32: index of the first token of every row; the number of columns where there is none."""
    first = present.int().argmax(1)
    return torch.where(present.any(1), first, present.shape[1]).int()


def _packed_by_position(position_ids: Tensor, tokens: Tensor) -> Batch:
    total = tokens.shape[0] * tokens.shape[1]
    blind = is_blind(position_ids)
    cu_seqlens, longest = cu_seqlens_from_position_ids(position_ids, max(total, 1) if blind else None)
    if cu_seqlens.shape[0] <= tokens.shape[0] + 1:
        return PLAIN  # one sequence in every row
    return _packed(cu_seqlens, longest, tokens)._replace(declared=False)


def _with_positions(batch: Batch, position_ids: Tensor) -> Batch:
    """A batch of packed sequences that came with position ids of any kind: (B, N) or, of images, (3, B, N) and more.

    Attention rotates by the place within a sequence. That is right for positions that count up by one, of which the
    device makes sure; any other kind of positions is rotated before.
    """
    if position_ids.ndim != 2:
        return batch._replace(rotates_first=True)
    positions, cu_seqlens = position_ids.flatten(), cast(Tensor, batch.cu_seqlens)
    index = torch.arange(positions.shape[0], device=positions.device, dtype=cu_seqlens.dtype)[1:]
    begins = torch.isin(index, cu_seqlens.to(positions.device))
    counts_up = (positions[1:] == positions[:-1] + 1) | begins
    torch._assert_async(counts_up.all(), "position_ids must count up by one within every sequence of cu_seq_lens_q")
    return batch


def _packed(cu_seqlens: Tensor, max_seqlen: int, tokens: Tensor) -> Batch:
    total = tokens.shape[0] * tokens.shape[1]
    cu_seqlens = cu_seqlens.to(tokens.device).contiguous()
    max_seqlen = min(max_seqlen, total)
    first = cu_seqlens[(cu_seqlens[1:] - cu_seqlens[:-1]).argmax()].long()
    longest = (first + torch.arange(max_seqlen, device=tokens.device)).clamp(max=total - 1)
    return Batch(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, longest=longest, declared=True)


def _lengths(
    past: Cache, given: dict[str, Any], seen: int | None, size: int, length: int, device: torch.device
) -> Tensor:
    """(B,) int32: tokens after this pass, of a cache that holds some; more than there are where a full sliding layer no
    longer counts them, since kernels read no further than its end."""
    layers = [layer for layer in past.layers if isinstance(layer, StaticLayer)]
    whole = next((layer for layer in layers if not layer.is_sliding), None)
    if given.get("cache_position") is not None:
        total = given["cache_position"][-1] + 1
    elif not layers:
        total = cast(int, seen) + length  # dynamic layers count on the host
    elif whole is None and cast(int, seen) >= layers[0].max_cache_len:
        total = layers[0].max_cache_len + length
    else:
        # Compiled graphs are replayed with a tensor's value, but with the int that they were made with.
        layer = layers[0] if whole is None else whole
        count = getattr(layer, "cumulative_length", None)
        total = (layer.get_seq_length() if count is None else count) + length
    if not isinstance(total, Tensor):
        return torch.full((size,), total, dtype=torch.int32, device=device)
    if whole is not None and not torch.compiler.is_compiling():
        # StaticLayer.update would refuse; what writes in its place passes over tokens that find no row.
        torch._assert_async(total <= whole.max_cache_len, f"a static cache of {whole.max_cache_len} tokens is full")
    return total.to(device, torch.int32).reshape(1).repeat(size)


def may_be_written(past: Cache) -> bool:
    """Whether nothing but the layers' own ``update`` happens when tokens join the cache."""
    return type(past).update is Cache.update and not past.offloading


def count_written(layer: StaticLayer, tokens: int) -> None:
    """What ``StaticLayer.update`` notes of tokens, for those that a kernel has written. 4.57 looks for rows not 0."""
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length.add_(tokens)  # in place: compiled graphs know its address
