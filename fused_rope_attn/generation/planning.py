"""Which configuration a generation step runs. Decides; launches nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fused_rope_attn.attention.configs import family
from fused_rope_attn.attention.planning import Plan
from fused_rope_attn.attention.problem import Problem
from fused_rope_attn.generation import configs
from fused_rope_attn.generation.problem import cache_of
from fused_rope_attn.runtime import device

# What ``configured`` says instead of the table.
override: configs.DecodeConfig | None = None


def reads_cache_once(len_q: int, group_size: int) -> bool:
    """Whether a generation step reads its cache once, or there is a single token. More tokens fill the tiles of
    ``rope_attention``, whose programs go through the keys once for each head instead."""
    return len_q == 1 or len_q * group_size <= configs.DECODE_ROWS


def step_config(problem: Problem) -> configs.DecodeConfig:
    """The configuration of a step that ``attention.planning.choose_backend`` has admitted to the kernels."""
    if override is not None:
        return override
    arch = family(device.arch(problem.device))
    return configs.decode(arch, problem.dtype.itemsize, problem.head_dim, cache_of(problem).is_rotated)


def plan_for(problem: Problem, reason: str) -> Plan:
    """The plan of such a step; ``reason`` is why the kernels were chosen."""
    keys = "cached keys are read as they are" if cache_of(problem).is_rotated else "cached keys are rotated in the loop"
    why = f"portable kernels: there are no others for a generation step; {keys}"
    return Plan("triton", None, f"{reason}; {why}" if reason else why, step_config(problem))


@contextlib.contextmanager
def configured(config: configs.DecodeConfig) -> Iterator[None]:
    """Generation steps within the context run ``config``, whatever the table says: for tuning and tests."""
    global override
    previous, override = override, config
    try:
        yield
    finally:
        override = previous
