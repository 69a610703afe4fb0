"""The torch.library operators of context parallelism and their autograd: opaque to compilers, one each way."""

from typing import Any, NamedTuple

import torch

from fused_rope_attn.attention.ops import backward_fake, needs_gradient, without_none
from fused_rope_attn.attention.problem import DESCRIBED, SCHEMA, Gradients, Problem, Tensors, flatten, rebuild
from fused_rope_attn.distributed import layout, methods
from fused_rope_attn.distributed.documents import plan_numbered
from fused_rope_attn.distributed.groups import agree, exchange, group_named, join_rows
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


def signature(cut: Cut, problem: Problem) -> dict[str, Any]:
    """Return the properties that must be equal on all ranks, by the names that messages use."""
    return {
        "q's dtype": problem.dtype,
        "the batch size": problem.batch,
        "the heads of q": problem.heads_q,
        "the heads of k": problem.heads_kv,
        "the local length of q": problem.len_q,
        "the local length of k": problem.len_k,
        "the head dim": problem.head_dim,
        "rotary_dim": problem.rotary_dim,
        **{name: getattr(problem, name) for name in DESCRIBED},
        "whether there are sinks": problem.has_sinks,
        "sharding": cut.sharding,
        "method": cut.method,
        "total_len": cut.total,
        "whether there is a plan": cut.plan != 0,
        "whether the tables are of the local rows": cut.tables_are_local,
        "the documents of plan": plan_numbered(cut.plan).summary if cut.plan else None,
    }


def _run(cut: Cut, problem: Problem, tensors: Tensors, *of_backward: torch.Tensor) -> Any:
    """Run the forward pass by the call's method, or with (do, o, lse) the backward pass."""
    group, method, masks = group_named(cut.group), cut.method, (problem.causal, problem.window)
    with device.guard(problem.device), torch.no_grad():
        if cut.plan:
            work = plan_numbered(cut.plan).work(*masks)
            if method == "auto":
                method = layout.choose_method(problem, method, work).method
        else:
            work = layout.work_of(group.size, cut.sharding, problem.len_q, cut.total, *masks)
        call = layout.ParallelCall(group, work, problem.len_q, cut.total, cut.tables_are_local)
        forward, backward = methods.gather_forward, methods.gather_backward
        if method == "all_to_all":
            forward, backward = methods.heads_forward, methods.heads_backward
        return (backward if of_backward else forward)(call, problem, tensors, *of_backward)


def _split(arguments: tuple) -> tuple[Cut, Problem, Tensors]:
    return Cut(*arguments[:6]), *rebuild(*arguments[6:])


def _forward_impl(*arguments):
    cut, problem, tensors = _split(arguments)
    # A compiled graph reaches the ranks' comparison only here.
    agree(group_named(cut.group), signature(cut, problem))
    return _run(cut, problem, tensors)


def _forward_fake(*arguments):
    q = arguments[6]
    return like_input(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


class _ContextParallel(SingleLevelFunction):
    """results: o and lse of the forward pass. plain: the call skips the dispatcher."""

    @staticmethod
    def forward(ctx, plain: bool, cut: Cut, problem: Problem, results: tuple, *tensors):
        ctx.plain, ctx.cut, ctx.problem = plain, cut, problem
        ctx.save_for_backward(*results, *tensors)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, do, dlse):
        o, lse, *saved = ctx.saved_tensors
        tensors = Tensors(*saved)._replace(dlse=dlse)
        needs = Tensors(*ctx.needs_input_grad[4:])
        if do is None:
            # The other ranks may have a gradient, and wait for this rank's part in theirs.
            do = torch.zeros_like(o)
        if ctx.plain and type(do) is torch.Tensor and not torch.is_grad_enabled() and not in_forward_mode():
            gradients = _run(ctx.cut, ctx.problem, tensors, do, o, lse)
        else:
            gradients = Gradients(*_backward(do, o, lse, *ctx.cut, *flatten(ctx.problem, tensors)))
        dq, dk, dv, dsinks, dq_norm, dk_norm = gradients[:6]
        of = Tensors(dq, dk, dv, None, None, sinks=dsinks, q_norm=dq_norm, k_norm=dk_norm)
        return None, None, None, None, *(gradient if needed else None for gradient, needed in zip(of, needs))


def _forward_autograd(keyset, *arguments):
    cut, problem, tensors = _split(arguments)
    results = _forward.below_autograd(keyset, *arguments)
    if needs_gradient(tensors):
        return apply_in_operator(_ContextParallel, False, cut, problem, results, *tensors)
    return results


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
    run=lambda do, o, lse, *arguments: without_none(_run(*_split(arguments), do, o, lse), do),
    fake=lambda do, o, lse, *arguments: backward_fake(do, o, lse, False, *arguments[6:]),
    function="rope_attention_cp",
    is_gradient=True,
)


def parallel_attention(cut: Cut, problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o, lse) of the local rows of a call on which all ranks have agreed."""
    if not is_plain(*tensors):
        return _forward(*cut, *flatten(problem, tensors))
    results = _run(cut, problem, tensors)
    if needs_gradient(tensors):
        return apply_in_operator(_ContextParallel, True, cut, problem, results, *tensors)
    return results


def _unshard_impl(x: torch.Tensor, dim: int, name: str, sharding: str, sums: bool) -> torch.Tensor:
    group = group_named(name)
    owners = layout.owners_of(group.size, sharding)
    if not sums:
        return join_rows(group, owners, x, dim)
    chunks = x.unflatten(dim, (len(owners), -1)).movedim(dim, 0)
    owned = (layout.chunks_of(rank, group.size, sharding) for rank in range(group.size))
    (parts,) = exchange(group, [torch.stack([chunks[c] for c in of_rank]) for of_rank in owned])
    total = sum(parts[1:], parts[0].to(torch.promote_types(x.dtype, torch.float32)))
    return torch.cat(list(total.to(x.dtype)), dim=dim)


def _unshard_fake(x: torch.Tensor, dim: int, name: str, sharding: str, sums: bool) -> torch.Tensor:
    size, shape = group_named(name).size, list(x.shape)
    shape[dim] = shape[dim] // size if sums else shape[dim] * size
    return x.new_empty(shape)


class _Unshard(SingleLevelFunction):
    """The gradient of the join is the sum, and that of the sum is the join."""

    @staticmethod
    def forward(ctx, results, x, *options):
        ctx.options = options
        return results[0]

    @staticmethod
    def backward(ctx, gradient):
        *options, sums = ctx.options
        return None, unshard(gradient, *options, not sums), None, None, None, None


# All ranks' rows of x along an axis, in order; with ``sums`` this rank's rows of the sum of all x.
unshard: Operator = Operator(
    "context_parallel_unshard(Tensor x, int dim, str group, str sharding, bool sums) -> Tensor",
    run=_unshard_impl,
    fake=_unshard_fake,
    function="cp_unshard",
    autograd=lambda keyset, *given: apply_in_operator(_Unshard, [unshard.below_autograd(keyset, *given)], *given),
)
