"""Launch configurations: records and the committed tables. Data, with a reason for each row.

Rows of the portable kernels are found by (architecture, element size, head dimension, strategy, causal, length bucket,
GQA), those of the sm_90 backend by (head dimension, causal, length bucket, GQA, packed, release of Triton), those of
the generation step by (architecture, element size, head dimension, rotated cache), never by exact length; the first row
that matches wins. ``python -m bench tune`` proposes rows of the portable kernels, ``python -m bench decode --tune``
those of the generation step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from fused_rope_attn.runtime import device

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
BUCKETS = ("tiny", "short", "medium", "long")  # the longer of NQ and NK up to 512, 1024, 4096, and beyond
STRATEGIES = ("inline", "prepass")
BEFORE_SCORES, BEFORE_WEIGHTS, BEHIND_WEIGHTS = VALUES = ("before scores", "before weights", "behind weights")


class TritonOptions:
    """What the configuration of one Triton kernel says to its launch.

    num_warps, num_stages: as Triton has them. max_registers: of a thread at most, or None: the compiler decides.
    """

    num_warps: int
    num_stages: int
    max_registers: int | None

    @functools.cached_property
    def launch_options(self) -> dict[str, int]:
        """Keyword arguments of a Triton launch."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}


@dataclass(frozen=True)
class Tile(TritonOptions):
    """block_m query rows by block_n key rows; num_stages is the depth of the load pipeline.

    max_registers caps registers per thread so that one more block fits a multiprocessor; None: the compiler decides.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@dataclass(frozen=True)
class ForwardConfig:
    """How one forward call runs.

    section_bytes: K and V of the heads that are scheduled together, in bytes (0: head by head).
    rotate_rows, rotate_heads: rows by heads that one program of the pre-pass turns.
    pdl: programmatic dependent launch (sm_90 and later).
    tma: read K and V through tensor descriptors where their strides allow (sm_90 and later, prepass only).
    prefetch_rows: of V, a power of two or 0, that a program asks the L2 for while the pre-pass runs (with pdl alone).
    """

    strategy: str
    tile: Tile
    section_bytes: int = 0
    rotate_rows: int = 32
    rotate_heads: int = 4
    pdl: bool = False
    tma: bool = False
    prefetch_rows: int = 0


@dataclass(frozen=True)
class BackwardConfig:
    """As ``ForwardConfig``; with tma, dkdv reads Q and dO, and dq reads K and V, through descriptors.

    one_launch: everything runs in one launch where nothing is to be rotated before it: forward saved q and k rotated,
    or the strategy is inline. Both tiles name the same warps, stages and registers then, and with tma the same rows.

    Raises:
        ValueError: where the two tiles cannot share a launch.
    """

    strategy: str
    dkdv: Tile
    dq: Tile
    one_launch: bool = False
    section_bytes: int = 0
    rotate_rows: int = 32
    rotate_heads: int = 4
    pdl: bool = False
    tma: bool = False

    def __post_init__(self) -> None:
        if self.one_launch and self.dkdv.launch_options != self.dq.launch_options:
            raise ValueError(f"the tiles of one launch must have the same launch options: {self.dkdv}, {self.dq}")
        if self.one_launch and self.tma and self.dkdv != self.dq:
            raise ValueError(f"the tiles of one launch with descriptors must be the same: {self.dkdv}, {self.dq}")


@dataclass(frozen=True)
class HopperForwardConfig:
    """How one forward call of the sm_90 backend runs: 64 query rows for each of ``consumers`` warpgroups, which attend,
    by block_n keys, ``stages`` blocks in flight.

    rotates_queries: whether four more warps rotate the queries, or else the pre-pass does. attend_registers,
    rotate_registers: of one thread of the warps that attend and that rotate; with 24 for the loading warps, those of
    all warpgroups fill the register file at 512. Head dims beyond 128 have neither registers for warps that rotate nor
    room for more than 64 keys and two stages. pin: keep the softmax beside the product of the block before
    (``hopper.softmax.pin``), which takes more registers. values: one of ``VALUES``, which says when a block's product
    with the values is awaited, from the fewest registers to the most: before the next block's scores are issued, before
    its weights are made of them, or behind these. halves_diagonal: leave out the quarter of a diagonal block that
    nobody sees, where tiles lie as ``hopper.shapes.is_aligned`` asks. The rest as in ``ForwardConfig``.

    Raises:
        ValueError: for values that are not one of ``VALUES``.
    """

    block_n: int
    stages: int = 2
    consumers: int = 2
    rotates_queries: bool = True
    attend_registers: int = 208
    rotate_registers: int = 72
    pin: bool = False
    halves_diagonal: bool = False
    values: str = BEHIND_WEIGHTS
    section_bytes: int = 0
    rotate_rows: int = 16
    rotate_heads: int = 1
    pdl: bool = True

    def __post_init__(self) -> None:
        if self.values not in VALUES:
            raise ValueError(f"values must be one of {VALUES}, but is {self.values!r}")


@dataclass(frozen=True)
class HopperBackwardConfig:
    """How one backward call of the sm_90 backend runs: key blocks of 128 (64 beyond head dim 128), query blocks of 64.

    q_stages, do_stages: blocks of Q and of dO in flight; q_stages 2 or more, because Q of one block and of the next are
    in use together. consumer_registers: of one thread of the two warpgroups that multiply; twice 240, with 24 for the
    loading and the adding warp, fill the register file at 504. section_bytes: Q, dO and the float32 dQ of the key heads
    that are scheduled together, in bytes (0: head by head). rotate_rows, rotate_heads: rows by heads that one program
    of the pre-process turns; post_rows, post_heads: of the post-process; norm_rows, norm_heads: of the post-process
    where q and k are normed, which reads twice as much of a row and sums it. halves_diagonal: the second warpgroup
    leaves out the query block that sees none of its keys, where queries and keys lie as ``hopper.shapes.is_aligned``
    asks. pdl: as in ``ForwardConfig``.

    Raises:
        ValueError: for post_rows that are not whole groups of 8, in whose order the accumulator has its rows.
    """

    q_stages: int = 3
    do_stages: int = 2
    consumer_registers: int = 240
    section_bytes: int = 0
    rotate_rows: int = 16
    rotate_heads: int = 4
    post_rows: int = 16
    post_heads: int = 4
    norm_rows: int = 8
    norm_heads: int = 8
    halves_diagonal: bool = False
    pdl: bool = True

    def __post_init__(self) -> None:
        if self.post_rows % 8:
            raise ValueError(f"post_rows must be a multiple of 8, but is {self.post_rows}")


@dataclass(frozen=True)
class Row:
    """One line of the table: ``tiles`` (one forward; dkdv and dq backward) for what the other fields select.

    head_dim: largest head dimension served. masked: whether the call has a window, lengths, a cap or sinks, which take
    registers. None matches anything. note: why these tiles. one_launch: as ``BackwardConfig`` has it.
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
    masked: bool | None = None
    section_bytes: int = 0
    rotate_rows: int = 32
    rotate_heads: int = 4
    tma: bool = False
    prefetch_rows: int = 0
    one_launch: bool = False

    def matches(self, arch, element_size, head_dim, strategy, causal, length_bucket, gqa, masked=False) -> bool:
        return (
            arch in self.archs
            and element_size == self.element_size
            and head_dim <= self.head_dim
            and strategy in self.strategies
            and self.causal in (None, causal)
            and (self.buckets is None or length_bucket in self.buckets)
            and self.gqa in (None, gqa)
            and self.masked in (None, masked)
        )

    def config(self, arch: str, strategy: str) -> ForwardConfig | BackwardConfig:
        """The launch configuration of this row."""
        options: dict[str, Any] = {
            "section_bytes": self.section_bytes,
            "rotate_rows": self.rotate_rows,
            "rotate_heads": self.rotate_heads,
            "pdl": arch in PDL,
            "tma": self.tma and strategy == "prepass",
        }
        if len(self.tiles) == 2:
            dkdv, dq = self.tiles
            return BackwardConfig(strategy, dkdv, dq, self.one_launch, **options)
        (tile,) = self.tiles
        return ForwardConfig(strategy, tile, prefetch_rows=self.prefetch_rows, **options)


