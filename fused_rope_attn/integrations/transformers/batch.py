"""The padding and packing of a batch, found on the device once per forward pass for all layers of a decoder. The masks
of layers depend on the attention implementation, so this file reads the model's inputs, a 2-D padding mask, position
ids or cu_seqlens, before transformers builds a mask from them."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers import masking_utils
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from fused_rope_attn.attention.api import bounds_of_sequences
from fused_rope_attn.distributed import api, documents
from fused_rope_attn.integrations.transformers import caches, obstacles, state
from fused_rope_attn.integrations.transformers.rotations import Kept
from fused_rope_attn.masks import intervals_of_dense
from fused_rope_attn.runtime.checks import kind_of
from fused_rope_attn.runtime.device import is_capturing
from fused_rope_attn.runtime.entry import in_context_parallel

# transformers 5.23 and later count the chunks of packed documents from each document's first token.
_COUNTS_CHUNKS_BY_DOCUMENT = hasattr(masking_utils, "remap_positions_for_packed_sequence")
# The keyword by which a decoder's Batch reaches its attention modules: transformers passes unknown keywords on.
BATCH = "fused_rope_batch"
# The argument of a model's forward that is the ``DocumentPlan`` of a batch.
PLAN = "cp_plan"
_PACKED_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_ON_SHARDS = "is not served by a model that patch_model has given a cp_group"
_SEVERAL_ROWS = f"a batch of several rows of packed documents {_ON_SHARDS}: pack them into one row"


class Batch(NamedTuple):
    """A tuple, because gradient checkpointing, torch.compile and accelerate's hooks handle tuples."""

    original: str = ""  # the reason why this batch needs the modules' own forward, or ""
    kv_starts: Tensor | None = None  # (B,) int32, first key of left-padded rows; None if no row is padded on the left
    # (B,) int32, tokens after this pass, an upper bound of the keys in every layer of the cache; None if it was empty.
    kv_lens: Tensor | None = None
    # (B,) int32, tokens before this pass, if attention may itself write StaticLayers, or with ``rows`` DynamicLayers.
    cached: Tensor | None = None
    rows: int | None = None  # tokens before this pass, if attention may itself write DynamicLayers
    cu_seqlens: Tensor | None = None  # (sequences + 1,) int32 of packed sequences, through all rows of the batch
    max_seqlen: int = 0  # an upper bound of their lengths
    # If cu_seqlens were found from position ids, the batch for layers in which the unpatched model does not separate
    # sequences (``attention.forward`` chooses).
    otherwise: Any = None
    kept: Kept | None = None  # the tables that layers share
    causal: bool = True  # False for bidirectional attention, and with intervals
    inclusive_window: bool = False  # a bidirectional window of w reaches keys at distance w, else w - 1
    # The ranks that share the sequences, and their packed documents. ``kept`` and ``causal`` are the only other fields.
    shared: state.Shards | None = None
    plan: documents.DocumentPlan | None = None
    paged: caches.PagedPass | None = None  # a pass of continuous batching. ``kept`` is the only other field.
    # The first query that sees each key, and the one after the last (1|B, N) int32, in place of causality and windows.
    intervals: tuple[Tensor, Tensor] | None = None
    by_type: dict[str, Any] | None = None  # batches of layers by their type in ``config.layer_types``; others have this


PLAIN = Batch()


def kept_of(batch: Batch) -> Kept | None:
    # A compiled graph that read the values that eager passes keep would be compiled again for each of them.
    return None if torch.compiler.is_compiling() else batch.kept


