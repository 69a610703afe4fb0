"""Launches that turn the masks of a call with intervals into rows of each key and visits of each tile."""

from __future__ import annotations

from typing import Any

import torch
import triton

from fused_rope_attn.attention.arguments import interval_strides, shared_tensors
from fused_rope_attn.attention.hopper.interval_kernels import (
    BLOCKS,
    TILES,
    WORD,
    backward_rows_kernel,
    key_rows_kernel,
    visits_kernel,
)
from fused_rope_attn.attention.hopper.shapes import CONSUMERS, KEYS
from fused_rope_attn.attention.hopper.shares import SHARE_WORDS, least_share, slot_words
from fused_rope_attn.attention.problem import Problem, Tensors
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.launch import Launch

# The tensors of ``Visits`` in calls without intervals.
NO_VISITS: dict[str, Any] = {"visits_ptr": None, "key_rows_ptr": None, "hidden_ptr": None}
# Those of ``VisibleRows``.
NO_VISIBLE_ROWS: dict[str, Any] = dict.fromkeys(
    ("key_rows_ptr", "blocks_ptr", "blind_ptr", "shares_ptr", "slots_ptr", "slot_counters_ptr")
)
# Words of a program of ``write_blind_rows``.
BLIND_WORDS = 32


def without_masks(shared: dict[str, Any]) -> dict[str, Any]:
    """Return ``shared`` for a main kernel that reads the masks as the rows of each key."""
    return shared | {"window": (None, None), "READS_LENGTHS": False}


class KeyRows:
    """The rows that see each of ``num_blocks`` blocks of ``block_n`` keys, as ``key_rows_kernel`` writes them.

    shared: the arguments that the kernels of the call have in common.
    """

    def __init__(self, problem: Problem, tensors: Tensors, shared: dict[str, Any], block_n: int, num_blocks: int):
        batch, num_keys = problem.batch, num_blocks * block_n
        self.shapes = (batch, 2, num_keys), (batch, 4 * num_blocks + num_keys // WORD.value)
        self.launch = Launch(
            key_rows_kernel,
            batch * triton.cdiv(num_blocks, BLOCKS.value),
            {"num_warps": 4},
            shared | {"interval_strides": interval_strides(tensors)},
            num_blocks=num_blocks,
            BLOCK_N=block_n,
        )

    def __call__(self, stream: int, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Launch, and return the results by the names of kernels' arguments."""
        key_rows, blocks = (torch.empty(x, dtype=torch.int32, device=tensors.q.device) for x in self.shapes)
        found = {"key_rows_ptr": key_rows, "blocks_ptr": blocks}
        self.launch(stream, shared_tensors(tensors), **found)
        return found


class Visits:
    """The blocks of block_n keys that each tile of block_m queries visits, as ``visits_kernel`` lists them.

    pdl: the next launch may begin at once. It must end after this one.
    """

    def __init__(
        self, problem: Problem, tensors: Tensors, shared: dict[str, Any], block_m: int, block_n: int, pdl: bool
    ):
        batch, tiles = problem.batch, triton.cdiv(problem.len_q, block_m)
        self.num_blocks = triton.cdiv(problem.len_k, block_n)
        num_keys = self.num_blocks * block_n
        self.shapes = {
            "visits_ptr": (batch, tiles, 1 + self.num_blocks),
            "key_rows_ptr": (batch, 2, num_keys),
            "hidden_ptr": (batch, num_keys // WORD.value),
        }
        self.launch = Launch(
            visits_kernel,
            batch * triton.cdiv(tiles, TILES.value),
            {"num_warps": 8},
            shared | {"interval_strides": interval_strides(tensors)},
            num_blocks=self.num_blocks,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            PDL=pdl,
        )

    def __call__(self, stream: int, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Launch, and return the results by the names of the main kernel's arguments."""
        device = tensors.q.device
        found = {name: torch.empty(x, dtype=torch.int32, device=device) for name, x in self.shapes.items()}
        self.launch(stream, shared_tensors(tensors), **found)
        return found


class VisibleRows:
    """``KeyRows`` for a backward pass, a bit for each of num_rows rows of q that sees no key, and ``Share``s.

    num_blocks: blocks of KEYS keys, ``halves`` of them in a tile. columns: as for ``slot_words``. section: key heads
    that run together. programs: those of the main kernel, one for each share; None for a deterministic call, which has
    no shares.
    """

    def __init__(
        self,
        problem: Problem,
        tensors: Tensors,
        shared: dict[str, Any],
        num_blocks: int,
        halves: int,
        num_rows: int,
        columns: int,
        section: int,
    ):
        self.key_rows = KeyRows(problem, tensors, shared | {"FROM_START": False}, KEYS.value, num_blocks)
        self.shape = (problem.batch, num_rows // WORD.value)
        multiprocessors, heads = device.num_sms(problem.device), problem.heads_kv
        tiles = problem.batch * num_blocks // halves
        # A share has half of a multiprocessor's mean work or more, and a tile one slot less than shares.
        slots = 2 * multiprocessors // heads * heads
        shares = tiles * heads + slots
        self.programs = None if problem.is_deterministic else shares
        self.shares_size, self.slots_shape = shares * SHARE_WORDS.value, (slots, slot_words(columns))
        self.counters_shape = slots, CONSUMERS.value
        programs = problem.batch * triton.cdiv(self.shape[1], BLIND_WORDS)
        self.launch = Launch(
            backward_rows_kernel,
            programs + (0 if self.programs is None else tiles),
            {"num_warps": 4},
            shared,
            num_words=self.shape[1],
            batch_stride=self.key_rows.shapes[1][1],
            num_blocks=num_blocks,
            num_tiles=tiles,
            num_shares=shares,
            least_share=least_share(problem.group_size),
            heads_per_section=min(section, heads),
            heads_per_multiprocessor=heads / multiprocessors,
            BLOCK=BLIND_WORDS,
            HALVES=halves,
        )

    def __call__(self, stream: int, tensors: Tensors, lse: torch.Tensor) -> dict[str, Any]:
        """Launch, and return the results by the names of the main kernel's arguments. lse ``(B, HQ, NQ)``."""
        found = NO_VISIBLE_ROWS | self.key_rows(stream, tensors) | {"starts_ptr": None}
        found["blind_ptr"] = torch.empty(self.shape, dtype=torch.int32, device=lse.device)
        if self.programs is not None:
            found["shares_ptr"] = torch.empty(self.shares_size, dtype=torch.int32, device=lse.device)
            found["slots_ptr"] = torch.empty(self.slots_shape, dtype=torch.float32, device=lse.device)
            found["slot_counters_ptr"] = torch.empty(self.counters_shape, dtype=torch.int32, device=lse.device)
        of_launch = {name: found[name] for name in ("blind_ptr", "shares_ptr", "slot_counters_ptr", "blocks_ptr")}
        self.launch(stream, of_launch, lse_ptr=lse)
        return found