@dataclass(frozen=True)
class HopperRow:
    """One line of the sm_90 backend's tables: ``config`` for what the other fields select, as in ``Row``.

    auto: the length buckets in which ``backend="auto"`` takes it instead of the portable kernels, with some_work only
    from ``SOME_WORK`` on, with much_work only from ``MUCH_WORK`` on; an explicit ``backend="hopper"`` takes it in all
    of ``buckets``. before: (major, minor) of the first release of Triton that it does not serve, or None; releases make
    different code of the same kernel. note: why this configuration, and why those buckets.
    """

    head_dim: int
    config: HopperForwardConfig | HopperBackwardConfig
    auto: tuple[str, ...]
    note: str
    causal: bool | None = None
    buckets: tuple[str, ...] | None = None
    gqa: bool | None = None
    some_work: bool = False
    much_work: bool = False
    packed: bool | None = None
    before: tuple[int, int] | None = None

    def matches(self, head_dim, causal, length_bucket, gqa, packed, release) -> bool:
        return (
            head_dim <= self.head_dim
            and self.causal in (None, causal)
            and (self.buckets is None or length_bucket in self.buckets)
            and self.gqa in (None, gqa)
            and self.packed in (None, packed)
            and (self.before is None or release < self.before)
        )


PDL = ("sm_90", "sm_100", "sm_120")
HOPPER = ("sm_90", "sm_100")  # 227 KB of shared memory per block
AMPERE = ("sm_80",)  # 163 KB
SMALL = ("sm_86", "sm_89", "sm_120")  # 99 KB
NVIDIA = HOPPER + AMPERE + SMALL
AMD = ("gfx942",)  # 64 KB
INTERPRETER = ("interpreter",)
_INLINE = ("inline",)
_PREPASS = ("prepass",)
_TINY = ("tiny",)
_SHORT = ("tiny", "short")
_MEDIUM = ("medium",)

