"""The padding and packing of a batch, found on the device once per forward pass for all layers of a decoder.

transformers passes each layer a mask, and its form depends on the attention implementation. This file reads the model's
own inputs, a 2-D padding mask, position ids or cu_seqlens, before transformers builds a mask from them.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers import masking_utils
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from fused_rope_attn.attention.api import bounds_of_sequences
from fused_rope_attn.integrations.transformers import caches, obstacles, paged
from fused_rope_attn.integrations.transformers.families import Convention
from fused_rope_attn.integrations.transformers.rotations import Kept
from fused_rope_attn.integrations.transformers.shards import Shared
from fused_rope_attn.integrations.transformers.state import PATCH, state_of
from fused_rope_attn.masks import intervals_of_dense
from fused_rope_attn.runtime.device import is_capturing

# transformers 5.23 and later count the chunks of packed documents from each document's first token.
_COUNTS_CHUNKS_BY_DOCUMENT = hasattr(masking_utils, "remap_positions_for_packed_sequence")
# The keyword by which a decoder's Batch reaches its attention modules: transformers passes unknown keywords on.
BATCH = "fused_rope_batch"
_PACKED_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Batch(NamedTuple):
    """A tuple, because gradient checkpointing, torch.compile and accelerate's hooks handle tuples.

    original: the reason why this batch needs the modules' own forward, or "".
    kv_starts: (B,) int32, first key of left-padded rows; None if no row is padded on the left.
    kv_lens: (B,) int32, tokens after this pass, an upper bound of the keys in every layer of the cache; None if the
        cache is empty before the pass.
    cached: (B,) int32, tokens before this pass, if attention may itself write StaticLayers, or with ``rows``
        DynamicLayers; None if it may not, or if the cache is empty.
    rows: tokens before this pass, if attention may itself write DynamicLayers; else None.
    cu_seqlens: (sequences + 1,) int32 of packed sequences, through all rows of the batch; None if nothing is packed.
    max_seqlen: an upper bound of their lengths.
    longest: (max_seqlen,) int64: the tokens of the longest sequence; all sequences use their table rows.
    otherwise: the batch for layers whose own attention would not separate the sequences of cu_seqlens, which were found
        from position ids. ``attention.forward`` chooses by the arguments of each layer. None if cu_seqlens always hold.
    kept: None if the layers share nothing.
    causal: False for bidirectional attention, and with intervals.
    intervals: query_starts and query_ends (1|B, N) int32 in place of causality and of the modules' windows, or None.
    by_type: the batches of layers by their type in ``config.layer_types``; other layers have this batch.
    inclusive_window: a bidirectional window of w reaches keys at distance w; else w - 1, as a causal one.
    shared: set if several ranks share the sequences; all other fields except ``kept`` and ``causal`` are then unused.
    own_tables: the sequences in cu_seqlens have their own table rows.
    paged: set in a pass of continuous batching; all other fields except ``kept`` are then unused.
    """

    original: str = ""
    kv_starts: Tensor | None = None
    kv_lens: Tensor | None = None
    cached: Tensor | None = None
    rows: int | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    longest: Tensor | None = None
    otherwise: Any = None
    kept: Kept | None = None
    causal: bool = True
    inclusive_window: bool = False
    own_tables: bool = False
    shared: Shared | None = None
    paged: paged.PagedPass | None = None
    intervals: Intervals | None = None
    by_type: dict[str, Any] | None = None


PLAIN = Batch()


def kept_of(batch: Batch) -> Kept | None:
    # A compiled graph that read the values that eager passes keep would be compiled again for each of them.
    return None if torch.compiler.is_compiling() else batch.kept


def describe(attentions: list[nn.Module], config: Any, given: dict[str, Any], made: bool = False) -> Batch:
    """Return the Batch of a forward pass. given: the arguments of the decoder's forward by name.

    Synchronise with the device at most once, and not at all in a decoding step after a described prompt, under
    torch.compile, or without mask and positions. Under flash-attention, which reads positions too, synchronise at most
    four times before a first step.
    Under torch.compile a padding mask must have no holes, because nothing can check it.

    made: the masks are made outside of the decoder, with the cache that is given. Else the decoder makes them, perhaps
        after a cache.
    """
    obstacles.refuse_wrong_calls(attentions, given)
    causal = obstacles.is_causal(attentions, config, given)
    past = caches.cache_of(given)
    if caches.is_paged(past):
        reason = paged.obstacle_to_pages(attentions, config, given, causal)
        return Batch(reason) if reason else Batch(paged=paged.PagedPass(given), kept=Kept())
    tokens = obstacles.tokens_of(given)
    convention = state_of(attentions[0], PATCH).convention
    # Latent attention takes no intervals.
    masks = dense_masks(attentions[0].config, given, tokens.shape[1]) if not convention.latent else None
    reason = obstacles.obstacle(
        attentions, config, given if masks is None else given | {"attention_mask": None}, causal
    )
    if reason:
        return Batch(reason)
    # Not the cache's first layer, which in hybrid models may be of another kind.
    seen = 0 if past is None else caches.tokens_seen(past, obstacles.layer_of(attentions[0]))
    if masks is not None:
        return _by_masks(masks, attentions, past, given, seen, tokens)
    # A bidirectional model would also attend to unwritten rows of a static cache.
    if not causal and (seen != 0 or past is not None and any(isinstance(x, StaticLayer) for x in past.layers)):
        return Batch("bidirectional attention with a cache that holds tokens, or is static,")
    if convention.latent and (seen != 0 or caches.reused(past)):
        return Batch("a step of latent attention onto a cache, whose format is the module's own,")

    def completed(batch: Batch) -> Batch:
        if batch.original:
            return batch
        if not causal:
            batch = _bidirectional(batch, config, given)
        batch = _with_cache(batch, past, given, seen, tokens)
        return _in_chunks(batch, attentions, past, given, tokens)

    batch = _masked(given, tokens, seen, bool(causal), config, convention)
    otherwise = (
        None if batch.otherwise is None or made and not obstacles.uses_flash(config) else completed(batch.otherwise)
    )
    batch = completed(batch)._replace(otherwise=otherwise)
    # If only one of the two is served, take the modules' own forward: the choice comes after the masks are made.
    return otherwise if otherwise is not None and otherwise.original else batch


def describe_layer(module: nn.Module, given: dict[str, Any], more: bool) -> Batch:
    """Return the Batch of an attention module that was called without its decoder. given: the call's keywords.

    more: there is a cache, or arguments without a name. Calls with a mask or a cache take the module's own forward,
    because the mask's form depends on the implementation, and the padding of cached keys is unknown.
    """
    obstacles.refuse_wrong_calls([module], given)
    if more or given.get("attention_mask") is not None:
        return Batch("a layer called with masks or caches and without its model")
    causal = obstacles.is_causal([module], module.config, given)
    reason = obstacles.obstacle([module], module.config, given, causal)
    named = any(given.get(name) is not None for name in ("position_ids", *_PACKED_NAMES))
    if not reason and obstacles.uses_flash(module.config) and named:
        reason = "a layer called without its model, and with positions from which flash-attention finds sequences,"
    # Flash-attention and SDPA are causal without a mask.
    if not reason and obstacles.implementation_of(module.config) in ("eager", "flex_attention"):
        reason = "a layer called without a mask, which hides no key from eager attention,"
    window = state_of(module, PATCH).convention.window_of(module)
    if not reason and (window or obstacles.chunk_of([module])) is not None and not obstacles.uses_flash(module.config):
        reason = "a layer with a window or chunks called without a mask, which alone shows them to SDPA,"
    if reason:
        return Batch(reason)
    return PLAIN if causal else _bidirectional(PLAIN, module.config, given)


def _bidirectional(batch: Batch, config: Any, given: dict[str, Any]) -> Batch:
    # transformers' masks reach one key further if the call or the config sets `is_causal`.
    inclusive = obstacles.asked_is_causal(config, given) is False and not obstacles.uses_flash(config)
    return batch._replace(causal=False, inclusive_window=inclusive)


def _by_masks(
    masks: dict[str, Tensor],
    attentions: list[nn.Module],
    past: Cache | None,
    given: dict[str, Any],
    seen: int | None,
    tokens: Tensor,
) -> Batch:
    """Return the batch that its ``dense_masks`` describe."""
    if seen != 0 or caches.reused(past):
        return Batch("an attention_mask of four dimensions with a cache that may hold tokens,")
    if "" not in masks and not {type_of(module) for module in attentions} <= masks.keys():
        return Batch("a mask for each type of layer, but not for all of this model's,")
    found = intervals_by_type(masks, tokens.device)
    if found is None:
        return Batch("an attention_mask in which the queries that see a key are not next to one another")
    batch = _with_cache(PLAIN, past, given, 0, tokens)
    by_type = {name: batch._replace(causal=False, intervals=intervals) for name, intervals in found.items()}
    return by_type[""] if "" in by_type else batch._replace(by_type=by_type)


def _in_chunks(
    batch: Batch, attentions: list[nn.Module], past: Cache | None, given: dict[str, Any], tokens: Tensor
) -> Batch:
    """Return a batch with that of layers which attend within chunks of a row's tokens, counted from its first one."""
    layer = next((module for module in attentions if obstacles.chunk_of([module]) is not None), None)
    if layer is None:
        return batch
    chunk = cast(int, obstacles.chunk_of([layer]))
    seen = 0 if past is None else caches.tokens_seen(past, obstacles.layer_of(layer))
    size, length = tokens.shape[:2]
    # A graph must not keep the host's count of a static cache, nor a condition on a length that has a name.
    if seen == 0:
        is_one_chunk = statically_known_true(length <= chunk)
    else:
        is_one_chunk = seen is not None and not caches.reused(past) and seen + length <= chunk
    if is_one_chunk:
        return batch
    if not batch.causal:
        return Batch("bidirectional attention in chunks")
    first = torch.zeros(size, dtype=torch.int32, device=tokens.device) if batch.kv_starts is None else batch.kv_starts
    if seen == 0:
        token = torch.arange(length, dtype=torch.int32, device=tokens.device).expand(size, -1)
        places, limit = token - first[:, None], torch.full_like(token, length)
        if batch.cu_seqlens is not None:
            if not _COUNTS_CHUNKS_BY_DOCUMENT:
                return Batch("packed sequences in chunks that are counted through all of them")
            rows = length * torch.arange(size, dtype=torch.int32, device=tokens.device)[:, None]
            after = batch.cu_seqlens[1:].contiguous()
            document = torch.searchsorted(after, token + rows, right=True).clamp(max=after.shape[0] - 1)
            begins, limit = batch.cu_seqlens[document] - rows, after[document] - rows
            # Masks count chunks by positions, which may begin with another number than 0.
            places = token - begins if given.get("position_ids") is None else given["position_ids"].to(tokens.device)
        ends = token + (chunk - places.remainder(chunk)).ceil().int()
        intervals = token, torch.minimum(ends, limit)
        in_chunks = batch._replace(causal=False, intervals=intervals, cu_seqlens=None)
    elif length > 1:
        return Batch("several tokens in chunks with a cache that holds others")
    elif given.get("cache_position") is None and all(
        isinstance(x, StaticLayer) and x.is_sliding for x in cast(Cache, past).layers
    ):
        return Batch("a static cache that does not count the tokens after a chunk")
    else:
        last = cast(Tensor, batch.kv_lens) - 1
        in_chunks = batch._replace(kv_starts=first + (last - first) // chunk * chunk)
    return batch._replace(by_type={cast(str, type_of(layer)): in_chunks})


def type_of(module: nn.Module) -> str | None:
    """Return the type of a module's layer in its config, or None."""
    types = getattr(module.config, "layer_types", None)
    return None if types is None else types[obstacles.layer_of(module)]


def _masked(
    given: dict[str, Any], tokens: Tensor, seen: int | None, causal: bool, config: Any, convention: Convention
) -> Batch:
    """Return the batch that its padding mask, its cu_seqlens or its position ids describe."""
    size, length = tokens.shape[:2]
    past, mask, position_ids = caches.cache_of(given), given.get("attention_mask"), given.get("position_ids")
    if all(given.get(name) is not None for name in _PACKED_NAMES):
        if seen != 0:
            return Batch("cu_seq_lens with a cache that holds tokens")
        batch = _packed(given["cu_seq_lens_q"].flatten().int(), int(given["max_length_q"]), tokens)
        return batch if position_ids is None else _with_positions(batch, position_ids)
    places = None if position_ids is None or length == 1 else convention.text_positions(position_ids)
    by_flash = obstacles.uses_flash(config) and size == 1 and seen == 0 and not caches.reused(past)
    if mask is not None:
        if seen is not None and mask.shape[1] != seen + length:
            return Batch("an attention_mask without exactly one column for every key")
        mask = mask.to(tokens.device)
        batch = _padded(mask, past, length) if causal else _padded_both_ways(mask)
        # flash-attention reads the positions of a single row if its mask hides nothing.
        if batch is not PLAIN or not by_flash or places is None or not bool((mask != 0).all()):
            return batch
    # Other attention separates documents by its mask: not with `is_causal=False`, in models that make masks without
    # positions, or with a cache.
    in_masks = convention.documents_in_masks and obstacles.asked_is_causal(config, given) is not False and past is None
    if places is None or not (by_flash if obstacles.uses_flash(config) else in_masks):
        return PLAIN
    batch = _packed_by_position(places.expand(size, -1), tokens, by_flash)
    # Image tokens are rotated by other positions than their places in the text.
    return batch if places is position_ids or batch.cu_seqlens is None else batch._replace(own_tables=True)


def _with_cache(batch: Batch, past: Cache | None, given: dict[str, Any], seen: int | None, tokens: Tensor) -> Batch:
    """Return the batch with its cache's fields. seen: as ``tokens_seen`` returns it."""
    # Compiled and captured graphs are run again, so they must not use values that the host kept from one pass.
    alone = torch.compiler.is_compiling() or is_capturing(tokens.device)
    if not alone:
        batch = batch._replace(kept=Kept())
    if past is None:
        return batch
    may_write = caches.may_be_written(past)
    if may_write and not alone and any(type(layer) is DynamicLayer for layer in past.layers):
        batch = batch._replace(rows=seen)
    if seen == 0 and not caches.reused(past) or batch.cu_seqlens is not None:
        return batch
    size, length = tokens.shape[:2]
    kv_lens = _lengths(past, given, seen, size, length, tokens.device)
    written = (StaticLayer,) if batch.rows is None else (StaticLayer, DynamicLayer)
    may_write = may_write and any(type(layer) in written for layer in past.layers)
    return batch._replace(kv_lens=kv_lens, cached=kv_lens - length if may_write else None)


# Cache to (the shape of its last mask, whether a row of that is padded on the left). Only masks without holes and with
# a full last column are kept, because generation appends full columns to them.
_described: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _padded(mask: Tensor, past: Cache | None, length: int) -> Batch:
    """Return the Batch of a padding mask (B, keys), 0 for padding, of causal attention.

    Padding after a row's last token needs no mask, because causal attention hides it from all tokens.
    """
    present = mask != 0
    if obstacles.is_blind(mask):
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
    """Return the Batch of a padding mask (B, keys) of bidirectional attention.

    Padding on either side must be hidden, so the tokens of every row become one packed sequence, and the padding
    between the tokens of two rows another.
    """
    present = mask != 0
    size, length = present.shape
    starts = _starts(present)
    ends = torch.where(present.any(1), length - present.flip(1).int().argmax(1), length).int()
    if not obstacles.is_blind(mask):
        holes, full = torch.stack(((present.sum(1) != ends - starts).any(), present.all())).tolist()
        if holes:
            return Batch("an attention_mask with holes")
        if full:
            return PLAIN
    rows = torch.arange(size, dtype=torch.int32, device=mask.device)[:, None] * length
    limits = (torch.stack((starts, ends), 1) + rows).flatten()
    cu_seqlens = torch.nn.functional.pad(torch.nn.functional.pad(limits, (1, 0)), (0, 1), value=size * length)
    return Batch(cu_seqlens=cu_seqlens, max_seqlen=2 * length, own_tables=True)


def _starts(present: Tensor) -> Tensor:
    """Return (B,) int32: the first token of every row, or the number of columns if a row has no token."""
    first = present.int().argmax(1)
    return torch.where(present.any(1), first, present.shape[1]).int()


def _packed_by_position(places: Tensor, tokens: Tensor, by_flash: bool) -> Batch:
    """Return the Batch of the sequences in places (B, N) of any dtype. by_flash: those of flash-attention, B = 1.

    A mask separates tokens whose places do not count up by one. flash-attention begins a sequence at each place 0.
    """
    blind, own_tables = obstacles.is_blind(places), False
    begins = torch.ones_like(places, dtype=torch.bool)
    begins[:, 1:] = places.diff(dim=1) != 1
    if by_flash:
        first, zeros = begins[:, :1], places == 0
        as_masks = torch.cat((first, zeros[:, 1:]), 1) == begins
        if blind:
            torch._assert_async(as_masks.all(), "position_ids must count up by one from 0 in every packed sequence")
        else:
            one, zero, same = torch.stack((~begins[:, 1:].any(), zeros[:, 0].any(), as_masks.all())).tolist()
            if one:
                return PLAIN
            if not zero:
                return Batch("packed sequences whose first position is not 0, with flash-attention,")
            begins, own_tables = zeros, not same
    cu_seqlens, longest = bounds_of_sequences(begins, max(begins.numel(), 1) if blind else None)
    if cu_seqlens.shape[0] <= tokens.shape[0] + 1:
        return PLAIN  # one sequence in every row
    return _packed(cu_seqlens, longest, tokens)._replace(own_tables=own_tables, otherwise=PLAIN)


def _with_positions(batch: Batch, position_ids: Tensor) -> Batch:
    """Return a packed batch with its position ids, (B, N), or (3, B, N) and more for images.

    Attention rotates by the place within a sequence, which is right for positions that count up by one. A device-side
    assertion checks (B, N); positions of images need tables for each token.
    """
    if position_ids.ndim != 2:
        return batch._replace(own_tables=True)
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
    return Batch(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, longest=longest)


def _lengths(
    past: Cache, given: dict[str, Any], seen: int | None, size: int, length: int, device: torch.device
) -> Tensor:
    """Return (B,) int32: tokens after this pass, of a cache that is not empty.

    A full sliding layer stops counting. The result is then too large, but kernels stop at the layer's end.
    """
    layers = [layer for layer in past.layers if isinstance(layer, StaticLayer)]
    whole = next((layer for layer in layers if not layer.is_sliding), None)
    if given.get("cache_position") is not None:
        total = given["cache_position"][-1] + 1
    elif not layers:
        total = cast(int, seen) + length  # dynamic layers count on the host
    elif whole is None and cast(int, seen) >= layers[0].max_cache_len:
        total = layers[0].max_cache_len + length
    else:
        # A compiled graph reads a tensor again in each run, but keeps the int that it was compiled with.
        layer = layers[0] if whole is None else whole
        count = getattr(layer, "cumulative_length", None)
        total = (layer.get_seq_length() if count is None else count) + length
    if not isinstance(total, Tensor):
        return torch.full((size,), total, dtype=torch.int32, device=device)
    if whole is not None and not torch.compiler.is_compiling():
        # StaticLayer.update would raise, but the kernel that replaces it skips tokens without a row.
        torch._assert_async(total <= whole.max_cache_len, f"a static cache of {whole.max_cache_len} tokens is full")
    return total.to(device, torch.int32).reshape(1).repeat(size)


Intervals = tuple[Tensor, Tensor]


def dense_masks(config: Any, given: dict[str, Any], length: int) -> dict[str, Tensor] | None:
    """Return the masks of four dimensions of a call by type of layer, "" for all; None if one can be no intervals.

    Users give such masks, and models like PaliGemma and Gemma 3 make them for tokens that see later ones. The hidden
    keys differ between models and releases, so they are read from the masks themselves.

    Masks have a row for each of the pass's tokens, a column for each, and perhaps more columns for the empty rows of a
    static cache. Eager attention adds them to scores, and SDPA adds them or takes True for visible.
    """
    mask: Any = given.get("attention_mask")
    masks: dict[str, Any] = mask if isinstance(mask, dict) else {"": mask}
    implementation = obstacles.implementation_of(config)
    if implementation not in ("eager", "sdpa"):
        return None
    for one in masks.values():
        if not isinstance(one, Tensor) or one.ndim != 4 or one.requires_grad:
            return None
        if one.shape[2] != length or one.shape[3] < length:
            return None
        if obstacles.is_blind(one) or not (
            one.is_floating_point() or one.dtype == torch.bool and implementation == "sdpa"
        ):
            return None
    return masks


def intervals_by_type(masks: dict[str, Tensor], device: torch.device) -> dict[str, Intervals] | None:
    """Return query_starts and query_ends (1|B, N) int32 of each mask (1|B, 1|HQ, N, K); None if they are not exact.

    Synchronise with the device once. Rows that see no key are padding, which no row may see.
    """
    found: dict[str, Intervals] = {}
    exact = []
    for name, mask in masks.items():
        sees = mask if mask.dtype == torch.bool else mask == 0
        if mask.dtype != torch.bool:
            exact.append((sees | (mask <= torch.finfo(mask.dtype).min)).all())
        sees, later = sees.tensor_split([sees.shape[2]], 3)
        starts, ends, is_exact = intervals_of_dense(sees)
        exact += [is_exact, ~later.any(), (sees[:, 0].any(2) | (starts == ends)).all()]
        found[name] = starts.to(device), ends.to(device)
    return found if bool(torch.stack(exact).all()) else None
