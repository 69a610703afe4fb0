"""The processes that share a sequence, the check that they make the same call, and exchanges of tensors."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from fused_rope_attn.distributed.cuts import chunks_of, owners_of
from fused_rope_attn.runtime.checks import kind_of

_ERRORS = {error.__name__: error for error in (TypeError, ValueError, NotImplementedError, RuntimeError)}


def _resolve(name: str) -> Any:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


class Group(NamedTuple):
    """P processes: the name of their process group, this process's rank in it (not its global rank), and P."""

    name: str
    rank: int
    size: int

    @property
    def processes(self) -> dist.ProcessGroup:
        return _resolve(self.name)


def group_of(group: Any) -> Group:
    """Return the ``Group`` of a ProcessGroup or of a DeviceMesh of one dimension.

    Raises TypeError and ValueError naming ``group``.
    """
    if not isinstance(group, dist.ProcessGroup):
        get_group = getattr(group, "get_group", None)
        if get_group is None:
            raise TypeError(f"group must be a ProcessGroup or a DeviceMesh of one dimension, but is {kind_of(group)}")
        if group.ndim != 1:
            raise ValueError(f"group must be a DeviceMesh of one dimension, but has {group.ndim}: index it by a name")
        group = get_group()
    return Group(group.group_name, group.rank(), group.size())


def group_named(name: str) -> Group:
    """Return the ``Group`` of the process group of this name."""
    return group_of(_resolve(name))


# Most signatures that a group keeps in pickled form.
_MOST_PICKLED = 1024


class _Failure(NamedTuple):
    """An error of one rank's own arguments."""

    kind: str
    message: str


class _Agreement:
    """The comparison of each call among the ranks of one group, through torch.distributed's default store.

    The GPU is not involved, and a rank with wrong arguments can say so without waiting for the others.
    """

    def __init__(self, group: Group, store: Any):
        ranks = dist.get_process_group_ranks(group.processes)
        self.group, self.store = group, store
        self.calls = 0
        self.connected = False
        self.prefix = f"fused_rope_attn/{group.name}/{'_'.join(map(str, ranks))}"
        self.pickled: dict[tuple, bytes] = {}

    def _key(self, call: int, rank: int) -> str:
        return f"{self.prefix}/{call}/{rank}"

    def publish(self, what: bytes) -> None:
        """Begin this rank's next call, and publish ``what`` describes it."""
        self.calls += 1
        self.store.set(self._key(self.calls, self.group.rank), what)
        # A rank that has begun the previous call has read every description of the call before it.
        if self.calls > 2:
            self.store.delete_key(self._key(self.calls - 2, self.group.rank))

    def collect(self) -> list[bytes]:
        """Return all ranks' descriptions of this call, by rank."""
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
    if found is None or found.store is not store:  # the groups have been destroyed and made again
        found = _agreements[group] = _Agreement(group, store)
    return found


def agree(group: Group, signature: dict[str, Any]) -> None:
    """Make sure that all ranks make the same call, before any of them waits for another's data.

    signature: the properties that must be equal on all ranks, by the names that messages use. Raises on every rank:
    ValueError naming the property that differs, or the error that another rank found in its own arguments.
    """
    if group.size == 1:
        return
    agreement, key = _agreement(group), tuple(signature.items())
    own = agreement.pickled.get(key)
    if own is None:
        if len(agreement.pickled) >= _MOST_PICKLED:  # every packed batch has one of its own
            agreement.pickled.clear()
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
    """An exchange in flight: ``inputs[r]`` are sent to rank r and ``outputs[r]`` received from it, all contiguous, each
    any number of tensors.

    The rank's own lists are empty or hold empty tensors, and any other may. Every rank of the group must begin it. It
    holds its tensors until it is over, so that their memory is not reused.

    Args:
        several: some pair of ranks exchanges several tensors at once. All ranks must say the same.
    """

    def __init__(
        self,
        group: Group,
        outputs: list[list[torch.Tensor]],
        inputs: list[list[torch.Tensor]],
        like: torch.Tensor,
        *,
        several: bool = False,
    ):
        """like: gives the device and the dtype."""
        self.outputs, self.inputs = [x for part in outputs for x in part], [x for part in inputs for x in part]
        self.flat: torch.Tensor | None = None
        self.works: list[Any] = []
        if group.size == 1:
            return
        processes = group.processes
        if like.device.type != "cuda":
            # gloo has the flat form only, and not for every dtype.
            self.sizes = [x.nbytes for x in self.outputs]
            self.flat = torch.zeros(sum(self.sizes), dtype=torch.uint8)
            self.sent = torch.cat([self.flat[:0], *(x.reshape(-1).view(torch.uint8) for x in self.inputs)])
            taken, given = ([sum(x.nbytes for x in part) for part in parts] for parts in (outputs, inputs))
            self.works.append(
                dist.all_to_all_single(self.flat, self.sent, taken, given, group=processes, async_op=True)
            )
        elif several:
            # One launch of NCCL for all of them. Several would wait for the kernels between them.
            _connect(group, like.device)
            operations = [
                dist.P2POp(operation, x, group=processes, group_peer=rank)
                for operation, parts in ((dist.isend, inputs), (dist.irecv, outputs))
                for rank, part in enumerate(parts)
                for x in part
                if x.numel()
            ]
            if operations:
                self.works += dist.batch_isend_irecv(operations)
        else:
            # Without copies: each part is sent from, and received in, its own memory.
            none = like.new_empty(0)
            to, from_ = ([part[0] if part else none for part in parts] for parts in (outputs, inputs))
            self.works.append(dist.all_to_all(to, from_, group=processes, async_op=True))

    def wait(self) -> None:
        """Let the current stream (with gloo, the host) wait for the outputs. Several streams may wait."""
        for work in self.works:
            work.wait()
        if self.flat is not None:
            for x, part in zip(self.outputs, self.flat.split(self.sizes)):
                if part.numel():
                    x.view(-1).copy_(part.view(x.dtype))
            self.works = []
        self.outputs, self.inputs, self.flat = [], [], None


def _connect(group: Group, device: torch.device) -> None:
    """Let NCCL connect all ranks of a group. Sends and receives may not do so, because a rank may have none of them."""
    agreement = _agreement(group)
    if not agreement.connected:
        dist.all_reduce(torch.zeros(1, device=device), group=group.processes)
        agreement.connected = True


def others(parts: Sequence[torch.Tensor], rank: int) -> list[list[torch.Tensor]]:
    """Return one part for every rank but ``rank``, as ``Exchange`` takes them."""
    return [[] if other == rank else [part] for other, part in enumerate(parts)]


def join_rows(group: Group, sharding: str, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return all ranks' rows along ``dim``, in the order of the sequence. Every rank must call it."""
    size, rank = group.size, group.rank
    parts = len(chunks_of(rank, size, sharding))
    sent = x.unflatten(dim, (parts, -1)).movedim(dim, 0).contiguous()
    outputs = [torch.empty_like(sent) if other != rank else sent for other in range(size)]
    Exchange(group, others(outputs, rank), others([sent] * size, rank), sent).wait()
    return torch.cat([outputs[owner][place] for owner, place in owners_of(size, sharding)], dim=dim)
