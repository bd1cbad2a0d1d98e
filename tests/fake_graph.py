"""CUDA graphs without a GPU: a graph is the list of the operations of its capture, on the same tensors.

A replay does not run host code, so numbers of the host stay as they were at the capture. An operation that waits for
the device, or that copies numbers from the host, raises in a capture. A replay overwrites the results of graphs that
were captured later, because these may use the memory of its intermediate results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tlt import cuda_graph
from tlt.cuda_graph import Replayed

_WAITS = {f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")}


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        masks = name.startswith("aten::index") and any(x.dtype == torch.bool for x in _tensors(args[1:2]))
        if name in _WAITS or masks:
            raise RuntimeError(f"{name} waits for the device")
        if name == "aten::lift_fresh" and args[0].dim() > 0:
            raise RuntimeError("a capture copies numbers from the host")
        found = func(*args, **kwargs)
        inputs = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        made = [x for x in _tensors(found) if x.untyped_storage().data_ptr() not in inputs]
        if made or func._schema.is_mutable:  # a view needs no replay
            self.calls.append((func, args, kwargs, made))
        return found

    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            found = _tensors(func(*args, **kwargs))
            for old, new in zip(made, found if made else (), strict=True):
                old.copy_(new)


class FakeGraph:
    """Stand-in for `torch.cuda.CUDAGraph`."""

    is_capturing = False  # whether any graph is being captured

    def __init__(self) -> None:
        self.recorder = _Recorder()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        FakeGraph.is_capturing = True
        self.recorder.__enter__()

    def capture_end(self) -> None:
        FakeGraph.is_capturing = False
        self.recorder.__exit__(None, None, None)
        with torch.inference_mode():  # a capture computes nothing
            for made in (made for *_, all_made in self.recorder.calls for made in all_made):
                made.fill_(torch.nan if made.is_floating_point() else -1)

    def pool(self) -> str:
        return "pool"

    @torch.inference_mode()
    def replay(self) -> None:
        self.recorder.replay()


class FakeStream:
    def __init__(self, device: torch.device | None = None) -> None: ...

    def wait_stream(self, other: FakeStream) -> None: ...


class _OnTheHost(TorchFunctionMode):
    """Mode in which tensors of the device are in host memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == torch.device("cuda"):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


@contextmanager
def fake_graphs() -> Iterator[list[ref[Replayed]]]:
    """Let every computation be captured and replayed. Yield the captured ones."""
    captured: list[ref[Replayed]] = []
    init, call, capture = Replayed.__init__, Replayed.__call__, Replayed._capture

    def begun(self: Replayed, device: torch.device) -> None:
        init(self, torch.device("cuda"))

    def captures(self: Replayed, compute: Any) -> Any:
        captured.append(ref(self))
        return capture(self, compute)

    def called(self: Replayed, compute: Any) -> Any:
        found = call(self, compute)
        if self.graph is not None:
            order = [one() for one in captured]
            for later in order[order.index(self) + 1 :]:
                with torch.inference_mode():
                    for result in later._result or () if later else ():
                        result.fill_(torch.nan if result.is_floating_point() else -1)
        return found

    cuda_graph._shared.cache_clear()
    streams = {"Stream": FakeStream, "current_stream": FakeStream, "stream": nullcontext}
    streams["is_current_stream_capturing"] = lambda: FakeGraph.is_capturing
    with (
        patch.multiple(torch.cuda, CUDAGraph=FakeGraph, **streams),
        patch.multiple(Replayed, __init__=begun, __call__=called, _capture=captures),
        _OnTheHost(),
    ):
        yield captured
    cuda_graph._shared.cache_clear()
