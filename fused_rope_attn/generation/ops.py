"""The torch.library operator of the generation step, which writes the caches that it is given. It has no gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fused_rope_attn.attention.problem import Problem
from fused_rope_attn.generation import planning
from fused_rope_attn.generation.configs import DecodeConfig
from fused_rope_attn.generation.launch import GatheredCall, OrderedCall, StepCall, WriteCall, can_copy
from fused_rope_attn.generation.problem import (
    SCHEMA,
    WRITE_SCHEMA,
    StepTensors,
    Written,
    flatten,
    flatten_write,
    rebuild,
    rebuild_write,
)
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.calls import call_of
from fused_rope_attn.runtime.layouts import like_input
from fused_rope_attn.runtime.registration import Operator, is_plain


def _prepare(problem: Problem, tensors: tuple, override: DecodeConfig | None) -> Callable:
    ordered = None if override is not None else planning.ordered_config(problem)
    if ordered is not None and can_copy(StepTensors(*tensors)):
        return OrderedCall(problem, tensors, ordered)
    gathered = None if override is not None else planning.gathered_config(problem)
    if gathered is not None:
        return GatheredCall(problem, tensors, gathered)
    return StepCall(problem, tensors, override or planning.step_config(problem))


def _run(problem: Problem, tensors: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
    q, k_cache, v_cache, k = tensors.q, tensors.k_cache, tensors.v_cache, tensors.k
    if problem.batch * problem.len_q == 0:
        return _fake(q)
    # The kernels index these with unit stride; they nearly always have it.
    for name in ("cache_seqlens", "kv_starts", "sinks", "q_norm", "k_norm"):
        x = getattr(tensors, name)
        if x is not None and not x.is_contiguous():
            tensors = tensors._replace(**{name: x.contiguous()})
    with device.guard(problem.device):
        out = call_of(_prepare, problem.with_precision(), tensors, planning.override)(tensors)
    if k is not None and not k_cache.is_inference():
        # Autograd should know if it has saved a cache that is another one now.
        torch.autograd.graph.increment_version((k_cache, v_cache))
    return out


def _fake(q, *arguments):
    return like_input(q), q.new_empty(q.shape[:3], dtype=torch.float32)


_operator = Operator(
    f"attention_with_kvcache({SCHEMA}) -> (Tensor, Tensor)",
    run=lambda *arguments: _run(*rebuild(*arguments)),
    fake=_fake,
    function="rope_attention_with_kvcache",
)


def attention_with_kvcache(problem: Problem, tensors: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a step that planning has admitted. Ordinary eager calls skip the dispatcher."""
    if is_plain(*tensors):
        return _run(problem, tensors)
    return _operator(*flatten(problem, tensors))


def _write(problem: Problem, tensors: Written) -> None:
    if tensors.k.numel() == 0:
        return
    for name in ("cache_seqlens", "new_lens", "cu_seqlens"):  # as in ``_run``
        x = getattr(tensors, name)
        if x is not None and not x.is_contiguous():
            tensors = tensors._replace(**{name: x.contiguous()})
    with device.guard(problem.device):
        call_of(WriteCall, problem, tensors)(tensors)
    if not tensors.k_cache.is_inference():
        torch.autograd.graph.increment_version((tensors.k_cache, tensors.v_cache))


_write_operator = Operator(
    f"write_kvcache({WRITE_SCHEMA}) -> ()",
    run=lambda *arguments: _write(*rebuild_write(*arguments)),
    fake=lambda *arguments: None,
    function="write_kvcache",
)


def write_kvcache(problem: Problem, tensors: Written) -> None:
    """Write k and v into the caches, as ``choose_step_backend`` has admitted it."""
    if is_plain(*tensors):
        _write(problem, tensors)
    else:
        _write_operator(*flatten_write(problem, tensors))