def describe(call: obstacles.Pass, made: bool = False) -> Batch:
    """Return the Batch of a decoder's forward pass.

    Synchronise with the device at most once, under flash-attention, which reads positions too, at most four times, and
    not at all in a decoding step after a described prompt, under torch.compile, or without mask and positions. Under
    torch.compile a padding mask must have no holes, because nothing can check it.
    made: ``generate``, or a model like Gemma 3's, makes the masks, with the cache that is given. Those are causal even
    if the modules are not. Else the decoder makes them, perhaps after a cache.
    """
    obstacles.refuse_wrong_calls(call)
    causal, past = obstacles.is_causal(call), call.past
    if caches.is_paged(past):
        reason = obstacles.obstacle_to_pages(call, causal)
        return Batch(reason) if reason else Batch(paged=caches.PagedPass(call.given), kept=Kept())
    if made and not causal:
        return Batch("bidirectional attention with masks that are made outside of the decoder")
    first = call.attentions[0]
    is_latent = bool(state.state_of(first, state.PATCH).convention.latent)
    masks = None if is_latent else dense_masks(call)  # latent attention takes no intervals
    others = call if masks is None else call._replace(given=call.given | {"attention_mask": None})
    reason = obstacles.obstacle(others, causal)
    if reason:
        return Batch(reason)
    # Not the cache's first layer, which in hybrid models may be of another kind.
    seen = 0 if past is None else caches.tokens_seen(past, obstacles.layer_of(first))
    if masks is not None:
        return _by_masks(masks, call, seen)
    # A bidirectional model would also attend to unwritten rows of a static cache.
    if not causal and (seen != 0 or past is not None and any(isinstance(x, StaticLayer) for x in past.layers)):
        return Batch("bidirectional attention with a cache that holds tokens, or is static,")
    if is_latent and (seen != 0 or caches.reused(past)):
        return Batch("a step of latent attention onto a cache, whose format is the module's own,")

    def completed(batch: Batch) -> Batch:
        if batch.original:
            return batch
        return _in_chunks(_with_cache(batch if causal else _bidirectional(batch, call), call, seen), call)

    batch, otherwise = _masked(call, seen, bool(causal)), None
    if batch.otherwise is not None and (not made or obstacles.uses_flash(call.config)):
        otherwise = completed(batch.otherwise)
    batch = completed(batch)._replace(otherwise=otherwise)
    # If only one of the two is served, take the modules' own forward: the choice comes after the masks are made.
    return otherwise if otherwise is not None and otherwise.original else batch


def describe_layer(module: nn.Module, given: dict[str, Any], more: bool) -> Batch:
    """Return the Batch of an attention module that was called without its decoder. given: the call's keywords. more:
    there is a cache, or arguments without a name. The form of a mask and the padding of cached keys are unknown."""
    call: obstacles.Pass = obstacles.Pass([module], module.config, given)
    obstacles.refuse_wrong_calls(call)
    if more or given.get("attention_mask") is not None:
        return Batch("a layer called with masks or caches and without its model")
    causal, flash = obstacles.is_causal(call), obstacles.uses_flash(module.config)
    found = flash and any(given.get(name) is not None for name in ("position_ids", *_PACKED_NAMES))
    limited = not flash and (obstacles.window_of(module) or obstacles.chunked_layer([module])) is not None
    eager = call.implementation in ("eager", "flex_attention")  # flash-attention and SDPA are causal without a mask
    reasons = {
        "a layer called without its model, and with positions from which flash-attention finds sequences,": found,
        "a layer called without a mask, which hides no key from eager attention,": eager,
        "a layer with a window or chunks called without a mask, which alone shows them to SDPA,": limited,
    }
    reason = obstacles.obstacle(call, causal) or obstacles.first_of(reasons)
    return Batch(reason) if reason or causal else _bidirectional(PLAIN, call)


def _bidirectional(batch: Batch, call: obstacles.Pass) -> Batch:
    # transformers' masks reach one key further if the call or the config sets `is_causal`.
    inclusive = call.asked_is_causal is False and not obstacles.uses_flash(call.config)
    return batch._replace(causal=False, inclusive_window=inclusive)


def _by_masks(masks: dict[str, Tensor], call: obstacles.Pass, seen: int | None) -> Batch:
    """Return the batch that its ``dense_masks`` (1|B, 1|HQ, N, K) describe. Synchronise with the device once. Rows that
    see no key are padding, which no row may see."""
    if seen != 0 or caches.reused(call.past):
        return Batch("an attention_mask of four dimensions with a cache that may hold tokens,")
    if "" not in masks and not {type_of(module) for module in call.attentions} <= masks.keys():
        return Batch("a mask for each type of layer, but not for all of this model's,")
    batch, by_type, exact = _with_cache(PLAIN, call, seen), {}, []
    for name, mask in masks.items():
        sees = mask if mask.dtype == torch.bool else mask == 0
        if mask.dtype != torch.bool:
            exact.append((sees | (mask <= torch.finfo(mask.dtype).min)).all())
        sees, later = sees.tensor_split([sees.shape[2]], 3)
        starts, ends, is_exact = intervals_of_dense(sees)
        exact += [is_exact, ~later.any(), (sees[:, 0].any(2) | (starts == ends)).all()]
        intervals = starts.to(call.tokens.device), ends.to(call.tokens.device)
        by_type[name] = batch._replace(causal=False, intervals=intervals)
    if not bool(torch.stack(exact).all()):
        return Batch("an attention_mask in which the queries that see a key are not next to one another")
    return by_type[""] if "" in by_type else batch._replace(by_type=by_type)


