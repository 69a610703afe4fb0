"""The choice of a generation step's configuration. Launches nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fused_rope_attn.attention import planning
from fused_rope_attn.attention.configs import ForwardConfig, HopperForwardConfig, family
from fused_rope_attn.attention.planning import Plan, choose_backend
from fused_rope_attn.attention.problem import Problem
from fused_rope_attn.generation import configs
from fused_rope_attn.generation.problem import cache_of
from fused_rope_attn.runtime import device

# The configuration of ``configured`` in place of the table's.
override: configs.DecodeConfig | None = None


def reads_cache_once(len_q: int, group_size: int) -> bool:
    """Return whether a generation step reads its cache once, or there is a single token. More tokens fill the tiles of
    ``rope_attention``, which reads the keys once for each head instead."""
    return len_q == 1 or len_q * group_size <= configs.DECODE_ROWS


def choose_step_backend(problem: Problem) -> tuple[str, str]:
    """Choose the backend of a step as attention does, and check that the card's kernels can read its caches."""
    if problem.batch_invariant:
        if cache_of(problem).is_float8:
            raise NotImplementedError("batch_invariant=True does not serve float8_e4m3fn caches, but k_cache is one")
        if not problem.causal:
            raise NotImplementedError("causal must be True with batch_invariant=True, but is False")
    chosen, reason = choose_backend(problem)
    if chosen == "reference" or not cache_of(problem).is_float8:
        return chosen, reason
    arch = device.arch(problem.device)
    if arch in configs.FLOAT8:
        return chosen, reason
    why = f"float8_e4m3fn caches need one of {', '.join(configs.FLOAT8)}, but q is on {arch}"
    if problem.backend != "auto":
        raise NotImplementedError(why)
    return "reference", why


def attention_problem(problem: Problem) -> Problem:
    """Return a chunk as a call of attention to the keys in the cache after it."""
    len_k = problem.len_k + (problem.len_q if cache_of(problem).appends else 0)
    return problem._replace(cache=None, len_k=len_k, has_kv_lens=True)


def gathered_config(problem: Problem) -> HopperForwardConfig | ForwardConfig | None:
    """Return the configuration of attention to a contiguous copy of a step's keys; None if it does not run so.

    With ``batch_invariant`` every step does, because attention to the whole sequence is to give the same bits.
    Otherwise only large chunks of a prompt on sm_90 do. In a step that is not causal, queries past the end of the cache
    may see keys that exist.
    """
    if problem.batch_invariant:
        return planning.plan_for(attention_problem(problem)).forward
    if device.arch(problem.device) != "sm_90" or problem.dtype.itemsize != 2 or not problem.causal:
        return None
    rows = problem.batch * problem.heads_kv * problem.len_k
    tiles = problem.batch * problem.heads_q * -(-problem.len_q // configs.CHUNK_TILE)
    is_large = problem.len_q * problem.group_size >= configs.GATHERED_ROWS
    fits = 2 * rows * problem.head_dim * problem.dtype.itemsize <= configs.GATHERED_BYTES
    if not (is_large and fits and 4 * tiles >= 3 * device.num_sms(problem.device)):
        return None
    forward = planning.plan_for(attention_problem(problem)).forward
    return forward if isinstance(forward, HopperForwardConfig) else None


def ordered_config(problem: Problem) -> configs.OrderedConfig | None:
    """Return the configuration of a step in the order of the sm_90 forward; None if it does not run so.

    More query rows than one program takes would read the cache several times, and run on a copy of it. So do caches of
    raw keys, and pairs of columns that are an odd number of columns apart, because a copy takes four bytes at least.
    """
    gathered = gathered_config(problem) if problem.batch_invariant else None
    in_fours = problem.interleaved or (problem.rotary_dim // 2 | problem.head_dim // 2) % 2 == 0
    fits = cache_of(problem).is_rotated and in_fours and problem.len_q * problem.group_size <= configs.DECODE_ROWS
    if not isinstance(gathered, HopperForwardConfig) or not fits:
        return None
    return configs.OrderedConfig(block_n=gathered.block_n)


def step_config(problem: Problem, can_copy: bool = True) -> Any:
    """Return the configuration of a step that ``choose_step_backend`` has admitted to the kernels.

    It is an ``OrderedConfig``, one of attention, or a ``DecodeConfig``. can_copy: the caches' rows can be copied 16
    bytes at a time, which an ordered step needs.
    """
    if override is not None:
        return override
    found = (ordered_config(problem) if can_copy else None) or gathered_config(problem)
    if found is not None:
        return found
    cache, arch = cache_of(problem), family(device.arch(problem.device))
    size = 1 if cache.is_float8 and problem.dtype.itemsize == 2 else problem.dtype.itemsize
    is_small = problem.batch * problem.heads_kv * problem.len_k <= configs.SMALL_CACHE
    is_chunk = problem.len_q * problem.group_size >= configs.CHUNK_ROWS
    return configs.decode(arch, size, problem.head_dim, cache.is_rotated, cache.page_size, is_small, is_chunk)


def plan_step(problem: Problem) -> Plan:
    """Return the plan of a step."""
    chosen, reason = choose_step_backend(problem)
    if chosen == "reference":
        return Plan("reference", None, reason)
    config = step_config(problem)
    backend = "hopper" if isinstance(config, (configs.OrderedConfig, HopperForwardConfig)) else "triton"
    if isinstance(config, configs.OrderedConfig):
        why = "batch_invariant: cached keys in the order of the sm_90 forward"
    elif not isinstance(config, configs.DecodeConfig):
        what = "batch_invariant" if problem.batch_invariant else "a chunk of a prompt"
        kernels = "sm_90" if backend == "hopper" else "portable"
        why = f"{what}: {kernels} kernels on a contiguous copy of the cached keys"
    else:
        cache = cache_of(problem)
        keys = "cached keys are read as they are" if cache.is_rotated else "cached keys are rotated in the loop"
        pages = "" if cache.page_size is None else f", from pages of {cache.page_size} rows"
        why = f"portable kernels: there are no others for a generation step; {keys}{pages}"
    return Plan(backend, None, f"{reason}; {why}" if reason else why, config)


@contextlib.contextmanager
def configured(config: configs.DecodeConfig) -> Iterator[None]:
    """Generation steps within the context run ``config``, whatever the table says: for tuning and tests."""
    global override
    previous, override = override, config
    try:
        yield
    finally:
        override = previous
