"""The torch.library operators of context parallelism and their autograd: one operator each way, opaque to compilers."""

from __future__ import annotations

from typing import Any

import torch

from fused_rope_attn.attention.ops import needs_gradient
from fused_rope_attn.attention.problem import DESCRIBED, SCHEMA, Gradients, Problem, Tensors, flatten, rebuild
from fused_rope_attn.distributed import gather, heads
from fused_rope_attn.distributed.call import Call
from fused_rope_attn.distributed.cuts import chunks_of
from fused_rope_attn.distributed.documents import plan_of
from fused_rope_attn.distributed.groups import Group, agree, group_named
from fused_rope_attn.distributed.layout import shares
from fused_rope_attn.distributed.planning import choose
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.differentiation import apply_in_operator, in_forward_mode
from fused_rope_attn.runtime.layouts import like_input
from fused_rope_attn.runtime.registration import Operator, is_plain

# group, sharding, method: as validated; "auto" of a traced call with a plan is decided here. total: rows of the
# sequence that exist. plan: number of a ``DocumentPlan``, or 0. tables_are_local: cos and sin have this rank's rows.
_SCHEMA = f"str group, str sharding, str method, SymInt total, SymInt plan, bool tables_are_local, {SCHEMA}"


def signature(how: tuple, problem: Problem) -> dict[str, Any]:
    """What must be equal on all ranks, by the names that messages use."""
    _, sharding, method, total, plan, tables_are_local = how
    return {
        "q's dtype": problem.dtype, "the batch size": problem.batch, "the heads of q": problem.heads_q,
        "the heads of k": problem.heads_kv, "the local length of q": problem.len_q,
        "the local length of k": problem.len_k, "the head dim": problem.head_dim, "rotary_dim": problem.rotary_dim,
        **{name: getattr(problem, name) for name in DESCRIBED}, "whether there are sinks": problem.has_sinks,
        "sharding": sharding, "method": method, "total_len": total,
        "whether there is a plan": plan != 0, "the documents of plan": plan_of(plan).summary if plan else None,
        "whether the tables are of the local rows": tables_are_local,
    }  # fmt: skip


def _call(how: tuple, problem: Problem) -> Call:
    name, sharding, method, total, number, tables_are_local = how
    group = group_named(name)
    if not number:
        chunk = problem.len_q // len(chunks_of(0, group.size, sharding))
        every = shares(group.size, sharding, problem.len_q, total, problem.causal, problem.window)
        return Call(group, method, chunk, every, tables_are_local)
    plan = plan_of(number)
    chunk = problem.len_q // len(chunks_of(0, group.size, plan.sharding))
    every = plan.shares(problem.causal, problem.window)
    on_device = plan.cu_seqlens_of(every.shares[group.rank], problem.causal, problem.window)
    if method == "auto":
        method = choose(problem, method, group, every).method
    return Call(group, method, chunk, every, tables_are_local, on_device)


def _run_forward(how: tuple, problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    with device.guard(problem.device):
        call = _call(how, problem)
        if call.method == "all_to_all":
            return heads.forward(call, problem, tensors, how[3])
        return gather.forward(call, problem, tensors)


def _run_backward(how: tuple, problem: Problem, tensors: Tensors, do, o, lse) -> Gradients:
    with device.guard(problem.device):
        call = _call(how, problem)
        if call.method == "all_to_all":
            return heads.backward(call, problem, tensors, how[3], do, o, lse)
        return gather.backward(call, problem, tensors, do, o, lse)


def _split(arguments: tuple) -> tuple[tuple, Problem, Tensors]:
    return arguments[:6], *rebuild(*arguments[6:])


def _forward_impl(*arguments):
    how, problem, tensors = _split(arguments)
    # Of a compiled graph nobody has asked it before.
    agree(group_named(how[0]), signature(how, problem))
    return _run_forward(how, problem, tensors)


def _backward_impl(do, o, lse, *arguments):
    gradients = _run_backward(*_split(arguments), do, o, lse)
    return tuple(do.new_empty(0) if x is None else x for x in gradients)


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _forward_fake(*arguments):
    q = arguments[6]
    return like_input(q), q.new_empty(q.shape[:3], dtype=_lse_dtype(q))


def _backward_fake(do, o, lse, *arguments):
    _, _, tensors = _split(arguments)
    weights = (tensors.sinks, tensors.q_norm, tensors.k_norm)
    of_weights = [do.new_empty(0) if x is None else torch.empty_like(x) for x in weights]
    return like_input(tensors.q), like_input(tensors.k), like_input(tensors.v), *of_weights


class _ContextParallel(torch.autograd.Function):
    """``keyset`` is the dispatcher's, or None for a call that skips it."""

    @staticmethod
    def forward(ctx, keyset, how: tuple, problem: Problem, *arguments):
        tensors = Tensors(*arguments)
        if keyset is None:
            o, lse = _run_forward(how, problem, tensors)
        else:
            o, lse = _forward.below_function(keyset, *how, *flatten(problem, tensors))
        ctx.plain, ctx.how, ctx.problem = keyset is None, how, problem
        ctx.save_for_backward(o, lse, *tensors)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        o, lse, *saved = ctx.saved_tensors
        tensors = Tensors(*saved)
        needs = Tensors(*ctx.needs_input_grad[3:])
        if do is None:
            # The other ranks may have a gradient, and wait for this rank's part in theirs.
            do = torch.zeros_like(o)
        if ctx.plain and type(do) is torch.Tensor and not torch.is_grad_enabled() and not in_forward_mode():
            gradients = _run_backward(ctx.how, ctx.problem, tensors, do, o, lse)
        else:
            gradients = Gradients(*_backward(do, o, lse, *ctx.how, *flatten(ctx.problem, tensors)))
        dq, dk, dv, dsinks, dq_norm, dk_norm = gradients
        of = Tensors(dq, dk, dv, None, None, sinks=dsinks, q_norm=dq_norm, k_norm=dk_norm)
        return None, None, None, *(gradient if needed else None for gradient, needed in zip(of, needs))


def _forward_autograd(keyset, *arguments):
    how, problem, tensors = _split(arguments)
    if needs_gradient(tensors):
        return apply_in_operator(_ContextParallel, keyset, how, problem, *tensors)
    return _forward.below_autograd(keyset, *arguments)


_forward = Operator(
    f"context_parallel_forward({_SCHEMA}) -> (Tensor, Tensor)",
    run=_forward_impl,
    fake=_forward_fake,
    function="rope_attention_cp",
    autograd=_forward_autograd,
)
_GRADIENTS = ", ".join(["Tensor"] * len(Gradients._fields))
# The last results are the gradients of sinks and of the norms' weights, empty where there are none.
_backward = Operator(
    f"context_parallel_backward(Tensor do, Tensor o, Tensor lse, {_SCHEMA}) -> ({_GRADIENTS})",
    run=_backward_impl,
    fake=_backward_fake,
    function="rope_attention_cp",
    is_gradient=True,
)


def attention(
    group: Group, sharding: str, method: str, total: int, plan: int, tables_are_local: bool, problem: Problem,
    tensors: Tensors,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(o, lse) of the local rows of a call on which all ranks have agreed."""
    how = (group.name, sharding, method, total, plan, tables_are_local)
    if not is_plain(*tensors):
        return _forward(*how, *flatten(problem, tensors))
    if needs_gradient(tensors):
        return apply_in_operator(_ContextParallel, None, how, problem, *tensors)
    return _run_forward(how, problem, tensors)
