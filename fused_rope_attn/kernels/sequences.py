# mypy: ignore-errors
"""Which rows of which sequence a program works on, and which keys of that sequence its queries see."""

import triton
import triton.language as tl

from fused_rope_attn.kernels.lengths import count_tiles, existing_keys, packed_partner, packed_tile, rows_of_sequence
from fused_rope_attn.kernels.masks import Mask, is_causal, sequence_mask
from fused_rope_attn.kernels.records import record
from fused_rope_attn.kernels.schedule import scheduled_tile
from fused_rope_attn.kernels.tiles import Origin


@record
class MaskArguments:
    """The masks of a call, as its kernels take them; None where the call has no such mask."""

    starts_ptr: tl.tensor | None  # kv_starts (B,) int32
    lens_ptr: tl.tensor | None  # kv_lens (B,) int32
    cu_q_ptr: tl.tensor | None  # cu_seqlens of queries and of keys, (num_sequences + 1,) int32; B = 1 then
    cu_k_ptr: tl.tensor | None
    num_sequences: tl.tensor | None
    left: tl.tensor | None  # the window's keys before and after a query's own position
    right: tl.tensor | None  # ``is_causal`` if the call is
    READS_LENGTHS: tl.constexpr  # whether any of the tensors is there


@record
class Tile:
    """A tile of rows of one head of one sequence, that of a program; by ``scheduled_queries`` or ``scheduled_keys``."""

    number: tl.tensor  # among the tiles of this head, of all sequences
    index: tl.tensor  # among the tiles of its sequence; that of a packed sequence may lie past its last row
    num_rows: tl.tensor  # of the sequence
    sequence: tl.tensor | None  # the number of the packed sequence
    origin: Origin  # the sequence's first row
    batch_head: tl.tensor  # batch * H + head


@record
class Sequence:
    """Queries and keys that belong together: those of a batch entry, or of a packed sequence."""

    batch: tl.tensor  # int64
    first_q: tl.tensor  # first query row in the tensor, 0 unless packed
    num_queries: tl.tensor
    first_k: tl.tensor  # first key row in the tensor, 0 unless packed
    num_keys: tl.tensor  # keys that exist
    q_offset: tl.tensor  # position of the first query; keys count their positions from 0
    mask: Mask


@triton.jit
def scheduled_rows(pid, N, partner_N, H, num_heads, heads_per_section, cu_ptr, partner_ptr, num_sequences,
                   BLOCK: tl.constexpr, LAST_TILE_FIRST: tl.constexpr):  # fmt: skip
    """The ``Tile`` of BLOCK rows that program ``pid`` works on, in the order of ``scheduled_tile``.

    Rows of a (B, H, N, D) tensor, num_heads = B * H; of packed sequences cu_ptr (sequences + 1,) int32 says where they
    begin, and partner_ptr and partner_N are the other tensor's, as ``packed_tile`` takes them; otherwise both pointers
    and num_sequences are None. There are ``count_tiles`` * num_heads programs.
    """
    tiles = count_tiles(N, num_sequences, BLOCK)
    number, batch_head = scheduled_tile(pid, tiles, num_heads, heads_per_section, LAST_TILE_FIRST)
    batch = (batch_head // H).to(tl.int64)
    head = (batch_head % H).to(tl.int64)
    sequence = None
    first_row = 0
    index = number
    if cu_ptr is not None:
        sequence, first_row, N, index = packed_tile(number, cu_ptr, partner_ptr, num_sequences, N, partner_N, BLOCK)
    origin = Origin(batch=batch, head=head, row=first_row)
    return Tile(number=number, index=index, num_rows=N, sequence=sequence, origin=origin, batch_head=batch_head)


@triton.jit
def scheduled_queries(pid, NQ, NK, HQ, num_heads, heads_per_section, masks, BLOCK_M: tl.constexpr):
    """``scheduled_rows`` of queries (B, HQ, NQ, D): causal, the last tiles take the longest and start first."""
    return scheduled_rows(
        pid, NQ, NK, HQ, num_heads, heads_per_section, masks.cu_q_ptr, masks.cu_k_ptr, masks.num_sequences, BLOCK_M,
        is_causal(masks.right),
    )  # fmt: skip


@triton.jit
def scheduled_keys(pid, NK, NQ, HKV, num_heads, heads_per_section, masks, BLOCK_N: tl.constexpr):
    """``scheduled_rows`` of keys (B, HKV, NK, D): causal, the first tiles take the longest."""
    return scheduled_rows(
        pid, NK, NQ, HKV, num_heads, heads_per_section, masks.cu_k_ptr, masks.cu_q_ptr, masks.num_sequences, BLOCK_N,
        LAST_TILE_FIRST=False,
    )  # fmt: skip


@triton.jit
def partner_rows(tile, cu_ptr, num_sequences, N):
    """(first row, rows) of the other tensor's part of a tile's sequence, of N rows in all: the keys of queries."""
    if cu_ptr is None:
        return 0, N
    else:
        return packed_partner(cu_ptr, tile.sequence, num_sequences, N)


@triton.jit
def described_sequence(batch, first_q, num_queries, first_k, rows_k, masks):
    """``Sequence`` of which the tensors hold ``num_queries`` and ``rows_k`` rows, of which some keys may not exist."""
    num_keys = existing_keys(masks.lens_ptr, batch, rows_k)
    q_offset = num_keys - num_queries
    mask = sequence_mask(
        masks.starts_ptr, batch, q_offset, num_keys, masks.left, masks.right, masks.READS_LENGTHS
    )  # fmt: skip
    return Sequence(
        batch=batch, first_q=first_q, num_queries=num_queries, first_k=first_k, num_keys=num_keys, q_offset=q_offset,
        mask=mask,
    )  # fmt: skip


@triton.jit
def sequence_of_queries(tile, NK, masks):
    """The ``Sequence`` of a tile of queries, with NK rows of keys in the tensor."""
    first_k, rows_k = partner_rows(tile, masks.cu_k_ptr, masks.num_sequences, NK)
    return described_sequence(tile.origin.batch, tile.origin.row, tile.num_rows, first_k, rows_k, masks)


@triton.jit
def sequence_of_keys(tile, NQ, masks):
    """The ``Sequence`` of a tile of keys, with NQ rows of queries in the tensor."""
    first_q, num_queries = partner_rows(tile, masks.cu_q_ptr, masks.num_sequences, NQ)
    num_rows = tile.num_rows
    if masks.cu_k_ptr is not None:
        num_rows = rows_of_sequence(tile.sequence, masks.num_sequences, num_rows)
    return described_sequence(tile.origin.batch, first_q, num_queries, tile.origin.row, num_rows, masks)
