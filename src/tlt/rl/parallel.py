"""Data-parallel updates: process groups and their members, the shards of a batch, and sums over a group.

An update is cut into one shard per worker of the recipe. Each member computes a contiguous range of shards. Gradients
are summed in the order of shards. So the result is bitwise the same whatever the number of members.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import (  # documented, not exported
    FileStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from tlt.files import first_line

_BUCKET = 1 << 20  # most tensor elements in one collective, so that its buffers fit the cache of a CPU
_PATIENCE = timedelta(minutes=60)  # timeout for a slow member; connections of a lost member close earlier
_RENDEZVOUS = timedelta(seconds=10)  # timeout for all members to connect
_NCCL_STARTS = timedelta(seconds=120)  # timeout for NCCL's first collective, which connects the GPUs
SILENT = 30  # seconds without an answer from the other machine, after which a connection closes


class GroupBroken(RuntimeError):
    """Error of a collective after another member was lost. The work in progress must be repeated."""


class Broken(NamedTuple):
    """Result of a worker whose update was interrupted because another worker failed."""

    reason: str


class ProcessGroup(Protocol):
    """Process group whose members compute an update together. All members make the same calls in the same order."""

    rank: int
    size: int
    shards: int
    """number of workers in the recipe, and of shards of an update"""

    def sum_(self, tensor: Tensor) -> None:
        """Sum the tensor over all members, in place. All members get the same bits."""
        ...

    def sum_shards(self, own: Tensor) -> Tensor:
        """Return the sum [n] of the shards of all members, added in the order of shards. The bits are the same on all
        members, and for any number of members. `own` [m, n] has the m shards of this member (`numbers_of`)."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors [n] of all members, concatenated in the order of ranks. n may differ between members."""
        ...

    def leave(self) -> None:
        """Leave the group, so that no other member waits for this one."""
        ...


class Alone:
    """Process group with a single process."""

    rank, size, shards = 0, 1, 1

    def sum_(self, tensor: Tensor) -> None: ...

    def sum_shards(self, own: Tensor) -> Tensor:
        return in_order(own)

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def leave(self) -> None: ...