# Bytes of K and V (or of Q and dO) that keep their place in a Hopper L2 beside the other traffic.
_WIDE = 24 << 20
_NARROW = 8 << 20

_H200 = "H200, triton 3.6.0, 2026-11-21 (docs/experiments); untimed on sm_100"
_ONE_LAUNCH = "H200, triton 3.6.0, 2026-11-23 (docs/experiments): no launch waits for another; untimed on sm_100"
FMA = "true float32 products run on the FMA units; sized by registers, untimed"
UNTIMED = "sized by shared memory and registers, untimed"
_MASKED = "untimed: with masks the tiles for longer sequences spill up to 500 bytes, inside the loops; this one nothing"
CPU = "more than one tile in few rows, so that small tests cross every border"

# fmt: off
FORWARD: tuple[Row, ...] = (
    Row(HOPPER, 2, 64, (Tile(64, 64, 4, 3),), _H200, buckets=_TINY, section_bytes=_WIDE, rotate_heads=1,
        prefetch_rows=512),
    Row(HOPPER, 2, 64, (Tile(64, 64, 4, 3),), _H200, buckets=_SHORT, section_bytes=_WIDE, rotate_heads=1,
        prefetch_rows=128),
    Row(HOPPER, 2, 128, (Tile(64, 64, 4, 3),), _H200, buckets=_MEDIUM, section_bytes=_NARROW, tma=True),
    Row(HOPPER, 2, 128, (Tile(64, 64, 4, 3),), _H200, section_bytes=_WIDE, tma=True),
    Row(HOPPER, 2, 256, (Tile(64, 32, 8, 2),), UNTIMED, strategies=_INLINE, section_bytes=_NARROW),
    Row(HOPPER, 2, 256, (Tile(64, 32, 4, 3),), _H200, strategies=_PREPASS, section_bytes=_NARROW, tma=True),
    Row(AMPERE, 2, 64, (Tile(128, 64, 4, 3),), UNTIMED),
    Row(AMPERE, 2, 128, (Tile(128, 32, 8, 3),), UNTIMED),
    Row(SMALL, 2, 64, (Tile(128, 64, 8, 2),), UNTIMED),
    Row(SMALL, 2, 128, (Tile(128, 32, 8, 2),), UNTIMED),
    Row(AMPERE + SMALL, 2, 256, (Tile(32, 32, 8, 1),), UNTIMED),
    Row(NVIDIA, 4, 64, (Tile(64, 16, 8, 1),), FMA),
    Row(NVIDIA, 4, 128, (Tile(32, 16, 8, 1),), FMA),
    Row(NVIDIA, 4, 256, (Tile(16, 16, 8, 1),), FMA),
    Row(AMD, 2, 128, (Tile(128, 32, 4, 2),), UNTIMED),
    Row(AMD, 2, 256, (Tile(64, 32, 4, 1),), UNTIMED),
    Row(AMD, 4, 128, (Tile(32, 32, 4, 1),), UNTIMED),
    Row(AMD, 4, 256, (Tile(16, 16, 4, 1),), UNTIMED),
    Row(INTERPRETER, 2, 256, (Tile(64, 32, 1, 1),), CPU, rotate_rows=16),
    Row(INTERPRETER, 4, 256, (Tile(64, 32, 1, 1),), CPU, rotate_rows=16, tma=True),
)

