# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="attr-defined, arg-type"
"""Launchers of Co-RoPE's kernels."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton

from fused_rope_attn.experimental.corope import kernels
from fused_rope_attn.experimental.corope.configs import CoRopeConfig, backward_config, forward_config
from fused_rope_attn.experimental.corope.distances import Frequencies
from fused_rope_attn.kernels.arguments import LOG2E, dot_precision
from fused_rope_attn.kernels.tiles import RowFormat, TensorView
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.calls import call_of
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


def _programs_and_numbers(options: Options, config: CoRopeConfig, q, k) -> tuple[int, dict[str, Any]]:
    """Return (programs, arguments that each call has) of both kernels."""
    batch, heads_q, length, head_dim = q.shape
    heads_kv = k.shape[1]
    group_size = heads_q // heads_kv
    head_chunks = triton.cdiv(group_size, config.heads)
    num_groups = batch * heads_kv
    return triton.cdiv(length, config.block_m) * num_groups * head_chunks, {
        "num_groups": num_groups,
        "head_chunks": head_chunks,
        "HKV": heads_kv,
        "GROUP_SIZE": group_size,
        "N": length,
        "HEADS": config.heads,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "PRECISION": options.precision,
    }


def _view(x: torch.Tensor) -> Any:
    return TensorView.host(x, x.stride())


def _inputs(options: Options, tensors: tuple, *others: torch.Tensor) -> Any:
    """Return the ``CoRopeInputs`` of a call, which also reads or writes others (B, H, N, D)."""
    q, k, v, *tables = tensors
    strides = [x.stride() for x in (q, k, v, *others)]
    group_size, length, head_dim = q.shape[1] // k.shape[1], q.shape[2], q.shape[3]
    # Offsets within a group, in addition to those within a tile.
    is_wide = is_long(*strides) or any(s[1] * group_size + s[2] * length + s[3] * 256 >= 2**31 for s in strides)
    row_format = RowFormat.host(head_dim, block_d(head_dim), is_wide)
    qk_scale = options.softmax_scale * LOG2E
    return kernels.CoRopeInputs.host(_view(q), _view(k), _view(v), Frequencies.host(*tables), qk_scale, row_format)


def _prepare_forward(options: Options, tensors: tuple, config: CoRopeConfig):
    q, k, *_ = tensors
    shape, strides = q.shape, output_strides(q)
    programs, numbers = _programs_and_numbers(options, config, q, k)
    launch = Launch(kernels.forward_kernel, programs, config.launch_options, numbers)

    def run(tensors: tuple) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, *_ = tensors
        o = torch.empty_strided(shape, strides, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        mileage = torch.empty(k.shape[:3], dtype=torch.int64, device=q.device)
        if q.numel():
            inputs = _inputs(options, tensors, o)
            launch(device.current_stream(q.device), inputs=inputs, o_view=_view(o), lse_ptr=lse, mileage_ptr=mileage)
        return o, lse, mileage

    return run


def _prepare_backward(options: Options, tensors: tuple, config: CoRopeConfig):
    q, k, *_ = tensors
    programs, numbers = _programs_and_numbers(options, config, q, k)
    # Three tf32 products are as exact as one in float32 if an operand has 16 bits, and need no FMA loop.
    exact = "ieee" if q.dtype is torch.float32 or torch.version.hip else "tf32x3"
    own = {"HEAD_SLOTS": max(16, config.heads), "DISTANCE_PRECISION": exact, "softmax_scale": options.softmax_scale}
    launch = Launch(kernels.backward_kernel, programs, config.launch_options, numbers, **own)

    def run(tensors: tuple) -> None:
        do, o, *others = tensors[5:]
        given = dict(zip("lse_ptr mileage_ptr dq_ptr dk_ptr dv_ptr".split(), others))
        inputs = _inputs(options, tensors[:5], do, o)
        launch(device.current_stream(do.device), given, inputs=inputs, do_view=_view(do), o_view=_view(o))

    return run


def corope_forward(q, k, v, *, base, softmax_scale, config=None):
    """Run the forward pass.

    q ``(B, HQ, N, D)``, k and v ``(B, HKV, N, D)``, any strides, D even from 32 to 128; ``config`` a ``CoRopeConfig``
    or None. Returns o (shape of q, its memory order), lse ``(B, HQ, N)`` float32 in base 2, and every row's whole
    mileage ``(B, HKV, N)`` int64, in units of 2**-23.
    """
    config = config or forward_config(q.dtype, q.shape[1] // k.shape[1])
    options = Options(q.device, softmax_scale, dot_precision(q.dtype))
    tensors = (q, k, v, *frequency_tables(base, q.shape[3], q.device))
    return call_of(_prepare_forward, options, tensors, config)(tensors)


def corope_backward(do, q, k, v, o, lse, mileage, *, base, softmax_scale, config=None):
    """Return dq, dk and dv in the inputs' dtype and memory order, from ``corope_forward``'s inputs and results.

    Needs ``4 (HQ + 2 HKV) B N D`` bytes for float32 sums besides the results.
    """
    config = config or backward_config(q.dtype, q.shape[1] // k.shape[1])
    sums = tuple(torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v))
    if q.numel():
        options = Options(q.device, softmax_scale, dot_precision(q.dtype))
        tensors = (q, k, v, *frequency_tables(base, q.shape[3], q.device), do, o, lse, mileage, *sums)
        call_of(_prepare_backward, options, tensors, config)(tensors)
    results = [torch.empty_strided(x.shape, output_strides(x), dtype=x.dtype, device=x.device) for x in (q, k, v)]
    for result, total in zip(results, sums):
        result.copy_(total)
    return tuple(results)
