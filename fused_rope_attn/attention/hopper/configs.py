"""The configurations of the sm_90 kernels, and the calls for which ``backend="auto"`` takes these kernels.

Rows are chosen by head dimension, causal mask, length bucket, GQA and packing. All were timed on an H200; where an H100
has a part, the row's comment names both.
"""

from dataclasses import dataclass, field

from fused_rope_attn.attention.configs import (
    BEFORE_SCORES,
    BEFORE_WEIGHTS,
    BUCKETS,
    MIB,
    TWO_LAUNCHES,
    WORK_LEVELS,
    HopperBackwardConfig,
    HopperForwardConfig,
)
from fused_rope_attn.runtime.rows import find_row

# Largest head dimension of the kernels, and of the wide ones, which share files with them and little else.
HEAD_DIM = 128
WIDE_HEAD_DIM = 256
# From 72 up to this head dimension a tile's columns are multiplied in two parts (``hopper.columns``).
NARROW_HEAD_DIM = 96

# Packed sequences that are shorter than this, tokens over sequences (empty ones too), are left to the portable kernels.
# Half of a forward tile of the sm_90 ones is empty then where a portable one is full, and their backward adds up to 64
# rows a sequence to rotated Q and float32 dQ, so that more memory would go to padding than to tokens: 64 times as much
# for cu_seqlens that have an entry for every token, which is the bound of a caller who counts no sequences
# (``cu_seqlens_from_position_ids``). H200, 2026-11-22, heads 32/8, D 128: 4096 of 16 tokens take 5.43 + 9.14 ms there
# against 5.04 + 8.53, 2048 of 32 2.79 + 5.02 against 2.42 + 4.52, 2048 of 64 2.85 + 6.30 against 2.99 + 6.41.
LEAST_MEAN_LENGTH = 64
# With fewer queries against more keys the portable forward is faster. H200, 2026-11-26, heads 32/8, 4096 keys, D 128,
# 3.9.0: the sm_90 one takes 1.30 times as long with 16 queries, and .93 with 64. The backward is untimed.
LEAST_QUERIES = 64


@dataclass(frozen=True, kw_only=True)
class Row:
    """Hold one row: ``config`` for the calls that the other fields select.

    head_dim: the largest head dimension served. None matches anything. least_work: for each length bucket the
    multiply-adds, one of ``WORK_LEVELS``, from which on ``backend="auto"`` takes the row instead of the portable
    kernels; it never does in a bucket that is missing. ``backend="hopper"`` takes the row in all of ``bucket``.
    from_work: the first of ``WORK_LEVELS`` that the row serves, whatever the backend.

    Raises:
        ValueError: for a least_work or from_work that is not one of ``WORK_LEVELS``.
    """

    head_dim: int
    config: HopperForwardConfig | HopperBackwardConfig
    least_work: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0))
    causal: bool | None = None
    bucket: tuple[str, ...] | None = None
    gqa: bool | None = None
    packed: bool | None = None
    from_work: int = 0

    def __post_init__(self) -> None:
        for name, work in (*(("least_work", work) for work in self.least_work.values()), ("from_work", self.from_work)):
            if work not in WORK_LEVELS:
                raise ValueError(f"{name} must be one of {WORK_LEVELS}, but is {work}")


