"""One segment's attention on this rank alone, forward and backward, by kernels or by the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from fused_rope_attn.attention import planning, reference
from fused_rope_attn.attention.planning import Plan
from fused_rope_attn.attention.problem import Gradients, Problem, Saved, Tensors, arguments_by_name
from fused_rope_attn.runtime.device import has_triton
from fused_rope_attn.runtime.keywords import parameters_of

if has_triton():  # elsewhere planning sends every call to the reference
    from fused_rope_attn.attention import ops

_OF_ATTENTION = parameters_of(reference.attention)


def plan_of(problem: Problem) -> Plan | None:
    """Return the kernels of one GPU's call of the whole sequence, ``problem``, because o and lse are to have the same
    bits; None for the reference."""
    chosen, _ = planning.choose_backend(problem)
    return None if chosen == "reference" else planning.plan_for(problem._replace(backend=chosen))


def forward(plan: Plan | None, problem: Problem, tensors: Tensors, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of one segment. out: the buffer for o; by default it is allocated."""
    if plan is not None:
        outputs = ops.forward_by(plan, problem, tensors, out)
        return outputs.o, outputs.lse
    o, lse = _reference(problem, tensors)
    return (o if out is None else out.copy_(o)), lse


def backward(
    plan: Plan | None, problem: Problem, do: Tensor, saved: Saved, outs: tuple = (None, None, None)
) -> Gradients:
    """Return the gradients of one segment in q's dtype; if ``problem`` sums keys, dk and dv in float32 (float64 for
    float64). outs: buffers for dq, dk and dv; None: allocated."""
    if plan is not None:
        return ops.backward_by(plan, problem, do, saved, outs)
    tensors = saved.tensors
    with _recording():
        wide = torch.promote_types(problem.dtype, torch.float32)
        q, k, v = (x.detach().to(wide).requires_grad_() for x in (tensors.q, tensors.k, tensors.v))
        weights = {
            name: getattr(tensors, name).detach().requires_grad_()
            for name in ("sinks", "q_norm", "k_norm")
            if getattr(tensors, name) is not None
        }
        again, given = list(_reference(problem, tensors._replace(q=q, k=k, v=v, **weights))), [do, tensors.dlse]
        if tensors.dlse is None:
            del again[1], given[1]
        leaves = [q, k, v, *weights.values()]
        dq, dk, dv, *others = torch.autograd.grad(again, leaves, [x.to(wide) for x in given], materialize_grads=True)
    key_dtype = wide if problem.sums_keys else problem.dtype
    dtypes = problem.dtype, key_dtype, key_dtype
    found = [x.to(dtype) if out is None else out.copy_(x) for x, dtype, out in zip((dq, dk, dv), dtypes, outs)]
    return Gradients(*found, **{f"d{name}": x for name, x in zip(weights, others)})


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Let autograd record inside, also in an operator's implementation, which the dispatcher calls below autograd."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _reference(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    o, lse = reference.attention(**arguments_by_name(_OF_ATTENTION, problem, tensors))
    return o, lse
