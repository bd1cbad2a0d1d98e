"""Memory of a process: size of the key-value cache, free memory, and return of freed memory to the operating system."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Literal

import psutil
import torch

from tlt.attention.slot_memory import HeadShape

_SHARES = {"cuda": 0.8, "cpu": 0.25}  # shares of free memory; on a CPU, other workers and the update need memory too
_GROUPS = {  # version of Linux control groups -> three files (limit, use, statistics), name of the reclaimable use
    2: ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    1: ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
}


def cache_tokens(mib: int | Literal["auto"], shape: HeadShape, held: int = 0, others: int = 0, masks: int = 0) -> int:
    """Return the number of tokens whose keys and values fit in `mib` MiB. 'auto' means 80 % of a CUDA device's free
    memory, or 25 % of the host's. `held`: bytes that the cache and `others` already have. `others`: bytes that a
    rollout needs for other purposes. They are left free on a CUDA device; the host's other 75 % suffice for them.
    `masks`: bytes of the attention masks of a pass, for each token of the cache."""
    if mib != "auto":
        return max(1, mib * 2**20 // shape.bytes_per_token)
    size = free_bytes(shape.device) + held - (others if shape.device.type == "cuda" else 0)
    size *= _SHARES[shape.device.type]
    return max(1, int(size) // (shape.bytes_per_token + masks))


def free_bytes(device: torch.device, groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free bytes of a CUDA device, or of the host within the limit of this process's container."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # free inside PyTorch
        return torch.cuda.mem_get_info(device)[0] + unused
    return min([psutil.virtual_memory().available, *_left_in_groups(groups)])


def _left_in_groups(folder: Path) -> list[int]:
    for *files, name in _GROUPS.values():
        try:
            limit, use, statistics = ((folder / file).read_text() for file in files)
            reclaimable = dict(line.split() for line in statistics.splitlines())[name]
            return [int(limit) - int(use) + int(reclaimable)]
        except (OSError, ValueError, KeyError):  # no such version, or no limit ("max")
            continue
    return []


class _MallocStatistics(ctypes.Structure):
    """`struct mallinfo2` of the C library. `fordblks` are the bytes of its free blocks."""

    _fields_ = (("_others", 8 * ctypes.c_size_t), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


def return_freed_memory() -> None:
    """Return the freed memory of this process to the operating system, if it is more than 25 % of the host's free
    memory.

    The C library of Linux keeps gigabytes of freed memory after each update. But returning it each time made steps of a
    small model 1.1 times as long, because the system clears every page again."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):  # absent from other C libraries
        return
    library.mallinfo2.restype = _MallocStatistics
    if library.mallinfo2().fordblks > _SHARES["cpu"] * free_bytes(torch.device("cpu")):
        library.malloc_trim(0)
