"""The configurations of the rotation alone: their record and the table, as ``attention/configs.py`` explains.

A memory-bound kernel needs bytes in flight, whatever the head dimension and the dtype: rows give bytes, and the
launcher turns them into tokens by heads. Rows are chosen by architecture, bytes of the largest tensor and norms.
"""

from __future__ import annotations

from dataclasses import dataclass

from fused_rope_attn.runtime.rows import find_row


@dataclass(frozen=True)
class RotationConfig:
    """The tile of one program.

    tile_bytes: bytes that it loads; divided by 32 * num_warps, the bytes that a thread has in flight.
    run_bytes: how many of them are neighbours in memory: heads of one token, or tokens of one head, whichever are.
    """

    tile_bytes: int
    run_bytes: int
    num_warps: int


@dataclass(frozen=True)
class RotationRow:
    """Hold one row: ``config`` for the calls that the other fields select.

    most_bytes: of a call's largest tensor. norms: whether the call has any. None matches anything.
    """

    config: RotationConfig
    arch: tuple[str, ...] | None = None
    most_bytes: int | None = None
    norms: bool | None = None


# fmt: off
TABLE: tuple[RotationRow, ...] = (
    # More than one tile in few rows, so that small tests cross every border.
    RotationRow(arch=("interpreter",), config=RotationConfig(tile_bytes=1 << 11, run_bytes=1 << 8, num_warps=1)),
    # Twice the programs, with eight 16-byte loads of a thread in flight. Untimed.
    RotationRow(most_bytes=4 << 20, config=RotationConfig(tile_bytes=1 << 13, run_bytes=1 << 12, num_warps=4)),
    # 90 registers forward and 128 backward on sm_90, so that smaller tiles keep more in flight. Untimed.
    RotationRow(norms=True, config=RotationConfig(tile_bytes=1 << 13, run_bytes=1 << 12, num_warps=4)),
    # H200, triton 3.6.0, 2026-11-21: .94 to .99 of a copy at seven shapes, both layouts.
    RotationRow(config=RotationConfig(tile_bytes=1 << 14, run_bytes=1 << 12, num_warps=8)),
)
# fmt: on


def rotation(arch: str, size: int, norms: bool = False) -> RotationConfig:
    """Return the configuration on ``arch`` for a call with a largest tensor of ``size`` bytes."""
    return find_row(TABLE, arch=arch, most_bytes=size, norms=norms).config
