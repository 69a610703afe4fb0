"""The method ``"all_gather"``: a rank gets the keys and values that its queries see, and sends their gradients back.

K and V are sent in the inputs' dtype, a few heads at a time: the attention of the first heads runs while the next ones
are in flight. A rank gets only the rows that it needs. Backward gathers them once more, because that costs less than
keeping them. The parts of dk and dv are sent in float32 and summed in a fixed order, so that repeats are equal.
"""

from __future__ import annotations

import itertools

import torch

from fused_rope_attn.attention.planning import Plan
from fused_rope_attn.attention.problem import Gradients, Problem, Saved, Tensors
from fused_rope_attn.distributed import local
from fused_rope_attn.distributed.groups import join_rows
from fused_rope_attn.distributed.keys import GatheredKeys, ScatteredGradients
from fused_rope_attn.distributed.layout import Call, Segment
from fused_rope_attn.distributed.streams import TwoStreams
from fused_rope_attn.runtime.layouts import like_input

# Bytes that a rank receives in the first section: below it a message is too short for the links' full rate.
SECTION_BYTES = 8 << 20


Heads = tuple[int, int]  # [first, last) of the key heads


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


def returns_of(sections: list[Heads]) -> list[Heads]:
    """Return the key heads of gradients that are sent together: the last section, which no work hides, and the rest."""
    parts = [(0, sections[-1][0]), sections[-1]]
    return [(first, last) for first, last in parts if first < last]


def _tables(call: Call, tensors: Tensors) -> list[tuple[torch.Tensor, ...]]:
    """Return cos and sin of each segment."""
    both: tuple[torch.Tensor, ...] = (tensors.cos, tensors.sin)
    if call.tables_are_local:
        both = tuple(join_rows(call.group, call.sharding, x, x.ndim - 2) for x in both)
    found = []
    for segment in call.own.segments:
        if segment.cu_seqlens_k:
            found.append(both)
        elif segment.position is not None:
            found.append(tuple(x.narrow(-2, segment.position, segment.num_keys) for x in both))
        else:
            starts = [(run.chunk * call.chunk + run.first, run.rows) for run in call.own.buffer]
            found.append(tuple(torch.cat([x.narrow(-2, *rows) for rows in starts], dim=-2) for x in both))
    return found


class _Segments:
    """The segments of this rank as calls of attention, for some key heads at a time."""

    def __init__(self, call: Call, problem: Problem, tensors: Tensors):
        self.call, self.problem, self.tensors = call, problem, tensors
        self.tables = _tables(call, tensors)

    def queries(self, x: torch.Tensor, segment: Segment, heads: slice, fill: float = 0.0) -> torch.Tensor:
        """Return the segment's rows of a tensor (B, HQ, N / P, ...), followed by its padding, full of ``fill``."""
        x = x[:, heads, segment.rows[0] : segment.rows[1]]
        if not segment.padding:
            return x
        return torch.cat((x, x.new_full((*x.shape[:2], segment.padding, *x.shape[3:]), fill)), dim=2)

    def build(
        self, index: int, section: tuple[int, int], found: GatheredKeys
    ) -> tuple[Segment, slice, Problem, Tensors]:
        """Return (the segment, its query heads, its problem, its tensors) of one section, with the keys ``found``."""
        segment, given, group = self.call.own.segments[index], self.tensors, self.problem.group_size
        heads = slice(section[0] * group, section[1] * group)
        q, k, v = self.queries(given.q, segment, heads), found.k, found.v
        keys, sinks = slice(*segment.keys), None if given.sinks is None else given.sinks[heads]
        cos, sin = self.tables[index]
        dlse = None if given.dlse is None else self.queries(given.dlse, segment, heads)
        tensors = given._replace(q=q, k=k[:, :, keys], v=v[:, :, keys], cos=cos, sin=sin, sinks=sinks, dlse=dlse)
        count = section[1] - section[0]
        problem = self.problem._replace(
            heads_q=count * group, heads_kv=count, len_q=segment.queries, len_k=segment.num_keys
        )
        if self.call.cu_seqlens is not None:
            cu_q, cu_k, longest = self.call.cu_seqlens[index]
            tensors = tensors._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
            problem = problem._replace(sequences=cu_q.shape[0] - 1, max_seqlen=longest)
        return segment, heads, problem, tensors


def _begin(call: Call, tensors: Tensors, *, backward: bool) -> list[tuple[Heads, GatheredKeys]]:
    """Begin to gather the keys of every section, all at once, so that none waits for an attention to end."""
    k, v = tensors.k, tensors.v
    batch, heads, _, columns = k.shape
    bytes_of_head = 2 * batch * call.shares.most_received * columns * k.element_size()
    hidden = call.shares.all_have_local_work
    sections = sections_of(heads, bytes_of_head, backward=backward, hidden=hidden)
    return [(s, GatheredKeys(call, k[:, s[0] : s[1]], v[:, s[0] : s[1]])) for s in sections]


def _streams_of(call: Call, section: int) -> list[tuple[int, int]]:
    """Return (stream, segment) of a section, the one with most work first. Single segments alternate over sections."""
    order = call.own.order
    return [(section % 2, order[0])] if len(order) == 1 else [(i % 2, index) for i, index in enumerate(order)]


def _waits(call: Call, index: int) -> bool:
    """Return whether a segment waits for other ranks' keys.

    Those that need none wait as well, unless all ranks have such work, because they are to fill the multiprocessors
    that the segments with most work leave at their end.
    """
    is_local = call.shares.is_local(call.group.rank, call.own.segments[index])
    return not (is_local and call.shares.all_have_local_work)


