"""The processes that share a sequence, the check that they make the same call, and exchanges of tensors."""

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from fused_rope_attn.runtime.checks import kind_of

Parts = list[list[torch.Tensor]]  # by rank
_ERRORS = {error.__name__: error for error in (TypeError, ValueError, NotImplementedError, RuntimeError)}


class Group(NamedTuple):
    """P processes: the name of their process group, this process's rank in it (not its global rank), and P."""

    name: str
    rank: int
    size: int

    @property
    def processes(self) -> dist.ProcessGroup:
        return dist.distributed_c10d._resolve_process_group(self.name)  # type: ignore[arg-type]


def group_of(group: Any) -> Group:
    """Return the ``Group`` of a ProcessGroup or of a DeviceMesh of one dimension, or raise, naming ``group``."""
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
    return group_of(Group(name, 0, 0).processes)


class _Agreement:
    """The comparison of each call among the ranks of one group, through torch.distributed's default store.

    The GPU is not involved, and a rank with wrong arguments can say so without waiting for the others.
    """

    def __init__(self, group: Group, store: Any):
        ranks = dist.get_process_group_ranks(group.processes)
        self.group, self.store = group, store
        self.calls, self.connected = 0, False
        self.prefix = f"fused_rope_attn/{group.name}/{'_'.join(map(str, ranks))}"

    def publish(self, what: dict[str, Any] | tuple[str, str]) -> None:
        """Begin this rank's next call, and publish its description, or the name and message of its error."""
        self.calls += 1
        self.store.set(f"{self.prefix}/{self.calls}/{self.group.rank}", pickle.dumps(what))
        # A rank that has begun the previous call has read every description of the call before it.
        if self.calls > 2:
            self.store.delete_key(f"{self.prefix}/{self.calls - 2}/{self.group.rank}")

    def collect(self) -> list[Any]:
        """Return all ranks' descriptions of this call, by rank."""
        keys = [f"{self.prefix}/{self.calls}/{rank}" for rank in range(self.group.size)]
        try:
            several = self.store.has_extended_api()
            found = self.store.multi_get(keys) if several else [self.store.get(key) for key in keys]
        except RuntimeError as error:
            raise RuntimeError(
                f"group has {self.group.size} ranks, of which some did not make this call, number {self.calls}, before "
                f"the store's time-out: {error}"
            ) from error
        return [pickle.loads(x) for x in found]


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
    agreement = _agreement(group)
    agreement.publish(signature)
    said = agreement.collect()
    for rank, other in enumerate(said):
        if isinstance(other, tuple):
            raise _ERRORS[other[0]](f"rank {rank} of the group could not make this call: {other[1]}")
    # The first difference of the lowest rank that differs, so that all ranks say the same.
    for rank, other in enumerate(said):
        for name in dict.fromkeys((*said[0], *other)) if other != said[0] else ():
            if other.get(name) != said[0].get(name):
                raise ValueError(
                    f"{name} must be the same on all ranks of the group, but is {said[0].get(name)} on rank 0 and "
                    f"{other.get(name)} on rank {rank}"
                )


def fail_together(group: Group, error: Exception) -> NoReturn:
    """Tell the ranks that make this call with this one why it cannot, and raise ``error``."""
    if group.size > 1:
        name = type(error).__name__ if type(error).__name__ in _ERRORS else "RuntimeError"
        _agreement(group).publish((name, f"{error}"))
    raise error


class Exchange:
    """An exchange in flight: ``inputs[r]`` are sent to rank r and ``outputs[r]`` received from it, all contiguous, each
    any number of tensors.

    The rank's own lists are empty or hold empty tensors, and any other may. Every rank of the group must begin it, with
    the same ``most`` tensors that any pair of ranks exchanges. It holds its tensors until it is over, so that their
    memory is not reused. like: gives the device and the dtype.
    """

    def __init__(self, group: Group, outputs: Parts, inputs: Parts, like: torch.Tensor, most: int = 1):
        self.held: tuple = (outputs, inputs)
        self.works: list[Any] = []
        self.on_gpu = like.device.type == "cuda"
        if group.size == 1 or most == 0:
            return
        processes = group.processes
        if self.on_gpu and most == 1:
            # Without copies: each part is sent from, and received in, its own memory.
            none = like.new_empty(0)
            to, from_ = ([part[0] if part else none for part in parts] for parts in (outputs, inputs))
            self.works = [dist.all_to_all(to, from_, group=processes, async_op=True)]
            return
        agreement = _agreement(group)
        if self.on_gpu and not agreement.connected:  # a rank that has no message must connect, too
            dist.all_reduce(torch.zeros(1, device=like.device), group=processes)
            agreement.connected = True
        # One launch of NCCL for all of them. Several would wait for the kernels between them.
        operations = [
            dist.P2POp(operation, x, group=processes, group_peer=rank)
            for operation, parts in ((dist.isend, inputs), (dist.irecv, outputs))
            for rank, part in enumerate(parts)
            for x in part
            if x.numel()
        ]
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Let the current stream (with gloo, the host, once) wait for the outputs. Several streams may wait."""
        for work in self.works:
            work.wait()
        if not self.on_gpu:
            self.works = []
        self.held = ()


def exchange(group: Group, *several: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Send part r of each of ``several`` to rank r, and return the parts that arrive, (P, ...), of the same shapes."""
    found, running, rank = [], [], group.rank
    for sent in several:
        received = sent[0].new_empty(group.size, *sent[0].shape)
        received[rank].copy_(sent[rank])
        outputs, inputs = ([[] if r == rank else [x] for r, x in enumerate(parts)] for parts in (received, sent))
        running.append(Exchange(group, outputs, inputs, received))
        found.append(received)
    for one in running:
        one.wait()
    return found


def join_rows(group: Group, owners: Sequence[tuple[int, int]], x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return all ranks' rows along ``dim``, in the order of the sequence; owners: as of ``layout.owners_of``."""
    sent = x.unflatten(dim, (len(owners) // group.size, -1)).movedim(dim, 0).contiguous()
    (received,) = exchange(group, [sent] * group.size)
    return torch.cat([received[owner, place] for owner, place in owners], dim=dim)
