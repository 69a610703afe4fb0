"""The method ``"all_gather"``: a rank gets the keys and values that its queries see, and sends their gradients back.

K and V travel as they came, in the inputs' dtype, a few heads at a time: the attention of the first heads runs while
the next ones are on their way. A rank gets only the rows that it needs. Backward gathers them once more, which costs
less than to keep them, and the parts of dk and dv travel in float32 and are summed in a fixed order, so that neither
the network nor the number of processes costs a bit, and repeats are equal.
"""

from __future__ import annotations

import itertools

import torch

from fused_rope_attn.attention.planning import Plan
from fused_rope_attn.attention.problem import Gradients, Problem, Tensors
from fused_rope_attn.distributed import local
from fused_rope_attn.distributed.call import Call
from fused_rope_attn.distributed.groups import join_rows
from fused_rope_attn.distributed.keys import KeyGradients, Keys
from fused_rope_attn.distributed.lanes import Lanes
from fused_rope_attn.distributed.layout import Piece
from fused_rope_attn.runtime.layouts import like_input

# Bytes that a rank receives in the first section: below it a message is too short for the links' full rate.
SECTION_BYTES = 8 << 20


Heads = tuple[int, int]  # [first, last) of the key heads


def sections_of(heads: int, bytes_of_head: int, *, backward: bool, hidden: bool) -> list[Heads]:
    """The key heads that travel together.

    bytes_of_head: what a rank receives of a head. Nothing runs beside the first ones' way here, unless it is
    ``hidden``, because every rank has work that needs no other's keys; and nothing beside the last ones' way back. So
    these are few, and the rest is one section. All heads are one section where messages would be short.
    """
    few = max(1, -(-SECTION_BYTES // max(1, bytes_of_head)))
    limits = {0, heads}
    if 4 * few <= heads:
        limits |= set() if hidden else {few}
        limits |= {heads - few} if backward else set()
    return list(itertools.pairwise(sorted(limits)))


def returns_of(sections: list[Heads]) -> list[Heads]:
    """The key heads whose gradients travel together: the last section's, which nothing runs beside, and the others'."""
    parts = [(0, sections[-1][0]), sections[-1]]
    return [(first, last) for first, last in parts if first < last]


def _tables(call: Call, tensors: Tensors) -> list[tuple[torch.Tensor, ...]]:
    """cos and sin of each piece."""
    both: tuple[torch.Tensor, ...] = (tensors.cos, tensors.sin)
    if call.tables_are_local:
        both = tuple(join_rows(call.group, call.sharding, x, x.ndim - 2) for x in both)
    found = []
    for piece in call.own.pieces:
        if piece.cu_seqlens_k:
            found.append(both)
        elif piece.position is not None:
            found.append(tuple(x.narrow(-2, piece.position, piece.num_keys) for x in both))
        else:
            starts = [(run.chunk * call.chunk + run.first, run.rows) for run in call.own.buffer]
            found.append(tuple(torch.cat([x.narrow(-2, *rows) for rows in starts], dim=-2) for x in both))
    return found


class _Pieces:
    """The pieces of this rank as calls of attention, for some key heads at a time."""

    def __init__(self, call: Call, problem: Problem, tensors: Tensors):
        self.call, self.problem, self.tensors = call, problem, tensors
        self.tables = _tables(call, tensors)

    def queries(self, x: torch.Tensor, piece: Piece, heads: slice, ghost: float = 0.0) -> torch.Tensor:
        """The piece's rows of a tensor (B, HQ, N / P, ...), and behind them its ghosts' rows, full of ``ghost``."""
        x = x[:, heads, piece.rows[0] : piece.rows[1]]
        if not piece.ghosts:
            return x
        return torch.cat((x, x.new_full((*x.shape[:2], piece.ghosts, *x.shape[3:]), ghost)), dim=2)

    def build(self, index: int, section: tuple[int, int], found: Keys) -> tuple[Piece, slice, Problem, Tensors]:
        """(the piece, its query heads, its problem, its tensors) of one section, whose keys are found there."""
        piece, given, group = self.call.own.pieces[index], self.tensors, self.problem.group_size
        heads = slice(section[0] * group, section[1] * group)
        keys = slice(*piece.keys)
        cos, sin = self.tables[index]
        tensors = given._replace(
            q=self.queries(given.q, piece, heads), k=found.k[:, :, keys], v=found.v[:, :, keys], cos=cos, sin=sin,
            sinks=None if given.sinks is None else given.sinks[heads],
        )  # fmt: skip
        problem = self.problem._replace(
            heads_q=heads.stop - heads.start,
            heads_kv=section[1] - section[0],
            len_q=piece.queries,
            len_k=piece.num_keys,
        )
        if self.call.cu_seqlens is not None:
            cu_q, cu_k, longest = self.call.cu_seqlens[index]
            tensors = tensors._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
            problem = problem._replace(sequences=cu_q.shape[0] - 1, max_seqlen=longest)
        return piece, heads, problem, tensors


def _begin(call: Call, tensors: Tensors, *, backward: bool) -> list[tuple[Heads, Keys]]:
    """Every section with its keys on their way: all at once, so that none waits for an attention to end."""
    k, v = tensors.k, tensors.v
    batch, heads, _, columns = k.shape
    bytes_of_head = 2 * batch * call.shares.most_received * columns * k.element_size()
    hidden = call.shares.all_have_local_work
    sections = sections_of(heads, bytes_of_head, backward=backward, hidden=hidden)
    return [(s, Keys(call, k[:, s[0] : s[1]], v[:, s[0] : s[1]])) for s in sections]


def _lanes_of(call: Call, section: int) -> list[tuple[int, int]]:
    """(lane, piece) of a section, the piece with most work first; alone it takes turns with the other sections'."""
    order = call.own.order
    return [(section % 2, order[0])] if len(order) == 1 else [(i % 2, index) for i, index in enumerate(order)]


def _waits(call: Call, index: int) -> bool:
    """Whether a piece waits for others' keys. Those that need none wait as well, unless all ranks have such work: else
    they would come before the pieces with most work, whose ends they are to fill."""
    is_local = call.shares.is_local(call.group.rank, call.own.pieces[index])
    return not (is_local and call.shares.all_have_local_work)


def _uncovered(call: Call, rows: int) -> bool:
    """Whether some local rows are no piece's."""
    return sum(piece.rows[1] - piece.rows[0] for piece in call.own.pieces) < rows


def _end(arriving: list[tuple[Heads, Keys]]) -> None:
    """Wait for exchanges also of a rank that only sends."""
    for _, keys in arriving:
        keys.wait()


def forward(call: Call, problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of the local rows. problem: of the whole sequence, but for its lengths, which are the local rows."""
    o = like_input(tensors.q)
    wide = torch.float64 if o.dtype == torch.float64 else torch.float32
    lse = torch.empty(o.shape[:3], dtype=wide, device=o.device)
    if _uncovered(call, o.shape[2]):
        o.zero_()
        lse.fill_(float("-inf"))
    arriving = _begin(call, tensors, backward=False)
    pieces, plan = _Pieces(call, problem, tensors), _plan_of(call, problem)
    with Lanes(o.device) as lanes:
        for number, (section, keys) in enumerate(arriving):
            for lane, index in _lanes_of(call, number):
                with lanes.lane(lane):
                    if _waits(call, index):
                        keys.wait()
                    piece, heads, one, given = pieces.build(index, section, keys)
                    rows = slice(*piece.rows)
                    count = rows.stop - rows.start
                    room = None if piece.ghosts else o[:, heads, rows]
                    o_part, lse_part = local.forward(plan, one, given, room)
                    if room is None:
                        o[:, heads, rows].copy_(o_part[:, :, :count])
                    lse[:, heads, rows].copy_(lse_part[:, :, :count])
    _end(arriving)
    return o, lse


def backward(
    call: Call, problem: Problem, tensors: Tensors, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
) -> Gradients:
    """Gradients of the sum of all ranks' losses with respect to this rank's q, k and v, and this rank's part of sinks'.

    ``problem`` as in ``forward``.
    """
    dq, dk, dv = like_input(tensors.q), like_input(tensors.k), like_input(tensors.v)
    if _uncovered(call, dq.shape[2]):
        dq.zero_()
    arriving = _begin(call, tensors, backward=True)
    leaving = [
        (limits, KeyGradients(call, tensors.k[:, slice(*limits)]))
        for limits in returns_of([section for section, _ in arriving])
    ]
    pieces, plan = _Pieces(call, problem, tensors), _plan_of(call, problem)
    weights = _WeightGradients(tensors, lse.dtype)
    with Lanes(dq.device) as lanes:
        for number, (section, keys) in enumerate(arriving):
            (first, last), sums = next(x for x in leaving if x[0][0] <= section[0] < x[0][1])
            own = slice(section[0] - first, section[1] - first)
            order = _lanes_of(call, number)
            for lane, index in order:
                with lanes.lane(lane):
                    if _waits(call, index):
                        keys.wait()
                    piece, heads, one, given = pieces.build(index, section, keys)
                    rows = slice(*piece.rows)
                    do_part, o_part = (pieces.queries(x, piece, heads) for x in (do, o))
                    # To the kernels a ghost saw nothing.
                    lse_part = pieces.queries(lse, piece, heads, float("-inf")).contiguous()
                    rooms = None if piece.ghosts else dq[:, heads, rows], *sums.room(index, own)
                    found = local.backward(plan, one, given, do_part, o_part, lse_part, rooms=rooms)
                    if piece.ghosts:
                        dq[:, heads, rows].copy_(found.dq[:, :, : rows.stop - rows.start])
                    if sums.adds(index):
                        # What it adds to is written.
                        lanes.wait_for_other(lane)
                        sums.add(index, own, found)
                    weights.keep(found, heads, lanes)
            if section[1] == last < tensors.k.shape[1]:
                # The last section's work runs beside.
                with lanes.lane(1):
                    lanes.wait_for_main()
                    sums.send()
                lanes.pause()
    leaving[-1][1].send()
    _end(arriving)
    for limits, sums in leaving:
        sums.wait(dk[:, slice(*limits)], dv[:, slice(*limits)])
    return weights.join(dq, dk, dv)


class _WeightGradients:
    """This rank's parts of the gradients of sinks and of the norms' weights, summed over the pieces and sections."""

    def __init__(self, tensors: Tensors, dtype: torch.dtype):
        self.tensors, self.dtype = tensors, dtype
        self.parts: list[tuple[Gradients, slice]] = []

    def keep(self, gradients: Gradients, heads: slice, lanes: Lanes) -> None:
        """Take those of a piece of these query heads, from the lane that makes them."""
        weights = gradients._replace(dq=None, dk=None, dv=None)
        given = [x for x in weights if x is not None]
        lanes.lend_to_main(given)
        if given:
            self.parts.append((weights, heads))

    def join(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Gradients:
        """All gradients of this rank, once every lane is done."""
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
    """Return the kernels that all pieces take; None for the reference."""
    length = problem.len_q * call.group.size
    return local.plan_of(problem._replace(len_q=length, len_k=length))
