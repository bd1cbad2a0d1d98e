"""Captures on a stand-in for CUDA graphs. tests/gpu tests captures on a device."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fake_graph import FakeStream, fake_graphs
from torch import Tensor

from tlt.cuda_graph import CaptureError, Replayed, _shared, rounded_up


def test_a_count_is_rounded_up_to_one_of_few_shapes() -> None:
    for count in range(1, 33):
        assert rounded_up(count) == min(shape for shape in (1, 2, 4, 8, 16, 32) if shape >= count)


def test_a_computation_is_captured_at_its_second_call_and_then_replayed() -> None:
    """A replay reads the tensors again, but no numbers of the host."""
    read, calls = torch.zeros(2), list[int]()

    def compute() -> tuple[Tensor, ...]:
        calls.append(len(calls))
        return read * 2 + 10 * len(calls), read.clone()

    with fake_graphs():
        one, slow = Replayed(torch.device("cuda")), Replayed.slow_calls
        found = [[x.tolist() for x in one(compute)] for read[0] in (1.0, 2.0, 3.0, 4.0)]
    assert [doubled[0] for doubled, _ in found] == [12, 24, 26, 28]
    assert [same for _, same in found] == [[1, 0], [2, 0], [3, 0], [4, 0]]
    assert len(calls) == 2
    assert Replayed.slow_calls - slow == 2


def test_all_captures_use_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace for each stream, and PyTorch has 32 of them."""
    used: list[Any] = []
    with fake_graphs():
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(used.append(stream)))
        for _ in range(3):
            one = Replayed(torch.device("cuda"))
            for _ in range(2):
                one(lambda: (torch.zeros(1),))
    assert len(used) == 4  # the shared memory has its own capture
    assert len(set(used)) == 1


def test_a_capture_follows_earlier_work_and_no_collection_disturbs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log, device = list[Any](), torch.device("cuda")
    monkeypatch.setattr(FakeStream, "wait_stream", lambda stream, other: log.append((stream, other)))

    def compute() -> tuple[Tensor, ...]:
        log.append(gc.isenabled())
        return (torch.zeros(1),)

    with fake_graphs():
        one, (stream, _) = Replayed(device), _shared(device)
        for _ in range(3):
            one(compute)
    at_first, (capturing, _), in_capture, (_, awaited) = log
    assert (at_first, in_capture) == (True, False)
    assert capturing is awaited is stream


@pytest.mark.parametrize("waits", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x + torch.tensor([1.0])])
def test_a_computation_that_needs_the_host_cannot_be_captured(waits: Any) -> None:
    """The error names the remedy, and the collector works again afterwards."""
    reason = r"(waits for the device|numbers from the host).*set model\.cuda_graphs = false"
    with fake_graphs():
        one = Replayed(torch.device("cuda"))
        one(lambda: (waits(torch.ones(1)),))
        with pytest.raises(CaptureError, match=reason):
            one(lambda: (waits(torch.ones(1)),))
    assert gc.isenabled()


def test_an_error_of_memory_in_a_capture_is_raised_unchanged() -> None:
    def compute() -> tuple[Tensor, ...]:
        raise torch.OutOfMemoryError("no memory")

    with fake_graphs():
        one = Replayed(torch.device("cuda"))
        one(lambda: (torch.ones(1),))
        with pytest.raises(torch.OutOfMemoryError):
            one(compute)
