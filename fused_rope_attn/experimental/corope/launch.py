# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launchers of Co-RoPE's kernels."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton

from fused_rope_attn.experimental.corope.configs import CoRopeConfig, backward_config, forward_config
from fused_rope_attn.experimental.corope.kernels import backward_kernel, forward_kernel
from fused_rope_attn.kernels.arguments import LOG2E, dot_precision
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.calls import Calls
from fused_rope_attn.runtime.launch import Launch
from fused_rope_attn.runtime.layouts import block_d, is_long, output_strides


class Options(NamedTuple):
    """The key of a prepared launch, in addition to its tensors' signatures and its configuration."""

    device: torch.device
    softmax_scale: float
    precision: str  # of products of float32


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


def _shared_arguments(
    options: Options, tensors: dict[str, torch.Tensor], config: CoRopeConfig
) -> tuple[int, dict[str, Any]]:
    """(programs, arguments by name) of both kernels, for tensors (B, H, N, D) by name."""
    q, k = tensors["q"], tensors["k"]
    batch, heads_q, length, head_dim = q.shape
    heads_kv = k.shape[1]
    group_size = heads_q // heads_kv
    head_chunks = triton.cdiv(group_size, config.heads)
    num_groups = batch * heads_kv
    strides = {f"{name}_strides": x.stride() for name, x in tensors.items()}
    # Offsets within a group, in addition to those within a tile.
    long = is_long(*strides.values()) or any(
        s[1] * group_size + s[2] * length + s[3] * 256 >= 2**31 for s in strides.values()
    )
    return triton.cdiv(length, config.block_m) * num_groups * head_chunks, {
        **strides,
        "qk_scale": options.softmax_scale * LOG2E,
        "softmax_scale": options.softmax_scale,
        "num_groups": num_groups,
        "head_chunks": head_chunks,
        "HKV": heads_kv,
        "GROUP_SIZE": group_size,
        "N": length,
        "D": head_dim,
        "HEADS": config.heads,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": block_d(head_dim),
        "PRECISION": options.precision,
        "USE_INT64_OFFSETS": long,
    }


_INPUTS = "q_ptr k_ptr v_ptr multiples_ptr revolutions_ptr".split()


def _prepare_forward(options: Options, tensors: tuple, config: CoRopeConfig):
    q, k, v, *_ = tensors
    shape, strides = q.shape, output_strides(q)
    o = torch.empty_strided(shape, strides, dtype=q.dtype, device="meta")
    programs, shared = _shared_arguments(options, {"q": q, "k": k, "v": v, "o": o}, config)
    launch = Launch(forward_kernel, programs, config.launch_options, shared)

    def run(tensors: tuple) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, *_ = tensors
        o = torch.empty_strided(shape, strides, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        mileage = torch.empty(k.shape[:3], dtype=torch.int64, device=q.device)
        if q.numel():
            inputs = dict(zip(_INPUTS, tensors))
            launch(device.current_stream(q.device), **inputs, o_ptr=o, lse_ptr=lse, mileage_ptr=mileage)
        return o, lse, mileage

    return run


def _prepare_backward(options: Options, tensors: tuple, config: CoRopeConfig):
    q, k, v, _, _, do, o, *_ = tensors
    programs, shared = _shared_arguments(options, {"q": q, "k": k, "v": v, "do": do, "o": o}, config)
    # Three tf32 products are as exact as one in float32 if an operand has 16 bits, and need no FMA loop.
    exact = "ieee" if q.dtype is torch.float32 or torch.version.hip else "tf32x3"
    own = {"HEAD_SLOTS": max(16, config.heads), "DISTANCE_PRECISION": exact}
    launch = Launch(backward_kernel, programs, config.launch_options, shared, **own)
    pointers = [*_INPUTS, *"do_ptr o_ptr lse_ptr mileage_ptr dq_ptr dk_ptr dv_ptr".split()]

    def run(tensors: tuple) -> None:
        launch(device.current_stream(tensors[0].device), **dict(zip(pointers, tensors)))

    return run


_forward_calls = Calls(_prepare_forward)
_backward_calls = Calls(_prepare_backward)


def corope_forward(q, k, v, *, base, softmax_scale, config=None):
    """Run the forward pass.

    q ``(B, HQ, N, D)``, k and v ``(B, HKV, N, D)``, any strides, D even from 32 to 128; ``config`` a ``CoRopeConfig``
    or None. Returns o (shape of q, its memory order), lse ``(B, HQ, N)`` float32 in base 2, and every row's whole
    mileage ``(B, HKV, N)`` int64, in units of 2**-23.
    """
    config = config or forward_config(q.dtype, q.shape[1] // k.shape[1])
    options = Options(q.device, softmax_scale, dot_precision(q.dtype))
    tensors = (q, k, v, *frequency_tables(base, q.shape[3], q.device))
    return _forward_calls(options, tensors, config)(tensors)


def corope_backward(do, q, k, v, o, lse, mileage, *, base, softmax_scale, config=None):
    """Return dq, dk and dv in the inputs' dtype and memory order, from ``corope_forward``'s inputs and results.

    Needs ``4 (HQ + 2 HKV) B N D`` bytes for float32 sums besides the results.
    """
    config = config or backward_config(q.dtype, q.shape[1] // k.shape[1])
    sums = tuple(torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v))
    if q.numel():
        options = Options(q.device, softmax_scale, dot_precision(q.dtype))
        tensors = (q, k, v, *frequency_tables(base, q.shape[3], q.device), do, o, lse, mileage, *sums)
        _backward_calls(options, tensors, config)(tensors)
    results = [torch.empty_strided(x.shape, output_strides(x), dtype=x.dtype, device=x.device) for x in (q, k, v)]
    for result, total in zip(results, sums):
        result.copy_(total)
    return tuple(results)
