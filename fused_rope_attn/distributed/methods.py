"""The two methods of context parallelism, forward and backward; docs/design/distributed.md has their reasons.

``"all_gather"``: a rank gets the rows of K and V that its queries see, in the inputs' dtype and a few heads at a time,
and sends their gradients back in float32, to be summed in a fixed order. Backward gathers once more, because that costs
less than keeping them. Buffers are (rows, 2, B, H, D): adjacent rows of a chunk are then adjacent in memory, and need
no copy before they are sent, nor between their arrival and the kernels or sums that read them.

``"all_to_all"``: sequence shards of all heads become whole sequences of a part of the heads, and back.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from fused_rope_attn.attention import ops, planning, reference
from fused_rope_attn.attention.problem import Gradients, Problem, Saved, Tensors
from fused_rope_attn.distributed.groups import Exchange, exchange, join_rows
from fused_rope_attn.distributed.layout import ParallelCall, Run, Segment
from fused_rope_attn.runtime import device
from fused_rope_attn.runtime.layouts import like_input

# Bytes that a rank receives in the first section: below it a message is too short for the links' full rate.
SECTION_BYTES = 8 << 20
# About 20 us, in cycles of a GPU's clock.
PAUSE_CYCLES = 40_000

Heads = tuple[int, int]  # [first, last) of the key heads
Rows = tuple[int, int]  # [first, last) of a buffer


def sections_of(heads: int, bytes_of_head: int, *, backward: bool, hidden: bool) -> list[Heads]:
    """Return the key heads that are sent together.

    bytes_of_head: received by a rank for each head. No work hides the exchange of the first heads, unless it is
    ``hidden`` because every rank has work that needs no other rank's keys, and none hides the return of the last heads.
    So these are few, and the rest is one section. All heads are one section if messages would be short.
    """
    few = max(1, -(-SECTION_BYTES // max(1, bytes_of_head)))
    limits = {0, heads}
    if 4 * few <= heads:
        limits |= set() if hidden else {few}
        limits |= {heads - few} if backward else set()
    return list(itertools.pairwise(sorted(limits)))


def _plan_of(problem: Problem) -> planning.Plan | None:
    """Return the kernels of one GPU's call of the whole sequence, ``problem``, because o and lse are to have the same
    bits; None for the reference."""
    chosen, _ = planning.choose_backend(problem)
    return None if chosen == "reference" else planning.plan_for(problem._replace(backend=chosen))


def segment_forward(
    plan: planning.Plan | None, problem: Problem, tensors: Tensors, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o, lse) of one segment. out: the buffer for o; by default it is allocated."""
    if plan is not None:
        outputs = ops.run_forward(problem, tensors, plan, out)
        return outputs.o, outputs.lse
    o, lse = reference.attention(problem, tensors)
    return (o if out is None else out.copy_(o)), lse


def segment_backward(
    plan: planning.Plan | None, problem: Problem, do: torch.Tensor, saved: Saved, outs: tuple = (None, None, None)
) -> Gradients:
    """Return the gradients of one segment in q's dtype; if ``problem`` sums keys, dk and dv in float32 (float64 for
    float64). outs: buffers for dq, dk and dv; None: allocated."""
    if plan is not None:
        return ops.run_backward(problem, do, saved, plan, outs)
    tensors = saved.tensors
    wide = torch.promote_types(problem.dtype, torch.float32)
    with _recording():
        leaves = {
            name: x.detach().to(wide if name in "qkv" else x.dtype).requires_grad_()
            for name in ("q", "k", "v", "sinks", "q_norm", "k_norm")
            if (x := getattr(tensors, name)) is not None
        }
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

    def lend_to_main(self, tensors: list[torch.Tensor]) -> None:
        """Let the current stream read ``tensors`` of either stream, after the streams have joined."""
        if self.streams is not None:
            for x in tensors:
                x.record_stream(self.streams[0])

    def pause(self) -> None:
        """Join both streams and stop them for a moment, so that an exchange that began before finds free
        multiprocessors. Otherwise it may find none on one rank until the launches end, while it occupies some on the
        other ranks, which wait for that rank."""
        if self.streams is not None:
            self.wait_for_other(0)
            device.pause(PAUSE_CYCLES)
            self.wait_for_other(1)