# section_bytes: of K and V (or of Q, dO and dQ), 32 MiB stay in the L2 of 50 MB. Several rows share these two:
_FORWARD = HopperForwardConfig(block_n=128, values=BEFORE_WEIGHTS, section_bytes=32 * MIB)
_SHORT = HopperBackwardConfig(section_bytes=32 * MIB, rotate_heads=2, post_rows=8, post_heads=2)
# fmt: off
FORWARD: tuple[Row, ...] = (
    # Never by itself, because tiles are 64 columns wide at any head dim. Untimed.
    Row(head_dim=32, least_work={}, config=HopperForwardConfig(block_n=128, section_bytes=32 * MIB)),
    # Three warpgroups overlap their exponentials from 8192 tokens on, and lose below. 3.6.0 and 3.9.0, 2026-11-22. With
    # few tiles some multiprocessors get one, others two: at (1, 4/4, 8192) the two warpgroups of the next rows take .66
    # of the time, without a mask .80; with 8 heads .93 to .96 and 1.05. 3.6.0 and 3.9.0, 2026-11-27.
    Row(head_dim=64, packed=False, bucket=("long",), from_work=2**36,
        config=HopperForwardConfig(block_n=128, stages=3, consumers=3, rotates_queries=False, attend_registers=160,
            values=BEFORE_WEIGHTS, section_bytes=32 * MIB, rotate_heads=4)),
    # Values before weights take 2 to 5 % less time. 3.6.0 and 3.9.0, 2026-11-23. With inputs in the L2 0 to 39 % faster
    # than the portable kernels from the least work on. H200 and H100, 3.6.0 and 3.9.0, 2026-11-26 and 27.
    Row(head_dim=64, causal=True, packed=False,
        least_work={"tiny": 2**29, "short": 2**29, "medium": 2**30, "long": 0}, config=_FORWARD),
    # Packed sequences: 0 to 17 % faster than the portable kernels from the least work on; below, these take .87 to 1.17
    # of the time. H200 and H100, 3.6.0 and 3.9.0, 2026-11-27.
    Row(head_dim=64, causal=True, least_work={"tiny": 2**32, "short": 2**33, "medium": 2**32, "long": 0},
        config=_FORWARD),
    # 0 to 34 % slower than the portable kernels at 2**29, 0 to 39 % faster from the least work on. H200 and H100, 3.6.0
    # and 3.9.0, 2026-11-26 and 27.
    Row(head_dim=64, packed=False,
        least_work={"tiny": 2**30, "short": 2**31, "medium": 2**30, "long": 0}, config=_FORWARD),
    # Packed sequences of up to 512 tokens are 4 to 24 % faster. H200 and H100, 2026-11-27.
    Row(head_dim=64, least_work={"tiny": 2**30, "short": 0, "medium": 0, "long": 0}, config=_FORWARD),
    # Without a causal mask three warpgroups take 6 to 11 % less time. 3.6.0 and 3.9.0, 2026-11-23. With 4 heads of 8192
    # tokens two take .77 to .79 of the time. 3.6.0 and 3.9.0, 2026-11-27.
    Row(head_dim=NARROW_HEAD_DIM, causal=False, packed=False, bucket=("long",), from_work=2**36,
        config=HopperForwardConfig(block_n=128, consumers=3, rotates_queries=False, attend_registers=160,
            values=BEFORE_SCORES, section_bytes=32 * MIB, rotate_heads=4)),
    # Values before weights take 2 to 5 % less time. 3.6.0 and 3.9.0, 2026-11-23. 4 % faster than the portable kernels
    # at the least work, 15 to 18 % at 2**31. H200 and H100, 3.6.0 and 3.9.0, 2026-11-27.
    Row(head_dim=NARROW_HEAD_DIM, packed=False, bucket=("medium", "long"), least_work={"medium": 2**30, "long": 0},
        config=_FORWARD),
    # Without a mask 8 MiB take 1 to 5 % less time than 32 up to 2048 tokens, and the same beyond. 3.9.0, 2026-11-29. Up
    # to 1024 tokens 6 to 27 % faster than the portable kernels from the least work on. H200 and H100, 2026-11-27.
    Row(head_dim=HEAD_DIM, causal=False, packed=False,
        least_work={"tiny": 2**30, "short": 2**30, "medium": 2**31, "long": 0},
        config=HopperForwardConfig(block_n=128, pin=True, section_bytes=8 * MIB)),
    # From 1025 to 4096 tokens they take 11 to 21 % less time than the portable kernels at 2**31, and the same at 2**30.
    # H200 and H100, 3.6.0 and 3.9.0, 2026-11-27.
    Row(head_dim=HEAD_DIM, packed=False, bucket=("medium", "long"), least_work={"medium": 2**31, "long": 0},
        config=HopperForwardConfig(block_n=128, pin=True, section_bytes=32 * MIB)),
    # Packed sequences are 3 to 9 % faster at the least work. H200 and H100, 2026-11-27.
    Row(head_dim=HEAD_DIM, bucket=("medium", "long"), least_work={"medium": 2**32, "long": 0},
        config=HopperForwardConfig(block_n=128, pin=True, section_bytes=32 * MIB)),
    # Values before weights take 1 % less time up to 1024 tokens, and more beyond. 3.6.0, 2026-11-21. 5 to 25 % faster
    # than the portable kernels from the least work on where key heads are not shared. H200 and H100, 2026-11-27.
    Row(head_dim=HEAD_DIM, gqa=False, packed=False, least_work={"tiny": TWO_LAUNCHES, "short": 2**29}, config=_FORWARD),
    # With shared key heads the portable kernels take .94 to 1.02 of the time up to 2**29, and .99 at 2**30. Both cards,
    # 2026-11-27. 6 to 13 % faster than the portable kernels at 2**31. H200 and H100, 3.9.0, 2026-11-26 and 27.
    Row(head_dim=HEAD_DIM, packed=False, least_work={"tiny": 2**31, "short": 2**30}, config=_FORWARD),
    # Many short sequences fill the card, one does not. 3.6.0, 2026-11-22. Up to 512 tokens 2 % slower to 27 % faster
    # at the least work, 7 to 33 % faster at 2**33. H200 and H100, 2026-11-27.
    Row(head_dim=HEAD_DIM, least_work={"tiny": 2**31, "short": 2**33}, config=_FORWARD),
    # 256 columns of O leave registers and shared memory for 64 keys. 3.6.0, 2026-11-22.
    # With 3.6.0 the portable kernels take .96 to 1.00 of its time up to 2**31 multiply-adds, from 1K tokens on. With
    # 3.9.0 they take 1.04 to 1.9 times as long at any work, because ptxas lets each of their products wait for the one
    # before. H200 and H100, 2026-11-26.
    Row(head_dim=WIDE_HEAD_DIM, least_work=dict.fromkeys(BUCKETS, TWO_LAUNCHES),
        config=HopperForwardConfig(block_n=64, rotates_queries=False, attend_registers=240, pin=True,
            section_bytes=64 * MIB)),
)