BACKWARD: tuple[Row, ...] = (
    Row(HOPPER, 2, 64, (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)), _ONE_LAUNCH, buckets=_TINY, one_launch=True, tma=True),
    Row(HOPPER, 2, 64, (Tile(32, 64, 4, 3), Tile(64, 64, 4, 3)), _MASKED, _PREPASS, masked=True, section_bytes=_NARROW,
        tma=True),
    Row(HOPPER, 2, 64, (Tile(64, 64, 4, 2), Tile(64, 64, 4, 3)), _H200, buckets=_SHORT, section_bytes=_WIDE, tma=True),
    Row(HOPPER, 2, 64, (Tile(32, 128, 4, 3), Tile(128, 64, 4, 3)), _H200, section_bytes=_NARROW, tma=True),
    Row(HOPPER, 2, 128, (Tile(32, 64, 8, 2), Tile(64, 64, 4, 2)), UNTIMED, strategies=_INLINE),
    Row(HOPPER, 2, 128, (Tile(32, 64, 4, 3), Tile(64, 64, 4, 2)), _H200, _PREPASS, buckets=_SHORT, section_bytes=_WIDE,
        tma=True),
    Row(HOPPER, 2, 128, (Tile(32, 64, 4, 3), Tile(128, 64, 8, 3)), _H200, _PREPASS, section_bytes=_NARROW, tma=True),
    Row(HOPPER, 2, 256, (Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)), UNTIMED, _INLINE),
    Row(HOPPER, 2, 256, (Tile(32, 32, 8, 2), Tile(128, 32, 8, 2)),
        "untimed: with masks 64 key rows spill 992 bytes with triton 3.8, and 32 nothing", _PREPASS, masked=True,
        section_bytes=_NARROW, tma=True),
    Row(("sm_90",), 2, 256, (Tile(32, 64, 8, 2), Tile(128, 32, 8, 2)),
        f"{_H200}; 64x64 is 3 % faster with triton 3.6 and spills 856 bytes with 3.9", _PREPASS, section_bytes=_NARROW,
        tma=True),
    Row(("sm_100",), 2, 256, (Tile(64, 64, 8, 1), Tile(128, 32, 8, 2)), UNTIMED, _PREPASS, section_bytes=_NARROW,
        tma=True),
    Row(HOPPER, 4, 64, (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)), FMA),
    Row(HOPPER, 4, 128, (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)), FMA),
    Row(HOPPER, 4, 256, (Tile(16, 32, 8, 1), Tile(32, 16, 8, 1)), FMA),
    Row(AMPERE, 2, 64, (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)), UNTIMED),
    Row(AMPERE, 2, 128, (Tile(32, 128, 8, 2), Tile(64, 64, 8, 2)), UNTIMED),
    Row(AMPERE, 2, 256, (Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)), UNTIMED),
    Row(SMALL, 2, 64, (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)), UNTIMED),
    Row(SMALL, 2, 128, (Tile(32, 64, 8, 1), Tile(64, 32, 8, 1)), UNTIMED),
    Row(SMALL, 2, 256, (Tile(16, 32, 8, 1), Tile(32, 16, 8, 1)), UNTIMED),
    Row(AMPERE + SMALL, 4, 64, (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)), FMA),
    Row(AMPERE + SMALL, 4, 128, (Tile(16, 32, 8, 1), Tile(32, 16, 8, 1)), FMA),
    Row(AMPERE + SMALL, 4, 256, (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)), FMA),
    Row(AMD, 2, 64, (Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)), UNTIMED),
    Row(AMD, 2, 128, (Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)), UNTIMED),
    Row(AMD, 2, 256, (Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)), UNTIMED),
    Row(AMD, 4, 256, (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)), UNTIMED),
    Row(INTERPRETER, 2, 256, (Tile(32, 64, 1, 1), Tile(64, 32, 1, 1)), CPU, rotate_rows=16),
    Row(INTERPRETER, 4, 256, (Tile(32, 64, 1, 1), Tile(64, 32, 1, 1)), CPU, rotate_rows=16, tma=True),
)
# fmt: on