def _uncovered(call: Call, rows: int) -> bool:
    """Return whether some local rows belong to no segment."""
    return sum(segment.rows[1] - segment.rows[0] for segment in call.own.segments) < rows


def _end(arriving: list[tuple[Heads, GatheredKeys]]) -> None:
    """Wait for exchanges also of a rank that only sends."""
    for _, keys in arriving:
        keys.wait()


def forward(call: Call, problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o, lse) of the local rows. problem: of the whole sequence, with the lengths of the local rows."""
    o = like_input(tensors.q)
    lse = torch.empty(o.shape[:3], dtype=torch.promote_types(o.dtype, torch.float32), device=o.device)
    if _uncovered(call, o.shape[2]):
        o.zero_()
        lse.fill_(float("-inf"))
    arriving = _begin(call, tensors, backward=False)
    segments, plan = _Segments(call, problem, tensors), _plan_of(call, problem)
    with TwoStreams(o.device) as streams:
        for number, (section, keys) in enumerate(arriving):
            for stream, index in _streams_of(call, number):
                with streams.stream(stream):
                    if _waits(call, index):
                        keys.wait()
                    segment, heads, one, given = segments.build(index, section, keys)
                    rows = slice(*segment.rows)
                    count = rows.stop - rows.start
                    out = None if segment.padding else o[:, heads, rows]
                    o_part, lse_part = local.forward(plan, one, given, out)
                    if out is None:
                        o[:, heads, rows].copy_(o_part[:, :, :count])
                    lse[:, heads, rows].copy_(lse_part[:, :, :count])
    _end(arriving)
    return o, lse


def backward(
    call: Call, problem: Problem, tensors: Tensors, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
) -> Gradients:
    """Return the gradients of the sum of all ranks' losses with respect to this rank's q, k and v, and this rank's part
    of those of sinks and of the norms' weights. ``problem`` as in ``forward``."""
    dq, dk, dv = like_input(tensors.q), like_input(tensors.k), like_input(tensors.v)
    if _uncovered(call, dq.shape[2]):
        dq.zero_()
    arriving = _begin(call, tensors, backward=True)
    leaving = [
        (limits, ScatteredGradients(call, tensors.k[:, slice(*limits)]))
        for limits in returns_of([section for section, _ in arriving])
    ]
    segments, plan = _Segments(call, problem, tensors), _plan_of(call, problem)
    weights = _WeightGradients(tensors, lse.dtype)
    with TwoStreams(dq.device) as streams:
        for number, (section, keys) in enumerate(arriving):
            (first, last), sums = next(x for x in leaving if x[0][0] <= section[0] < x[0][1])
            own = slice(section[0] - first, section[1] - first)
            order = _streams_of(call, number)
            for stream, index in order:
                with streams.stream(stream):
                    if _waits(call, index):
                        keys.wait()
                    segment, heads, one, given = segments.build(index, section, keys)
                    rows = slice(*segment.rows)
                    do_part, o_part = (segments.queries(x, segment, heads) for x in (do, o))
                    # lse -inf: the kernels take padding for queries that saw no key.
                    lse_part = segments.queries(lse, segment, heads, float("-inf")).contiguous()
                    outs = None if segment.padding else dq[:, heads, rows], *sums.outputs(index, own)
                    one = one._replace(sums_keys=True)
                    found = local.backward(plan, one, do_part, Saved(o_part, lse_part, given), outs)
                    if segment.padding:
                        dq[:, heads, rows].copy_(found.dq[:, :, : rows.stop - rows.start])
                    if sums.adds(index):
                        # The other stream writes the rows to which this segment adds.
                        streams.wait_for_other(stream)
                        sums.add(index, own, found)
                    weights.keep(found, heads, streams)
            if section[1] == last < tensors.k.shape[1]:
                # The work of the last section hides this exchange.
                with streams.stream(1):
                    streams.wait_for_other(1)
                    sums.send()
                streams.pause()
    leaving[-1][1].send()
    _end(arriving)
    for limits, sums in leaving:
        sums.wait(dk[:, slice(*limits)], dv[:, slice(*limits)])
    return weights.join(dq, dk, dv)


class _WeightGradients:
    """This rank's parts of the gradients of sinks and of the norms' weights, summed over the segments and sections."""

    def __init__(self, tensors: Tensors, dtype: torch.dtype):
        self.tensors, self.dtype = tensors, dtype
        self.parts: list[tuple[Gradients, slice]] = []

    def keep(self, gradients: Gradients, heads: slice, streams: TwoStreams) -> None:
        """Keep the gradients of a segment of these query heads; the current stream makes them."""
        weights = gradients._replace(dq=None, dk=None, dv=None)
        given = [x for x in weights if x is not None]
        streams.lend_to_main(given)
        if given:
            self.parts.append((weights, heads))

    def join(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Gradients:
        """Return all gradients of this rank, after the streams have joined."""
        found = {}
        for name in ("sinks", "q_norm", "k_norm"):
            weight = getattr(self.tensors, name)
            if weight is not None:
                total = torch.zeros_like(weight, dtype=self.dtype)
                for part, heads in self.parts:
                    (total[heads] if name == "sinks" else total).add_(getattr(part, f"d{name}"))
                found[f"d{name}"] = total.to(weight.dtype)
        return Gradients(dq, dk, dv, **found)


def _plan_of(call: Call, problem: Problem) -> Plan | None:
    """Return the kernels that all segments take; None for the reference."""
    length = problem.len_q * call.group.size
    return local.plan_of(problem._replace(len_q=length, len_k=length))
