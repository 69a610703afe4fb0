"""Plans: the backend, strategy and configuration of a ``Problem``, with the reason. Launches nothing."""

import functools
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from fused_rope_attn.attention import configs
from fused_rope_attn.attention.hopper import configs as hopper_configs
from fused_rope_attn.attention.portable import configs as portable_configs
from fused_rope_attn.attention.problem import Problem
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.layouts import block_d

KERNEL_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 256, 8
# In multi-head latent attention: the most columns of q_rope, the most of q_nope and of v, and what divides them.
MAX_ROPE_DIM, MAX_LATENT_DIM, LATENT_DIM_STEP = 64, 128, 16
# Columns of q_nope, q_rope and v that the sm_90 kernels serve, those of DeepSeek.
HOPPER_LATENT_DIMS = (128, 64, 128)
HOPPER_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
Obstacle = tuple[type[Exception], str]


@dataclass(frozen=True)
class Plan:
    """The kernels of a call. ``forward`` and ``backward`` are None for the reference backend.

    ``backend`` and ``strategy`` are those of the forward pass. The backward pass may differ in both: the type of its
    configuration tells its backend, and ``reason`` explains it. A generation step has a forward pass only.

    ``saves_rotated``: an eager forward pass saves rotated q and k for backward instead of the caller's. Backward then
    rotates nothing, and the memory of q and k can be freed as soon as the caller drops them. In latent
    attention only q_rope is saved rotated.
    """

    backend: str
    strategy: str | None
    reason: str
    forward: configs.ForwardConfig | configs.HopperForwardConfig | Any = None
    backward: configs.BackwardConfig | configs.HopperBackwardConfig | None = None
    saves_rotated: bool = False


def visited_keys(length: int, causal: bool, window: tuple[int, int] | None) -> int:
    """Return the most keys that one query sees of ``length``."""
    if window is None:
        return length
    left, right = window[0], 0 if causal else window[1]
    return length if left < 0 or right < 0 else min(length, left + right + 1)


def obstacle(backend: str, problem: Problem, arch: str) -> Obstacle | None:
    """Return the error that explains why the ``backend`` "triton" or "hopper" cannot run a call; None if it can.

    No other function states the limits of a backend. arch: of the call's device. Sizes that vary within a traced
    graph are not read, except len_k for "hopper".
    """
    if not device.has_triton():
        return RuntimeError, f"backend={backend!r} needs the package triton, which is not installed here"
    name, dtypes = "the Triton kernels", KERNEL_DTYPES
    if backend == "hopper":
        name, dtypes = ("backend='hopper'", HOPPER_DTYPES)
        if problem.cache is not None and not problem.batch_invariant:
            return NotImplementedError, (
                "cache_seqlens is not served by backend='hopper' yet, but by the portable kernels"
            )
    if problem.batch_invariant and problem.strategy == "inline":
        return NotImplementedError, "strategy must be 'auto' or 'prepass' with batch_invariant=True, but is 'inline'"
    if problem.dtype not in dtypes:
        listed = " or ".join(", ".join(str(x).removeprefix("torch.") for x in dtypes).rsplit(", ", 1))
        return NotImplementedError, f"q must be {listed} for {name}, but is {problem.dtype}"
    if problem.nope_dim is not None:
        found = _latent_obstacle(backend, problem)
        if found is not None:
            return found
    elif problem.head_dim % HEAD_DIM_STEP or not MIN_HEAD_DIM <= problem.head_dim <= MAX_HEAD_DIM:
        return NotImplementedError, (
            f"q must have a head dim that is a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM} for "
            f"{name}, but has {problem.head_dim}"
        )
    if backend == "triton":
        return _portable_machine_obstacle(arch)
    if problem.strategy == "inline":
        return NotImplementedError, "strategy must be 'auto' or 'prepass' for backend='hopper', but is 'inline'"
    if problem.len_k == 0:
        return NotImplementedError, "k must have at least one position for backend='hopper', but has 0"
    if arch != "sm_90":
        return RuntimeError, f"backend='hopper' needs an sm_90 GPU (H100, H200), but q is on {arch}"
    return None