def _whole_tables(call: ParallelCall, tensors: Tensors) -> list[Any]:
    """Return cos and sin with the rows of the whole sequence; None without tables."""
    both = [tensors.cos, tensors.sin]
    return [join_rows(call.group, call.owners, x, x.ndim - 2) for x in both] if call.tables_are_local else both


class _Pass:
    """The segments of this rank as calls of attention, for the key heads of one section at a time."""

    def __init__(self, call: ParallelCall, problem: Problem, tensors: Tensors, *, backward: bool):
        self.call, self.problem, self.tensors = call, problem, tensors
        # All sections begin at once, so that none waits for an attention to end.
        batch, heads, _, columns = tensors.k.shape
        bytes_of_head = 2 * batch * call.work.most_received * columns * tensors.k.element_size()
        sections = sections_of(heads, bytes_of_head, backward=backward, hidden=call.work.all_have_local_work)
        self.arriving = [_Keys(call, tensors.k, tensors.v, section) for section in sections]
        both = _whole_tables(call, tensors)
        self.tables = [self._tables_of(segment, both) for segment in call.own.segments]
        # All segments take the kernels of the whole sequence.
        length = problem.len_q * call.group.size
        self.plan = _plan_of(problem._replace(len_q=length, len_k=length))

    def _tables_of(self, segment: Segment, both: list[Any]) -> list[Any]:
        """Return the rows of cos and sin for the keys of a segment."""
        if segment.cu_seqlens_k or both[0] is None:
            return both
        parts = [(run.chunk * self.call.chunk + run.first, run.rows) for run in self.call.own.buffer]
        if segment.position is not None:
            parts = [(segment.position, segment.num_keys)]
        rows = [[x.narrow(-2, *part) for part in parts] for x in both]
        return [x[0] if len(x) == 1 else torch.cat(x, dim=-2) for x in rows]

    def order(self, number: int) -> list[tuple[int, int]]:
        """Return (stream, segment) of section ``number``, the one with most work first. Single segments alternate."""
        order = self.call.own.order
        return [((number if len(order) == 1 else i) % 2, index) for i, index in enumerate(order)]

    def queries(self, x: torch.Tensor, segment: Segment, heads: slice, fill: float = 0.0) -> torch.Tensor:
        """Return the segment's rows of a tensor (B, HQ, N / P, ...), followed by its padding, full of ``fill``."""
        x = x[:, heads, slice(*segment.rows)]
        if not segment.padding:
            return x
        return torch.cat((x, x.new_full((*x.shape[:2], segment.padding, *x.shape[3:]), fill)), dim=2)

    def step(self, index: int, keys: _Keys) -> tuple[Segment, slice, Problem, Tensors]:
        """Return (segment number ``index``, its query heads, its problem, its tensors) with the keys of a section.

        Let the current stream wait for these keys. A segment that needs no other rank's waits as well, unless all ranks
        have such work, because it is to fill the multiprocessors that the segments with most work leave at their end.
        """
        call, given, group = self.call, self.tensors, self.problem.group_size
        segment = call.own.segments[index]
        if not (call.work.all_have_local_work and call.work.is_local(call.group.rank, segment)):
            keys.exchange.wait()
        first, last = keys.heads
        heads = slice(first * group, last * group)
        k, v = _heads_first(keys.buffer[slice(*segment.keys)])
        cos, sin = self.tables[index]
        tensors = given._replace(q=self.queries(given.q, segment, heads), k=k, v=v, cos=cos, sin=sin)
        if given.sinks is not None:
            tensors = tensors._replace(sinks=given.sinks[heads])
        if given.dlse is not None:
            tensors = tensors._replace(dlse=self.queries(given.dlse, segment, heads))
        problem = self.problem._replace(heads_q=(last - first) * group, heads_kv=last - first)
        problem = problem._replace(len_q=segment.queries, len_k=segment.num_keys)
        if call.work.cu_seqlens is not None:
            cu_q, cu_k, longest = call.work.cu_seqlens[index]
            tensors = tensors._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
            problem = problem._replace(sequences=cu_q.shape[0] - 1, max_seqlen=longest)
        return segment, heads, problem, tensors


