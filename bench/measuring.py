"""What the GPU scripts share: counts of a piece of work, and a file of results that grows case by case."""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tlt.config import ModelConfig
from tlt.files import read_json
from tlt.metrics import provenance, write_json
from tlt.models.device import torch_device, torch_dtype

_COPIES = {"HtoD": "host_to_device", "DtoH": "device_to_host", "DtoD": "device_to_device"}
_KERNELS = 15  # number of kernels that are reported, the slowest first
_COPIED = 1 << 30  # bytes that are copied to measure a device's memory bandwidth


# -- options -----------------------------------------------------------------------------------------------------------


def parser_of(page: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have. `page` is the script's docstring."""
    parser = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto (cuda if there is one)")
    parser.add_argument("--dtype", default="auto", help="auto: bfloat16 on CUDA, else float32")
    parser.add_argument("--json", type=Path, help="file of the results; cases that it has are not measured again")
    return parser


def place(arguments: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype that the options name."""
    config = ModelConfig(path="random", device=arguments.device, dtype=arguments.dtype)
    return torch_device(config), torch_dtype(config)


# -- results -----------------------------------------------------------------------------------------------------------


class Results:
    """Results of a script, written to a JSON file after each case, so that a cut-off loses nothing.

    Cases that the file has already are not measured again, unless they failed, or another machine, package version or
    commit measured them."""

    def __init__(self, file: Path | None, **facts: Any) -> None:
        self.file, self.failed = file, False
        self.tree: dict[str, Any] = {**facts, **provenance()}
        before = read_json(file) if file and file.is_file() else {}
        same = all(before.get(name) == value for name, value in self.tree.items())
        self.cases: list[dict[str, Any]] = [one for one in before.get("cases", ()) if same and "error" not in one]

    def measure(self, case: dict[str, Any], work: Callable[[], dict[str, Any]]) -> None:
        """Measure a case unless the file has it. `case` names it, and `work` returns the figures. A case that does not
        fit the memory is recorded as skipped."""
        if any(case.items() <= known.items() for known in self.cases):
            return
        try:
            found = work()
        except torch.OutOfMemoryError:
            found = {"skipped": "out of memory"}
        except Exception as error:
            traceback.print_exc()
            found, self.failed = {"error": f"{type(error).__name__}: {error}"}, True
        self.cases.append(case | found)
        figures = {name: value for name, value in (case | found).items() if name != "kernels" and value is not None}
        print(", ".join(f"{name} {_short(value)}" for name, value in figures.items()), flush=True)
        if self.file:
            write_json(self.file, self.tree | {"cases": self.cases})
        free_memory()


def _short(value: Any) -> str:
    """Return a figure, or a dictionary of figures, as a short text."""
    if isinstance(value, dict):
        return " ".join(f"{key}:{_short(one)}" for key, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- counts ------------------------------------------------------------------------------------------------------------


class Dispatched(TorchDispatchMode):
    """Counter of the operations that the host starts, without views, and of the tensors that it makes from Python
    numbers. On a GPU each of the latter is a copy to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.from_numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.lift_fresh.default:
            self.from_numbers += 1
        elif not func.is_view:
            self.operations += 1
        return func(*args, **kwargs or {})


def counts(work: Callable[[], Any], device: torch.device, times: int = 3) -> dict[str, Any]:
    """Return counts of one call of `work`. Figures of the device are means over `times` calls, and None on a CPU."""
    with Dispatched() as dispatched:
        work()
    found: dict[str, Any] = {"operations": dispatched.operations, "from_numbers": dispatched.from_numbers}
    if device.type != "cuda":
        return found | dict.fromkeys(("device_ms", "launches", *_COPIES.values(), "kernels"))
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(times):
            work()
        torch.cuda.synchronize(device)
    return found | device_counts(profiled.events() or (), times)


def device_counts(events: Iterable[Any], times: int) -> dict[str, Any]:
    """Return the figures of a device from the events of a profile: milliseconds that it works, launches of kernels and
    graphs by the host, copies by direction, and the slowest kernels. All are divided by `times`."""
    launches, copies, calls, micros = 0, Counter[str](), Counter[str](), Counter[str]()
    for event in events:
        name = event.name
        if event.device_type.name == "CPU":
            launches += name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch"))
        elif not event.is_user_annotation:  # an annotation lasts as long as the kernels that it spans
            calls[name] += 1
            micros[name] += event.time_range.elapsed_us()
            if name.startswith("Memcpy "):
                copies[name.split()[1]] += 1
    return {
        "device_ms": micros.total() / times / 1000,
        "launches": launches / times,
        **{label: copies[direction] / times for direction, label in _COPIES.items()},
        "kernels": [
            {"name": name[:100], "calls": calls[name] / times, "ms": spent / times / 1000}
            for name, spent in micros.most_common(_KERNELS)
        ],
    }


@contextmanager
def counted_captures() -> Iterator[Counter[str]]:
    """Yield a counter whose entry `captures` is the number of CUDA graphs captured in the `with` block."""
    begin, found = torch.cuda.CUDAGraph.capture_begin, Counter[str]()

    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        found["captures"] += 1
        begin(self, *arguments, **options)

    with patch.object(torch.cuda.CUDAGraph, "capture_begin", counted):
        yield found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call of `work`, until the device has finished it."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


@contextmanager
def peak_mib(device: torch.device) -> Iterator[dict[str, float | None]]:
    """Yield a dictionary that gets `peak_mib`, the peak of a CUDA device's allocated memory in the `with` block. On a
    CPU it gets None."""
    found: dict[str, float | None] = {"peak_mib": None}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield found
    if device.type == "cuda":
        found["peak_mib"] = torch.cuda.max_memory_allocated(device) / 2**20


def bandwidth(device: torch.device) -> float | None:
    """Return the memory bandwidth of a CUDA device in GB/s, from the fastest of ten copies. Return None for a CPU."""
    if device.type != "cuda":
        return None
    source = torch.zeros(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / min(seconds_of(lambda: target.copy_(source), device) for _ in range(10)) / 1e9
