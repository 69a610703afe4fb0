# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="attr-defined, arg-type"
"""Launchers of Co-RoPE's kernels, and their tiles.

Tiles are chosen by the compiler's figures (sm_90, triton 3.6, 2026-11-21): the largest ones that hardly spill, of equal
size in both passes, which then find the same angles to the last bit. Timed on an H200 (docs/experiments).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton

from fused_rope_attn.experimental.corope import kernels
from fused_rope_attn.kernels import softmax, tiles
from fused_rope_attn.runtime import device, layouts
from fused_rope_attn.runtime.launch import Launch, call_of


class CoRopeConfig(NamedTuple):
    """One kernel: query rows and keys of a tile (keys at most 128, so that a tile's distances fit into 31 bits), most
    heads of one group in a program, and warps."""

    block_m: int
    block_n: int
    heads: int
    num_warps: int = 8


def _config(element_size: int, group_size: int, of_backward: bool) -> CoRopeConfig:
    """Return the configuration of a kernel. A program holds all of a group's heads where it can, so that they are
    computed with the same angles once."""
    heads = triton.next_power_of_2(group_size)
    if element_size == 4:
        # Products in float32 are unrolled into registers, so that tiles are small. 64 bytes spill backward; triton 3.9
        # spills 520 with 4 heads.
        return CoRopeConfig(16, 16, min(heads, 2 if of_backward else 4))
    # Never one head: triton 3.6's product of three dimensions is wrong on sm_90 where the last has one column (dq).
    # 96 bytes spill forward with 16 heads, and 80 to 190 backward.
    return CoRopeConfig(16, 32 if group_size <= 8 else 16, max(2, min(heads, 16)))


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


def _prepare(key: tuple, tensors: tuple, config: CoRopeConfig | None):
    """Prepare a pass. key: softmax_scale, and the precision of products of float32. tensors: q, k, v and the tables,
    and then those that the kernel takes after its inputs: from o on forward, from do on backward."""
    softmax_scale, precision = key
    q, k, *_ = tensors
    (batch, heads_q, length, head_dim), heads_kv = q.shape, k.shape[1]
    group_size, of_backward = heads_q // heads_kv, len(tensors) > 8
    config = config or _config(q.dtype.itemsize, group_size, of_backward)
    kernel, own = kernels.corope_forward_kernel, {}
    if of_backward:
        # Three tf32 products are as exact as one in float32 if an operand has 16 bits, and need no FMA loop.
        exact = "ieee" if q.dtype is torch.float32 or torch.version.hip else "tf32x3"
        kernel, own = kernels.corope_backward_kernel, {"softmax_scale": softmax_scale, "DISTANCE_PRECISION": exact}
        own["HEAD_SLOTS"] = max(16, config.heads)
    # Offsets within a group, in addition to those within a tile.
    strides = [x.stride() for x in (*tensors[:3], *tensors[5:7]) if x.ndim == 4]
    is_wide = layouts.is_long(*strides) or any(s[1] * group_size + s[2] * length + s[3] * 256 >= 2**31 for s in strides)
    qk_scale, sizes = softmax_scale * softmax.LOG2E.value, (config.heads, config.block_m, config.block_n)
    row_format = tiles.RowFormat.host(head_dim, layouts.block_d(head_dim), is_wide)
    shape = kernels.Shape.host(qk_scale, *sizes, precision, row_format)
    num_groups, head_chunks = batch * heads_kv, triton.cdiv(group_size, config.heads)
    numbers = {"num_groups": num_groups, "head_chunks": head_chunks, "HKV": heads_kv, "GROUP_SIZE": group_size}
    programs = triton.cdiv(length, config.block_m) * num_groups * head_chunks
    options = {"num_warps": config.num_warps, "num_stages": 1}
    launch = Launch(kernel, programs, options, numbers, N=length, shape=shape, **own)

    def run(tensors: tuple) -> None:
        inputs = kernels.CoRopeInputs.host(*map(tiles.view, tensors[:3]), *tensors[3:5])
        given = zip(launch.tensor_names[1:], tensors[5:])
        others = {name: tiles.view(x) if name.endswith("_view") else x for name, x in given}
        launch(device.current_stream(tensors[0].device), others, inputs=inputs)

    return run


def _run(config: CoRopeConfig | None, base: float, softmax_scale: float, q, k, v, *others) -> None:
    """Run the kernel that takes ``others`` after its inputs."""
    if q.numel():
        tensors = (q, k, v, *frequency_tables(base, q.shape[3], q.device), *others)
        call_of(_prepare, (softmax_scale, device.dot_precision(q.dtype)), tensors, config)(tensors)


def corope_forward(q, k, v, *, base, softmax_scale, config=None):
    """Run the forward pass.

    q ``(B, HQ, N, D)``, k and v ``(B, HKV, N, D)``, any strides, D even from 32 to 128; ``config`` a ``CoRopeConfig``
    or None. Returns o (shape of q, its memory order), lse ``(B, HQ, N)`` float32 in base 2, and every row's whole
    mileage ``(B, HKV, N)`` int64, in units of 2**-23.
    """
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    results = layouts.like_input(q), lse, torch.empty(k.shape[:3], dtype=torch.int64, device=q.device)
    _run(config, base, softmax_scale, q, k, v, *results)
    return results


def corope_backward(do, q, k, v, o, lse, mileage, *, base, softmax_scale, config=None):
    """Return dq, dk and dv in the inputs' dtype and memory order, from ``corope_forward``'s inputs and results.

    Needs ``4 (HQ + 2 HKV) B N D`` bytes for float32 sums besides the results.
    """
    sums = tuple(torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v))
    _run(config, base, softmax_scale, q, k, v, do, o, lse, mileage, *sums)
    return tuple(layouts.like_input(x).copy_(total) for x, total in zip((q, k, v), sums))