def gather_forward(call: ParallelCall, problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o, lse) of the local rows. problem: of the whole sequence, with the lengths of the local rows."""
    o = like_input(tensors.q)
    lse = torch.empty(o.shape[:3], dtype=torch.promote_types(o.dtype, torch.float32), device=o.device)
    if call.own.rows < o.shape[2]:
        o.zero_()
        lse.fill_(float("-inf"))
    run = _Pass(call, problem, tensors, backward=False)
    with TwoStreams(o.device) as streams:
        for number, keys in enumerate(run.arriving):
            for stream, index in run.order(number):
                with streams.stream(stream):
                    segment, heads, one, given = run.step(index, keys)
                    rows = slice(*segment.rows)
                    out = None if segment.padding else o[:, heads, rows]
                    o_part, lse_part = segment_forward(run.plan, one, given, out)
                    if out is None:
                        o[:, heads, rows].copy_(o_part[:, :, : rows.stop - rows.start])
                    lse[:, heads, rows].copy_(lse_part[:, :, : rows.stop - rows.start])
    for keys in run.arriving:  # on a rank that only sends, no segment waited for the exchange
        keys.exchange.wait()
    return o, lse


def gather_backward(
    call: ParallelCall, problem: Problem, tensors: Tensors, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
) -> Gradients:
    """Return the gradients of the sum of all ranks' losses with respect to this rank's q, k and v, and this rank's part
    of those of sinks and of the norms' weights. ``problem`` as in ``gather_forward``."""
    dq, dk, dv = (like_input(x) for x in tensors[:3])
    if call.own.rows < dq.shape[2]:
        dq.zero_()
    run = _Pass(call, problem, tensors, backward=True)
    # No work hides the return of the last section. The rest returns before it.
    last = run.arriving[-1].heads
    leaving = [_KeyGradients(call, tensors.k, heads) for heads in ((0, last[0]), last) if heads[0] < heads[1]]
    weights: list[tuple[Gradients, slice]] = []
    with TwoStreams(dq.device) as streams:
        for number, keys in enumerate(run.arriving):
            sums = leaving[-1] if keys.heads == last else leaving[0]
            own = slice(keys.heads[0] - sums.heads[0], keys.heads[1] - sums.heads[0])
            for stream, index in run.order(number):
                with streams.stream(stream):
                    segment, heads, one, given = run.step(index, keys)
                    rows = slice(*segment.rows)
                    do_part, o_part = (run.queries(x, segment, heads) for x in (do, o))
                    # lse -inf: the kernels take padding for queries that saw no key.
                    lse_part = run.queries(lse, segment, heads, float("-inf")).contiguous()
                    is_direct = index in sums.direct
                    of_keys = _heads_first(sums.buffer[slice(*segment.keys), :, :, own])
                    outs = None if segment.padding else dq[:, heads, rows], *(of_keys if is_direct else (None, None))
                    one = one._replace(sums_keys=True)
                    found = segment_backward(run.plan, one, do_part, Saved(o_part, lse_part, given), outs)
                    if segment.padding:
                        dq[:, heads, rows].copy_(found.dq[:, :, : rows.stop - rows.start])
                    if not is_direct:
                        # The other stream writes the rows to which this segment adds.
                        streams.wait_for_other(stream)
                        of_keys[0].add_(found.dk)
                        of_keys[1].add_(found.dv)
                    found = found._replace(dq=None, dk=None, dv=None)
                    streams.lend_to_main([x for x in found if x is not None])
                    weights.append((found, heads))
            if keys.heads[1] == last[0]:
                # The work of the last section hides this exchange.
                with streams.stream(1):
                    streams.wait_for_other(1)
                    sums.send()
                streams.pause()
    leaving[-1].send()
    for keys in run.arriving:
        keys.exchange.wait()
    for sums in leaving:
        sums.wait(dk, dv)
    return Gradients(dq, dk, dv, **_summed(weights, tensors, lse.dtype))


