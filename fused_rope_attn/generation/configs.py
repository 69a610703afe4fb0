"""The configurations of the generation step: their record and the tables, which ``attention/configs.py`` explains.

Rows are chosen by architecture, element size, head dimension, rotated cache, page size and small cache.
``python -m tools.compare_checkouts`` times a changed row against the commit before.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from fused_rope_attn.attention.configs import (
    AMD,
    INTERPRETER,
    LARGE,
    MEDIUM,
    NVIDIA,
    PDL,
    SMALL,
    TritonOptions,
)
from fused_rope_attn.runtime.rows import find_row

# Most query rows (new tokens times heads of a group) of one program of the generation step: registers hold no more next
# to a pipeline of enough stages for the memory.
DECODE_ROWS = 64
# From so many query rows of a key head on, a call is a chunk of a prompt: products take its time, not memory.
CHUNK_ROWS = 256
# The sm_90 kernels of attention run a chunk on a copy of its keys if it has so many query rows of a key head at least,
# because their products then take longer than the copy, and so many bytes of copy at most. CHUNK_TILE: query rows of
# their tiles.
GATHERED_ROWS = 512
GATHERED_BYTES = 1 << 30
CHUNK_TILE = 128
# Up to so many query rows of all heads the kernel that adds parts takes the new tokens too. Timed on an H200 were 32
# and 256 rows (8 to 18 % of a step on 128 MiB saved) on one side and 2048 (a tenth more) on the other.
ROWS_APART = 512
# Rows of all heads of a cache that is small: fewer programs have less to add up at the end. Timed were
# 2**18 rows (B8-4K) on one side and 2**21 (B8-32K, B64-4K) on the other.
SMALL_CACHE = 1 << 19


@dataclass(frozen=True)
class DecodeConfig(TritonOptions):
    """The configuration of one generation step: tiles of block_n cached keys, ``num_stages`` deep in the load pipeline.

    programs_per_sm: programs for each multiprocessor, which share all tiles equally; as many as fit at once, or some
    would begin when the others have ended. combine_parts: parts of a shared head that are added in one step. pdl: as in
    ``ForwardConfig``. block_m: query rows of one program at most in a chunk of a prompt; None: as many as a step has,
    up to DECODE_ROWS. by_page: tiles that hold whole pages begin with a page, and look each of theirs up once.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    combine_parts: int = 32
    pdl: bool = False
    block_m: int | None = None
    rows_apart: int = 0
    registers_apart: int | None = None
    by_page: bool = False


@dataclass(frozen=True)
class OrderedConfig:
    """The configuration of a step in the order of the sm_90 forward, by tiles of its ``block_n`` keys.

    From ``least_units`` key heads of all sequences on, one program goes through all keys of each, most_stages deep in
    the load pipeline. With fewer, up to ``programs`` programs compute the scores, and about as many add up the values,
    of least_columns columns or more. Those weigh step_rows query rows of several tiles at a time; their pipeline of
    values has up to value_stages stages. Timed on an H200 with 3.9.0, 2026-11-26.
    """

    block_n: int
    least_units: int = 48
    most_stages: int = 6
    programs: int = 64
    least_columns: int = 16
    step_rows: int = 32
    value_stages: int = 12


@dataclass(frozen=True, kw_only=True)
class DecodeRow:
    """Hold one row: ``config`` for the calls that the other fields select; ``config_on`` adds what the card decides.

    element_size: of q, or 1 where q has two bytes and the caches are float8. head_dim: the largest served. rotated:
    whether the cached keys are. most_page: the most rows of a page; caches that are not paged do not match. small:
    whether caches have SMALL_CACHE rows at most. chunk: whether steps have CHUNK_ROWS query rows. None matches all.
    """

    arch: tuple[str, ...]
    element_size: tuple[int, ...]
    head_dim: int
    config: DecodeConfig
    rotated: bool | None = None
    most_page: int | None = None
    small: bool | None = None
    chunk: bool | None = None

    def config_on(self, arch: str) -> DecodeConfig:
        """Return the configuration as ``arch`` takes it."""
        apart = ROWS_APART if arch in LARGE and max(self.element_size) < 4 else self.config.rows_apart
        return replace(self.config, pdl=arch in PDL, rows_apart=apart)


# The cards, and the interpreter, on which the kernels read and write float8_e4m3fn.
FLOAT8 = (*LARGE, "sm_89", "sm_120", INTERPRETER[0])

