"""The tiles of the portable kernels, for every card.

Rows are chosen by architecture, element size, head dimension, strategy, length bucket and masks.
``python -m tools.compare_checkouts`` times a changed row against the commit before.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from fused_rope_attn.attention.configs import (
    AMD,
    ARCHS,
    INTERPRETER,
    LARGE,
    MIB,
    PDL,
    STRATEGIES,
    BackwardConfig,
    ForwardConfig,
    Tile,
)
from fused_rope_attn.runtime.rows import find_row


@dataclass(frozen=True, kw_only=True)
class Row:
    """Hold one row: the key of the calls that it serves, and the fields of their configuration.

    head_dim: the largest head dimension served. masked: whether the call has a window, lengths, a cap or sinks, which
    take registers. latent: whether it is multi-head latent attention; head_dim is DN + R then, and no strategy but
    prepass serves it. None matches anything. tile is that of a ``ForwardConfig``, dkdv and dq are those of a
    ``BackwardConfig``, and the others of both; tma holds for the pre-pass alone.
    """

    arch: tuple[str, ...]
    element_size: int | tuple[int, ...]
    head_dim: int
    strategy: tuple[str, ...] = STRATEGIES
    bucket: tuple[str, ...] | None = None
    masked: bool | None = None
    latent: bool | None = False
    tile: Tile | None = None
    dkdv: Tile | None = None
    dq: Tile | None = None
    section_bytes: int = 0
    rotate_rows: int = 32
    rotate_heads: int = 4
    tma: bool = False

    def config(self, arch: str, strategy: str) -> Any:
        """Return the configuration of this row on ``arch`` with ``strategy``."""

        def on_arch(tile: Any) -> Tile:
            # Warps of AMD's cards have 64 threads.
            return replace(tile, num_warps=tile.num_warps // 2) if arch in AMD else tile

        shared = {name: getattr(self, name) for name in ("section_bytes", "rotate_rows", "rotate_heads")}
        shared |= {"strategy": strategy, "pdl": arch in PDL, "tma": self.tma and strategy == "prepass"}
        if self.tile is not None:
            return ForwardConfig(tile=on_arch(self.tile), **shared)
        return BackwardConfig(dkdv=on_arch(self.dkdv), dq=on_arch(self.dq), **shared)


# section_bytes: of K and V (or of Q and dO), 24 MiB stay in a Hopper L2 next to little other traffic, 8 MiB next to
# much. Rows for every card, ARCHS, are untimed: they are sized by the smallest shared memory, 64 KB, and by registers.
# fmt: off
FORWARD: tuple[Row, ...] = (
    # H200, 2026-11-21, triton 3.6.0; untimed on sm_100.
    Row(arch=LARGE, element_size=2, head_dim=64, bucket=("tiny", "short"),
        tile=Tile(64, 64, num_warps=4, num_stages=3), section_bytes=24 * MIB, rotate_heads=1),
    # Few tiles take 6 to 47 % more time through descriptors at most shapes. Many take up to 14 % less, but the sm_90
    # kernels serve most of these. H200 and H100, 3.6.0 and 3.9.0, 2026-11-27.
    Row(arch=("sm_90",), element_size=2, head_dim=64,
        tile=Tile(64, 64, num_warps=4, num_stages=3), section_bytes=8 * MIB),
    # H200, 2026-11-21, triton 3.6.0; untimed on sm_100.
    Row(arch=LARGE, element_size=2, head_dim=128, bucket=("medium",),
        tile=Tile(64, 64, num_warps=4, num_stages=3), section_bytes=8 * MIB, tma=True),
    Row(arch=LARGE, element_size=2, head_dim=128,
        tile=Tile(64, 64, num_warps=4, num_stages=3), section_bytes=24 * MIB, tma=True),
    # One stage takes 9 to 14 % less time than two. H200 and H100, 3.6.0 and 3.9.0, 2026-11-27; untimed on sm_100.
    Row(arch=LARGE, element_size=2, head_dim=256, strategy=("inline",),
        tile=Tile(64, 32, num_warps=8, num_stages=1), section_bytes=8 * MIB),
    # H200, 2026-11-21, triton 3.6.0; untimed on sm_100.
    Row(arch=LARGE, element_size=2, head_dim=256, strategy=("prepass",),
        tile=Tile(64, 32, num_warps=4, num_stages=3), section_bytes=8 * MIB, tma=True),
    Row(arch=ARCHS, element_size=2, head_dim=64, tile=Tile(128, 64, num_warps=8, num_stages=2)),
    Row(arch=ARCHS, element_size=2, head_dim=128, tile=Tile(128, 32, num_warps=8, num_stages=2)),
    Row(arch=ARCHS, element_size=2, head_dim=256, tile=Tile(32, 32, num_warps=8, num_stages=1)),
    # True float32 products run on the FMA units.
    Row(arch=ARCHS, element_size=4, head_dim=64, tile=Tile(64, 16, num_warps=8, num_stages=1)),
    Row(arch=ARCHS, element_size=4, head_dim=128, tile=Tile(32, 16, num_warps=8, num_stages=1)),
    Row(arch=ARCHS, element_size=4, head_dim=256, tile=Tile(16, 16, num_warps=8, num_stages=1)),
    # Multi-head latent attention.
    Row(arch=ARCHS, element_size=2, head_dim=192, latent=True, tile=Tile(128, 32, num_warps=8, num_stages=2)),
    Row(arch=ARCHS, element_size=4, head_dim=192, latent=True, tile=Tile(32, 16, num_warps=8, num_stages=1)),
    # More than one tile in few rows, so that small tests cross every border.
    Row(arch=INTERPRETER, element_size=4, head_dim=256,
        tile=Tile(64, 32, num_warps=1, num_stages=1), rotate_rows=16, tma=True),
    Row(arch=INTERPRETER, element_size=(2, 4), head_dim=256, latent=None,
        tile=Tile(64, 32, num_warps=1, num_stages=1), rotate_rows=16),
)

BACKWARD: tuple[Row, ...] = (
    # With masks the tiles for longer sequences spill up to 500 bytes in their loops, these spill nothing. Untimed.
    Row(arch=LARGE, element_size=2, head_dim=64, strategy=("prepass",), masked=True,
        dkdv=Tile(32, 64, num_warps=4, num_stages=3), dq=Tile(64, 64, num_warps=4, num_stages=3),
        section_bytes=8 * MIB, tma=True),
    # H200, 2026-11-21, triton 3.6.0; untimed on sm_100.
    Row(arch=LARGE, element_size=2, head_dim=64, bucket=("tiny", "short"),
        dkdv=Tile(64, 64, num_warps=4, num_stages=2), dq=Tile(64, 64, num_warps=4, num_stages=3),
        section_bytes=24 * MIB, tma=True),
    Row(arch=LARGE, element_size=2, head_dim=64,
        dkdv=Tile(32, 128, num_warps=4, num_stages=3), dq=Tile(128, 64, num_warps=4, num_stages=3),
        section_bytes=8 * MIB, tma=True),
    Row(arch=LARGE, element_size=2, head_dim=128, strategy=("prepass",), bucket=("tiny", "short"),
        dkdv=Tile(32, 64, num_warps=4, num_stages=3), dq=Tile(64, 64, num_warps=4, num_stages=2),
        section_bytes=24 * MIB, tma=True),
    Row(arch=LARGE, element_size=2, head_dim=128, strategy=("prepass",),
        dkdv=Tile(32, 64, num_warps=4, num_stages=3), dq=Tile(128, 64, num_warps=8, num_stages=3),
        section_bytes=8 * MIB, tma=True),
    # 64x64 is 3 % faster with triton 3.6, but spills 856 bytes with 3.9. H200, 2026-11-21.
    Row(arch=("sm_90",), element_size=2, head_dim=256, strategy=("prepass",), masked=False,
        dkdv=Tile(32, 64, num_warps=8, num_stages=2), dq=Tile(128, 32, num_warps=8, num_stages=2),
        section_bytes=8 * MIB, tma=True),
    # 64 key rows spill 992 bytes with masks (triton 3.8), and 760 on sm_100 (3.9); 32 spill nothing. Untimed.
    Row(arch=LARGE, element_size=2, head_dim=256, strategy=("prepass",),
        dkdv=Tile(32, 32, num_warps=8, num_stages=2), dq=Tile(128, 32, num_warps=8, num_stages=2),
        section_bytes=8 * MIB, tma=True),
    Row(arch=ARCHS, element_size=2, head_dim=64,
        dkdv=Tile(64, 64, num_warps=8, num_stages=2), dq=Tile(64, 64, num_warps=8, num_stages=2)),
    Row(arch=ARCHS, element_size=2, head_dim=128,
        dkdv=Tile(32, 64, num_warps=8, num_stages=1), dq=Tile(64, 32, num_warps=8, num_stages=1)),
    Row(arch=ARCHS, element_size=2, head_dim=256,
        dkdv=Tile(16, 32, num_warps=8, num_stages=1), dq=Tile(32, 16, num_warps=8, num_stages=1)),
    # True float32 products run on the FMA units.
    Row(arch=ARCHS, element_size=4, head_dim=64,
        dkdv=Tile(32, 32, num_warps=4, num_stages=1), dq=Tile(32, 32, num_warps=4, num_stages=1)),
    Row(arch=ARCHS, element_size=4, head_dim=128,
        dkdv=Tile(16, 32, num_warps=8, num_stages=1), dq=Tile(32, 16, num_warps=8, num_stages=1)),
    Row(arch=ARCHS, element_size=4, head_dim=256,
        dkdv=Tile(16, 16, num_warps=8, num_stages=1), dq=Tile(16, 16, num_warps=8, num_stages=1)),
    # Multi-head latent attention.
    Row(arch=ARCHS, element_size=2, head_dim=192, latent=True,
        dkdv=Tile(32, 32, num_warps=4, num_stages=1), dq=Tile(64, 32, num_warps=8, num_stages=1)),
    Row(arch=ARCHS, element_size=4, head_dim=192, latent=True,
        dkdv=Tile(16, 16, num_warps=8, num_stages=1), dq=Tile(16, 16, num_warps=8, num_stages=1)),
    # More than one tile in few rows, so that small tests cross every border.
    Row(arch=INTERPRETER, element_size=4, head_dim=256,
        dkdv=Tile(32, 64, num_warps=1, num_stages=1), dq=Tile(64, 32, num_warps=1, num_stages=1), rotate_rows=16,
        tma=True),
    Row(arch=INTERPRETER, element_size=(2, 4), head_dim=256, latent=None,
        dkdv=Tile(32, 64, num_warps=1, num_stages=1), dq=Tile(64, 32, num_warps=1, num_stages=1), rotate_rows=16),
)
# fmt: on


@functools.cache
def forward_config(arch: str, element_size: int, head_dim: int, strategy: str, *shape: bool | str) -> ForwardConfig:
    """Return the configuration of the forward pass for these properties.

    shape: length bucket and, where they are not False, masked and latent, as ``Row`` names them.
    """
    return _find(FORWARD, arch, element_size, head_dim, strategy, *shape).config(arch, strategy)


@functools.cache
def backward_config(arch: str, element_size: int, head_dim: int, strategy: str, *shape: bool | str) -> BackwardConfig:
    """Return the configuration of the backward pass for these properties, as in ``forward_config``."""
    return _find(BACKWARD, arch, element_size, head_dim, strategy, *shape).config(arch, strategy)


def _find(rows: tuple[Row, ...], *properties: int | str) -> Row:
    names = ("arch", "element_size", "head_dim", "strategy", "bucket", "masked", "latent")
    return find_row(rows, **{"masked": False, "latent": False, **dict(zip(names, properties))})
