"""Plans: the backend, strategy and configuration of a ``Problem``, with the reason. Launches nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

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
FixedOrder = tuple[bool, str]


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


class Needs(NamedTuple):
    """The properties of a call that decide its kernels.

    Those up to positive_scale decide whether a backend can serve it, and do not depend on lengths that vary within a
    traced graph. cached: it is a generation step. no_keys: K has no rows. nope_dim and value_dim: as in ``Problem``,
    None except in multi-head latent attention, where head_dim is that of q_rope. positive_scale: that softmax_scale is
    above 0, read there alone.

    The others choose among kernels. fixed_order: as ``_fixed_order`` returns it. length: a bucket. work: a level, see
    ``configs.work_level``. short_sequences: packed ones are shorter than ``hopper_configs.LEAST_MEAN_LENGTH``, on
    average. few_queries: fewer than ``LEAST_QUERIES`` there. fills_results: a launch must fill a result in any case.
    """

    arch: str
    dtype: torch.dtype
    head_dim: int
    strategy: str = "auto"
    packed: bool = False
    cached: bool = False
    no_keys: bool = False
    batch_invariant: bool = False
    nope_dim: int | None = None
    value_dim: int | None = None
    positive_scale: bool = True
    backend: str = "auto"
    fixed_order: FixedOrder | None = None
    causal: bool = False
    length: str = "long"
    gqa: bool = False
    work: int = 0
    masked: bool = False
    short_sequences: bool = False
    few_queries: bool = False
    fills_results: bool = False


def obstacle(backend: str, needs: Needs) -> Obstacle | None:
    """Return the error that explains why the ``backend`` "triton" or "hopper" cannot run a call; None if it can.

    No other function states the limits of a backend.
    """
    if not device.has_triton():
        return RuntimeError, f"backend={backend!r} needs the package triton, which is not installed here"
    name, dtypes = "the Triton kernels", KERNEL_DTYPES
    if backend == "hopper":
        name, dtypes = ("backend='hopper'", HOPPER_DTYPES)
        if needs.cached and not needs.batch_invariant:
            return NotImplementedError, (
                "cache_seqlens is not served by backend='hopper' yet, but by the portable kernels"
            )
    if needs.batch_invariant and needs.strategy == "inline":
        return NotImplementedError, "strategy must be 'auto' or 'prepass' with batch_invariant=True, but is 'inline'"
    if needs.dtype not in dtypes:
        listed = " or ".join(", ".join(str(x).removeprefix("torch.") for x in dtypes).rsplit(", ", 1))
        return NotImplementedError, f"q must be {listed} for {name}, but is {needs.dtype}"
    if needs.nope_dim is not None:
        found = _latent_obstacle(backend, needs)
        if found is not None:
            return found
    elif needs.head_dim % HEAD_DIM_STEP or not MIN_HEAD_DIM <= needs.head_dim <= MAX_HEAD_DIM:
        return NotImplementedError, (
            f"q must have a head dim that is a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM} for "
            f"{name}, but has {needs.head_dim}"
        )
    if backend == "triton":
        return _portable_machine_obstacle(needs.arch)
    if needs.strategy == "inline":
        return NotImplementedError, "strategy must be 'auto' or 'prepass' for backend='hopper', but is 'inline'"
    if needs.no_keys:
        return NotImplementedError, "k must have at least one position for backend='hopper', but has 0"
    if needs.arch != "sm_90":
        return RuntimeError, f"backend='hopper' needs an sm_90 GPU (H100, H200), but q is on {needs.arch}"
    return None


def _latent_obstacle(backend: str, needs: Needs) -> Obstacle | None:
    dims = (("q_rope", needs.head_dim, MAX_ROPE_DIM), ("q_nope", needs.nope_dim, MAX_LATENT_DIM))
    for name, columns, most in (*dims, ("v", needs.value_dim, MAX_LATENT_DIM)) if backend == "triton" else ():
        if columns is not None and (columns % LATENT_DIM_STEP or not LATENT_DIM_STEP <= columns <= most):
            return NotImplementedError, (
                f"{name} must have a number of columns that is a multiple of {LATENT_DIM_STEP} from {LATENT_DIM_STEP} "
                f"to {most} for the Triton kernels, but has {columns}"
            )
    widths = (needs.nope_dim, needs.head_dim, needs.value_dim)
    if backend == "hopper" and widths != HOPPER_LATENT_DIMS:
        served, found = (", ".join(map(str, x)) for x in (HOPPER_LATENT_DIMS, widths))
        return NotImplementedError, (
            f"q_nope, q_rope and v must have {served} columns for backend='hopper', but have {found}; the portable "
            "kernels serve other widths"
        )
    if backend == "hopper" and not needs.positive_scale:
        return NotImplementedError, (
            "softmax_scale must be positive for backend='hopper' in multi-head latent attention; the portable "
            "kernels serve others"
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


def _needs(problem: Problem, arch: str, no_keys: bool) -> Needs:
    """Return the ``Needs`` of a call on ``arch`` that decide whether a backend can serve it."""
    return Needs(
        arch,
        problem.dtype,
        problem.head_dim,
        problem.strategy,
        problem.is_packed,
        problem.cache is not None,
        no_keys,
        problem.batch_invariant,
        problem.nope_dim,
        None if problem.nope_dim is None else problem.value_dim,
        problem.nope_dim is None or problem.softmax_scale > 0,
        problem.backend,
    )


def choose_backend(problem: Problem) -> tuple[str, str]:
    """Return ("reference", the reason), or (the backend for ``plan_for``, a reason that may be "").

    Read only properties that are constants of a traced graph. Raise if an explicit backend cannot run.
    """
    choose = _choose.__wrapped__ if torch.compiler.is_compiling() else _choose
    no_keys = problem.backend == "hopper" and problem.len_k == 0
    return choose(_needs(problem, _arch(problem.device), no_keys), problem.device.type == "cpu")


@functools.cache
def _choose(needs: Needs, on_cpu: bool) -> tuple[str, str]:
    backend, strategy = needs.backend, needs.strategy
    if backend == "reference":
        if strategy != "auto":
            raise ValueError(f"strategy={strategy!r} selects among kernels, but backend='reference' has none")
        if needs.batch_invariant:
            raise ValueError("batch_invariant=True needs kernels: the bits of backend='reference' depend on the batch")
        return "reference", "asked for"
    kernels = "hopper" if backend == "hopper" else "triton"
    found = obstacle(kernels, needs)
    if found is not None:
        if backend != "auto" or strategy != "auto" or (needs.batch_invariant and not on_cpu):
            raise found[0](found[1])
        return "reference", found[1]
    if backend == "auto" and on_cpu:
        if strategy != "auto":
            return "triton", f"strategy={strategy!r} asks for kernels, which run in Triton's interpreter"
        return "reference", "CPU tensors take the reference; backend='triton' would run in Triton's interpreter"
    return backend, ""


def plan_for(problem: Problem) -> Plan:
    """Return the kernels' plan for a problem that ``choose_backend`` has admitted.

    Plans are cached by properties of the call, not by exact lengths. The longest packed sequence is rounded as for
    launches, so that calls with the same launches have the same plan.
    """
    problem = problem.for_launch()
    length, most = problem.len_k, max(problem.len_q, problem.len_k)
    packed = problem.sequences is not None
    visited = visited_keys(problem.longest(length), problem.causal, problem.window)
    # Kernels multiply padded columns too; the sm_90 kernels skip some of them at head dims 72 to 96.
    queries = problem.batch * problem.heads_q * problem.len_q * block_d(problem.score_dim)
    needs = _needs(problem, device.arch(problem.device), length == 0)
    return _plan(
        needs._replace(
            fixed_order=_fixed_order(problem),
            causal=problem.causal,
            length=configs.bucket(problem.longest(most)),
            gqa=problem.heads_q != problem.heads_kv,
            work=configs.work_level(queries * visited),
            masked=problem.has_masks,
            short_sequences=packed and most < hopper_configs.LEAST_MEAN_LENGTH * (problem.sequences or 0),
            few_queries=not packed and problem.len_q < hopper_configs.LEAST_QUERIES,
            fills_results=problem.fills_results,
        )
    )


def plan_call(problem: Problem) -> Plan:
    """Return the plan of a call, that of the reference included."""
    chosen, reason = choose_backend(problem)
    if chosen == "reference":
        return Plan("reference", None, reason)
    kernels = plan_for(problem._replace(backend=chosen))
    return replace(kernels, reason=f"{reason}; {kernels.reason}") if reason else kernels


def _fixed_order(problem: Problem) -> FixedOrder | None:
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


@functools.cache
def _plan(needs: Needs) -> Plan:
    """Return the plan of calls with these properties."""
    work = needs.work
    # With ``batch_invariant`` the same tiles for all lengths, because the order of sums over keys is that of tiles. The
    # configurations of the sm_90 forward differ in ways that change no bit.
    portable_shape: tuple[bool | str, ...] = ("long", True) if needs.batch_invariant else (needs.length, needs.masked)
    # The one head of keys that latent attention rotates is too little work to rotate it again for each query block.
    latent = needs.nope_dim is not None
    strategy = "prepass" if latent else needs.strategy
    hopper_obstacle = obstacle("hopper", needs)
    if hopper_obstacle is None and latent:
        row = hopper_configs.LATENT_PACKED_FORWARD if needs.packed else hopper_configs.LATENT_FORWARD
        row_backward = hopper_configs.LATENT_BACKWARD
    elif hopper_obstacle is None:
        row, row_backward = (
            find(needs.head_dim, needs.causal, needs.length, needs.gqa, needs.packed, work)
            for find in (hopper_configs.forward, hopper_configs.backward)
        )
    elif needs.backend == "hopper":
        raise hopper_obstacle[0](hopper_obstacle[1])
    # (whether the sm_90 kernels run the pass, why)
    if needs.backend != "auto":
        forward = backward = (needs.backend == "hopper", "asked for")
    elif hopper_obstacle is not None:
        forward = backward = (False, hopper_obstacle[1])
    elif needs.batch_invariant:
        reason = "with batch_invariant they depend on dtype, head dim and options only"
        forward = backward = (bool(row.least_work), reason)
    elif work < configs.TWO_LAUNCHES:
        forward = backward = (False, "a launch-bound call, and they cost the host less than the sm_90 ones")
    elif needs.short_sequences:
        mean = f"packed sequences of less than {hopper_configs.LEAST_MEAN_LENGTH} tokens on average"
        forward = backward = (False, f"{mean}, which leave the larger tiles of the sm_90 ones empty")
    else:
        forward, backward = (_prefer(r, needs.length, work) for r in (row, row_backward))
        if needs.few_queries and forward[0] and not latent:
            few = f"fewer than {hopper_configs.LEAST_QUERIES} queries"
            forward = (False, f"{few}, which leave most of a tile of the sm_90 ones empty")
    if backward[0] and needs.fixed_order is not None:
        backward = needs.fixed_order

    head_dim = needs.head_dim + (needs.nope_dim or 0)
    portable = (configs.family(needs.arch), needs.dtype.itemsize, head_dim)
    if latent:
        portable_shape = (needs.length, needs.masked, True)
    why, backward_strategy = "the shared key head is rotated once" if latent else "strategy asked for", strategy
    if strategy == "auto":
        # Backward has a pre-process anyway, so rotating there costs no launch.
        strategy, backward_strategy = "prepass", "prepass"
        why = "K is rotated once instead of once per query block"
        if work < configs.TWO_LAUNCHES and not (forward[0] or needs.batch_invariant or needs.fills_results):
            strategy, why = "inline", "so little work that one launch less is worth rotating K in the loop"
    # Both must rotate before their loops. Up to 128 columns the sm_90 forward rotates queries itself and stores them in
    # whole tiles, with padding between packed sequences, but the portable backward reads them without padding.
    rotates_before = (forward[0] or strategy == "prepass") and (backward[0] or backward_strategy == "prepass")
    stores_tiles = forward[0] and needs.head_dim <= hopper_configs.HEAD_DIM
    words = [f"{'sm_90' if is_hopper else 'portable'} kernels: {reason}" for is_hopper, reason in (forward, backward)]
    kernels = words[0] if forward == backward else f"forward, {words[0]}; backward, {words[1]}"
    return Plan(
        "hopper" if forward[0] else "triton",
        strategy,
        f"{kernels}; {why}",
        row.config if forward[0] else portable_configs.forward(*portable, strategy, *portable_shape),
        cast(configs.HopperBackwardConfig, row_backward.config)
        if backward[0]
        else portable_configs.backward(*portable, backward_strategy, *portable_shape),
        forward[0] and backward[0]
        if latent  # the portable kernels read latent queries as the caller gave them
        else rotates_before and not (needs.packed and stores_tiles and not backward[0]),
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
