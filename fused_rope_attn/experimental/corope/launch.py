# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="attr-defined, arg-type"
"""Launchers of Co-RoPE's kernels, and the tables of their tiles: the first row that matches wins.

Tiles are chosen by the compiler's figures (sm_90, triton 3.6, 2026-11-21): the largest ones that hardly spill, of equal
size in both passes, which then find the same angles to the last bit. Timed on an H200 (docs/experiments).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from fused_rope_attn.experimental.corope import kernels
from fused_rope_attn.kernels import softmax, tiles
from fused_rope_attn.runtime import device, layouts
from fused_rope_attn.runtime.launch import Launch, call_of
from fused_rope_attn.runtime.rows import find_row


@dataclass(frozen=True)
class CoRopeConfig:
    """One kernel: query rows and keys of a tile (keys at most 128, so that a tile's distances fit into 31 bits), most
    heads of one group in a program, and warps."""

    block_m: int
    block_n: int
    heads: int
    num_warps: int


@dataclass(frozen=True, kw_only=True)
class CoRopeRow:
    """Hold one row: tiles of block_m by block_n for groups of up to most_group heads (None: of any size).

    heads: the fewest and the most heads of one program, which holds all of a group where it can, so that they are
    computed with the same angles once.
    """

    element_size: int
    block_m: int
    block_n: int
    heads: tuple[int, int]
    most_group: int | None = None


# fmt: off
FORWARD: tuple[CoRopeRow, ...] = (
    # Products in float32 are unrolled into registers, so that tiles are small. Nothing spills.
    CoRopeRow(element_size=4, block_m=16, block_n=16, heads=(1, 4)),
    # Never one head: triton 3.6's product of three dimensions is wrong on sm_90 where the last has one column (dq).
    # Nothing spills.
    CoRopeRow(element_size=2, block_m=16, block_n=32, heads=(2, 16), most_group=8),
    # 96 bytes spill with 16 heads.
    CoRopeRow(element_size=2, block_m=16, block_n=16, heads=(2, 16)),
)

BACKWARD: tuple[CoRopeRow, ...] = (
    # 64 bytes spill; triton 3.9 spills 520 with 4 heads.
    CoRopeRow(element_size=4, block_m=16, block_n=16, heads=(1, 2)),
    # The forward's tiles; 80 to 190 bytes spill.
    *FORWARD[1:],
)
# fmt: on


def _config(rows: tuple[CoRopeRow, ...], q: torch.Tensor, k: torch.Tensor) -> CoRopeConfig:
    """Return the configuration by one of the tables."""
    group_size = q.shape[1] // k.shape[1]
    row = find_row(rows, element_size=q.dtype.itemsize, most_group=group_size)
    heads = max(row.heads[0], min(row.heads[1], triton.next_power_of_2(group_size)))
    return CoRopeConfig(row.block_m, row.block_n, heads, num_warps=8)


@functools.lru_cache(maxsize=64)
def frequency_tables(base: float, head_dim: int, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (multiples, revolutions) for ``distance_phases``, computed in float64.

    multiples ``(D/2,)`` int32 is a step's angle modulo one revolution, in units of 2**-32. revolutions ``(D,)`` float32
    holds a step's angle ``(D/2,)``, and the rest of it that multiples lack ``(D/2,)``.
    """
    half = head_dim // 2
    steps = [base ** -(d / half) / (2 * math.pi) for d in range(half)]
    multiples = [round((step % 1.0) * 2**32) for step in steps]
    low = [step % 1.0 - multiple / 2**32 for step, multiple in zip(steps, multiples)]
    revolutions = torch.tensor([*steps, *low], dtype=torch.float64)
    wrapped = torch.tensor(multiples, dtype=torch.int64).to(torch.int32)
    return wrapped.to(where), revolutions.float().to(where)


def _prepare(kernel, key: tuple, tensors: tuple, config: CoRopeConfig, strides: list, **own: Any) -> Launch:
    """Return the launch of either pass. key: softmax_scale, and the precision of products of float32. strides: of all
    (B, H, N, D) tensors that it reads or writes by strides."""
    softmax_scale, precision = key
    (batch, heads_q, length, head_dim), heads_kv = tensors[0].shape, tensors[1].shape[1]
    group_size = heads_q // heads_kv
    # Offsets within a group, in addition to those within a tile.
    is_wide = layouts.is_long(*strides) or any(s[1] * group_size + s[2] * length + s[3] * 256 >= 2**31 for s in strides)
    qk_scale, sizes = softmax_scale * softmax.LOG2E.value, (config.heads, config.block_m, config.block_n)
    row_format = tiles.RowFormat.host(head_dim, layouts.block_d(head_dim), is_wide)
    shape = kernels.Shape.host(qk_scale, *sizes, precision, row_format)
    num_groups, head_chunks = batch * heads_kv, triton.cdiv(group_size, config.heads)
    numbers = {"num_groups": num_groups, "head_chunks": head_chunks, "HKV": heads_kv, "GROUP_SIZE": group_size}
    programs = triton.cdiv(length, config.block_m) * num_groups * head_chunks
    options = {"num_warps": config.num_warps, "num_stages": 1}
    return Launch(kernel, programs, options, numbers, N=length, shape=shape, **own)


def _inputs(*tensors) -> Any:
    return kernels.CoRopeInputs.host(*map(tiles.view, tensors[:3]), kernels.Frequencies.host(*tensors[3:5]))


def _prepare_forward(key: tuple, tensors: tuple, config: CoRopeConfig | None):
    config = config or _config(FORWARD, *tensors[:2])
    strides = [layouts.output_strides(tensors[0]), *(x.stride() for x in tensors[:3])]
    launch = _prepare(kernels.corope_forward_kernel, key, tensors, config, strides)

    def run(tensors: tuple) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, *_ = tensors
        o = layouts.like_input(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        mileage = torch.empty(k.shape[:3], dtype=torch.int64, device=q.device)
        if q.numel():
            results = {"o_view": tiles.view(o), "lse_ptr": lse, "mileage_ptr": mileage}
            launch(device.current_stream(q.device), results, inputs=_inputs(*tensors))
        return o, lse, mileage

    return run


def _prepare_backward(key: tuple, tensors: tuple, config: CoRopeConfig | None):
    config = config or _config(BACKWARD, *tensors[:2])
    # Three tf32 products are as exact as one in float32 if an operand has 16 bits, and need no FMA loop.
    exact = "ieee" if tensors[0].dtype is torch.float32 or torch.version.hip else "tf32x3"
    own = {"HEAD_SLOTS": max(16, config.heads), "DISTANCE_PRECISION": exact, "softmax_scale": key[0]}
    strides = [x.stride() for x in (*tensors[:3], *tensors[5:7])]
    launch = _prepare(kernels.corope_backward_kernel, key, tensors, config, strides, **own)

    def run(tensors: tuple) -> None:
        do, o, *others = tensors[5:]
        given = dict(zip("lse_ptr mileage_ptr dq_ptr dk_ptr dv_ptr".split(), others))
        views = {"do_view": tiles.view(do), "o_view": tiles.view(o)}
        launch(device.current_stream(do.device), given, inputs=_inputs(*tensors), **views)

    return run


def corope_forward(q, k, v, *, base, softmax_scale, config=None):
    """Run the forward pass.

    q ``(B, HQ, N, D)``, k and v ``(B, HKV, N, D)``, any strides, D even from 32 to 128; ``config`` a ``CoRopeConfig``
    or None. Returns o (shape of q, its memory order), lse ``(B, HQ, N)`` float32 in base 2, and every row's whole
    mileage ``(B, HKV, N)`` int64, in units of 2**-23.
    """
    tensors = (q, k, v, *frequency_tables(base, q.shape[3], q.device))
    return call_of(_prepare_forward, (softmax_scale, device.dot_precision(q.dtype)), tensors, config)(tensors)


def corope_backward(do, q, k, v, o, lse, mileage, *, base, softmax_scale, config=None):
    """Return dq, dk and dv in the inputs' dtype and memory order, from ``corope_forward``'s inputs and results.

    Needs ``4 (HQ + 2 HKV) B N D`` bytes for float32 sums besides the results.
    """
    sums = tuple(torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v))
    if q.numel():
        tensors = (q, k, v, *frequency_tables(base, q.shape[3], q.device), do, o, lse, mileage, *sums)
        call_of(_prepare_backward, (softmax_scale, device.dot_precision(q.dtype)), tensors, config)(tensors)
    return tuple(layouts.like_input(x).copy_(total) for x, total in zip((q, k, v), sums))
