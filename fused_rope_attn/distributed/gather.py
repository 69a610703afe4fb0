"""The method ``"all_gather"``: a rank gets the keys and values that its queries see, and sends their gradients back.

K and V travel as they came, in the inputs' dtype, a few heads at a time: the attention of the first heads runs while
the next ones are on their way. A rank gets only the chunks that it needs. Backward gathers them once more, which costs
less than to keep them, and the parts of dk and dv travel in float32 and are summed in the order of the ranks, so that
neither the network nor the number of processes costs a bit, and repeats are equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fused_rope_attn.attention.planning import Plan
from fused_rope_attn.attention.problem import Gradients, Problem, Tensors
from fused_rope_attn.distributed import local
from fused_rope_attn.distributed.groups import Exchange, Group, join_rows
from fused_rope_attn.distributed.layout import Piece, Share, chunks_of, owner_of
from fused_rope_attn.runtime.layouts import like_input

# Bytes of K and V of one section: below it a message is too short for the links' full rate.
SECTION_BYTES = 8 << 20


class Call(NamedTuple):
    """What the ranks share in one call.

    shares: every rank's. sharding: how the local rows lie. chunk: rows of a chunk. tables_are_local: cos and sin have
    the rows of the local rows. cu_seqlens: of each of this rank's pieces (cu_seqlens_q, cu_seqlens_k, the longest) on
    the device, None without documents.
    """

    group: Group
    sharding: str
    chunk: int
    shares: tuple[Share, ...]
    tables_are_local: bool = False
    cu_seqlens: tuple[tuple[torch.Tensor, torch.Tensor, int], ...] | None = None

    @property
    def own(self) -> Share:
        return self.shares[self.group.rank]

    @property
    def owned(self) -> tuple[int, ...]:
        return chunks_of(self.group.rank, self.group.size, self.sharding)

    def sent_to(self, rank: int) -> list[int]:
        """Which of this rank's chunks, by their places among them, another rank needs."""
        if rank == self.group.rank:
            return []
        return [place for place, chunk in enumerate(self.owned) if chunk in self.shares[rank].chunks]

    def received_from(self, rank: int) -> list[int]:
        """Which of another rank's chunks, by their places among them, this rank needs."""
        if rank == self.group.rank:
            return []
        chunks = chunks_of(rank, self.group.size, self.sharding)
        return [place for place, chunk in enumerate(chunks) if chunk in self.own.chunks]


