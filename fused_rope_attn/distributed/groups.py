"""The processes that share a sequence: who they are, and how they make sure that they make the same call."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from fused_rope_attn.distributed.layout import chunks_of, owner_of
from fused_rope_attn.runtime.checks import kind_of

_ERRORS = {error.__name__: error for error in (TypeError, ValueError, NotImplementedError, RuntimeError)}


def _resolve(name: str) -> Any:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


class Group(NamedTuple):
    """P processes as one of them sees them: the name by which operators find their process group, this process's rank
    among them, which is not its global rank, and P."""

    name: str
    rank: int
    size: int

    @property
    def processes(self) -> dist.ProcessGroup:
        return _resolve(self.name)


def group_of(group: Any) -> Group:
    """The ``Group`` of a ProcessGroup or of a DeviceMesh of one dimension.

    Raises TypeError and ValueError naming ``group``.
    """
    if isinstance(group, dist.ProcessGroup):
        return Group(group.group_name, group.rank(), group.size())
    get_group = getattr(group, "get_group", None)
    if get_group is None:
        raise TypeError(f"group must be a ProcessGroup or a DeviceMesh of one dimension, but is {kind_of(group)}")
    if group.ndim != 1:
        raise ValueError(f"group must be a DeviceMesh of one dimension, but has {group.ndim}: index it by a name")
    processes = get_group()
    return Group(processes.group_name, processes.rank(), processes.size())


def group_named(name: str) -> Group:
    """The ``Group`` of the process group of this name."""
    processes = _resolve(name)
    return Group(name, processes.rank(), processes.size())


class _Failure(NamedTuple):
    """An error of one rank's own arguments."""

    kind: str
    message: str


class _Agreement:
    """What the ranks of one group tell one another about each call, by the store through which they found each other.

    The GPU is not involved, and a rank whose own arguments are wrong can say so without waiting for the others.
    """

    def __init__(self, group: Group, store: Any):
        ranks = dist.get_process_group_ranks(group.processes)
        self.group, self.store = group, store
        self.calls = 0
        self.prefix = f"fused_rope_attn/{group.name}/{'_'.join(map(str, ranks))}"
        self.pickled: dict[tuple, bytes] = {}

    def _key(self, call: int, rank: int) -> str:
        return f"{self.prefix}/{call}/{rank}"

    def publish(self, what: bytes) -> None:
        """Begin this rank's next call with ``what`` it says of it."""
        self.calls += 1
        self.store.set(self._key(self.calls, self.group.rank), what)
        # Who has begun the call before this one has read all that was said of the one before that.
        if self.calls > 2:
            self.store.delete_key(self._key(self.calls - 2, self.group.rank))

    def collect(self) -> list[bytes]:
        """What all ranks say of this call, by rank."""
        keys = [self._key(self.calls, rank) for rank in range(self.group.size)]
        try:
            if self.store.has_extended_api():
                return self.store.multi_get(keys)
            return [self.store.get(key) for key in keys]
        except RuntimeError as error:
            raise RuntimeError(
                f"group has {self.group.size} ranks, of which some did not make this call, number {self.calls}, before "
                f"the store's time-out: {error}"
            ) from error


_agreements: dict[Group, _Agreement] = {}


def _agreement(group: Group) -> _Agreement:
    store: Any = dist.distributed_c10d._get_default_store()
    found = _agreements.get(group)
    if found is None or found.store is not store:  # the groups were destroyed since, and others made
        found = _agreements[group] = _Agreement(group, store)
    return found


def agree(group: Group, signature: dict[str, Any]) -> None:
    """Make sure that all ranks make the same call, before any of them waits for another's data.

    signature: what must be equal on all ranks, by the names that messages use. Raises on every rank: ValueError naming
    what differs, or the error that another rank found in its own arguments.
    """
    if group.size == 1:
        return
    agreement, key = _agreement(group), tuple(signature.items())
    own = agreement.pickled.get(key)
    if own is None:
        own = agreement.pickled[key] = pickle.dumps(signature)
    agreement.publish(own)
    said = agreement.collect()
    if all(x == own for x in said):
        return
    others = [pickle.loads(x) for x in said]
    for rank, other in enumerate(others):
        if isinstance(other, _Failure):
            raise _ERRORS[other.kind](f"rank {rank} of the group could not make this call: {other.message}")
    # The first difference of the lowest rank that differs, so that all ranks say the same.
    for rank, other in enumerate(others):
        for name in dict.fromkeys((*others[0], *other)):
            if other.get(name) != others[0].get(name):
                raise ValueError(
                    f"{name} must be the same on all ranks of the group, but is {others[0].get(name)} on rank 0 and "
                    f"{other.get(name)} on rank {rank}"
                )


def fail_together(group: Group, error: Exception) -> NoReturn:
    """Tell the ranks that make this call with this one why it cannot, and raise ``error``."""
    if group.size > 1:
        name = type(error).__name__
        failure = _Failure(name if name in _ERRORS else "RuntimeError", f"{error}")
        _agreement(group).publish(pickle.dumps(failure))
    raise error


class Exchange:
    """An exchange under way: ``inputs[r]`` goes to rank r and ``outputs[r]`` comes from it, all contiguous.

    Those of the rank itself are empty, as any may be. Every rank of the group must begin it. It holds its tensors until
    it is over, so that nobody else gets their memory.
    """

    def __init__(self, group: Group, outputs: list[torch.Tensor], inputs: list[torch.Tensor]):
        self.outputs, self.inputs = list(outputs), list(inputs)
        self.flat: torch.Tensor | None = None
        self.work: Any = None
        if group.size == 1:
            return
        processes = group.processes
        if inputs[0].device.type == "cuda":
            # Each part goes from and to where it lies.
            self.work = dist.all_to_all(self.outputs, self.inputs, group=processes, async_op=True)
            return
        # gloo has the flat form only, and not for every dtype.
        self.sizes = [x.nbytes for x in self.outputs]
        self.flat = torch.zeros(sum(self.sizes), dtype=torch.uint8)
        self.sent = torch.cat([x.reshape(-1).view(torch.uint8) for x in self.inputs])
        given = [x.nbytes for x in self.inputs]
        self.work = dist.all_to_all_single(self.flat, self.sent, self.sizes, given, group=processes, async_op=True)

    def wait(self) -> None:
        """Let the current stream go on when the outputs are there; with gloo, the host."""
        if self.work is not None:
            self.work.wait()
        if self.flat is not None:
            for x, part in zip(self.outputs, self.flat.split(self.sizes)):
                if part.numel():
                    x.view(-1).copy_(part.view(x.dtype))
        self.outputs, self.inputs, self.flat = [], [], None


def join_rows(group: Group, sharding: str, x: torch.Tensor, dim: int) -> torch.Tensor:
    """All ranks' rows along ``dim``, in the order of the sequence. Every rank must call it."""
    size, rank = group.size, group.rank
    parts = len(chunks_of(rank, size, sharding))
    sent = x.unflatten(dim, (parts, -1)).movedim(dim, 0).contiguous()
    inputs = [sent if other != rank else sent[:0] for other in range(size)]
    outputs = [torch.empty_like(sent) if other != rank else sent[:0] for other in range(size)]
    Exchange(group, outputs, inputs).wait()
    outputs[rank] = sent
    every = [owner_of(chunk, size) for chunk in range(parts * size)]
    return torch.cat([outputs[owner][place] for owner, place in every], dim=dim)