def _summed(parts: list[tuple[Gradients, slice]], tensors: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the sums of this rank's gradients of sinks and of the norms' weights; parts: with their query heads."""
    found = {}
    for name in ("sinks", "q_norm", "k_norm"):
        weight = getattr(tensors, name)
        if weight is not None:
            total = torch.zeros_like(weight, dtype=dtype)
            for part, heads in parts:
                (total[heads] if name == "sinks" else total).add_(getattr(part, f"d{name}"))
            found[f"d{name}"] = total.to(weight.dtype)
    return found


def _heads_first(buffer: torch.Tensor) -> torch.Tensor:
    """(rows, 2, B, H, D) as (2, B, H, rows, D)."""
    return buffer.permute(1, 2, 3, 0, 4)


class _Keys:
    """The keys and values of one section's heads that this rank's queries see, from k and v (B, H, N / P, D)."""

    def __init__(self, call: ParallelCall, k: torch.Tensor, v: torch.Tensor, heads: Heads):
        self.heads = heads
        own = [x[:, slice(*heads)] for x in (k, v)]
        self.buffer = k.new_empty(call.own.length, 2, k.shape[0], heads[1] - heads[0], k.shape[3])
        for place, chunk in enumerate(call.owned):
            run, first = call.work.own.get(chunk), place * call.chunk
            if run is not None:
                for target, x in zip(_heads_first(self.buffer[run.start :][: run.rows]), own):
                    target.copy_(x[:, :, first : first + run.rows])
        inputs = [[self.buffer[m.sent :][: m.rows] for m in part] for part in call.sent]
        outputs = [[self.buffer[m.received :][: m.rows] for m in part] for part in call.received]
        self.exchange = Exchange(call.group, outputs, inputs, self.buffer, most=call.work.most_messages)


class _KeyGradients:
    """This rank's parts of dk and dv of some heads, which are sent to the owners of the keys and summed there.

    The kernels write them in float32 (float64 for float64). direct: the segments that write to the buffer. One that has
    keys in common with one before it, in the order of the work, writes to a buffer of its own, which is then added.
    """

    def __init__(self, call: ParallelCall, k: torch.Tensor, heads: Heads):
        """k: (B, H, N / P, D) of all heads."""
        self.call, self.heads = call, heads
        dtype = torch.promote_types(k.dtype, torch.float32)
        shape = 2, k.shape[0], heads[1] - heads[0], k.shape[3]
        self.buffer = torch.empty(call.own.length, *shape, dtype=dtype, device=k.device)
        # For each message of keys that this rank sends, it receives one of gradients.
        self.arriving = [[self.buffer.new_empty(m.rows, *shape) for m in part] for part in call.sent]
        keys = [call.own.segments[index].keys for index in call.own.order]
        are_new = [_gaps(keys[:i], own) == [own] for i, own in enumerate(keys)]
        self.direct = set(itertools.compress(call.own.order, are_new))
        for first, last in _gaps(list(itertools.compress(keys, are_new)), (0, call.own.length)):
            self.buffer[first:last].zero_()

    def send(self) -> None:
        """Begin the exchange, after all segments."""
        inputs = [[self.buffer[m.received :][: m.rows] for m in part] for part in self.call.received]
        most = self.call.work.most_messages
        self.exchange = Exchange(self.call.group, self.arriving, inputs, self.buffer, most=most)

    def wait(self, *gradients: torch.Tensor) -> None:
        """Write the sums over all ranks to these heads of dk and dv (B, H, N / P, D), rounded once: first this rank's
        part, then the others in the order of the ranks."""
        self.exchange.wait()
        call = self.call
        for messages, parts in zip(call.sent, self.arriving):
            for message, part in zip(messages, parts):
                self.buffer[message.sent :][: message.rows].add_(part)
        for place, chunk in enumerate(call.owned):
            own, first = call.work.own.get(chunk, Run(chunk, 0, 0, 0)), place * call.chunk
            for total, gradient in zip(_heads_first(self.buffer[own.start :][: own.rows]), gradients):
                target = gradient[:, slice(*self.heads), first : first + call.chunk]
                target[:, :, : own.rows].copy_(total)
                target[:, :, own.rows :].zero_()


def _gaps(ranges: list[Rows], within: Rows) -> list[Rows]:
    """Return the parts of a range that ``ranges`` do not cover."""
    gaps, end = [], within[0]
    for first, last in sorted(ranges):
        if min(first, within[1]) > end:
            gaps.append((end, min(first, within[1])))
        end = max(end, last)
    if end < within[1]:
        gaps.append((end, within[1]))
    return gaps


def heads_forward(call: ParallelCall, problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o, lse) of the local rows. Arguments as in ``gather_forward``."""
    one, given, _ = _own_heads(call, problem, tensors)
    o, lse = segment_forward(_plan_of(one), one, given)
    o, lse = to_rows(call, [(o, 0.0), (lse, float("-inf"))])
    return like_input(tensors.q).copy_(o), lse


def heads_backward(
    call: ParallelCall, problem: Problem, tensors: Tensors, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
) -> Gradients:
    """Return gradients as ``gather_backward`` does."""
    # Some ranks may have no gradient of lse, but all take part in the exchange.
    dlse = torch.zeros_like(lse) if tensors.dlse is None else tensors.dlse
    one, given, (do, o, of_rows) = _own_heads(call, problem, tensors, do, o, torch.stack((lse, dlse), -1))
    lse, dlse = (x.contiguous() for x in of_rows.unbind(-1))
    found = segment_backward(_plan_of(one), one, do, Saved(o, lse, given._replace(dlse=dlse)))
    gradients = to_rows(call, [(x, 0.0) for x in found[:3]])
    dq, dk, dv = (like_input(x).copy_(dx) for x, dx in zip(tensors[:3], gradients))
    dsinks = None
    if tensors.sinks is not None:
        dsinks = torch.zeros_like(tensors.sinks)
        dsinks.unflatten(0, (call.group.size, -1))[call.group.rank].copy_(found.dsinks)
    return Gradients(dq, dk, dv, dsinks, found.dq_norm, found.dk_norm)


def _own_heads(
    call: ParallelCall, problem: Problem, tensors: Tensors, *others: torch.Tensor
) -> tuple[Problem, Tensors, list[torch.Tensor]]:
    """Return this rank's heads of the whole sequence as one call, and those of ``others``, which have a row a query."""
    q, k, v, *of_others = (x[:, :, : call.total] for x in to_heads(call, [*tensors[:3], *others]))
    cos, sin = _whole_tables(call, tensors)
    sinks = None if tensors.sinks is None else tensors.sinks.unflatten(0, (call.group.size, -1))[call.group.rank]
    problem = problem._replace(heads_q=q.shape[1], heads_kv=k.shape[1], len_q=call.total, len_k=call.total)
    return problem, tensors._replace(q=q, k=k, v=v, cos=cos, sin=sin, sinks=sinks), of_others


def to_heads(call: ParallelCall, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Exchange (B, H, N / P, ...) for this rank's H / P heads of the whole sequence, (B, H / P, N, ...), contiguous."""
    size, parts = call.group.size, len(call.owned)
    # (P, parts, B, H / P, C, ...)
    sent = [x.unflatten(2, (parts, -1)).unflatten(1, (size, -1)).movedim((1, 3), (0, 1)).contiguous() for x in tensors]
    return [torch.cat([x[owner] for owner in call.owners], dim=2) for x in exchange(call.group, *sent)]


def to_rows(call: ParallelCall, tensors: list[tuple[torch.Tensor, float]]) -> list[torch.Tensor]:
    """Inverse of ``to_heads``: (B, H / P, N, ...) become (B, H, N / P, ...), contiguous.

    Each tensor has a value for the rows that do not exist.
    """
    size, sent = call.group.size, []
    for x, fill in tensors:
        missing = len(call.owners) * call.chunk - x.shape[2]
        if missing:
            x = torch.cat((x, x.new_full((*x.shape[:2], missing, *x.shape[3:]), fill)), dim=2)
        chunks = x.unflatten(2, (len(call.owners), -1)).unbind(2)
        sent.append([torch.stack([chunks[c] for c in call.work.owned[rank]]) for rank in range(size)])
    # (P, parts, B, H / P, C, ...) to (B, P, H / P, parts, C, ...)
    received = exchange(call.group, *sent)
    return [x.movedim((0, 1), (1, 3)).flatten(3, 4).flatten(1, 2) for x in received]