def _latent_obstacle(backend: str, problem: Problem) -> Obstacle | None:
    widths = (problem.nope_dim or 0, problem.head_dim, problem.value_dim)
    if backend == "hopper":
        served, found = (", ".join(map(str, x)) for x in (HOPPER_LATENT_DIMS, widths))
        refusal = ""
        if widths != HOPPER_LATENT_DIMS:
            refusal = f"q_nope, q_rope and v must have {served} columns for backend='hopper', but have {found}"
        elif problem.softmax_scale <= 0:
            refusal = "softmax_scale must be positive for backend='hopper' in multi-head latent attention"
        return (NotImplementedError, f"{refusal}; the portable kernels serve others") if refusal else None
    for name, columns, most in zip(("q_nope", "q_rope", "v"), widths, (MAX_LATENT_DIM, MAX_ROPE_DIM, MAX_LATENT_DIM)):
        if columns % LATENT_DIM_STEP or not LATENT_DIM_STEP <= columns <= most:
            return NotImplementedError, (
                f"{name} must have a number of columns that is a multiple of {LATENT_DIM_STEP} from {LATENT_DIM_STEP} "
                f"to {most} for the Triton kernels, but has {columns}"
            )
    return None


def _portable_machine_obstacle(arch: str) -> Obstacle | None:
    if configs.family(arch) is not None:
        return None
    if arch.startswith(("sm_", "gfx")):
        return RuntimeError, f"the Triton kernels need one of {', '.join(configs.ARCHS)}, but q is on {arch}"
    return RuntimeError, f"the Triton kernels need a GPU, or TRITON_INTERPRET=1 for CPU tensors, but q is on {arch}"


def _arch(where: torch.device) -> str:
    return device.arch(where)


# Same as torch.compiler.assume_constant_result, which would import torch._dynamo, and that takes seconds.
_arch._dynamo_marked_constant = True  # type: ignore[attr-defined]
_portable_machine_obstacle._dynamo_marked_constant = True  # type: ignore[attr-defined]


def choose_backend(problem: Problem) -> tuple[str, str]:
    """Return ("reference", the reason), or (the backend for ``plan_for``, a reason that may be "").

    Read only properties that are constants of a traced graph. Raise if an explicit backend cannot run.
    """
    backend, strategy, on_cpu = problem.backend, problem.strategy, problem.device.type == "cpu"
    if backend == "reference":
        if strategy != "auto":
            raise ValueError(f"strategy={strategy!r} selects among kernels, but backend='reference' has none")
        if problem.batch_invariant:
            raise ValueError("batch_invariant=True needs kernels: the bits of backend='reference' depend on the batch")
        return "reference", "asked for"
    found = obstacle("hopper" if backend == "hopper" else "triton", problem, _arch(problem.device))
    if found is not None:
        if backend != "auto" or strategy != "auto" or (problem.batch_invariant and not on_cpu):
            raise found[0](found[1])
        return "reference", found[1]
    if backend == "auto" and on_cpu:
        if strategy != "auto":
            return "triton", f"strategy={strategy!r} asks for kernels, which run in Triton's interpreter"
        return "reference", "CPU tensors take the reference; backend='triton' would run in Triton's interpreter"
    return backend, ""


def plan_call(problem: Problem) -> Plan:
    """Return the plan of a call, that of the reference included."""
    chosen, reason = choose_backend(problem)
    if chosen == "reference":
        return Plan("reference", None, reason)
    kernels = plan_for(problem._replace(backend=chosen))
    return replace(kernels, reason=f"{reason}; {kernels.reason}") if reason else kernels


def plan_for(problem: Problem) -> Plan:
    """Return the kernels' plan for a problem that ``choose_backend`` has admitted.

    The longest packed sequence is rounded as for launches, so that calls with the same launches have the same plan.
    """
    return _plan(problem.for_launch(), device.arch(problem.device))


def _work(problem: Problem) -> int:
    """Return the level of work of a call, one of ``configs.WORK_LEVELS``."""
    # Kernels multiply padded columns too; the sm_90 kernels skip some of them at head dims 72 to 96.
    queries = problem.batch * problem.heads_q * problem.len_q * block_d(problem.score_dim)
    return configs.work_level(queries * visited_keys(problem.longest(problem.len_k), problem.causal, problem.window))


def _fixed_order(problem: Problem) -> tuple[bool, str] | None:
    """Return (whether the sm_90 backward can add dQ in a fixed order, why), or None if any order will do."""
    if not problem.is_deterministic or problem.nope_dim is not None:
        return None
    asked = (
        "deterministic=True, batch_invariant=True or torch.use_deterministic_algorithms asks for equal gradients "
        "in every run"
    )
    if problem.batch_invariant and problem.has_kv_starts:
        return False, f"{asked}, and the sm_90 kernels count blocks of keys from row 0, not from kv_starts"
    return True, f"{asked}, so dQ is added in the order of the key blocks"