# Largest head dimension of the sm_90 backend, and of its wide kernels, which share a file and little else.
HOPPER_HEAD_DIM = 128
HOPPER_WIDE_HEAD_DIM = 256
# Up to this one, from 72 on, the sm_90 kernels take a tile's columns in two pieces (``hopper.columns``).
HOPPER_NARROW_HEAD_DIM = 96

# What the sm_90 backend keeps together in the L2 of 50 MB.
_WIDEST = 32 << 20
_BEYOND_TINY = ("short", "medium", "long")
_TIMED = "H200, triton 3.6.0, 2026-11-21 (docs/experiments)"
_PADDED = "untimed: tiles are 64 columns wide whatever the head dim"
_BOTH = "H200, triton 3.6.0 and 3.9.0, 2026-11-22 (docs/experiments)"
_SLOWER = f"{_BOTH}: up to 1024 tokens the portable kernels are faster"
_THREE = f"{_BOTH}: three warpgroups hide each other's exponentials from 8192 tokens on; below they lose"
_EARLY = "H200, triton 3.6.0 and 3.9.0, 2026-11-23 (docs/experiments): values before weights take 2 to 5 % less"
_TILES = f"{_TIMED}; not with fewer tiles than a few for every multiprocessor"
_HALVES = f"{_TILES}; by halves, diagonals take 2 to 3 % less from 1K to 4K (3.6.0, 2026-11-23)"
_PIECES = "H200, triton 3.6.0 and 3.9.0, 2026-11-23 (docs/experiments): unmasked, three warpgroups take 6 to 11 % less"
_SHORT_TILES = f"{_HALVES}; values before weights take 1 % less up to 1024 tokens, and more beyond"
_OLDER = (3, 9)  # triton 3.6 to 3.8 make one code of these kernels, 3.9 another
_HALVES_LONG = "H200, 2026-11-23 (docs/experiments): by halves, diagonals take 1.5 to 2.5 % less with triton 3.9.0"
_WHOLE_LONG = "H200, 2026-11-23 (docs/experiments): by halves, diagonals take .5 to 1.5 % more with triton 3.6.0"
_WHOLE_TINY = "H200, 2026-11-23 (docs/experiments): by halves, diagonals take 1 to 8 % more with triton 3.6.0"
_FEW_HEADS = "H200, triton 3.9.0, 2026-11-23 (docs/experiments): a post-process of more programs, 1 to 10 % less"
_FEW_HEADS_HIDDEN = f"{_FEW_HEADS}; hidden queries left out, 0 to 3 % less"
_HIDDEN = "H200, 2026-11-23 (docs/experiments): 0 to 2 % less with triton 3.6.0, 2 to 3 % with 3.9.0; not with GQA"
_TINY_TILES = "H200, triton 3.6.0, 2026-11-22 (docs/experiments): 9 and 15 % faster with 64 and 128 heads of 512"
_WIDE_TILES = "H200, triton 3.6.0, 2026-11-22 (docs/experiments): 64 keys beside 256 columns of O; not with few tiles"
_WIDE_TIMED = "H200, triton 3.6.0, 2026-11-22 (docs/experiments): half the time of the portable kernels from 4K on"
_MANY_SEQUENCES = "H200, triton 3.6.0, 2026-11-22 (docs/experiments): many short sequences fill the card, one does not"

