"""Data-parallel updates: who takes which responses, and sums over the group of those who do.

A batch is cut into as many shards as the recipe has workers, and gradients are summed in the order of shards: so the
bits depend neither on who was fast nor on how many members there are to compute them.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
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

_BUCKET = 1 << 24  # numbers that are summed at once
_PATIENCE = timedelta(minutes=60)  # with a member that is slow; the connections of one that is lost end
_RENDEZVOUS = timedelta(seconds=10)
SILENT = 30  # seconds without a sign of life from the machine at the other end, after which a connection ends


class GroupBroken(RuntimeError):
    """Another member is gone, so a sum has no result: what was under way must be done again."""


class Broken(NamedTuple):
    """What a member's part of joint work came to as another member was gone."""

    reason: str


Owners = Sequence[Sequence[int]]
"""[member] -> numbers of its shards; each shard of an update has one owner"""


class ProcessGroup(Protocol):
    """Those who update together. Calls are made by all members, in the same order."""

    rank: int
    size: int
    shards: int
    """that a batch is cut into; a member has one, or several where there are fewer members than shards"""

    def sum_(self, tensor: Tensor) -> None:
        """In place; all members get the same bits."""
        ...

    def sum_shards(self, own: Tensor, owners: Owners) -> Tensor:
        """[own shards, n] of every member -> [n], summed in the order of shards: on all members the same bits, and for
        any number of members. `owners` says which shards `own` has, in this order."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """[n] of every member, n its own -> all of them, in order of rank."""
        ...

    def leave(self) -> None:
        """No other member waits for this one any more."""
        ...


class Alone:
    rank, size, shards = 0, 1, 1

    def sum_(self, tensor: Tensor) -> None: ...

    def sum_shards(self, own: Tensor, owners: Owners) -> Tensor:
        return in_order(own, owners)

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def leave(self) -> None: ...


def numbers_of(rank: int, size: int, shards: int) -> range:
    """The shards of a member: they lie beside each other, and differ by one in number between members."""
    return range(rank * shards // size, (rank + 1) * shards // size)


def own_shards(
    groups: Sequence[Sequence[int]], work: Callable[[Sequence[int]], int], group: ProcessGroup
) -> list[list[int]]:
    """Return this rank's part of `all_shards`."""
    shards = all_shards(groups, work, group.shards)
    return [shards[number] for number in numbers_of(group.rank, group.size, group.shards)]


def all_shards(groups: Sequence[Sequence[int]], work: Callable[[Sequence[int]], int], count: int) -> list[list[int]]:
    """Return `count` shards of an optimizer step's responses, each in prompt order; some may be empty.

    `groups` are responses to one prompt each, and `work` is that of responses which stay together. Groups stay whole,
    or all of them are cut into 2, 4, .. parts, whichever leaves least work to the shard that has most."""
    longest = max(map(len, groups), default=1)
    cuts = [1 << k for k in range(longest.bit_length())] + [longest]
    dealt = (_deal([own for whole in groups for own in _cut(whole, parts)], work, count) for parts in cuts)
    return [sorted(shard) for shard in min(dealt, key=lambda found: found[0])[1]]


