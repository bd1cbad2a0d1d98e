"""Data-parallel updates: who takes which responses, and sums over the group of those who do.

For a given number of members every sum has one order, so its bits do not depend on who was fast.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # documented, not exported
    FileStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

_BUCKET = 1 << 24  # numbers that are summed at once
_PATIENCE = timedelta(minutes=60)  # with a member that is slow; one that is lost closes its connections
_RENDEZVOUS = timedelta(seconds=10)


class GroupBroken(RuntimeError):
    """Another member is gone, so a sum has no result: what was under way must be done again."""


class Broken(NamedTuple):
    """What a member's part of joint work came to as another member was gone."""

    reason: str


class ProcessGroup(Protocol):
    """Those who update together. Calls are made by all members, in the same order."""

    rank: int
    size: int

    def sum_(self, tensor: Tensor) -> None:
        """In place; all members get the same bits."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """[n] of every member, n its own -> all of them, in order of rank."""
        ...

    def leave(self) -> None:
        """No other member waits for this one any more."""
        ...


class Alone:
    rank, size = 0, 1

    def sum_(self, tensor: Tensor) -> None: ...

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def leave(self) -> None: ...


def shard(members: Sequence[int], tokens: Sequence[int], group: ProcessGroup) -> list[int]:
    """This rank's share of an optimizer step's responses, each of so many `tokens`, in prompt order; it may be empty.
    The longest is dealt out first, each to whom has least (LPT: Graham, 1969), so that all have about as much work."""
    shares: list[list[int]] = [[] for _ in range(group.size)]
    loads = [0] * group.size
    for place in sorted(range(len(members)), key=lambda k: (-tokens[k], k)):
        rank = loads.index(min(loads))
        loads[rank] += tokens[place]
        shares[rank].append(place)
    return [members[place] for place in sorted(shares[group.rank])]


def sum_gradients(parameters: Sequence[torch.nn.Parameter], group: ProcessGroup) -> None:
    """Give every member the sum of all members' gradients."""
    if group.size == 1:
        return
    for bucket in _buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        group.sum_(flat)
        for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    held: list[Tensor] = []
    for gradient in gradients:
        if held and (sum(g.numel() for g in held) + gradient.numel() > _BUCKET or gradient.dtype != held[0].dtype):
            yield held
            held = []
        held.append(gradient)
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

    def __init__(self, address: str, rank: int, size: int, device: torch.device) -> None:
        """Waits for the others for at most 10 s. Raises GroupBroken if they do not come."""
        self.rank, self.size = rank, size
        backend = "nccl" if device.type == "cuda" else "gloo"
        if dist.is_initialized() and dist.get_world_size() == 1:  # vLLM's in this process, which has no use for it
            dist.destroy_process_group()
        try:
            store = _store_at(address, size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_RENDEZVOUS)
            dist.barrier()
            dist.distributed_c10d._set_pg_timeout(_PATIENCE)
        except RuntimeError as error:  # torch raises subclasses of it
            self.leave()
            raise GroupBroken(f"{size} workers did not meet at {address}: {_first_line(error)}") from None

    def sum_(self, tensor: Tensor) -> None:
        self._call(dist.all_reduce, tensor)

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


def broken(error: RuntimeError) -> GroupBroken | None:
    """What was raised amid a collective that torch itself began, if it was that. Of gloo's errors only the text tells,
    which begins with a path of its sources."""
    if isinstance(error, GroupBroken):
        return error
    return GroupBroken(_first_line(error)) if isinstance(error, dist.DistError) or "gloo" in str(error) else None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
