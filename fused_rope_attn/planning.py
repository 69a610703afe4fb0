"""(shape, device, features) -> backend, strategy and configuration, with the reason. Decides; launches nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fused_rope_attn import configs, device

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 256, 8


@dataclass(frozen=True)
class Plan:
    """What a call would run. ``forward`` and ``backward`` are None for the reference backend.

    ``strategy`` is that of the forward pass; ``backward.strategy`` may differ.
    """

    backend: str
    strategy: str | None
    reason: str
    forward: configs.ForwardConfig | None = None
    backward: configs.BackwardConfig | None = None


def kernel_obstacle(q, window, softcap, sinks, kv_starts, kv_lens) -> tuple[type[Exception], str] | None:
    """Why the Triton kernels cannot serve this call, as the error an explicit backend raises; None when they can."""
    for name, given in (
        ("window", window is not None),
        ("softcap", softcap != 0.0),
        ("sinks", sinks is not None),
        ("kv_starts", kv_starts is not None),
        ("kv_lens", kv_lens is not None),
    ):
        if given:
            return (
                NotImplementedError,
                f"{name} is served by backend='reference' only; the Triton kernels have no {name} yet",
            )
    if q.dtype not in KERNEL_DTYPES:
        return NotImplementedError, f"q must be float16, bfloat16 or float32 for the Triton kernels, but is {q.dtype}"
    head_dim = q.shape[3]
    if head_dim % HEAD_DIM_STEP or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return NotImplementedError, (
            f"q must have a head dim that is a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM} for "
            f"the Triton kernels, but has {head_dim}"
        )
    return _device_obstacle(q.device)


def _device_obstacle(where: torch.device) -> tuple[type[Exception], str] | None:
    name = device.arch(where)
    if configs.family(name) is None:
        if where.type == "cuda":
            return RuntimeError, f"the Triton kernels need one of {', '.join(configs.ARCHS)}, but q is on {name}"
        return (
            RuntimeError,
            f"the Triton kernels need a GPU, or TRITON_INTERPRET=1 for CPU tensors, but q is on {where}",
        )
    return None


# What torch.compiler.assume_constant_result does to a function; calling it would import torch._dynamo with us, seconds.
_device_obstacle._dynamo_marked_constant = True


def choose_backend(q, backend, strategy, window, softcap, sinks, kv_starts, kv_lens) -> tuple[str, str]:
    """Resolve ``backend`` to "reference" or "triton", with the reason; an explicit choice that cannot run raises."""
    if backend == "hopper":
        raise NotImplementedError(
            "backend='hopper' (sm_90 kernels) is not part of this version; use 'triton' or 'auto'"
        )
    if backend == "reference":
        if strategy != "auto":
            raise ValueError(f"strategy={strategy!r} selects among kernels, but backend='reference' has none")
        return "reference", "asked for"
    obstacle = kernel_obstacle(q, window, softcap, sinks, kv_starts, kv_lens)
    if obstacle is not None:
        if backend == "triton" or strategy != "auto":
            raise obstacle[0](obstacle[1])
        return "reference", obstacle[1]
    if backend == "triton":
        return "triton", "asked for"
    if q.device.type == "cpu":
        if strategy != "auto":
            return "triton", f"strategy={strategy!r} asks for kernels, which run in Triton's interpreter"
        return "reference", "CPU tensors take the reference; backend='triton' would run in Triton's interpreter"
    return "triton", "the portable kernels serve every architecture in the table"


def plan_for(q, k, causal: bool, strategy: str) -> Plan:
    """The kernels' plan for tensors that ``choose_backend`` has admitted; cached by properties, not by exact length."""
    length = k.shape[2]
    return _plan(
        device.arch(q.device),
        q.element_size(),
        q.shape[3],
        strategy,
        causal,
        configs.bucket(max(q.shape[2], length)),
        q.shape[1] != k.shape[1],
        q.numel() * length <= configs.LAUNCH_BOUND_WORK,
    )


@functools.cache
def _plan(arch, element_size, head_dim, strategy, causal, length_bucket, gqa, launch_bound) -> Plan:
    family = configs.family(arch)
    backward_strategy, reason = strategy, "strategy asked for"
    if strategy == "auto":
        # Backward has a pre-process anyway, so that rotating there costs no launch.
        strategy, backward_strategy = "prepass", "prepass"
        reason = "K is rotated once instead of once per query block"
        if launch_bound:
            strategy, reason = "inline", "so little work that one launch less is worth rotating K in the loop"
    shape = (causal, length_bucket, gqa)
    return Plan(
        "triton",
        strategy,
        reason,
        configs.forward(family, element_size, head_dim, strategy, *shape),
        configs.backward(family, element_size, head_dim, backward_strategy, *shape),
    )