def sections_of(heads: int, bytes_of_head: int, *, backward: bool) -> list[tuple[int, int]]:
    """[first, last) of the key heads that travel together.

    Nothing runs beside the first ones' way here, and in backward beside the last ones' way back: these are a quarter,
    and the rest is one section, so that few launches have a tail. All are one where their messages would be short.
    """
    quarter = max(1, heads // 4, -(-SECTION_BYTES // max(1, bytes_of_head)))
    limits = [0, quarter, heads - quarter, heads] if backward else [0, quarter, heads]
    if 2 * quarter > heads:
        limits = [0, heads]
    return [(first, last) for first, last in zip(limits, limits[1:]) if first < last]


class _Keys:
    """The keys and values of some heads on their way to this rank."""

    def __init__(self, call: Call, k: torch.Tensor, v: torch.Tensor):
        self.call, self.k, self.v = call, k, v
        batch, heads, rows, columns = k.shape
        parts = len(call.owned)
        # Chunk by chunk, so that what any rank needs is contiguous: (chunks, 2, B, H, C, D).
        sent = k.new_empty(parts, 2, batch, heads, call.chunk, columns)
        for i, x in enumerate((k, v)):
            sent[:, i].copy_(x.reshape(batch, heads, parts, call.chunk, columns).permute(2, 0, 1, 3, 4))
        inputs = [_places(sent, call.sent_to(rank)) for rank in range(call.group.size)]
        self.outputs = [sent.new_empty(len(call.received_from(r)), *sent.shape[1:]) for r in range(call.group.size)]
        self.exchange = Exchange(call.group, self.outputs, inputs)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of this rank's buffer, (B, H, rows of the buffer, D)."""
        self.exchange.wait()
        call, (batch, heads, _, columns) = self.call, self.k.shape
        buffer = self.k.new_empty(2, batch, heads, call.own.length, columns)
        first = 0
        for chunk, rows in call.own.buffer:
            target = buffer[:, :, :, first : first + rows]
            rank, place = owner_of(chunk, call.group.size)
            if rank == call.group.rank:
                start = place * call.chunk
                for i, x in enumerate((self.k, self.v)):
                    target[i].copy_(x[:, :, start : start + rows])
            else:
                slot = call.received_from(rank).index(place)
                target.copy_(self.outputs[rank][slot][:, :, :, :rows])
            first += rows
        self.outputs = []
        return buffer[0], buffer[1]


class _KeyGradients:
    """Parts of dk and dv of some heads on their way to the ranks whose keys they are of."""

    def __init__(self, call: Call, like: torch.Tensor, found: list[tuple[Piece, Gradients]]):
        """like: k of these heads. found: each piece with its dk and dv."""
        self.call = call
        batch, heads, _, columns = like.shape
        dtype = torch.promote_types(like.dtype, torch.float32)
        size = call.group.size
        shape = (2, batch, heads, call.chunk, columns)
        # One slot for each chunk of the buffer, those of one owner side by side.
        inputs = []
        for rank in range(size):
            owned = chunks_of(rank, size, call.sharding)
            held = [chunk for chunk in owned if chunk in call.own.chunks]
            slots = torch.empty((len(held), *shape), dtype=dtype, device=like.device)
            for slot, chunk in zip(slots, held):
                self._fill(slot, chunk, found)
            inputs.append(slots)
        self.own = inputs[call.group.rank]
        inputs[call.group.rank] = self.own[:0]
        self.outputs = [self.own.new_empty(len(call.sent_to(rank)), *shape) for rank in range(size)]
        self.exchange = Exchange(call.group, self.outputs, inputs)

    def _fill(self, slot: torch.Tensor, chunk: int, found: list[tuple[Piece, Gradients]]) -> None:
        """Write the sum of all pieces' dk and dv of a chunk to its slot (2, B, H, C, D)."""
        first = 0
        for other, rows in self.call.own.buffer:
            if other == chunk:
                break
            first += rows
        written = 0, 0
        for piece, gradients in found:
            begin, end = max(first, piece.keys[0]), min(first + rows, piece.keys[1])
            if end <= begin:
                continue
            source = slice(begin - piece.keys[0], end - piece.keys[0])
            begin, end = begin - first, end - first
            if written == (0, 0) and (begin, end) != (0, slot.shape[3]):
                slot.zero_()
            for target, gradient in zip(slot[:, :, :, begin:end], (gradients.dk, gradients.dv)):
                if written == (0, 0):
                    target.copy_(gradient[:, :, source])
                else:
                    target.add_(gradient[:, :, source])
            written = begin, end
        if written == (0, 0):
            slot.zero_()

    def wait(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Write the sums over all ranks to dk and dv (B, H, N / P, D), rounded once."""
        self.exchange.wait()
        call = self.call
        places: dict[int, list[torch.Tensor]] = {place: [] for place in range(len(call.owned))}
        for rank, parts in enumerate(self.outputs):
            if rank == call.group.rank:
                held = [place for place, chunk in enumerate(call.owned) if chunk in call.own.chunks]
                mine = self.own
            else:
                held, mine = call.sent_to(rank), parts
            for place, part in zip(held, mine):
                places[place].append(part)
        for place, terms in places.items():
            rows = slice(place * call.chunk, (place + 1) * call.chunk)
            total = None
            for part in terms:
                total = part if total is None else total.add_(part)
            for i, target in enumerate((dk, dv)):
                if total is None:
                    target[:, :, rows].zero_()
                else:
                    target[:, :, rows].copy_(total[i])
        self.outputs, self.own = [], self.own[:0]


def _places(sent: torch.Tensor, places: list[int]) -> torch.Tensor:
    """The chunks at these places, which are adjacent, as one contiguous view."""
    return sent[places[0] : places[-1] + 1] if places else sent[:0]


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
            runs = [x.narrow(-2, chunk * call.chunk, rows) for x in both for chunk, rows in call.own.buffer]
            half = len(runs) // 2
            found.append((torch.cat(runs[:half], dim=-2), torch.cat(runs[half:], dim=-2)))
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

    def build(
        self, index: int, section: tuple[int, int], k: torch.Tensor, v: torch.Tensor
    ) -> tuple[Piece, slice, Problem, Tensors]:
        """(the piece, its query heads, its problem, its tensors) of one section, whose buffers are k and v."""
        piece, given, group = self.call.own.pieces[index], self.tensors, self.problem.group_size
        heads = slice(section[0] * group, section[1] * group)
        keys = slice(*piece.keys)
        cos, sin = self.tables[index]
        tensors = given._replace(
            q=self.queries(given.q, piece, heads), k=k[:, :, keys], v=v[:, :, keys], cos=cos, sin=sin,
            sinks=None if given.sinks is None else given.sinks[heads],
        )  # fmt: skip
        problem = self.problem._replace(
            heads_q=heads.stop - heads.start, heads_kv=k.shape[1], len_q=piece.queries, len_k=piece.num_keys
        )
        if self.call.cu_seqlens is not None:
            cu_q, cu_k, longest = self.call.cu_seqlens[index]
            tensors = tensors._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
            problem = problem._replace(sequences=cu_q.shape[0] - 1, max_seqlen=longest)
        return piece, heads, problem, tensors


def _begin(call: Call, tensors: Tensors, *, backward: bool) -> list[tuple[tuple[int, int], _Keys]]:
    """Every section with its keys on their way: all at once, so that none waits for an attention to end."""
    k, v = tensors.k, tensors.v
    batch, heads, rows, columns = k.shape
    bytes_of_head = 2 * batch * rows * call.group.size * columns * k.element_size()
    sections = sections_of(heads, bytes_of_head, backward=backward)
    return [(s, _Keys(call, k[:, s[0] : s[1]], v[:, s[0] : s[1]])) for s in sections]


def forward(call: Call, problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of the local rows. problem: of the whole sequence, but for its lengths, which are the local rows."""
    o = like_input(tensors.q)
    wide = torch.float64 if o.dtype == torch.float64 else torch.float32
    lse = torch.empty(o.shape[:3], dtype=wide, device=o.device)
    covered = sum(piece.rows[1] - piece.rows[0] for piece in call.own.pieces)
    if covered < o.shape[2]:
        o.zero_()
        lse.fill_(float("-inf"))
    arriving = _begin(call, tensors, backward=False)
    pieces, plan = _Pieces(call, problem, tensors), _plan_of(call, problem, tensors)
    for section, keys in arriving:
        k, v = keys.wait()
        for index in range(len(call.own.pieces)):
            piece, heads, one, given = pieces.build(index, section, k, v)
            o_part, lse_part = local.forward(plan, one, given)
            rows = slice(*piece.rows)
            count = rows.stop - rows.start
            o[:, heads, rows].copy_(o_part[:, :, :count])
            lse[:, heads, rows].copy_(lse_part[:, :, :count])
    return o, lse


def backward(
    call: Call, problem: Problem, tensors: Tensors, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
) -> Gradients:
    """Gradients of the sum of all ranks' losses with respect to this rank's q, k and v, and this rank's part of sinks'.

    ``problem`` as in ``forward``.
    """
    dq, dk, dv = like_input(tensors.q), like_input(tensors.k), like_input(tensors.v)
    covered = sum(piece.rows[1] - piece.rows[0] for piece in call.own.pieces)
    if covered < dq.shape[2]:
        dq.zero_()
    weights = _WeightGradients(tensors, lse.dtype)
    arriving = _begin(call, tensors, backward=True)
    pieces, plan = _Pieces(call, problem, tensors), _plan_of(call, problem, tensors)
    leaving = []
    for section, keys in arriving:
        k, v = keys.wait()
        found = []
        for index in range(len(call.own.pieces)):
            piece, heads, one, given = pieces.build(index, section, k, v)
            rows = slice(*piece.rows)
            do_part, o_part = (pieces.queries(x, piece, heads) for x in (do, o))
            # To the kernels a ghost saw nothing.
            lse_part = pieces.queries(lse, piece, heads, float("-inf")).contiguous()
            gradients = local.backward(plan, one, given, do_part, o_part, lse_part)
            dq[:, heads, rows].copy_(gradients.dq[:, :, : rows.stop - rows.start])
            weights.add(gradients, heads)
            found.append((piece, gradients))
        leaving.append((section, _KeyGradients(call, tensors.k[:, section[0] : section[1]], found)))
        del k, v, found
    for section, sums in leaving:
        heads = slice(*section)
        sums.wait(dk[:, heads], dv[:, heads])
    return weights.join(dq, dk, dv)


class _WeightGradients:
    """This rank's parts of the gradients of sinks and of the norms' weights, summed over the pieces and sections."""

    def __init__(self, tensors: Tensors, dtype: torch.dtype):
        self.tensors = tensors
        self.sums = {
            name: torch.zeros_like(getattr(tensors, name), dtype=dtype)
            for name in ("sinks", "q_norm", "k_norm")
            if getattr(tensors, name) is not None
        }

    def add(self, gradients: Gradients, heads: slice) -> None:
        """Add those of a piece of these query heads."""
        for name, total in self.sums.items():
            (total[heads] if name == "sinks" else total).add_(getattr(gradients, f"d{name}"))

    def join(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Gradients:
        found = {f"d{name}": total.to(getattr(self.tensors, name).dtype) for name, total in self.sums.items()}
        return Gradients(dq, dk, dv, **found)


def _plan_of(call: Call, problem: Problem, tensors: Tensors) -> Plan | None:
    """The kernels that all pieces take."""
    length = problem.len_q * call.group.size
    # K and V lie in buffers of this room's own.
    like = tensors.v.new_empty(1, 1, 1, problem.head_dim)
    return local.plan_of(problem._replace(len_q=length, len_k=length), like)
