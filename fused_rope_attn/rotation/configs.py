"""Launch configurations of the rotation alone: records and the committed table. Data, with a reason for each row.

A memory-bound kernel needs bytes in flight, whatever the head dimension and the dtype: rows give bytes, and the
launcher turns them into tokens by heads. Rows are found by (architecture, bytes of the largest tensor, whether there
are norms); the first that matches wins.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RotationConfig:
    """What one program turns.

    tile_bytes: bytes that it loads; divided by 32 * num_warps, the bytes that a thread has in flight.
    run_bytes: how many of them are neighbours in memory: heads of one token, or tokens of one head, whichever are.
    """

    tile_bytes: int
    run_bytes: int
    num_warps: int


@dataclass(frozen=True)
class RotationRow:
    """One line of the table. archs, max_bytes (of a call's largest tensor), norms (whether the call has any): None
    serves any. note: why this one."""

    archs: tuple[str, ...] | None
    max_bytes: int | None
    config: RotationConfig
    note: str
    norms: bool | None = None

    def matches(self, arch: str, size: float, norms: bool) -> bool:
        known = self.norms is None or self.norms is norms
        return (
            known and (self.archs is None or arch in self.archs) and (self.max_bytes is None or size <= self.max_bytes)
        )


_H200 = "H200, triton 3.6.0, 2026-11-21: .94 to .99 of a copy at seven shapes, both layouts (docs/experiments)"
_UNTIMED = "twice the programs; eight 16-byte loads of a thread in flight, untimed"
_NORMS = "90 registers forward and 128 backward on sm_90: more tiles of this size are in flight there, untimed"
_CPU = "more than one tile in few rows, so that small tests cross every border"

TABLE: tuple[RotationRow, ...] = (
    RotationRow(("interpreter",), None, RotationConfig(1 << 11, 1 << 8, 1), _CPU),
    RotationRow(None, 4 << 20, RotationConfig(1 << 13, 1 << 12, 4), _UNTIMED),
    RotationRow(None, None, RotationConfig(1 << 13, 1 << 12, 4), _NORMS, norms=True),
    RotationRow(None, None, RotationConfig(1 << 14, 1 << 12, 8), _H200),
)
_LIMITS = sorted({row.max_bytes for row in TABLE if row.max_bytes is not None})


def rotation(arch: str, size: int, norms: bool = False) -> RotationConfig:
    """The configuration on ``arch`` for a call whose largest tensor has ``size`` bytes."""
    return _rotation(arch, sum(size > limit for limit in _LIMITS), norms)


@functools.cache
def _rotation(arch: str, bucket: int, norms: bool) -> RotationConfig:
    size = (*_LIMITS, math.inf)[bucket]
    return next(row.config for row in TABLE if row.matches(arch, size, norms))