# fmt: off
HOPPER_FORWARD: tuple[HopperRow, ...] = (
    HopperRow(32, HopperForwardConfig(128, section_bytes=_WIDEST), (), _PADDED),
    HopperRow(64, HopperForwardConfig(128, stages=3, consumers=3, rotates_queries=False, attend_registers=160,
              values=BEFORE_WEIGHTS, section_bytes=_WIDEST, rotate_heads=4), ("long",), _THREE, buckets=("long",),
              packed=False),
    HopperRow(64, HopperForwardConfig(128, values=BEFORE_WEIGHTS, section_bytes=_WIDEST), ("long",), _EARLY,
              causal=True, buckets=("long",)),
    HopperRow(64, HopperForwardConfig(128, halves_diagonal=True, values=BEFORE_WEIGHTS, section_bytes=_WIDEST),
              _MEDIUM, _SLOWER, causal=True, much_work=True),
    HopperRow(64, HopperForwardConfig(128, values=BEFORE_WEIGHTS, section_bytes=_WIDEST), _BEYOND_TINY, _EARLY,
              causal=False),
    HopperRow(HOPPER_NARROW_HEAD_DIM, HopperForwardConfig(128, halves_diagonal=True, values=BEFORE_WEIGHTS,
              section_bytes=_WIDEST), ("long",), _EARLY, causal=True, buckets=("long",), packed=False),
    HopperRow(HOPPER_NARROW_HEAD_DIM, HopperForwardConfig(128, consumers=3, rotates_queries=False, attend_registers=160,
              values=BEFORE_SCORES, section_bytes=_WIDEST, rotate_heads=4), ("long",), _PIECES, buckets=("long",),
              packed=False),
    HopperRow(HOPPER_NARROW_HEAD_DIM, HopperForwardConfig(128, halves_diagonal=True, values=BEFORE_WEIGHTS,
              section_bytes=_WIDEST), _MEDIUM, _EARLY, buckets=_MEDIUM, much_work=True, packed=False),
    HopperRow(128, HopperForwardConfig(128, pin=True, section_bytes=_WIDEST), ("long",), _WHOLE_LONG, buckets=("long",),
              before=_OLDER),
    HopperRow(128, HopperForwardConfig(128, pin=True, halves_diagonal=True, section_bytes=_WIDEST), ("long",),
              _HALVES_LONG, buckets=("long",)),
    HopperRow(128, HopperForwardConfig(128, pin=True, halves_diagonal=True, section_bytes=_WIDEST), _MEDIUM, _HALVES,
              buckets=_MEDIUM, much_work=True),
    HopperRow(128, HopperForwardConfig(128, values=BEFORE_WEIGHTS, section_bytes=_WIDEST), BUCKETS, _MANY_SEQUENCES,
              buckets=_TINY, much_work=True, packed=True),
    HopperRow(128, HopperForwardConfig(128, values=BEFORE_WEIGHTS, section_bytes=_WIDEST), BUCKETS, _WHOLE_TINY,
              buckets=_TINY, some_work=True, before=_OLDER),
    HopperRow(128, HopperForwardConfig(128, halves_diagonal=True, values=BEFORE_WEIGHTS, section_bytes=_WIDEST),
              BUCKETS, _TINY_TILES, buckets=_TINY, some_work=True),
    HopperRow(128, HopperForwardConfig(128, halves_diagonal=True, values=BEFORE_WEIGHTS, section_bytes=_WIDEST),
              _BEYOND_TINY, _SHORT_TILES, much_work=True),
    HopperRow(256, HopperForwardConfig(64, rotates_queries=False, attend_registers=240, pin=True,
              section_bytes=2 * _WIDEST), _BEYOND_TINY, _WIDE_TILES, much_work=True),
)

