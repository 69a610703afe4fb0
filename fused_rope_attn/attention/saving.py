"""How a forward pass saves q and k for backward: as its plan has it, and as it can be known while a graph is traced."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from fused_rope_attn.attention import configs, planning
from fused_rope_attn.attention.arguments import PADDED_TILE_ROWS
from fused_rope_attn.attention.planning import Lengths, Plan
from fused_rope_attn.attention.problem import Problem, Saving

# Of a ``Lengths``, by whether the call is launch-bound.
_WORK = {True: (0,), False: (1, 2, 3)}


def planned(problem: Problem, plan: Plan) -> Saving:
    """What the plan of a problem saves where it has a gradient. This is the one statement of it."""
    if not plan.saves_rotated or problem.batch * problem.len_q * problem.len_k == 0:
        return Saving.NOTHING
    if not (problem.is_packed and isinstance(plan.backward, configs.HopperBackwardConfig)):
        return Saving.ROWS
    # Tiles of fewer rows would leave some of the padding as it was.
    if isinstance(plan.forward, configs.ForwardConfig) and plan.forward.tile.block_m < PADDED_TILE_ROWS:
        return Saving.NOTHING
    return Saving.TILES


def traced(problem: Problem, v: torch.Tensor) -> Saving:
    """``planned`` for a call through the dispatcher, which may be one that is traced.

    Lengths may be symbolic. What is asked of them becomes a guard, so that they are asked no more than the answer
    depends on: for calls without packed sequences at most whether there is so little work that launches are what
    counts. v's address is unknown, and taken to be one that the TMA can read.
    """
    if torch.compiler.is_exporting() or _depends_on_data(problem):
        return Saving.NOTHING
    v_layout = None
    if problem.is_packed and problem.backend == "auto" and not _has_tma_strides(v):
        v_layout = "another layout"

    def answers(lengths: Iterable[Lengths]) -> set[Saving]:
        return {planned(problem, planning.plan_by(problem, x, v_layout)[0]) for x in lengths}

    few, many = (answers(_any_lengths(problem, launch_bound)) for launch_bound in (True, False))
    found = few | many
    if len(found) > 1:
        found = many if planning.multiply_adds(problem) > configs.LAUNCH_BOUND_WORK else few
    if len(found) > 1:
        found = answers([planning.lengths_of(problem)])
    return found.pop()


def _any_lengths(problem: Problem, launch_bound: bool) -> Iterable[Lengths]:
    flags = (False, True)
    short_sequences = flags if problem.is_packed else (False,)
    return itertools.starmap(Lengths, itertools.product(configs.BUCKETS, _WORK[launch_bound], flags, short_sequences))


def _depends_on_data(problem: Problem) -> bool:
    """Whether sizes are known to the device alone, so that nothing can be asked of them."""
    symbolic = [size for size in problem if isinstance(size, torch.SymInt)]
    if not symbolic:
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(symbolic))


def _has_tma_strides(v: torch.Tensor) -> bool:
    """``layouts.has_descriptor``, but for the address."""
    *strides, column = v.stride()
    per_16_bytes = 16 // v.element_size()
    return column == 1 and all(
        size == 1 or (stride > 0 and stride % per_16_bytes == 0) for size, stride in zip(v.shape, strides)
    )
