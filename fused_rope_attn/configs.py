"""Launch configurations of the portable kernels: records and the committed table. Data, with a reason for each row.

Rows are found by (architecture, element size, head dimension, strategy, causal, length bucket, GQA), never by exact
length; the first row that matches wins. ``python -m bench tune`` proposes rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
BUCKETS = ("tiny", "short", "medium", "long")  # the longer of NQ and NK up to 512, 1024, 4096, and beyond
STRATEGIES = ("inline", "prepass")


@dataclass(frozen=True)
class Tile:
    """block_m query rows by block_n key rows; num_stages is the depth of the load pipeline.

    max_registers caps registers per thread so that one more block fits a multiprocessor; None: the compiler decides.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    @functools.cached_property
    def launch_options(self) -> dict[str, int]:
        """Keyword arguments of a Triton launch."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}


@dataclass(frozen=True)
class ForwardConfig:
    """How one forward call runs.

    section_bytes: K and V of the heads that are scheduled together, in bytes (0: head by head).
    rotate_rows, rotate_heads: rows by heads that one program of the pre-pass turns.
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
    """As ``ForwardConfig``; with tma, dkdv reads Q and dO, and dq reads K and V, through descriptors."""

    strategy: str
    dkdv: Tile
    dq: Tile
    section_bytes: int = 0
    rotate_rows: int = 32
    rotate_heads: int = 4
    pdl: bool = False
    tma: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the table: ``tiles`` (one forward; dkdv and dq backward) for what the other fields select.

    head_dim: largest head dimension served. None matches anything. note: why these tiles.
    """

    archs: tuple[str, ...]
    element_size: int
    head_dim: int
    tiles: tuple[Tile, ...]
    note: str
    strategies: tuple[str, ...] = STRATEGIES
    causal: bool | None = None
    buckets: tuple[str, ...] | None = None
    gqa: bool | None = None
    section_bytes: int = 0
    rotate_rows: int = 32
    tma: bool = False

    def matches(self, arch, element_size, head_dim, strategy, causal, length_bucket, gqa) -> bool:
        return (
            arch in self.archs
            and element_size == self.element_size
            and head_dim <= self.head_dim
            and strategy in self.strategies
            and self.causal in (None, causal)
            and (self.buckets is None or length_bucket in self.buckets)
            and self.gqa in (None, gqa)
        )

    def config(self, arch: str, strategy: str) -> ForwardConfig | BackwardConfig:
        """The launch configuration of this row."""
        kind = ForwardConfig if len(self.tiles) == 1 else BackwardConfig
        return kind(
            strategy,
            *self.tiles,
            section_bytes=self.section_bytes,
            rotate_rows=self.rotate_rows,
            pdl=arch in _PDL,
            tma=self.tma and strategy == "prepass",
        )


_PDL = ("sm_90", "sm_100", "sm_120")
_HOPPER = ("sm_90", "sm_100")  # 227 KB of shared memory per block
_AMPERE = ("sm_80",)  # 163 KB
_SMALL = ("sm_86", "sm_89", "sm_120")  # 99 KB
_NVIDIA = _HOPPER + _AMPERE + _SMALL
_AMD = ("gfx942",)  # 64 KB
_INTERPRETER = ("interpreter",)
_INLINE = ("inline",)
_PREPASS = ("prepass",)
_TINY = ("tiny",)
_SHORT = ("tiny", "short")
_MEDIUM = ("medium",)

# Bytes of K and V (or of Q and dO) that keep their place in a Hopper L2 beside the other traffic.
_WIDE = 24 << 20
_NARROW = 8 << 20

_H200 = "H200, triton 3.6.0, 2026-11-21 (docs/log.md); untimed on sm_100"
_FMA = "true float32 products run on the FMA units; sized by registers, untimed"
_UNTIMED = "sized by shared memory and registers, untimed"
_CPU = "more than one tile in few rows, so that small tests cross every border"

# fmt: off
FORWARD: tuple[Row, ...] = (
    Row(_HOPPER, 2, 64, (Tile(64, 64, 4, 3),), _H200, buckets=_TINY, section_bytes=_WIDE),
    Row(_HOPPER, 2, 128, (Tile(64, 64, 4, 3),), _H200, buckets=_MEDIUM, section_bytes=_NARROW, tma=True),
    Row(_HOPPER, 2, 128, (Tile(64, 64, 4, 3),), _H200, section_bytes=_WIDE, tma=True),
    Row(_HOPPER, 2, 256, (Tile(64, 32, 8, 2),), _UNTIMED, strategies=_INLINE, section_bytes=_NARROW),
    Row(_HOPPER, 2, 256, (Tile(64, 32, 4, 3),), _H200, strategies=_PREPASS, section_bytes=_NARROW, tma=True),
    Row(_AMPERE, 2, 64, (Tile(128, 64, 4, 3),), _UNTIMED),
    Row(_AMPERE, 2, 128, (Tile(128, 32, 8, 3),), _UNTIMED),
    Row(_SMALL, 2, 64, (Tile(128, 64, 8, 2),), _UNTIMED),
    Row(_SMALL, 2, 128, (Tile(128, 32, 8, 2),), _UNTIMED),
    Row(_AMPERE + _SMALL, 2, 256, (Tile(32, 32, 8, 1),), _UNTIMED),
    Row(_NVIDIA, 4, 64, (Tile(64, 16, 8, 1),), _FMA),
    Row(_NVIDIA, 4, 128, (Tile(32, 16, 8, 1),), _FMA),
    Row(_NVIDIA, 4, 256, (Tile(16, 16, 8, 1),), _FMA),
    Row(_AMD, 2, 128, (Tile(128, 32, 4, 2),), _UNTIMED),
    Row(_AMD, 2, 256, (Tile(64, 32, 4, 1),), _UNTIMED),
    Row(_AMD, 4, 128, (Tile(32, 32, 4, 1),), _UNTIMED),
    Row(_AMD, 4, 256, (Tile(16, 16, 4, 1),), _UNTIMED),
    Row(_INTERPRETER, 2, 256, (Tile(64, 32, 1, 1),), _CPU, rotate_rows=16),
    Row(_INTERPRETER, 4, 256, (Tile(64, 32, 1, 1),), _CPU, rotate_rows=16, tma=True),
)

BACKWARD: tuple[Row, ...] = (
    Row(_HOPPER, 2, 64, (Tile(32, 64, 4, 3), Tile(64, 64, 4, 3)), _H200, buckets=_TINY, section_bytes=_WIDE),
    Row(_HOPPER, 2, 64, (Tile(64, 64, 4, 2), Tile(64, 64, 4, 3)), _H200, buckets=_SHORT, section_bytes=_WIDE, tma=True),
    Row(_HOPPER, 2, 64, (Tile(32, 128, 4, 3), Tile(128, 64, 4, 3)), _H200, section_bytes=_NARROW, tma=True),
    Row(_HOPPER, 2, 128, (Tile(32, 64, 8, 2), Tile(64, 64, 4, 2)), _UNTIMED, strategies=_INLINE),
    Row(_HOPPER, 2, 128, (Tile(32, 64, 4, 3), Tile(64, 64, 4, 2)), _H200, _PREPASS, buckets=_SHORT, section_bytes=_WIDE,
        tma=True),
    Row(_HOPPER, 2, 128, (Tile(32, 64, 4, 3), Tile(128, 64, 8, 3)), _H200, _PREPASS, section_bytes=_NARROW, tma=True),
    Row(_HOPPER, 2, 256, (Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)), _UNTIMED, _INLINE),
    Row(("sm_90",), 2, 256, (Tile(32, 64, 8, 2), Tile(128, 32, 8, 2)),
        f"{_H200}; 64x64 is 3 % faster with triton 3.6 and spills 856 bytes with 3.9", _PREPASS, section_bytes=_NARROW,
        tma=True),
    Row(("sm_100",), 2, 256, (Tile(64, 64, 8, 1), Tile(128, 32, 8, 2)), _UNTIMED, _PREPASS, section_bytes=_NARROW,
        tma=True),
    Row(_HOPPER, 4, 64, (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)), _FMA),
    Row(_HOPPER, 4, 128, (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)), _FMA),
    Row(_HOPPER, 4, 256, (Tile(16, 32, 8, 1), Tile(32, 16, 8, 1)), _FMA),
    Row(_AMPERE, 2, 64, (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)), _UNTIMED),
    Row(_AMPERE, 2, 128, (Tile(32, 128, 8, 2), Tile(64, 64, 8, 2)), _UNTIMED),
    Row(_AMPERE, 2, 256, (Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)), _UNTIMED),
    Row(_SMALL, 2, 64, (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)), _UNTIMED),
    Row(_SMALL, 2, 128, (Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)), _UNTIMED),
    Row(_SMALL, 2, 256, (Tile(16, 32, 8, 1), Tile(32, 16, 8, 1)), _UNTIMED),
    Row(_AMPERE + _SMALL, 4, 64, (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)), _FMA),
    Row(_AMPERE + _SMALL, 4, 128, (Tile(16, 32, 8, 1), Tile(32, 16, 8, 1)), _FMA),
    Row(_AMPERE + _SMALL, 4, 256, (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)), _FMA),
    Row(_AMD, 2, 64, (Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)), _UNTIMED),
    Row(_AMD, 2, 128, (Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)), _UNTIMED),
    Row(_AMD, 2, 256, (Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)), _UNTIMED),
    Row(_AMD, 4, 256, (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)), _UNTIMED),
    Row(_INTERPRETER, 2, 256, (Tile(32, 64, 1, 1), Tile(64, 32, 1, 1)), _CPU, rotate_rows=16),
    Row(_INTERPRETER, 4, 256, (Tile(32, 64, 1, 1), Tile(64, 32, 1, 1)), _CPU, rotate_rows=16, tma=True),
)
# fmt: on

# Up to this many multiply-adds of Q K^T (B * HQ * NQ * NK * D) a forward call is over before the host could launch a
# second kernel. H200, 2026-11-21: at (1, 4/4, 128, 64), 2**22, a call takes 37 us of host time inline and 48 with the
# pre-pass; at Small-512, 2**29, the pre-pass wins already (17.6 us against 19.6). A plan must not depend on graph
# capture: what a warm-up outside has not compiled would be compiled inside.
LAUNCH_BOUND_WORK = 2**26

# Architectures without rows of their own run those of the nearest relative.
_RELATIVES = {"sm_87": "sm_86", "sm_103": "sm_100", "sm_121": "sm_120", "gfx90a": "gfx942", "gfx950": "gfx942"}


def family(arch: str) -> str | None:
    """The architecture whose rows serve ``arch``; None if there is none."""
    arch = _RELATIVES.get(arch, arch)
    return arch if arch in ARCHS + _INTERPRETER else None


def bucket(length: int) -> str:
    """Length bucket of the longer of NQ and NK."""
    if length <= 1024:
        return "tiny" if length <= 512 else "short"
    return "medium" if length <= 4096 else "long"


def _find(rows, arch, *key) -> Row:
    for row in rows:
        if row.matches(arch, *key):
            return row
    raise LookupError(f"no configuration for {(arch, *key)}")


@functools.cache
def forward(arch, element_size, head_dim, strategy, causal, length_bucket, gqa) -> ForwardConfig:
    """The forward configuration for these properties."""
    return _find(FORWARD, arch, element_size, head_dim, strategy, causal, length_bucket, gqa).config(arch, strategy)


@functools.cache
def backward(arch, element_size, head_dim, strategy, causal, length_bucket, gqa) -> BackwardConfig:
    """The backward configuration for these properties."""
    return _find(BACKWARD, arch, element_size, head_dim, strategy, causal, length_bucket, gqa).config(arch, strategy)