def numbers_of(rank: int, size: int, shards: int) -> range:
    """Return the shard indices of member `rank`, a contiguous range. Counts of two members differ by at most 1."""
    return range(rank * shards // size, (rank + 1) * shards // size)


def all_shards(groups: Sequence[Sequence[int]], work: Callable[[Sequence[int]], int], count: int) -> list[list[int]]:
    """Return `count` shards of response indices, each in prompt order. Some may be empty.

    Each of `groups` has the responses to one prompt. `work` returns the work of responses that are computed together.
    Groups stay whole, or all are cut into 2, 4, ... parts, whichever minimizes the work of the largest shard."""
    longest = max(map(len, groups), default=1)
    cuts = [1 << k for k in range(longest.bit_length())] + [longest]
    found = (_assign([own for whole in groups for own in _cut(whole, parts)], work, count) for parts in cuts)
    return [sorted(shard) for shard in min(found, key=lambda found: found[0])[1]]


def _cut(group: Sequence[int], parts: int) -> list[Sequence[int]]:
    borders = [len(group) * k // parts for k in range(parts + 1)]
    return [group[lo:hi] for lo, hi in pairwise(borders) if hi > lo]


def _assign(
    units: Sequence[Sequence[int]], work: Callable[[Sequence[int]], int], count: int
) -> tuple[int, list[list[int]]]:
    """Assign units (parts of groups) to `count` shards. Return the work of the largest shard, and the shards.

    Units are assigned in descending order of work, each to the shard with the least work (LPT: Graham, 1969)."""
    shards: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    sizes = [work(unit) for unit in units]
    for place in sorted(range(len(units)), key=lambda k: (-sizes[k], k)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[place]
        shards[lightest] += units[place]
    return max(loads), shards


def take_gradients(parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    """Return a finished shard's gradients in host memory, and clear the parameters' gradients for the next shard."""
    taken = [_host_memory(parameter) for parameter in parameters]
    for parameter, host in zip(parameters, taken, strict=True):
        host.zero_() if parameter.grad is None else host.copy_(parameter.grad, non_blocking=True)
    if parameters and parameters[0].is_cuda:
        torch.cuda.current_stream(parameters[0].device).synchronize()
    for parameter in parameters:
        parameter.grad = None
    return taken


def _host_memory(like: Tensor) -> Tensor:
    """Return an empty tensor in host memory. It is pinned if it takes copies from a GPU, so that no copy of a copy is
    made."""
    return torch.empty_like(like, device="cpu", pin_memory=like.is_cuda, requires_grad=False)


def sum_gradients(gradients: Sequence[Tensor], group: ProcessGroup, taken: Sequence[Sequence[Tensor]]) -> None:
    """Write the sum of the gradients of all shards of all members into `gradients`, which has the gradients of this
    member's last shard. `taken`: gradients of its other shards, in the order of shards."""
    if group.shards == 1:
        return
    shards = [*taken, gradients]
    for bucket in _buckets(gradients):
        pieces = (shard[k].reshape(-1)[piece] for shard in shards for k, piece in bucket)
        own = torch.cat([piece.to(gradients[0].device) for piece in pieces])  # `taken` is in host memory
        total = group.sum_shards(own.view(len(shards), -1))
        parts = total.split([piece.stop - piece.start for _, piece in bucket])
        for (k, piece), part in zip(bucket, parts, strict=True):
            gradients[k].view(-1)[piece] = part


def in_order(shards: Tensor) -> Tensor:
    """Return the sum [n] of the rows of `shards` [shards, n], added one after the other."""
    first, *rest = shards
    if not rest:
        return first
    total = first + rest[0]
    for shard in rest[1:]:
        total += shard
    return total


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[tuple[int, slice]]]:
    """Yield buckets: pieces of consecutive tensors of one dtype, with at most `_BUCKET` elements in all. A piece is the
    index of a tensor and a slice of its elements."""
    held: list[tuple[int, slice]] = []
    room = _BUCKET
    for k, gradient in enumerate(gradients):
        start = 0
        while start < gradient.numel():
            if held and (room == 0 or gradient.dtype != gradients[held[0][0]].dtype):
                yield held
                held, room = [], _BUCKET
            stop = min(start + room, gradient.numel())
            held.append((k, slice(start, stop)))
            room -= stop - start
            start = stop
    if held:
        yield held


# -- over processes ----------------------------------------------------------------------------------------------------


class Rendezvous:
    """Meeting point through which the members of a process group connect. It belongs to the process of one member.

    Its name is random, so that only processes that know its address can connect."""

    def __init__(self, place: str | Path) -> None:
        """Create the meeting point. If `place` is a Path, the meeting point is a file in this folder, and no port is
        opened. If `place` is a string, it is this machine's address, and a TCP port is opened there."""
        name = secrets.token_hex(16)
        if isinstance(place, Path):
            self.address = str(place / f"rendezvous_{name}")
            return
        self._store = TCPStore(place, 0, is_master=True, wait_for_workers=False, timeout=_RENDEZVOUS)
        self.address = f"{place}:{self._store.port}/{name}"


def _store_at(address: str, size: int) -> Store:
    if address.startswith("/"):
        store = FileStore(address, size)
        store.set_timeout(_RENDEZVOUS)
        return store
    where, _, name = address.rpartition("/")
    host, _, port = where.rpartition(":")
    return PrefixStore(name, TCPStore(host, int(port), timeout=_RENDEZVOUS))


class Processes:
    """Process group of several processes. Collectives use gloo on CPUs and NCCL on GPUs."""

    def __init__(self, address: str, rank: int, size: int, shards: int, device: torch.device) -> None:
        """Connect to the other members at a `Rendezvous` within 10 s, or 120 s on GPUs. Raises GroupBroken if one is
        missing."""
        self.rank, self.size, self.shards = rank, size, shards
        self._tell_others: Callable[[], None] = lambda: None
        on_gpu = device.type == "cuda"
        if on_gpu:  # else a failed collective returns before it fails, and the process is ended later
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        limit = _NCCL_STARTS if on_gpu else _RENDEZVOUS
        place = torch.device("cuda", device.index or 0) if on_gpu else None  # else NCCL guesses it by the rank
        if dist.is_initialized() and dist.get_world_size() == 1:  # vLLM made this group, and does not use it
            dist.destroy_process_group()
        try:
            store = _store_at(address, size)
            backend = "nccl" if on_gpu else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=place)
            dist.barrier()
            dist.distributed_c10d._set_pg_timeout(_PATIENCE)
            if place:
                nccl = dist.distributed_c10d._get_default_group()._get_backend(place)
                self._tell_others = watch_members(rank, size, nccl.abort)
            _end_silent_connections()
        except RuntimeError as error:  # torch raises subclasses of it
            self.leave()
            message = f"the {size} workers could not form a process group at {address}: {first_line(error)}"
            raise GroupBroken(message) from None

    def sum_(self, tensor: Tensor) -> None:
        self._call(dist.all_reduce, tensor)

    def sum_shards(self, own: Tensor) -> Tensor:
        """Return the sum of all shards. Each member sums one slice of every shard, and then the sums are gathered.

        With one shard per member this moves the same number of bytes as an all-reduce."""
        count, n = own.shape
        width = -(-n // self.size)
        whole = F.pad(own, (0, width * self.size - n)) if n % self.size else own  # padding takes as long as the sum
        parts = whole.view(count, self.size, width).transpose(0, 1)
        counts = [len(numbers_of(rank, self.size, self.shards)) for rank in range(self.size)]
        mine = own.new_empty(sum(counts), width)
        sent = parts.reshape(self.size * count, width)
        self._call(dist.all_to_all_single, mine, sent, counts, [count] * self.size)
        total = own.new_empty(self.size, width)
        self._call(dist.all_gather, list(total), in_order(mine))
        return total.view(-1)[:n]

    def gather(self, tensor: Tensor) -> Tensor:
        lengths = torch.zeros(self.size, dtype=torch.long, device=tensor.device)
        lengths[self.rank] = len(tensor)
        self.sum_(lengths)
        alike = [tensor.new_empty(int(lengths.max())) for _ in range(self.size)]
        own = torch.zeros_like(alike[0])
        own[: len(tensor)] = tensor
        self._call(dist.all_gather, alike, own)
        return torch.cat([part[:n] for part, n in zip(alike, lengths.tolist(), strict=True)])

    def _call(self, collective: Callable[..., Any], *arguments: Any) -> None:
        try:
            collective(*arguments)
        except RuntimeError as error:
            self.leave()
            raise GroupBroken(first_line(error)) from None

    def leave(self) -> None:
        """Close the connections, so that members that wait for this one get an error."""
        self._tell_others()
        if dist.is_initialized():
            dist.destroy_process_group()


def watch_members(rank: int, size: int, lost: Callable[[], None]) -> Callable[[], None]:
    """Call `lost` in another thread when a member of the default group ends or leaves. All members make this call. A
    member that leaves calls the returned function first.

    NCCL does not notice the end of a member on the same machine, and would wait for it. gloo does, because the member's
    connections close. So each member waits over gloo for a message, which a member sends only if it leaves."""
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(days=365))
    others = set(range(size)) - {rank}
    has_left = threading.Event()

    def wait_for(member: int) -> None:
        with suppress(RuntimeError):
            dist.recv(torch.zeros(1), src=member, group=group)
        if not has_left.is_set():
            lost()

    def tell_others() -> None:
        if not has_left.is_set():
            has_left.set()
            for member in others:
                with suppress(RuntimeError):  # it has ended
                    dist.send(torch.zeros(1), dst=member, group=group)

    for member in others:
        threading.Thread(target=wait_for, args=(member,), daemon=True).start()
    return tell_others


def _end_silent_connections() -> None:
    """Make all TCP connections of this process, gloo's and NCCL's included, close after `SILENT` seconds of silence.

    A machine that is cut off from the network closes no connection, and the system would wait for hours. A slow or
    stopped process is not affected, because its machine still answers."""
    for number in (path.name for path in Path("/proc/self/fd").glob("*")):  # empty outside Linux
        with suppress(OSError):  # the file descriptor was closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT // 3)
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT // 6)
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT)


def broken(error: RuntimeError) -> GroupBroken | None:
    """Return `error` as GroupBroken if it comes from a collective, such as one of FSDP, else None.

    An error of gloo is recognized by its text, which begins with the path of a source file of gloo."""
    if isinstance(error, GroupBroken):
        return error
    return GroupBroken(first_line(error)) if isinstance(error, dist.DistError) or "gloo" in str(error) else None


Join = Callable[[Any, int, int, int, torch.device], ProcessGroup]
"""function that joins a process group: (address of the rendezvous, rank, number of members, number of workers in the
recipe, device) -> process group"""


class Membership:
    """Process group that this worker is a member of. `workers`: number of workers in the recipe. `meets`: place where
    workers meet to form a group. It is a folder that they share on one machine, or this machine's address in the
    cluster. `join`: function that joins a group."""

    def __init__(self, meets: str | Path, workers: int, device: torch.device, join: Join) -> None:
        self.meets, self.workers, self.device, self._join = meets, workers, device, join
        self._rendezvous: Rendezvous | None = None
        self._group: tuple[Any, ProcessGroup] | None = None

    def open_rendezvous(self) -> str:
        """Open a rendezvous, where members of a new group meet, and return its address. It stays open until the next
        call of this method."""
        self._rendezvous = Rendezvous(self.meets)
        return self._rendezvous.address

    def enter(self, rendezvous: Any, rank: int, size: int) -> ProcessGroup:
        """Join the process group that meets at this address, as member `rank` of `size`, and return it. If the worker
        is in another group, it leaves that one first."""
        if self._group is None or self._group[0] != rendezvous:
            self.leave()
            self._group = rendezvous, self._join(rendezvous, rank, size, self.workers, self.device)
        return self._group[1]

    def leave(self) -> None:
        """Leave the group, if there is one. A group that lost a member cannot be used again."""
        if self._group:
            self._group[1].leave()
        self._group = None
