"""Replay of a fixed computation as a CUDA graph: one call starts all its kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from weakref import ref

import torch
from torch import Tensor

from tlt.files import first_line


class CaptureError(ValueError):
    """Error for a computation that cannot be captured. The message names the remedy."""


Compute = Callable[[], tuple[Tensor, ...]]


class Addresses:
    """Tensors whose addresses captured graphs have. The references are weak, so that the memory of a tensor which
    nobody else uses is freed."""

    def __init__(self) -> None:
        self._known: list[ref[Tensor]] = []

    def have_changed(self, *tensors: Tensor) -> bool:
        """Return whether these are other tensors than in the previous call."""
        before, self._known = [one() for one in self._known], [ref(tensor) for tensor in tensors]
        return [*map(id, before)] != [*map(id, tensors)]


class Replayed:
    """Computation that is captured as a CUDA graph and then replayed. It reads tensors that the caller fills before
    each call. Each call overwrites the result of the previous call.

    The first call runs `compute` without a capture, because a capture takes as long as a call and only later calls gain
    from it. The second call captures a graph, and later calls replay it. On a CPU every call runs `compute`. `compute`
    must not make the host wait for the device. It is passed at each call, because a stored reference could keep a graph
    and its memory alive."""

    slow_calls = 0
    """number of calls in this process that ran or captured `compute`; a round with such a call is slow"""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graph: torch.cuda.CUDAGraph | None = None
        self._result: tuple[Tensor, ...] | None = None

    def __call__(self, compute: Compute) -> tuple[Tensor, ...]:
        if self.device.type != "cuda":
            return compute()
        if self.graph is not None:
            self.graph.replay()
        else:
            Replayed.slow_calls += 1
            if self._result is None:
                self._result = compute()
                return self._result
            self._capture(compute).replay()
        assert self._result is not None, "`compute` returned no result"
        return self._result

    def _capture(self, compute: Compute) -> torch.cuda.CUDAGraph:
        """Capture `compute` as a CUDA graph and return the graph. `torch.cuda.graph` is not used, because it also
        empties the allocator's cache, which takes longer than a pass."""
        graph, (stream, keeper) = torch.cuda.CUDAGraph(), _shared(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream), _no_collection():
                graph.capture_begin(keeper.pool(), "thread_local")  # other threads may train a drafter
                try:
                    self._result = compute()
                finally:
                    graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = first_line(error)
            raise CaptureError(f"no CUDA graph can be captured ({reason}): set model.cuda_graphs = false") from error
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.graph = graph
        return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector, because a capture fails if another graph is freed during it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def _shared(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]:
    """Return the stream for all captures of a device, and a graph with the memory pool for all graphs.

    All captures use one stream, because cuBLAS keeps a workspace for each stream (32 MiB on an H100). All graphs use
    one memory pool, because they are replayed one after the other. A result keeps its memory while a tensor refers to
    it. The returned graph keeps the pool alive, because PyTorch fails on a pool without graphs."""
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=device)
        graph.capture_end()
    return stream, graph


def rounded_up(count: int) -> int:
    """Round `count`, which is at least 1, up to a power of two, so that few different shapes occur."""
    return 1 << (count - 1).bit_length()