HOPPER_BACKWARD: tuple[HopperRow, ...] = (
    HopperRow(32, HopperBackwardConfig(section_bytes=_WIDEST, norm_rows=16, norm_heads=4), (), _PADDED),
    HopperRow(64, HopperBackwardConfig(section_bytes=_WIDEST, rotate_heads=2, post_rows=8, norm_rows=16, norm_heads=4),
              BUCKETS, _TIMED, buckets=_TINY, some_work=True),
    HopperRow(64, HopperBackwardConfig(section_bytes=_WIDEST, rotate_heads=2, post_rows=8, post_heads=2, norm_rows=16,
              norm_heads=4), BUCKETS, _FEW_HEADS, buckets=_SHORT),
    HopperRow(64, HopperBackwardConfig(section_bytes=_WIDEST, post_rows=8, post_heads=8), BUCKETS, _TIMED),
    HopperRow(HOPPER_NARROW_HEAD_DIM, HopperBackwardConfig(section_bytes=_WIDEST, post_rows=8, halves_diagonal=True),
              BUCKETS, _FEW_HEADS_HIDDEN, causal=True, gqa=False, buckets=_SHORT),
    HopperRow(HOPPER_NARROW_HEAD_DIM, HopperBackwardConfig(section_bytes=_WIDEST, post_rows=8, post_heads=8,
              halves_diagonal=True), BUCKETS, _HIDDEN, causal=True, gqa=False, buckets=_MEDIUM),
    HopperRow(128, HopperBackwardConfig(section_bytes=_WIDEST, post_rows=8, post_heads=2, halves_diagonal=True),
              BUCKETS, _FEW_HEADS_HIDDEN, causal=True, gqa=False, buckets=_TINY),
    HopperRow(128, HopperBackwardConfig(section_bytes=_WIDEST, post_rows=8, halves_diagonal=True), BUCKETS,
              _FEW_HEADS_HIDDEN, causal=True, gqa=False, buckets=_SHORT),
    HopperRow(128, HopperBackwardConfig(section_bytes=_WIDEST, post_rows=8, post_heads=2), BUCKETS, _FEW_HEADS,
              buckets=_TINY),
    HopperRow(128, HopperBackwardConfig(section_bytes=_WIDEST, post_rows=8), BUCKETS, _FEW_HEADS, buckets=_SHORT),
    HopperRow(HOPPER_NARROW_HEAD_DIM, HopperBackwardConfig(section_bytes=_WIDEST, post_rows=8, post_heads=8), BUCKETS,
              _TIMED),
    HopperRow(128, HopperBackwardConfig(section_bytes=2 * _WIDEST, post_rows=8, post_heads=8), BUCKETS,
              f"{_TIMED}; with 32 MiB the last section leaves a tail", gqa=True, buckets=_MEDIUM),
    HopperRow(128, HopperBackwardConfig(section_bytes=_WIDEST, post_rows=8, post_heads=8, halves_diagonal=True),
              BUCKETS, _HIDDEN, causal=True, gqa=False, buckets=_MEDIUM),
    HopperRow(128, HopperBackwardConfig(section_bytes=_WIDEST, post_rows=8, post_heads=8), BUCKETS, _TIMED),
    HopperRow(256, HopperBackwardConfig(q_stages=2, section_bytes=_WIDEST, norm_rows=4, norm_heads=4), BUCKETS,
              _WIDE_TIMED),
)
# fmt: on

# Up to this many multiply-adds of Q K^T (B * HQ * NQ * NK * D, with D padded as tiles are) a forward call is over
# before the host could launch a second kernel. H200, 2026-11-21: at (1, 4/4, 128, 64), 2**22, a call takes 37 us of
# host time inline and 48 with the pre-pass; at Small-512, 2**29, the pre-pass wins already (17.6 us against 19.6). A
# plan must not depend on graph capture: what a warm-up outside has not compiled would be compiled inside.
LAUNCH_BOUND_WORK = 2**26