# Multi-head latent attention with 128 + 64 columns of keys and 128 of values. The forward takes 4 to 18 % more time
# with whole diagonals (3.6.0), and 0 to 4 % with a pre-pass of q_rope (3.9.0). Row statistics of one head a program
# take 8 % less time at 1K (3.9.0). 2026-11-26. From 2**28 multiply-adds on the portable forward takes 1.3 to 1.7 times
# as long, and the portable backward 3.4 to 5.8 times. H100, 3.9.0, 2026-11-27.
LATENT_FORWARD = Row(head_dim=192, least_work=dict.fromkeys(BUCKETS, TWO_LAUNCHES),
    config=HopperForwardConfig(block_n=128, attend_registers=200, rotate_registers=88, section_bytes=32 * MIB))
# With packed sequences the attending warps would spill 208 bytes next to warps that rotate. 3.9.0, 2026-11-26.
LATENT_PACKED_FORWARD = Row(head_dim=192, least_work=dict.fromkeys(BUCKETS, TWO_LAUNCHES),
    config=HopperForwardConfig(block_n=128, rotates_queries=False, attend_registers=240, section_bytes=32 * MIB,
        rotate_heads=4))
LATENT_BACKWARD = Row(head_dim=192, least_work=dict.fromkeys(BUCKETS, TWO_LAUNCHES),
    config=HopperBackwardConfig(do_stages=3, section_bytes=32 * MIB, rotate_heads=1))