def _cut(group: Sequence[int], parts: int) -> list[Sequence[int]]:
    borders = [len(group) * k // parts for k in range(parts + 1)]
    return [group[lo:hi] for lo, hi in pairwise(borders) if hi > lo]


def _deal(
    units: Sequence[Sequence[int]], work: Callable[[Sequence[int]], int], count: int
) -> tuple[int, list[list[int]]]:
    """Deal out units to `count` shards: the most work that one has, and the shards.

    The largest is dealt out first, each to the shard that has least work (LPT: Graham, 1969)."""
    shards: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    sizes = [work(unit) for unit in units]
    for place in sorted(range(len(units)), key=lambda k: (-sizes[k], k)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[place]
        shards[lightest] += units[place]
    return max(loads), shards


def take_gradients(parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    """The gradients of a shard that is done, in host memory; the next one begins with none."""
    taken = [torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.cpu() for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken


def sum_gradients(
    gradients: Sequence[Tensor], group: ProcessGroup, shards: Sequence[Sequence[Tensor]], owners: Owners
) -> None:
    """Write the sum over all shards into `gradients`. `shards` are the gradients of this member's own, in the order of
    `owners`; `gradients` may be among them."""
    if group.shards == 1:
        return
    for bucket in _buckets(gradients):
        own = [torch.cat([shard[place].reshape(-1) for place in bucket]) for shard in shards]
        total = group.sum_shards(torch.stack([shard.to(gradients[0].device) for shard in own]), owners)
        parts = total.split([gradients[place].numel() for place in bucket])
        for place, part in zip(bucket, parts, strict=True):
            gradients[place].copy_(part.view_as(gradients[place]))


def in_order(shards: Tensor, owners: Owners) -> Tensor:
    """[shards, n], those of each member together -> [n], the sum in the order of shards."""
    numbers = [number for own in owners for number in own]
    first, *rest = (shards[row] for row in sorted(range(len(numbers)), key=numbers.__getitem__))
    if not rest:
        return first
    total = first + rest[0]
    for shard in rest[1:]:
        total += shard
    return total


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[int]]:
    """Places of tensors of about `_BUCKET` numbers together and of one dtype."""
    held: list[int] = []
    for place, gradient in enumerate(gradients):
        count = sum(gradients[k].numel() for k in held)
        if held and (count + gradient.numel() > _BUCKET or gradient.dtype != gradients[held[0]].dtype):
            yield held
            held = []
        held.append(place)
    if held:
        yield held


# -- over processes ----------------------------------------------------------------------------------------------------


class Rendezvous:
    """Where the members of a group find each other; it belongs to the process of one of them, and ends with it. Nobody
    finds it who was not told its name."""

    def __init__(self, place: str | Path) -> None:
        """In a folder of this machine, through no open port; or at this machine's address."""
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
    """A group of processes, over gloo on CPUs and NCCL on GPUs."""

    def __init__(self, address: str, rank: int, size: int, shards: int, device: torch.device) -> None:
        """Waits for the others for at most 10 s. Raises GroupBroken if they do not come."""
        self.rank, self.size, self.shards = rank, size, shards
        backend = "nccl" if device.type == "cuda" else "gloo"
        if dist.is_initialized() and dist.get_world_size() == 1:  # vLLM's in this process, which has no use for it
            dist.destroy_process_group()
        try:
            store = _store_at(address, size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_RENDEZVOUS)
            dist.barrier()
            dist.distributed_c10d._set_pg_timeout(_PATIENCE)
            _end_silent_connections()
        except RuntimeError as error:  # torch raises subclasses of it
            self.leave()
            raise GroupBroken(f"{size} workers did not meet at {address}: {_first_line(error)}") from None

    def sum_(self, tensor: Tensor) -> None:
        self._call(dist.all_reduce, tensor)

    def sum_shards(self, own: Tensor, owners: Owners) -> Tensor:
        """Each member sums a part of all shards, and gives it to the others: as many bytes as an all-reduce moves."""
        count, n = own.shape
        width = -(-n // self.size)
        whole = F.pad(own, (0, width * self.size - n)) if n % self.size else own  # a copy takes as long as the sum
        parts = whole.view(count, self.size, width).transpose(0, 1)
        counts = [len(numbers) for numbers in owners]
        mine = own.new_empty(sum(counts), width)
        sent = parts.reshape(self.size * count, width)
        self._call(dist.all_to_all_single, mine, sent, counts, [count] * self.size)
        total = own.new_empty(self.size, width)
        self._call(dist.all_gather, list(total), in_order(mine, owners))
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
            raise GroupBroken(_first_line(error)) from None

    def leave(self) -> None:
        """Closes the connections: those who wait for this one notice."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _end_silent_connections() -> None:
    """Of this process, gloo's and NCCL's among them. A machine that is cut off closes nothing, and the system waits for
    it for hours; the machine of a process that is slow, or stopped, still answers."""
    for number in (path.name for path in Path("/proc/self/fd").glob("*")):  # elsewhere than on Linux: of none
        with suppress(OSError):  # closed by now
            if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT // 3)
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT // 6)
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT)


def broken(error: RuntimeError) -> GroupBroken | None:
    """What was raised amid a collective that torch itself began, if it was that. Of gloo's errors only the text tells,
    which begins with a path of its sources."""
    if isinstance(error, GroupBroken):
        return error
    return GroupBroken(_first_line(error)) if isinstance(error, dist.DistError) or "gloo" in str(error) else None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
