"""Energy and CPU time of a run: NVML for GPUs, RAPL for CPU packages, psutil for the run's processes.

NVML and RAPL count everything that runs on this machine's cards and packages. CPU time counts the run's own processes.
Counters of other machines cannot be read, so a run that joins a Ray cluster by its address has no energy and CPU time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tlt.trace import Tracer

PHASES = ("rollout", "compare", "update")
"""phases of a step whose energy is recorded separately"""

_log = logging.getLogger(__name__)
Counters = dict[str, float]


def rapl(root: Path = Path("/sys/class/powercap")) -> Callable[[], float] | None:
    """Return a function that reads the joules of all CPU packages since this call, or None if their counters cannot be
    read. The counters wrap around."""
    last: dict[Path, int] = {}
    for zone in sorted(root.glob("*-rapl:*")):
        if zone.name.count(":") == 1:  # a zone with two colons is a part of a package
            with suppress(OSError, ValueError):  # most systems let only root read this file
                last[zone] = _microjoules(zone / "energy_uj")
    total = 0.0

    def read() -> float:
        nonlocal total
        for zone, before in last.items():
            last[zone] = now = _microjoules(zone / "energy_uj")
            wrapped = _microjoules(zone / "max_energy_range_uj") if now < before else 0
            total += (now - before + wrapped) / 1e6
        return total

    return read if last else None


def _microjoules(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))


def nvml(library: Any = None) -> Callable[[], float] | None:
    """Return a function that reads the joules that all NVIDIA GPUs of this machine have used, or None if they have no
    counter. `library` is pynvml, from the package nvidia-ml-py."""
    try:
        if library is None:
            import pynvml as library  # pyright: ignore[reportMissingImports]
        library.nvmlInit()
        cards = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        read = lambda: sum(map(library.nvmlDeviceGetTotalEnergyConsumption, cards)) / 1e3  # noqa: E731
        read()  # cards before Volta have no such counter
    except Exception as error:  # no package, no driver, no card
        _log.debug("no GPU energy: %s", error)
        return None
    return read if cards else None


class CpuTime:
    """CPU time of this process and of all its descendants, including those that have ended. New descendants count from
    the next `find_descendants` on, which looks at all processes of the machine."""

    def __init__(self) -> None:
        self.find_descendants()

    def find_descendants(self) -> None:
        me = psutil.Process()
        self._processes = [me, *me.children(recursive=True)]

    def read_waiting(self) -> float:
        """Return the seconds so far in which threads were ready to run and waited for a free core. Only Linux counts
        them."""
        nanoseconds = 0
        for folder in (f"/proc/{process.pid}/task" for process in self._processes):
            with suppress(OSError):  # the process has ended
                for thread in os.listdir(folder):
                    # not by pathlib, which takes three times as long: Ray's processes have hundreds of threads
                    with suppress(OSError), open(f"{folder}/{thread}/schedstat", encoding="ascii") as file:
                        nanoseconds += int(file.read().split()[1])
        return nanoseconds / 1e9

    def read(self) -> float:
        """Return the CPU seconds so far."""
        seconds = 0.0
        for process in self._processes:
            with suppress(psutil.Error):  # it has ended
                seconds += sum(process.cpu_times()[:4])  # user and system, its own and those of its ended children
        return seconds


class Meter:
    """Reader of the energy and CPU time counters of this machine. If a counter fails, the run continues without it."""

    def __init__(self, sources: dict[str, Callable[[], float] | None] | None = None) -> None:
        """Find the counters of this machine, unless `sources` is given."""
        self._cpu = CpuTime() if sources is None else None
        if self._cpu:
            waiting = self._cpu.read_waiting if Path("/proc/self/schedstat").is_file() else None
            sources = {"cpu_seconds": self._cpu.read, "cpu_wait_seconds": waiting}
            sources |= {"cpu_joules": rapl(), "gpu_joules": nvml()}
        self._sources = {name: source for name, source in (sources or {}).items() if source}

    def find_descendants(self) -> None:
        """Count the CPU time of processes that were started since the last call, too."""
        if self._cpu:
            self._cpu.find_descendants()

    def read(self) -> Counters:
        """Return the current value of each available counter: `cpu_seconds`, `cpu_wait_seconds`, `cpu_joules`,
        `gpu_joules`."""
        found: Counters = {}
        for name, source in list(self._sources.items()):
            try:
                found[name] = source()
            except Exception as error:
                del self._sources[name]
                _log.warning("energy/%s is no longer recorded (%s); the run continues", name, error)
        return found


class MeteredTracer(Tracer):
    """Tracer of the driver process that also records the energy and CPU time of each phase of a step."""

    def __init__(self, meter: Meter | None = None) -> None:
        """Measure with `meter`. Without a meter, energy and CPU time are not measured."""
        super().__init__()
        self._meter = meter or Meter({})
        self._last = self._meter.read()
        self._phases: dict[str, Counters] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        before = self._meter.read() if name in PHASES else {}
        with super().span(name):
            yield
        if name in PHASES:
            used = _difference(self._meter.read(), before)
            mine = self._phases.get(name, {})
            self._phases[name] = {key: mine.get(key, 0.0) + used[key] for key in used}

    def step_energy(self) -> dict[str, Any]:
        """Return energy and CPU time since the last call, with the names of docs/metrics.md."""
        self._meter.find_descendants()
        now = self._meter.read()
        found: dict[str, Any] = _difference(now, self._last)
        if self._phases:
            found["phases"] = self._phases
        self._last, self._phases = now, {}
        return found


def _difference(now: Counters, before: Counters) -> Counters:
    """Return the increase of each counter. If a counter fell, return 0, because the CPU seconds of a process that has
    just ended may be missing until its parent counts them."""
    return {name: max(0.0, now[name] - before[name]) for name in now if name in before}


def total_energy(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return energy and CPU time summed over the steps in `lines` of metrics.jsonl, per step, and per million tokens.
    `compared` has those of plain decoding (`plain`) and of decoding with speculation (`ours`), over the steps that
    decoded the same requests both ways. The result is empty if nothing was measured."""
    found = [line["energy"] for line in lines if line.get("energy")]
    if not found:
        return {}
    sums = _sums(found)
    tokens = sum(line.get("tokens", 0) for line in lines if line.get("energy"))
    phases = [step["phases"] for step in found if "compare" in step.get("phases", {})]
    kinds = {"plain": "compare", "ours": "rollout"}
    compared = {kind: _sums([each.get(phase, {}) for each in phases]) for kind, phase in kinds.items()}
    return {
        "steps": len(found),
        "sums": sums,
        "per_step": {name: value / len(found) for name, value in sums.items()},
        "per_million_tokens": {name: value / tokens * 1e6 for name, value in sums.items()} if tokens else {},
        "compared": {"steps": len(phases), **compared} if phases else {},
    }


def _sums(counters: list[dict[str, Any]]) -> Counters:
    names = [name for name in counters[-1] if name != "phases"] if counters else []
    return {name: sum(each.get(name, 0.0) for each in counters) for name in names}