def _in_chunks(batch: Batch, call: obstacles.Pass) -> Batch:
    """Return a batch with that of layers which attend within chunks of a row's tokens, counted from its first one."""
    layer = obstacles.chunked_layer(call.attentions)
    if layer is None:
        return batch
    if not batch.causal:  # masks of chunks are causal, whatever the config says
        return Batch("bidirectional attention in chunks")
    past, (size, length), device = call.past, call.tokens.shape[:2], call.tokens.device
    chunk: int = state.state_of(layer, state.PATCH).convention.chunk_of(layer)
    seen = 0 if past is None else caches.tokens_seen(past, obstacles.layer_of(layer))
    # A graph must not keep the host's count of a static cache, nor a condition on a length that has a name.
    if seen == 0:
        is_one_chunk = statically_known_true(length <= chunk)
    else:
        is_one_chunk = seen is not None and not caches.reused(past) and seen + length <= chunk
    if is_one_chunk:
        return batch
    first = torch.zeros(size, dtype=torch.int32, device=device) if batch.kv_starts is None else batch.kv_starts
    if seen == 0:
        token = torch.arange(length, dtype=torch.int32, device=device).expand(size, -1)
        places, limit = token - first[:, None], torch.full_like(token, length)
        if batch.cu_seqlens is not None:
            if not _COUNTS_CHUNKS_BY_DOCUMENT:
                return Batch("packed sequences in chunks that are counted through all of them")
            rows = length * torch.arange(size, dtype=torch.int32, device=device)[:, None]
            after = batch.cu_seqlens[1:].contiguous()
            document = torch.searchsorted(after, token + rows, right=True).clamp(max=after.shape[0] - 1)
            begins, limit = batch.cu_seqlens[document] - rows, after[document] - rows
            # Masks count chunks by positions, which may begin with another number than 0.
            positions = call.given.get("position_ids")
            places = token - begins if positions is None else positions.to(device)
        ends = token + (chunk - places.remainder(chunk)).ceil().int()
        intervals = token, torch.minimum(ends, limit)
        in_chunks = batch._replace(causal=False, intervals=intervals, cu_seqlens=None)
    elif length > 1:
        return Batch("several tokens in chunks with a cache that holds others")
    elif call.given.get("cache_position") is None and all(
        isinstance(x, StaticLayer) and x.is_sliding for x in past.layers
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


def _masked(call: obstacles.Pass, seen: int | None, causal: bool) -> Batch:
    """Return the batch that its padding mask, its cu_seqlens or its position ids describe."""
    given, past, tokens = call.given, call.past, call.tokens
    convention = state.state_of(call.attentions[0], state.PATCH).convention
    (size, length), flash = tokens.shape[:2], obstacles.uses_flash(call.config)
    mask, position_ids = given.get("attention_mask"), given.get("position_ids")
    if all(given.get(name) is not None for name in _PACKED_NAMES):
        if seen != 0:
            return Batch("cu_seq_lens with a cache that holds tokens")
        cu_seqlens = given["cu_seq_lens_q"].flatten().int().to(tokens.device).contiguous()
        return Batch(cu_seqlens=cu_seqlens, max_seqlen=min(int(given["max_length_q"]), size * length))
    places = None if position_ids is None or length == 1 else convention.text_positions(position_ids)
    by_flash = flash and size == 1 and seen == 0 and not caches.reused(past)
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
    in_masks = convention.documents_in_masks and call.asked_is_causal is not False and past is None
    if places is None or not (by_flash if flash else in_masks):
        return PLAIN
    return _packed_by_position(places.expand(size, -1), tokens, by_flash)


def _with_cache(batch: Batch, call: obstacles.Pass, seen: int | None) -> Batch:
    """Return the batch with its cache's fields. seen: as ``tokens_seen`` returns it."""
    past, tokens = call.past, call.tokens
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
    kv_lens = _lengths(call, seen)
    written = (StaticLayer,) if batch.rows is None else (StaticLayer, DynamicLayer)
    may_write = may_write and any(type(layer) in written for layer in past.layers)
    return batch._replace(kv_lens=kv_lens, cached=kv_lens - tokens.shape[1] if may_write else None)


# Cache to (the shape of its last mask, whether a row of that is padded on the left). Only masks without holes and with
# a full last column are kept, because generation appends full columns to them.
_described: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _padded(mask: Tensor, past: Cache | None, length: int) -> Batch:
    """Return the Batch of a padding mask (B, keys), 0 for padding, of causal attention, which by itself hides the
    padding after a row's last token."""
    present = mask != 0
    if obstacles.is_blind(mask):
        return Batch(kv_starts=_starts(present))
    shape, left = (None, None) if past is None else _described.get(past, (None, None))
    holes, full = False, True
    if length != 1 or shape != (mask.shape[0], mask.shape[1] - 1):
        steps = present[:, 1:] & ~present[:, :-1]
        found = (_starts(present) > 0).any(), (steps.sum(1) + present[:, 0] > 1).any(), present[:, -1].all()
        left, holes, full = torch.stack(found).tolist()
    if past is not None:
        _described[past] = (tuple(mask.shape), left) if full and not holes else (None, None)
    if holes:
        return Batch("an attention_mask with holes")
    return Batch(kv_starts=_starts(present)) if left else PLAIN


def _padded_both_ways(mask: Tensor) -> Batch:
    """Return the Batch of a padding mask (B, keys) of bidirectional attention. The tokens of every row become one
    packed sequence, and the padding between the tokens of two rows another."""
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
    return Batch(cu_seqlens=cu_seqlens, max_seqlen=min(size, 2) * length)


def _starts(present: Tensor) -> Tensor:
    """Return (B,) int32: the first token of every row, or the number of columns if a row has no token."""
    first = present.int().argmax(1)
    return torch.where(present.any(1), first, present.shape[1]).int()


def _packed_by_position(places: Tensor, tokens: Tensor, by_flash: bool) -> Batch:
    """Return the Batch of the sequences in places (B, N) of any dtype. A mask begins a sequence at each place
    that is not the one before it plus one. flash-attention (``by_flash``, B = 1) begins a sequence at each place 0."""
    blind = obstacles.is_blind(places)
    begins = torch.ones_like(places, dtype=torch.bool)
    begins[:, 1:] = places.diff(dim=1) != 1
    if by_flash:
        zeros = places == 0
        if blind:
            as_masks = (zeros[:, 1:] == begins[:, 1:]).all()
            torch._assert_async(as_masks, "position_ids must count up by one from 0 in every packed sequence")
        else:
            one, zero = torch.stack((~begins[:, 1:].any(), zeros[:, 0].any())).tolist()
            if one:
                return PLAIN
            if not zero:
                return Batch("packed sequences whose first position is not 0, with flash-attention,")
            begins = zeros
    cu_seqlens, longest = bounds_of_sequences(begins, max(begins.numel(), 1) if blind else None)
    if cu_seqlens.shape[0] <= tokens.shape[0] + 1:
        return PLAIN  # one sequence in every row
    return Batch(cu_seqlens=cu_seqlens.to(tokens.device), max_seqlen=longest, otherwise=PLAIN)


def _lengths(call: obstacles.Pass, seen: int | None) -> Tensor:
    """Return (B,) int32: tokens after this pass, of a cache that is not empty. A full sliding layer stops counting. The
    result is then too large, but kernels stop at the layer's end."""
    past, (size, length), device = call.past, call.tokens.shape[:2], call.tokens.device
    layers = [layer for layer in past.layers if isinstance(layer, StaticLayer)]
    whole = next((layer for layer in layers if not layer.is_sliding), None)
    position = call.given.get("cache_position")
    if position is not None:
        total = position[-1] + 1
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


def dense_masks(call: obstacles.Pass) -> dict[str, Tensor] | None:
    """Return the masks of four dimensions of a call by type of layer, "" for all; None if one can be no intervals. They
    have a row for each of the pass's tokens, a column for each, and perhaps more for the empty rows of a static cache.
    Eager attention adds them to scores, and SDPA adds them or takes True for visible."""
    mask: Any = call.given.get("attention_mask")
    masks: dict[str, Any] = mask if isinstance(mask, dict) else {"": mask}
    length = call.tokens.shape[1]
    if call.implementation not in ("eager", "sdpa"):
        return None
    for one in masks.values():
        readable = isinstance(one, Tensor) and one.ndim == 4 and not (one.requires_grad or obstacles.is_blind(one))
        if not readable or one.shape[2] != length or one.shape[3] < length:
            return None
        if not (one.is_floating_point() or one.dtype == torch.bool and call.implementation == "sdpa"):
            return None
    return masks


def describe_shard(call: obstacles.Pass, shards: state.Shards) -> Batch:
    """Return the Batch of a decoder's forward pass over one rank's shard. Without a plan of the documents all ranks
    exchange their position ids: a document begins at every id that is not the one before it plus one. Raise if the pass
    cannot be computed on shards, because the modules' own forward cannot either."""
    obstacles.refuse_wrong_calls(call, on_shards=True)
    causal = obstacles.is_causal(call)
    mask, position_ids, plan = (call.given.get(name) for name in ("attention_mask", "position_ids", PLAN))
    obstacle, lengths = obstacles.obstacle(call, causal), call.given.get("cu_seq_lens_q")
    reasons = {
        f"{obstacle} {_ON_SHARDS}": obstacle,
        f"attention in chunks {_ON_SHARDS}": obstacles.chunked_layer(call.attentions) is not None,
        f"a cache {_ON_SHARDS}: generate with the model unpatched, or whole": call.past is not None,
        f"cu_seq_lens_q {_ON_SHARDS}: leave it out, position_ids say where documents begin": lengths is not None,
    }
    reason = obstacles.first_of(reasons)
    if reason:
        raise NotImplementedError(reason)
    if position_ids is None:
        raise ValueError(
            "position_ids must be given to a model that has a cp_group, this rank's shard of them: "
            "cp_positions(total_len, group=, sharding=), or of packed documents their cp_shard"
        )
    if position_ids.ndim != 2:
        raise NotImplementedError(f"position_ids of {position_ids.ndim} dimensions, which images have, {_ON_SHARDS}")
    if mask is not None and not bool((mask != 0).all()):
        raise NotImplementedError(
            f"an attention_mask with padding {_ON_SHARDS}: pad after the sequence, where causal attention does not "
            "see it, leave the mask out and give the padding the label -100"
        )
    if plan is None:
        plan = _plan(position_ids, shards)
    elif not isinstance(plan, documents.DocumentPlan):
        raise TypeError(f"{PLAN} must be a DocumentPlan from plan_varlen_cp, but is {kind_of(plan)}")
    elif plan.group != shards.group:
        raise ValueError(f"{PLAN} must be of the ranks of the model's cp_group")
    elif position_ids.shape[1] != plan.local:
        every = position_ids.shape[1] * shards.group.size
        raise ValueError(f"{PLAN} must be of the {every} tokens that all ranks have, but is of {plan.total}")
    elif position_ids.shape[0] > 1:
        raise NotImplementedError(_SEVERAL_ROWS)
    kept = None if torch.compiler.is_compiling() else Kept()
    return Batch(shared=shards, plan=plan, causal=bool(causal), kept=kept)


def _plan(position_ids: Tensor, shards: state.Shards) -> documents.DocumentPlan | None:
    """Return the plan of the documents in all ranks' position ids; None if there is one document."""
    whole = api.cp_unshard(position_ids, 1, **shards.options)
    begins = whole[:, 1:] != whole[:, :-1] + 1
    if in_context_parallel():  # torch, or the caller, may have cut the sequences differently than these shards
        firsts = torch.cat((whole[:, :1], torch.where(begins, whole[:, 1:], 0)), 1)
        if bool((firsts != 0).any()):
            raise ValueError(
                f"cp_sharding must be how torch's context_parallel has cut the sequence, but is {shards.sharding!r}, "
                "by which the ranks' position_ids join to a document that does not begin with 0: torch cuts by "
                "'zigzag', unless its load balancing is turned off, and cuts only what is among its buffers"
            )
    if not bool(begins.any()):
        return None
    if whole.shape[0] > 1:
        raise NotImplementedError(_SEVERAL_ROWS)
    first = torch.nn.functional.pad(begins[0], (1, 0), value=True).nonzero().flatten()
    return documents.plan_varlen_cp(torch.nn.functional.pad(first, (0, 1), value=whole.shape[1]), **shards.options)
