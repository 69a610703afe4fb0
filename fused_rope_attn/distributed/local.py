"""The work of this rank alone: one segment's attention by kernels or by the reference, and two streams to run on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from fused_rope_attn.attention import ops, planning, reference
from fused_rope_attn.attention.planning import Plan
from fused_rope_attn.attention.problem import Gradients, Problem, Saved, Tensors
from fused_rope_attn.runtime import device

# About 20 us, in cycles of a GPU's clock.
PAUSE_CYCLES = 40_000


def plan_of(problem: Problem) -> Plan | None:
    """Return the kernels of one GPU's call of the whole sequence, ``problem``, because o and lse are to have the same
    bits; None for the reference."""
    chosen, _ = planning.choose_backend(problem)
    return None if chosen == "reference" else planning.plan_for(problem._replace(backend=chosen))


def segment_forward(
    plan: Plan | None, problem: Problem, tensors: Tensors, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of one segment. out: the buffer for o; by default it is allocated."""
    if plan is not None:
        outputs = ops.run_forward(problem, tensors, plan, out)
        return outputs.o, outputs.lse
    o, lse = reference.attention(problem, tensors)
    return (o if out is None else out.copy_(o)), lse


def segment_backward(
    plan: Plan | None, problem: Problem, do: Tensor, saved: Saved, outs: tuple = (None, None, None)
) -> Gradients:
    """Return the gradients of one segment in q's dtype; if ``problem`` sums keys, dk and dv in float32 (float64 for
    float64). outs: buffers for dq, dk and dv; None: allocated."""
    if plan is not None:
        return ops.run_backward(problem, do, saved, plan, outs)
    tensors = saved.tensors
    wide = torch.promote_types(problem.dtype, torch.float32)
    with _recording():
        leaves = {name: getattr(tensors, name).detach().to(wide).requires_grad_() for name in ("q", "k", "v")}
        for name in ("sinks", "q_norm", "k_norm"):
            if getattr(tensors, name) is not None:
                leaves[name] = getattr(tensors, name).detach().requires_grad_()
        o, lse = segment_forward(None, problem, tensors._replace(**leaves))
        results, upstream = ((o,), (do,)) if tensors.dlse is None else ((o, lse), (do, tensors.dlse))
        found = torch.autograd.grad(results, [*leaves.values()], [x.to(wide) for x in upstream], materialize_grads=True)
    key_dtype = wide if problem.sums_keys else problem.dtype
    dtypes = problem.dtype, key_dtype, key_dtype
    first = [x.to(dtype) if out is None else out.copy_(x) for x, dtype, out in zip(found, dtypes, outs)]
    return Gradients(*first, **{f"d{name}": x for name, x in list(zip(leaves, found))[3:]})


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Let autograd record inside, also in an operator's implementation, which the dispatcher calls below autograd."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


class TwoStreams:
    """The current stream, number 0, and a side stream, number 1, so that one launch fills the multiprocessors that
    another leaves. Without a GPU both do nothing.

    The side stream waits for the current one at the beginning of the ``with`` block, and the current one for the side
    stream at its end. Memory that both use must be allocated before the block and held until its end.
    """

    def __init__(self, where: torch.device):
        self.streams = device.two_streams(where)

    def __enter__(self) -> TwoStreams:
        self.wait_for_other(1)
        return self

    def __exit__(self, *error: object) -> None:
        self.wait_for_other(0)

    def stream(self, number: int) -> contextlib.AbstractContextManager[object]:
        """Return a context in which launches go to this stream."""
        return contextlib.nullcontext() if self.streams is None else device.on_stream(self.streams[number])

    def wait_for_other(self, number: int) -> None:
        """Let this stream wait for all work so far of the other one."""
        if self.streams is not None:
            self.streams[number].wait_stream(self.streams[1 - number])

    def lend_to_main(self, tensors: list[Tensor]) -> None:
        """Let the current stream read ``tensors`` of either stream, after the streams have joined."""
        if self.streams is not None:
            for x in tensors:
                x.record_stream(self.streams[0])

    def pause(self) -> None:
        """Join both streams and stop them for a moment, so that an exchange that began before finds free
        multiprocessors. Otherwise it may find none on one rank until the launches end, while it occupies some on the
        other ranks, which wait for that rank."""
        if self.streams is not None and PAUSE_CYCLES:
            self.wait_for_other(0)
            device.pause(PAUSE_CYCLES)
            self.wait_for_other(1)