# Up to 1024 tokens a post-process of more programs takes 1 to 10 % less time. 3.9.0, 2026-11-23.
BACKWARD: tuple[Row, ...] = (
    # Never by itself, because tiles are 64 columns wide at any head dim. Untimed.
    Row(head_dim=32, least_work={}, config=HopperBackwardConfig(section_bytes=32 * MIB)),
    # 3.6.0, 2026-11-21. 14 to 27 % faster than the portable kernels at the least work, 1 to 22 % slower below where key
    # heads are not shared. H100, 3.9.0, 2026-11-27.
    Row(head_dim=64, bucket=("tiny",), least_work={"tiny": 2**30},
        config=HopperBackwardConfig(section_bytes=32 * MIB, rotate_heads=2, post_rows=8)),
    # Three blocks of dO take 2 to 3 % less time at (4, 8/8, 1024, 64), and the same with more heads. H200 and H100,
    # 3.9.0, 2026-11-26.
    Row(head_dim=64, causal=False, bucket=("short",),
        config=HopperBackwardConfig(do_stages=3, section_bytes=32 * MIB, rotate_heads=2, post_rows=8, post_heads=2)),
    # 5 to 11 % slower than the portable kernels below the least work. H100, 3.9.0, 2026-11-27.
    Row(head_dim=64, causal=True, gqa=False, bucket=("short",), least_work={"short": 2**30}, config=_SHORT),
    Row(head_dim=64, bucket=("short",), config=_SHORT),
    # A post-process of more programs takes 2 % less time at (4, 8/8, 2048, 64), and the same beyond. H200 and H100,
    # 3.6.0 and 3.9.0, 2026-11-26.
    Row(head_dim=64, config=HopperBackwardConfig(section_bytes=32 * MIB, post_rows=8, post_heads=2)),
    Row(head_dim=NARROW_HEAD_DIM, causal=True, gqa=False, bucket=("tiny", "short"),
        config=HopperBackwardConfig(section_bytes=32 * MIB, post_rows=8)),
    # 16 MiB take 2 to 4 % less time on an H100, 0 to 4 % on an H200. 2026-11-26.
    Row(head_dim=HEAD_DIM, gqa=False, bucket=("tiny",),
        config=HopperBackwardConfig(section_bytes=16 * MIB, post_rows=8, post_heads=2)),
    # 16 MiB take 3 to 4 % less time on an H100, 1 % on an H200. 3.9.0, 2026-11-26. 8 to 11 % slower than the portable
    # kernels below the least work. H100, 3.9.0, 2026-11-27.
    Row(head_dim=HEAD_DIM, causal=False, gqa=False, bucket=("short",), least_work={"short": 2**30},
        config=HopperBackwardConfig(section_bytes=16 * MIB, post_rows=8)),
    # With a causal mask 16 MiB take 1 to 2 % less time on an H100, and 0 to 1 % more on an H200. 2026-11-26. Below the
    # least work 5 to 8 % slower than the portable kernels. H100, 3.9.0, 2026-11-27.
    Row(head_dim=HEAD_DIM, causal=True, gqa=False, bucket=("short",), least_work={"short": 2**30},
        config=HopperBackwardConfig(section_bytes=32 * MIB, post_rows=8)),
    Row(head_dim=HEAD_DIM, bucket=("tiny",),
        config=HopperBackwardConfig(section_bytes=32 * MIB, post_rows=8, post_heads=2)),
    Row(head_dim=HEAD_DIM, bucket=("tiny", "short"),
        config=HopperBackwardConfig(section_bytes=32 * MIB, post_rows=8)),
    # 3.6.0, 2026-11-21.
    Row(head_dim=NARROW_HEAD_DIM,
        config=HopperBackwardConfig(section_bytes=32 * MIB, post_rows=8, post_heads=8)),
    # With 32 MiB the last section leaves a tail. 3.6.0, 2026-11-21.
    Row(head_dim=HEAD_DIM, gqa=True, bucket=("medium",),
        config=HopperBackwardConfig(section_bytes=64 * MIB, post_rows=8, post_heads=8)),
    # 3.6.0, 2026-11-21.
    Row(head_dim=HEAD_DIM, config=HopperBackwardConfig(section_bytes=32 * MIB, post_rows=8, post_heads=8)),
    # Half the time of the portable kernels from 4K on. 3.6.0, 2026-11-22.
    Row(head_dim=WIDE_HEAD_DIM, config=HopperBackwardConfig(q_stages=2, section_bytes=32 * MIB)),
)
# fmt: on


def forward_row(
    head_dim: int, causal: bool, bucket: str, gqa: bool, packed: bool = False, work: int = WORK_LEVELS[-1]
) -> Row:
    """Return the row of the forward pass for these properties and one of ``WORK_LEVELS``."""
    return find_row(FORWARD, head_dim=head_dim, causal=causal, bucket=bucket, gqa=gqa, packed=packed, from_work=work)


def backward_row(
    head_dim: int, causal: bool, bucket: str, gqa: bool, packed: bool = False, work: int = WORK_LEVELS[-1]
) -> Row:
    """Return the row of the backward pass for these properties and one of ``WORK_LEVELS``."""
    return find_row(BACKWARD, head_dim=head_dim, causal=causal, bucket=bucket, gqa=gqa, packed=packed, from_work=work)
