"""(shape, device, features) -> backend, strategy and configuration, with the reason. Decides; launches nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fused_rope_attn.attention import configs
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.layouts import has_descriptor

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 256, 8
HOPPER_DTYPES = (torch.float16, torch.bfloat16)
Obstacle = tuple[type[Exception], str]


@dataclass(frozen=True)
class Plan:
    """What a call would run. ``forward`` and ``backward`` are None for the reference backend.

    ``backend`` and ``strategy`` are those of the forward pass. The backward pass may differ in both: the type of its
    configuration says which kernels it takes, and ``reason`` why.
    """

    backend: str
    strategy: str | None
    reason: str
    forward: configs.ForwardConfig | configs.HopperForwardConfig | None = None
    backward: configs.BackwardConfig | configs.HopperBackwardConfig | None = None


# The generation step's lengths: served by its own portable kernel and the reference only.
PORTABLE_FEATURES = ("cache_seqlens",)


def mask_feature(window, softcap, sinks, kv_starts, kv_lens, cu_seqlens=None) -> str:
    """The argument, of perhaps several, that makes a call a masked one; "" where there is none.

    Packed sequences come first: they say how ``plan_for`` reads lengths.
    """
    for name, given in (
        ("cu_seqlens_q", cu_seqlens is not None),
        ("window", window is not None),
        ("softcap", softcap != 0.0),
        ("sinks", sinks is not None),
        ("kv_starts", kv_starts is not None),
        ("kv_lens", kv_lens is not None),
    ):
        if given:
            return name
    return ""


def visited_keys(length: int, causal: bool, window: tuple[int, int] | None) -> int:
    """How many of ``length`` keys a query sees at most, by one."""
    left, right = (-1, -1) if window is None else window
    right = 0 if causal else right
    return length if left < 0 or right < 0 else min(length, left + right + 1)


def kernel_obstacle(q) -> Obstacle | None:
    """Why the portable kernels cannot serve this call, as the error an explicit backend raises; None when they can."""
    if q.dtype not in KERNEL_DTYPES:
        return NotImplementedError, f"q must be float16, bfloat16 or float32 for the Triton kernels, but is {q.dtype}"
    head_dim = q.shape[3]
    if head_dim % HEAD_DIM_STEP or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return NotImplementedError, (
            f"q must have a head dim that is a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM} for "
            f"the Triton kernels, but has {head_dim}"
        )
    return _device_obstacle(q.device)


def _device_obstacle(where: torch.device) -> Obstacle | None:
    name = device.arch(where)
    if configs.family(name) is None:
        if where.type == "cuda":
            return RuntimeError, f"the Triton kernels need one of {', '.join(configs.ARCHS)}, but q is on {name}"
        return (
            RuntimeError,
            f"the Triton kernels need a GPU, or TRITON_INTERPRET=1 for CPU tensors, but q is on {where}",
        )
    return None


def hopper_obstacle(arch, dtype, head_dim, no_keys: bool, strategy: str, v_layout: str | None = None, feature=""):
    """Why the sm_90 kernels cannot serve a call, as ``kernel_obstacle`` says it; at least its forward pass.

    With ``_serves_backward`` the one statement of what they serve. v_layout: how v lies in memory, where the TMA cannot
    address it. feature: what ``mask_feature`` found.
    """
    if feature in PORTABLE_FEATURES:
        return NotImplementedError, f"{feature} is not served by backend='hopper' yet, but by the portable kernels"
    if dtype not in HOPPER_DTYPES:
        return NotImplementedError, f"q must be float16 or bfloat16 for backend='hopper', but is {dtype}"
    if head_dim % HEAD_DIM_STEP or not MIN_HEAD_DIM <= head_dim <= configs.HOPPER_WIDE_HEAD_DIM:
        return NotImplementedError, (
            f"q must have a head dim that is a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to "
            f"{configs.HOPPER_WIDE_HEAD_DIM} for backend='hopper', but has {head_dim}"
        )
    if strategy == "inline":
        return NotImplementedError, "strategy must be 'auto' or 'prepass' for backend='hopper', but is 'inline'"
    if no_keys:
        return NotImplementedError, "k must have at least one position for backend='hopper', but has 0"
    if arch != "sm_90":
        return RuntimeError, f"backend='hopper' needs an sm_90 GPU (H100, H200), but q is on {arch}"
    if v_layout is not None:
        return NotImplementedError, (
            "v must have adjacent columns and positive strides and an address that are multiples of 16 bytes for "
            f"backend='hopper', which reads it through the TMA, but has {v_layout}"
        )
    return None


def _serves_backward(head_dim: int, feature: str) -> bool:
    """Whether the sm_90 backward serves a call whose forward ``hopper_obstacle`` admits."""
    return head_dim <= configs.HOPPER_HEAD_DIM or feature != "cu_seqlens_q"


def _arch(where: torch.device) -> str:
    return device.arch(where)


# What torch.compiler.assume_constant_result does to a function; calling it would import torch._dynamo with us, seconds.
_device_obstacle._dynamo_marked_constant = True
_arch._dynamo_marked_constant = True


def choose_backend(q, k, backend, strategy, feature: str = "") -> tuple[str, str]:
    """Resolve ``backend`` to "reference", with the reason, or to what ``plan_for`` takes; raises where an explicit
    choice cannot run. ``feature`` as ``mask_feature`` gives it.

    Looks at nothing that a traced graph could not know, such as addresses: that is left to ``plan_for``.
    """
    if backend == "reference":
        if strategy != "auto":
            raise ValueError(f"strategy={strategy!r} selects among kernels, but backend='reference' has none")
        return "reference", "asked for"
    if backend == "hopper":
        obstacle = hopper_obstacle(_arch(q.device), q.dtype, q.shape[3], k.shape[2] == 0, strategy, None, feature)
    else:
        obstacle = kernel_obstacle(q)
    if obstacle is not None:
        if backend != "auto" or strategy != "auto":
            raise obstacle[0](obstacle[1])
        return "reference", obstacle[1]
    if backend == "auto" and q.device.type == "cpu":
        if strategy != "auto":
            return "triton", f"strategy={strategy!r} asks for kernels, which run in Triton's interpreter"
        return "reference", "CPU tensors take the reference; backend='triton' would run in Triton's interpreter"
    return backend, ""


def plan_for(
    q, k, v, causal: bool, strategy: str, backend: str, deterministic: bool, feature: str = "", max_seqlen: int = 0,
    window: tuple[int, int] | None = None, num_sequences: int = 0,
) -> Plan:  # fmt: skip
    """The kernels' plan for tensors that ``choose_backend`` has admitted; cached by properties, not by exact length.

    max_seqlen, num_sequences: the longest of packed sequences, and how many there are, empty ones included. window: as
    in the call, for how much work there is. Raises where an explicit ``backend="hopper"`` cannot address v.
    """
    length = k.shape[2]
    longest = max(q.shape[2], length)
    visited = length
    short_sequences = longest < configs.LEAST_MEAN_LENGTH * num_sequences
    if feature == "cu_seqlens_q":
        longest, visited = min(max_seqlen, longest), min(max_seqlen, length)
    visited = visited_keys(visited, causal, window)
    key = (
        device.arch(q.device),
        q.dtype,
        q.shape[3],
        strategy,
        backend,
        deterministic,
        causal,
        configs.bucket(longest),
        q.shape[1] != k.shape[1],
        length == 0,
        configs.work_class(q.numel() * visited),
        feature,
        short_sequences,
    )
    plan, tma = _plan(*key)
    if tma and not has_descriptor(v) and q.numel() > 0:
        if backend == "hopper":
            where = f"strides {tuple(v.stride())} of {v.element_size()} bytes and address 16 n + {v.data_ptr() % 16}"
            error, message = hopper_obstacle(*key[:3], length == 0, strategy, where)
            raise error(message)
        plan, _ = _plan(*key, "another layout")
    return plan


@functools.cache
def _plan(
    arch, dtype, head_dim, strategy, backend, deterministic, causal, length_bucket, gqa, no_keys, work, feature,
    short_sequences, v_layout=None,
) -> tuple[Plan, bool]:  # fmt: skip
    """(the plan, whether kernels of sm_90 are in it, which read v through the TMA).

    short_sequences: packed ones are shorter than ``configs.LEAST_MEAN_LENGTH``, on average.
    """
    shape = (causal, length_bucket, gqa)
    obstacle = hopper_obstacle(arch, dtype, head_dim, no_keys, strategy, v_layout, feature)
    if obstacle is None:
        packed = feature == "cu_seqlens_q"
        row, row_backward = (
            find(head_dim, *shape, packed) for find in (configs.hopper_forward, configs.hopper_backward)
        )
    elif backend == "hopper":
        raise obstacle[0](obstacle[1])
    # (whether the sm_90 kernels run the pass, why)
    if backend != "auto":
        forward = backward = (backend == "hopper", "asked for")
    elif obstacle is not None:
        forward = backward = (False, obstacle[1])
    elif work == 0:
        forward = backward = (False, "a launch-bound call, and they cost the host less than the sm_90 ones")
    elif short_sequences:
        mean = f"packed sequences of less than {configs.LEAST_MEAN_LENGTH} tokens on average"
        forward = backward = (False, f"{mean}, which leave the larger tiles of the sm_90 ones empty")
    else:
        forward, backward = (_prefer(r, length_bucket, work) for r in (row, row_backward))
    if backward[0] and not _serves_backward(head_dim, feature):
        beyond = f"head dims beyond {configs.HOPPER_HEAD_DIM}"
        backward = (False, f"the sm_90 ones have no backward pass for packed sequences of {beyond}")
    if deterministic and backward[0]:
        backward = (False, "deterministic=True, and the sm_90 kernels add dQ in any order")

    why, backward_strategy = "strategy asked for", strategy
    if strategy == "auto":
        # Backward has a pre-process anyway, so that rotating there costs no launch.
        strategy, backward_strategy = "prepass", "prepass"
        why = "K is rotated once instead of once per query block"
        if work == 0 and not forward[0]:
            strategy, why = "inline", "so little work that one launch less is worth rotating K in the loop"
    portable = (configs.family(arch), dtype.itemsize, head_dim)
    masked = feature != ""
    plan = Plan(
        "hopper" if forward[0] else "triton",
        strategy,
        f"{_which(forward, backward)}; {why}",
        row.config if forward[0] else configs.forward(*portable, strategy, *shape, masked),
        row_backward.config if backward[0] else configs.backward(*portable, backward_strategy, *shape, masked),
    )
    return plan, forward[0] or backward[0]


def _prefer(row: configs.HopperRow, length_bucket: str, work: int) -> tuple[bool, str]:
    """(whether ``"auto"`` takes the sm_90 kernels, why)."""
    if length_bucket in row.auto and row.much_work and work < 2:
        return False, f"too little work for the sm_90 ones ({row.note})"
    if length_bucket in row.auto:
        return True, f"they are made for this card ({row.note})"
    return False, f"for {length_bucket} sequences at this head dim they are preferred to the sm_90 ones ({row.note})"


def _which(forward: tuple[bool, str], backward: tuple[bool, str]) -> str:
    """The reason's first half: which kernels run each pass, and why."""

    def words(hopper, why):
        return f"{'sm_90' if hopper else 'portable'} kernels: {why}"

    if forward == backward:
        return words(*forward)
    return f"forward, {words(*forward)}; backward, {words(*backward)}"