@functools.lru_cache(maxsize=1024)  # context parallelism finds launches by their plan, in every call
def _plan(problem: Problem, arch: str) -> Plan:
    work, most = _work(problem), max(problem.len_q, problem.len_k)
    length, is_packed, backend = configs.bucket(problem.longest(most)), problem.is_packed, problem.backend
    # The one head of keys that latent attention rotates is too little work to rotate it again for each query block.
    latent = problem.nope_dim is not None
    strategy = "prepass" if latent else problem.strategy
    found = obstacle("hopper", problem, arch)
    if found is not None and backend == "hopper":
        raise found[0](found[1])
    if latent:
        row = hopper_configs.LATENT_PACKED_FORWARD if is_packed else hopper_configs.LATENT_FORWARD
        row_backward = hopper_configs.LATENT_BACKWARD
    elif found is None:
        row, row_backward = (
            find(problem.head_dim, problem.causal, length, problem.group_size > 1, is_packed, work)
            for find in (hopper_configs.forward_row, hopper_configs.backward_row)
        )
    # (whether the sm_90 kernels run the pass, why)
    if backend != "auto":
        forward = backward = (backend == "hopper", "asked for")
    elif found is not None:
        forward = backward = (False, found[1])
    elif problem.batch_invariant:
        reason = "with batch_invariant they depend on dtype, head dim and options only"
        forward = backward = (bool(row.least_work), reason)
    elif work < configs.TWO_LAUNCHES:
        forward = backward = (False, "a launch-bound call, and they cost the host less than the sm_90 ones")
    elif is_packed and most < hopper_configs.LEAST_MEAN_LENGTH * (problem.sequences or 0):
        mean = f"packed sequences of less than {hopper_configs.LEAST_MEAN_LENGTH} tokens on average"
        forward = backward = (False, f"{mean}, which leave the larger tiles of the sm_90 ones empty")
    else:
        forward, backward = (_prefer(r, length, work) for r in (row, row_backward))
        few_queries = not is_packed and problem.len_q < hopper_configs.LEAST_QUERIES
        if few_queries and forward[0] and not latent:
            few = f"fewer than {hopper_configs.LEAST_QUERIES} queries"
            forward = (False, f"{few}, which leave most of a tile of the sm_90 ones empty")
    if backward[0]:
        backward = _fixed_order(problem) or backward

    portable = (configs.family(arch), problem.dtype.itemsize, problem.score_dim)
    # With ``batch_invariant`` the same tiles for all lengths, because the order of sums over keys is that of tiles. The
    # configurations of the sm_90 forward differ in ways that change no bit.
    shape = ("long", True) if problem.batch_invariant else (length, problem.has_masks, latent)
    why = "the shared key head is rotated once" if latent else "strategy asked for"
    if problem.is_plain:
        strategy, why = "prepass" if strategy == "auto" else strategy, "q and k are read as they are given"
    elif strategy == "auto":
        strategy, why = "prepass", "K is rotated once instead of once per query block"
        if work < configs.TWO_LAUNCHES and not (forward[0] or problem.batch_invariant or problem.fills_results):
            strategy, why = "inline", "so little work that one launch less is worth rotating K in the loop"
    # Forward must rotate before its loop. Up to 128 columns the sm_90 forward rotates queries itself and stores them in
    # whole tiles, with padding between packed sequences, but the portable backward reads them without padding.
    rotates_before = (forward[0] or strategy == "prepass") and not problem.is_plain
    stores_tiles = forward[0] and problem.head_dim <= hopper_configs.HEAD_DIM
    words = [f"{'sm_90' if is_hopper else 'portable'} kernels: {reason}" for is_hopper, reason in (forward, backward)]
    kernels = words[0] if forward == backward else f"forward, {words[0]}; backward, {words[1]}"
    return Plan(
        "hopper" if forward[0] else "triton",
        strategy,
        f"{kernels}; {why}",
        row.config if forward[0] else portable_configs.forward_config(*portable, strategy, *shape),
        cast(configs.HopperBackwardConfig, row_backward.config)
        if backward[0]
        else portable_configs.backward_config(*portable, *shape),
        forward[0] and backward[0]
        if latent  # the portable kernels read latent queries as the caller gave them
        else rotates_before and not (is_packed and stores_tiles and not backward[0]),
    )


def _prefer(row: hopper_configs.Row, length: str, work: int) -> tuple[bool, str]:
    """Return (whether ``"auto"`` takes the sm_90 kernels, the reason)."""
    least_work = row.least_work.get(length)
    if least_work is None:
        return False, f"for {length} sequences at this head dim they are preferred to the sm_90 ones"
    if work < least_work:
        least = f"2**{least_work.bit_length() - 1} multiply-adds"
        return False, f"too little work for the sm_90 ones, which need {least}"
    return True, "they are made for this card"