# From this many on the persistent forward of sm_90 has several tiles for every multiprocessor, which hide each other's
# ends. H200, 2026-11-21: .124 ms against .140 at (2, 64/64, 1024, 128), 2**34, but .042 against .037 at
# (1, 32/8, 1024, 128), 2**32.
MUCH_WORK = 2**33
# Short sequences have fewer keys for each tile, and the persistent forward is ahead earlier. H200, 2026-11-22: 25.7 us
# against 28.2 at (2, 32/32, 512, 128), 2**31, and 46.2 against 54.2 at (2, 64/64, 512, 128).
SOME_WORK = 2**31

# Packed sequences that are shorter than this, tokens over sequences (empty ones too), are left to the portable kernels.
# Half of a forward tile of the sm_90 ones is empty then where a portable one is full, and their backward adds up to 64
# rows a sequence to rotated Q and float32 dQ, so that more memory would go to padding than to tokens: 64 times as much
# for cu_seqlens that have an entry for every token, which is the bound of a caller who counts no sequences
# (``cu_seqlens_from_position_ids``). H200, 2026-11-22, heads 32/8, D 128: 4096 of 16 tokens take 5.43 + 9.14 ms there
# against 5.04 + 8.53, 2048 of 32 2.79 + 5.02 against 2.42 + 4.52, 2048 of 64 2.85 + 6.30 against 2.99 + 6.41.
LEAST_MEAN_LENGTH = 64


def work_class(multiply_adds: int) -> int:
    """0: launch-bound; 1: little work; 2: some; 3: much. A plan depends on this, not on the number."""
    return (multiply_adds > LAUNCH_BOUND_WORK) + (multiply_adds >= SOME_WORK) + (multiply_adds >= MUCH_WORK)


# Architectures without rows of their own run those of the nearest relative.
_RELATIVES = {"sm_87": "sm_86", "sm_103": "sm_100", "sm_121": "sm_120", "gfx90a": "gfx942", "gfx950": "gfx942"}


def family(arch: str) -> str | None:
    """The architecture whose rows serve ``arch``; None if there is none."""
    arch = _RELATIVES.get(arch, arch)
    return arch if arch in ARCHS + INTERPRETER else None


def bucket(length: int) -> str:
    """Length bucket of the longer of NQ and NK."""
    if length <= 1024:
        return "tiny" if length <= 512 else "short"
    return "medium" if length <= 4096 else "long"


def find_row(rows, *key):
    for row in rows:
        if row.matches(*key):
            return row
    raise LookupError(f"no configuration for {key}")


@functools.cache
def forward(arch, element_size, head_dim, strategy, causal, length_bucket, gqa, masked=False) -> ForwardConfig:
    """The forward configuration for these properties."""
    shape = (causal, length_bucket, gqa, masked)
    return find_row(FORWARD, arch, element_size, head_dim, strategy, *shape).config(arch, strategy)


@functools.cache
def backward(arch, element_size, head_dim, strategy, causal, length_bucket, gqa, masked=False) -> BackwardConfig:
    """The backward configuration for these properties."""
    shape = (causal, length_bucket, gqa, masked)
    return find_row(BACKWARD, arch, element_size, head_dim, strategy, *shape).config(arch, strategy)


def hopper_forward(head_dim, causal, length_bucket, gqa, packed=False, release=None) -> HopperRow:
    """The row of the sm_90 backend's forward pass for these properties; release: of Triton, by default the installed
    one's (major, minor)."""
    return find_row(HOPPER_FORWARD, head_dim, causal, length_bucket, gqa, packed, release or device.triton_release())


def hopper_backward(head_dim, causal, length_bucket, gqa, packed=False, release=None) -> HopperRow:
    """The row of the sm_90 backend's backward pass for these properties; release as for ``hopper_forward``."""
    return find_row(HOPPER_BACKWARD, head_dim, causal, length_bucket, gqa, packed, release or device.triton_release())
