"""The torch.library operators of context parallelism and their autograd: one operator each way, opaque to compilers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fused_rope_attn.attention.ops import backward_fake, needs_gradient, without_none
from fused_rope_attn.attention.problem import DESCRIBED, SCHEMA, Gradients, Problem, Tensors, flatten, rebuild
from fused_rope_attn.distributed import gather, heads
from fused_rope_attn.distributed.documents import plan_of
from fused_rope_attn.distributed.groups import agree, group_named
from fused_rope_attn.distributed.layout import Call, shares
from fused_rope_attn.distributed.planning import choose
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.differentiation import SingleLevelFunction, apply_in_operator, in_forward_mode
from fused_rope_attn.runtime.layouts import like_input
from fused_rope_attn.runtime.registration import Operator, is_plain

_SCHEMA = f"str group, str sharding, str method, SymInt total, SymInt plan, bool tables_are_local, {SCHEMA}"


class Cut(NamedTuple):
    """The operators' first arguments: how the sequence is cut over the ranks of the group of this name.

    sharding, method: as validated; "auto" of a traced call with a plan is decided when the graph runs. total: rows of
    the sequence that exist. plan: number of a ``DocumentPlan``, or 0. tables_are_local: cos and sin have this rank's
    rows.
    """

    group: str
    sharding: str
    method: str
    total: int
    plan: int
    tables_are_local: bool


# The fields of ``Problem`` that must be equal on all ranks, by the names that messages use.
_COMPARED = {
    "q's dtype": "dtype",
    "the batch size": "batch",
    "the heads of q": "heads_q",
    "the heads of k": "heads_kv",
    "the local length of q": "len_q",
    "the local length of k": "len_k",
    "the head dim": "head_dim",
    "rotary_dim": "rotary_dim",
    **{name: name for name in DESCRIBED},
    "whether there are sinks": "has_sinks",
}


def signature(cut: Cut, problem: Problem) -> dict[str, Any]:
    """Return the properties that must be equal on all ranks, by the names that messages use."""
    found = {name: getattr(problem, field) for name, field in _COMPARED.items()}
    found |= {"sharding": cut.sharding, "method": cut.method, "total_len": cut.total}
    found |= {
        "whether there is a plan": cut.plan != 0,
        "whether the tables are of the local rows": cut.tables_are_local,
    }
    return found | {"the documents of plan": plan_of(cut.plan).summary if cut.plan else None}


def _call(cut: Cut, problem: Problem) -> Call:
    group, method, on_device = group_named(cut.group), cut.method, None
    if cut.plan:
        plan = plan_of(cut.plan)
        every = plan.shares(problem.causal, problem.window)
        on_device = plan.cu_seqlens_of(every.shares[group.rank], problem.causal, problem.window)
        if method == "auto":
            method = choose(problem, method, group, every).method
    else:
        every = shares(group.size, cut.sharding, problem.len_q, cut.total, problem.causal, problem.window)
    chunk = problem.len_q // len(every.owned_by(0))
    return Call(group, method, chunk, every, cut.tables_are_local, on_device)


def _run_forward(cut: Cut, problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    with device.guard(problem.device):
        call = _call(cut, problem)
        if call.method == "all_to_all":
            return heads.forward(call, problem, tensors, cut.total)
        return gather.forward(call, problem, tensors)


def _run_backward(cut: Cut, problem: Problem, tensors: Tensors, do, o, lse) -> Gradients:
    with device.guard(problem.device):
        call = _call(cut, problem)
        if call.method == "all_to_all":
            return heads.backward(call, problem, tensors, cut.total, do, o, lse)
        return gather.backward(call, problem, tensors, do, o, lse)


def _split(arguments: tuple) -> tuple[Cut, Problem, Tensors]:
    return Cut(*arguments[:6]), *rebuild(*arguments[6:])


def _forward_impl(*arguments):
    cut, problem, tensors = _split(arguments)
    # A compiled graph reaches the ranks' comparison only here.
    agree(group_named(cut.group), signature(cut, problem))
    return _run_forward(cut, problem, tensors)


def _backward_impl(do, o, lse, *arguments):
    return without_none(_run_backward(*_split(arguments), do, o, lse), do)


def _forward_fake(*arguments):
    q = arguments[6]
    return like_input(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


class _ContextParallel(SingleLevelFunction):
    """``keyset`` is the dispatcher's, or None for a call that skips it."""

    @staticmethod
    def forward(ctx, keyset, cut: Cut, problem: Problem, *arguments):
        tensors = Tensors(*arguments)
        if keyset is None:
            o, lse = _run_forward(cut, problem, tensors)
        else:
            o, lse = _forward.below_function(keyset, *cut, *flatten(problem, tensors))
        ctx.plain, ctx.cut, ctx.problem = keyset is None, cut, problem
        ctx.save_for_backward(o, lse, *tensors)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        o, lse, *saved = ctx.saved_tensors
        tensors = Tensors(*saved)._replace(dlse=dlse)
        needs = Tensors(*ctx.needs_input_grad[3:])
        if do is None:
            # The other ranks may have a gradient, and wait for this rank's part in theirs.
            do = torch.zeros_like(o)
        if ctx.plain and type(do) is torch.Tensor and not torch.is_grad_enabled() and not in_forward_mode():
            gradients = _run_backward(ctx.cut, ctx.problem, tensors, do, o, lse)
        else:
            gradients = Gradients(*_backward(do, o, lse, *ctx.cut, *flatten(ctx.problem, tensors)))
        dq, dk, dv, dsinks, dq_norm, dk_norm = gradients[:6]
        of = Tensors(dq, dk, dv, None, None, sinks=dsinks, q_norm=dq_norm, k_norm=dk_norm)
        return None, None, None, *(gradient if needed else None for gradient, needed in zip(of, needs))


def _forward_autograd(keyset, *arguments):
    cut, problem, tensors = _split(arguments)
    if needs_gradient(tensors):
        return apply_in_operator(_ContextParallel, keyset, cut, problem, *tensors)
    return _forward.below_autograd(keyset, *arguments)


_forward = Operator(
    f"context_parallel_forward({_SCHEMA}) -> (Tensor, Tensor)",
    run=_forward_impl,
    fake=_forward_fake,
    function="rope_attention_cp",
    autograd=_forward_autograd,
)
_GRADIENTS = ", ".join(["Tensor"] * len(Gradients._fields))
# The last results are the gradients of sinks and of the norms' weights, empty if the call has none.
_backward = Operator(
    f"context_parallel_backward(Tensor do, Tensor o, Tensor lse, {_SCHEMA}) -> ({_GRADIENTS})",
    run=_backward_impl,
    fake=lambda do, o, lse, *arguments: backward_fake(do, o, lse, *arguments[6:]),
    function="rope_attention_cp",
    is_gradient=True,
)


def attention(cut: Cut, problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o, lse) of the local rows of a call on which all ranks have agreed."""
    if not is_plain(*tensors):
        return _forward(*cut, *flatten(problem, tensors))
    if needs_gradient(tensors):
        return apply_in_operator(_ContextParallel, None, cut, problem, *tensors)
    return _run_forward(cut, problem, tensors)