# A multiprocessor must have about 40 KB under way to keep an H200's memory busy (4.8 TB/s, 1 us, 132 of them). Rows
# without a date are untimed: two programs of LARGE rows have as much in flight, others fit shared memory and registers.
# fmt: off
DECODE: tuple[DecodeRow, ...] = (
    # Chunks of prompts; the other rows serve those that none of these does.
    # H200, 2026-11-22, 512 tokens onto 32K: 328 TFLOP/s in pages, tiles of 64 keys 234; contiguous 2 % less.
    # by_page: ptxas 13.4 loses a register in pages of 16 if each row looks up its page. 3.9.0, 2026-11-24.
    DecodeRow(arch=LARGE, element_size=(2,), head_dim=128, chunk=True, rotated=True,
        config=DecodeConfig(block_n=128, num_warps=8, num_stages=3, programs_per_sm=1, block_m=128, by_page=True)),
    # Raw keys: the angles leave fewer registers.
    DecodeRow(arch=LARGE, element_size=(2,), head_dim=128, chunk=True, rotated=False,
        config=DecodeConfig(block_n=32, num_warps=4, num_stages=3, block_m=64)),
    # H200, 2026-11-22, 512 tokens onto 32K in pages of 64: 266 TFLOP/s, tiles of 64 keys 203.
    DecodeRow(arch=LARGE, element_size=(1,), head_dim=128, chunk=True, rotated=True,
        config=DecodeConfig(block_n=128, num_warps=8, num_stages=3, programs_per_sm=1, block_m=128)),
    DecodeRow(arch=LARGE, element_size=(1,), head_dim=128, chunk=True, rotated=False,
        config=DecodeConfig(block_n=32, num_warps=8, num_stages=3, programs_per_sm=1, block_m=64)),
    # More than one tile in few rows, so that small tests cross every border.
    DecodeRow(arch=INTERPRETER, element_size=(4,), head_dim=256, chunk=True,
        config=DecodeConfig(block_n=32, num_warps=1, num_stages=1, programs_per_sm=5, combine_parts=2, block_m=128)),
    # Other steps.
    DecodeRow(arch=LARGE, element_size=(1,), head_dim=64,
        config=DecodeConfig(block_n=128, num_warps=4, num_stages=4)),
    DecodeRow(arch=LARGE, element_size=(2,), head_dim=64, rotated=True,
        config=DecodeConfig(block_n=128, num_warps=4, num_stages=3)),
    # H200, 2026-11-22, B8-32K: .63 of bf16's time with triton 3.6.0, tiles of 128 keys .69; small caches .98.
    DecodeRow(arch=LARGE, element_size=(1,), head_dim=128, rotated=True, most_page=127, small=False,
        config=DecodeConfig(block_n=64, num_warps=2, num_stages=3, programs_per_sm=4)),
    # H200, 2026-11-22, B8-32K: .57 of bf16's time with triton 3.9.0, .63 with 3.6.0; B8-4K: .85 in pages.
    DecodeRow(arch=LARGE, element_size=(1,), head_dim=128, rotated=True,
        config=DecodeConfig(block_n=128, num_warps=4, num_stages=3)),
    # H200, 2026-11-23: pages of 16 cost 2 to 5 %, and 5 to 20 % where each row looks its page up.
    DecodeRow(arch=LARGE, element_size=(2,), head_dim=128, rotated=True, most_page=63,
        config=DecodeConfig(block_n=32, num_warps=2, num_stages=3, programs_per_sm=4, by_page=True)),
    # H200, 2026-11-22: as fast as one program of 128 keys at equal lengths, up to 4 % faster with 64 sequences, .80 of
    # its time where lengths are mixed.
    DecodeRow(arch=LARGE, element_size=(2,), head_dim=128, rotated=True,
        config=DecodeConfig(block_n=64, num_warps=4, num_stages=3, registers_apart=192)),
    # On LARGE cards these are for raw keys: the angles of a tile are as many bytes as its keys and values.
    DecodeRow(arch=LARGE + MEDIUM + SMALL, element_size=(1, 2), head_dim=64,
        config=DecodeConfig(block_n=64, num_warps=4, num_stages=3)),
    DecodeRow(arch=LARGE + MEDIUM + SMALL, element_size=(1, 2), head_dim=128,
        config=DecodeConfig(block_n=32, num_warps=4, num_stages=3)),
    DecodeRow(arch=LARGE, element_size=(1,), head_dim=256,
        config=DecodeConfig(block_n=32, num_warps=4, num_stages=4)),
    DecodeRow(arch=LARGE, element_size=(2,), head_dim=256, rotated=True,
        config=DecodeConfig(block_n=32, num_warps=4, num_stages=4)),
    DecodeRow(arch=LARGE + MEDIUM + SMALL, element_size=(1, 2), head_dim=256,
        config=DecodeConfig(block_n=16, num_warps=4, num_stages=3)),
    # True float32 products run on the FMA units: sized by registers.
    DecodeRow(arch=NVIDIA, element_size=(4,), head_dim=64,
        config=DecodeConfig(block_n=32, num_warps=4, num_stages=2)),
    DecodeRow(arch=NVIDIA, element_size=(4,), head_dim=128,
        config=DecodeConfig(block_n=16, num_warps=8, num_stages=2)),
    DecodeRow(arch=NVIDIA, element_size=(4,), head_dim=256,
        config=DecodeConfig(block_n=16, num_warps=8, num_stages=1)),
    DecodeRow(arch=AMD, element_size=(2,), head_dim=128,
        config=DecodeConfig(block_n=64, num_warps=4, num_stages=2)),
    DecodeRow(arch=AMD, element_size=(2,), head_dim=256,
        config=DecodeConfig(block_n=32, num_warps=4, num_stages=2)),
    DecodeRow(arch=AMD, element_size=(4,), head_dim=128,
        config=DecodeConfig(block_n=32, num_warps=4, num_stages=1)),
    DecodeRow(arch=AMD, element_size=(4,), head_dim=256,
        config=DecodeConfig(block_n=16, num_warps=4, num_stages=1)),
    # num_sms is 1 in the interpreter: enough programs that heads are shared, and that some have more than one.
    # More than one tile in few rows, so that small tests cross every border.
    DecodeRow(arch=INTERPRETER, element_size=(1, 2, 4), head_dim=256,
        config=DecodeConfig(block_n=16, num_warps=1, num_stages=1, programs_per_sm=5, combine_parts=2, rows_apart=16)),
)
# fmt: on


@functools.cache
def decode(
    arch: str,
    element_size: int,
    head_dim: int,
    rotated: bool,
    page_size: int | None = None,
    small: bool = False,
    chunk: bool = False,
) -> DecodeConfig:
    """The configuration of the generation step for these properties, as ``DecodeRow`` names them."""
    key = {"element_size": element_size, "rotated": rotated, "most_page": page_size, "small": small, "chunk": chunk}
    return find_row(DECODE, arch=arch, head_dim=head_dim, **key).config_on(arch)
