"""Launch configurations of attention: their records, and the terms in which every table is written.

The tables are ``portable/configs.py`` and ``hopper/configs.py``, one file for each backend; ``generation/configs.py``
and ``rotation/ops.py`` have those of the other packages. A table is data: the first row that matches wins, rows are
never chosen by exact length, and the comment above a row, which holds for the rows after it too up to the next comment,
gives its reason. Cards, dates and releases of Triton are those of its timing; docs/experiments has the figures.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
PDL = ("sm_90", "sm_100", "sm_120")  # programmatic dependent launch
LARGE = ("sm_90", "sm_100")  # 227 KB of shared memory per block
MEDIUM = ("sm_80",)  # 163 KB
SMALL = ("sm_86", "sm_89", "sm_120")  # 99 KB
NVIDIA = LARGE + MEDIUM + SMALL
AMD = ("gfx942",)  # 64 KB
INTERPRETER = ("interpreter",)

BUCKETS = ("tiny", "short", "medium", "long")  # the longer of NQ and NK up to 512, 1024, 4096, and beyond
STRATEGIES = ("inline", "prepass")
BEFORE_SCORES, BEFORE_WEIGHTS, AFTER_WEIGHTS = VALUES = ("before scores", "before weights", "after weights")
MIB = 1 << 20

# The amounts of work at which a plan changes, in multiply-adds of Q K^T: B * HQ * NQ * NK * D, with D padded as tiles
# are, and with a window's width in place of NK.
#
# With less work than TWO_LAUNCHES a forward call ends before the host can launch a second kernel. H200,
# 2026-11-21: at (1, 4/4, 128, 64), 2**22, a call takes 37 us of host time inline and 48 with the pre-pass; at
# Small-512, 2**29, the pre-pass wins already (17.6 us against 19.6). A plan must not depend on graph capture: the
# warm-up runs outside of it, so other kernels would be compiled during the capture.
TWO_LAUNCHES = 2**26 + 1
# From 2**29 on the levels are those at which the sm_90 kernels begin to be faster than the portable ones, or another
# configuration of theirs is: a forward of 128 tiles of 128 query rows has 2**29 with 512 tokens at D 64, and 2**30 with
# twice the tokens or columns. docs/experiments has the times on both sides.
WORK_LEVELS = (0, TWO_LAUNCHES, 2**29, 2**30, 2**31, 2**32, 2**33, 2**36)


def work_level(multiply_adds: int) -> int:
    """Return the largest of ``WORK_LEVELS`` that ``multiply_adds`` reaches.

    Plans depend on the level alone, so that calls of nearly equal work share one.
    """
    return WORK_LEVELS[bisect.bisect_right(WORK_LEVELS, multiply_adds) - 1]


class TritonOptions:
    """The launch options of one Triton kernel, as Triton names them."""

    num_warps: int
    num_stages: int

    @functools.cached_property
    def launch_options(self) -> dict[str, int]:
        """The keyword arguments of a Triton launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Tile(TritonOptions):
    """block_m query rows by block_n key rows; num_stages is the depth of the load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ForwardConfig:
    """The configuration of one forward call of the portable backend.

    section_bytes: K and V of the heads that are scheduled together, in bytes (0: head by head).
    rotate_rows, rotate_heads: rows by heads that one program of the pre-pass rotates.
    pdl: programmatic dependent launch (sm_90 and later).
    tma: read K and V through tensor descriptors where their strides allow (sm_90 and later, prepass only).
    """

    strategy: str
    tile: Tile
    section_bytes: int = 0
    rotate_rows: int = 32
    rotate_heads: int = 4
    pdl: bool = False
    tma: bool = False


@dataclass(frozen=True)
class BackwardConfig:
    """The configuration of one backward call of the portable backend. Fields as in ``ForwardConfig``.

    tma: dkdv reads Q and dO, and dq reads K and V, through descriptors.
    """

    strategy: str
    dkdv: Tile
    dq: Tile
    section_bytes: int = 0
    rotate_rows: int = 32
    rotate_heads: int = 4
    pdl: bool = False
    tma: bool = False


@dataclass(frozen=True)
class HopperForwardConfig:
    """The configuration of one forward call of the sm_90 backend.

    Each of ``consumers`` warpgroups attends with 64 query rows, block_n keys at a time, ``stages`` blocks in flight.

    rotates_queries: four more warps rotate the queries; if False, the pre-pass does. attend_registers,
    rotate_registers: registers of one thread in the attending and in the rotating warps. With 24 for the loading warps
    the sum over all warpgroups must fit 512. Head dims beyond 128 have no registers for rotating warps, and no shared
    memory for more than 64 keys and two stages. pin: keep the softmax concurrent with the product of the block before
    (``hopper.softmax.pin``), which takes more registers. values: one of ``VALUES``, the point at which a warpgroup
    waits for a block's product with the values: before it issues the next block's scores, before it makes that block's
    weights, or after that. Later waits take more registers. The rest as in ``ForwardConfig``.

    Raises:
        ValueError: values is not one of ``VALUES``.
    """

    block_n: int
    stages: int = 2
    consumers: int = 2
    rotates_queries: bool = True
    attend_registers: int = 208
    rotate_registers: int = 72
    pin: bool = False
    values: str = AFTER_WEIGHTS
    section_bytes: int = 0
    rotate_rows: int = 16
    rotate_heads: int = 1
    pdl: bool = True

    def __post_init__(self) -> None:
        if self.values not in VALUES:
            raise ValueError(f"values must be one of {VALUES}, but is {self.values!r}")


@dataclass(frozen=True)
class HopperBackwardConfig:
    """The configuration of one backward call of the sm_90 backend.

    Key blocks have 128 rows (64 beyond head dim 128), query blocks 64.

    q_stages, do_stages: blocks of Q and of dO in flight; q_stages 2 or more, because Q of one block and of the next are
    in use together. section_bytes: Q, dO and the float32 dQ of the key heads that are scheduled together, in bytes (0:
    head by head). rotate_rows, rotate_heads: rows by heads that one program of the pre-process rotates; post_rows,
    post_heads: of the post-process. pdl: as in ``ForwardConfig``.

    Raises:
        ValueError: post_rows is not a multiple of 8, the group in which the accumulator stores its rows.
    """

    q_stages: int = 3
    do_stages: int = 2
    section_bytes: int = 0
    rotate_rows: int = 16
    rotate_heads: int = 4
    post_rows: int = 16
    post_heads: int = 4
    pdl: bool = True

    def __post_init__(self) -> None:
        if self.post_rows % 8:
            raise ValueError(f"post_rows must be a multiple of 8, but is {self.post_rows}")


# Architectures without rows of their own run those of the nearest relative.
_RELATIVES = {"sm_87": "sm_86", "sm_103": "sm_100", "sm_121": "sm_120", "gfx90a": "gfx942", "gfx950": "gfx942"}


def family(arch: str) -> str | None:
    """Return the architecture of the table rows that ``arch`` uses; None if there is none."""
    arch = _RELATIVES.get(arch, arch)
    return arch if arch in ARCHS + INTERPRETER else None


def bucket(length: int) -> str:
    """Return the length bucket. length: the longer of NQ and NK."""
    if length <= 1024:
        return "tiny" if length <= 512 else "short"
    return "medium" if length <= 4096 else "long"
