"""Memory of a process: size of the key-value cache and of the batch, free memory, and return of freed memory to the
operating system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
import torch

from tlt.attention.slot_memory import HeadShape
from tlt.config import EngineConfig
from tlt.draft.features import FeatureWindow
from tlt.engine.kv_cache import KVCache
from tlt.engine.noise_window import NoiseWindow

_SHARES = {"cuda": 0.8, "cpu": 0.25}  # shares of free memory; on a CPU, other workers and the update need memory too
_LOGITS_BYTES = 1 << 29  # largest size of a pass's logits
_MEAN = 4  # the longest possible sequence is about this many times as long as the mean one
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


def rows_that_fit(config: EngineConfig, device: torch.device, longest: int, tokens: Callable[[int], int]) -> int:
    """Return the largest number of rows in a batch. 'auto' means the largest power of two, up to the limit of this kind
    of device, for which the cache has room for a quarter of the `longest` sequence of each row. `tokens(rows)`: size of
    the cache in tokens that is left by the other memory of this number of rows."""
    rows = config.most_rows(device.type)
    while config.max_rows == "auto" and rows > 1 and tokens(rows) < rows * max(1, longest // _MEAN):
        rows //= 2
    return rows


def most_new(rows: int, vocab_size: int) -> int:
    """Return the largest number of new tokens per row in a pass over this many rows. The limit is 512 MiB for the
    logits."""
    return max(2, _LOGITS_BYTES // (rows * vocab_size * 4))


def other_memory(
    cache: KVCache, rows: int, new: int, noise: NoiseWindow, window: FeatureWindow | None
) -> tuple[int, int, int]:
    """Return the last arguments of `cache_tokens` for a rollout of up to `rows` rows at once, whose passes have
    up to `new` tokens per row.

    In addition to keys and values, a rollout needs memory for noise and hidden states, whose numbers of rows are powers
    of two, and for a pass's logits with their log-probs and sums with the noise."""
    vocab_size = noise.vocab_size
    stored, logits = 1 << (rows - 1).bit_length(), rows * min(new, most_new(rows, vocab_size)) * vocab_size
    others = stored * noise.row_bytes + (window.bytes_of(stored) if window else 0) + 3 * 4 * logits
    return cache.bytes + (window.bytes_of() if window else 0), others, cache.store.mask_bytes(new)


class RolloutMemory(NamedTuple):
    """Sizes of an engine's rollouts. They depend on the memory that is free when a rollout begins. `longest`: number of
    tokens of the longest possible sequence (0: not known). `kv_tokens`: limit of the cache (default: by `config`)."""

    config: EngineConfig
    cache: KVCache
    window: FeatureWindow | None
    vocab_size: int
    longest: int
    kv_tokens: int | None

    def sizes(self, depth: int, new: int) -> tuple[int, int, NoiseWindow]:
        """Return the largest number of rows, the limit of the cache in tokens, and the noise of these rows. `depth` and
        `new`: largest number of draft tokens of a row, and of its new tokens in a pass."""
        shape, mib = self.cache.store.shape, self.config.kv_memory_mb

        def noise_of(rows: int) -> NoiseWindow:
            return NoiseWindow(rows, self.vocab_size, depth, shape.device)

        def tokens_of(rows: int) -> int:
            others = other_memory(self.cache, rows, new, noise_of(rows), self.window)
            return self.kv_tokens or cache_tokens(mib, shape, *others)

        rows = rows_that_fit(self.config, shape.device, self.longest, tokens_of)
        return rows, tokens_of(rows), noise_of(rows)


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
