"""Energy and CPU time of a run: NVML for GPUs, RAPL for CPU packages, /proc for the run's processes.

NVML and RAPL count everything that runs on this machine's cards and packages. CPU time counts the run's own processes.
Counters of other machines cannot be read, so a run that joins a Ray cluster by its address has no energy and CPU time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tlt.config.run import RunConfig
from tlt.trace import Tracer

PHASES = ("rollout", "compare", "update")
"""phases of a step whose energy is recorded separately"""

_log = logging.getLogger(__name__)
_POWERCAP, _PROC = Path("/sys/class/powercap"), Path("/proc")

Counters = dict[str, float]


class Rapl:
    """Energy of all CPU packages of this machine in joules, from the RAPL counters in `/sys/class/powercap`. The
    counters wrap around, which `read` corrects."""

    def __init__(self, root: Path = _POWERCAP) -> None:
        self.joules = 0.0
        self._last: dict[Path, int] = {}
        for zone in sorted(root.glob("*-rapl:*")):
            if zone.name.count(":") == 1:  # a zone with two colons is a part of a package
                with suppress(OSError, ValueError):  # most systems let only root read this file
                    self._last[zone] = _microjoules(zone / "energy_uj")

    def __bool__(self) -> bool:
        return bool(self._last)

    def read(self) -> float:
        """Return the joules used since this object was made. Raises OSError and ValueError."""
        for zone, before in self._last.items():
            now = _microjoules(zone / "energy_uj")
            if now < before:
                before -= _microjoules(zone / "max_energy_range_uj")
            self.joules += (now - before) / 1e6
            self._last[zone] = now
        return self.joules


def _microjoules(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))


class Nvml:
    """Energy of all NVIDIA GPUs of this machine in joules, used by any process. It needs the package nvidia-ml-py."""

    def __init__(self, library: Any = None) -> None:
        self._cards: list[Any] = []
        try:
            if library is None:
                import pynvml as library  # pyright: ignore[reportMissingImports]
            library.nvmlInit()
            cards = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
            for card in cards:  # cards before Volta have no such counter
                library.nvmlDeviceGetTotalEnergyConsumption(card)
            self._library, self._cards = library, cards
        except Exception as error:  # no package, no driver, no card
            _log.debug("no GPU energy: %s", error)

    def __bool__(self) -> bool:
        return bool(self._cards)

    def read(self) -> float:
        """Return the joules that all GPUs have used since the NVIDIA driver was loaded. Raises errors of pynvml."""
        return sum(self._library.nvmlDeviceGetTotalEnergyConsumption(card) for card in self._cards) / 1e3


class CpuTime:
    """CPU time of this process and of all its descendants, including those that have ended. New descendants count from
    the next `find_descendants` on, which reads the files of all processes of the machine."""

    def __init__(self, root: Path = _PROC, ticks: int | None = None) -> None:
        self.root, self.ticks = root, ticks or os.sysconf("SC_CLK_TCK")
        self._has_proc = (root / "self" / "stat").exists()
        self.find_descendants()

    def find_descendants(self) -> None:
        names = os.listdir(self.root) if self._has_proc else ()
        parents = {int(name): self._stat(name)[0] for name in names if name.isdecimal()}
        self._processes = [pid for pid in parents if _descends(pid, os.getpid(), parents)]

    def read(self) -> float:
        """Return the CPU seconds so far."""
        if not self._has_proc:
            used = os.times()
            return used.user + used.system + used.children_user + used.children_system
        return sum(self._stat(pid)[1] for pid in self._processes) / self.ticks

    def _stat(self, pid: int | str) -> tuple[int, int]:
        """Return the parent of a process, and the ticks of CPU time of the process and of its ended children; (0, 0)
        if it has ended."""
        with suppress(OSError, ValueError, IndexError), open(f"{self.root}/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split(None, 15)
            return int(fields[1]), sum(map(int, fields[11:15]))
        return 0, 0


def _descends(pid: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    while pid and pid != ancestor:
        pid = parents.get(pid, 0)
    return pid == ancestor


class Meter:
    """Reader of the energy and CPU time counters of this machine. If a counter fails, the run continues without it."""

    def __init__(
        self, one_machine: bool = True, rapl: Rapl | None = None, nvml: Nvml | None = None, proc: Path = _PROC
    ) -> None:
        """Find the counters of this machine. If `one_machine` is False, because workers run on other machines, nothing
        is measured."""
        self._sources: dict[str, Callable[[], float]] = {}
        self._cpu = CpuTime(proc) if one_machine else None
        if self._cpu:
            self._sources["cpu_seconds"] = self._cpu.read
            for name, source in {"cpu_joules": rapl or Rapl(), "gpu_joules": nvml or Nvml()}.items():
                if source:
                    self._sources[name] = source.read

    def find_descendants(self) -> None:
        """Count the CPU time of processes that were started since the last call, too."""
        if self._cpu:
            self._cpu.find_descendants()

    def read(self) -> Counters:
        """Return the current value of each available counter: `cpu_seconds`, `cpu_joules`, `gpu_joules`."""
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
        self._meter = meter or Meter(one_machine=False)
        self._last, self._since = self._meter.read(), time.perf_counter()
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

    def step_energy(self, run: RunConfig) -> dict[str, Any]:
        """Return energy, CPU time and cost since the last call, with the names of docs/metrics.md."""
        self._meter.find_descendants()
        now, clock = self._meter.read(), time.perf_counter()
        used = _difference(now, self._last)
        found: dict[str, Any] = _with_estimate(used, run)
        if run.price_per_hour is not None:
            found["cost"] = run.price_per_hour * (clock - self._since) / 3600
        if self._phases:
            found["phases"] = {name: _with_estimate(mine, run) for name, mine in self._phases.items()}
        self._last, self._since, self._phases = now, clock, {}
        return found


def _difference(now: Counters, before: Counters) -> Counters:
    """Return the increase of each counter. If a counter fell, return 0, because the CPU seconds of a process that has
    just ended may be missing until its parent counts them."""
    return {name: max(0.0, now[name] - before[name]) for name in now if name in before}


def _with_estimate(used: Counters, run: RunConfig) -> Counters:
    """Return the counters. If none measures the CPU's joules, and `watts_per_core` is set, add joules estimated from
    CPU time."""
    if run.watts_per_core is None or "cpu_joules" in used or "cpu_seconds" not in used:
        return dict(used)
    return used | {"estimated_cpu_joules": used["cpu_seconds"] * run.watts_per_core}


def total_energy(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return energy, CPU time and cost summed over the steps in `lines` of metrics.jsonl, and each sum per step, per
    million tokens and per reward point. A reward point is an increase of the mean reward by 0.01 from the first to the
    last tenth of the steps. The result is empty if nothing was measured."""
    found = [line["energy"] for line in lines if line.get("energy")]
    if not found:
        return {}
    names = [name for name in found[-1] if name != "phases"]
    sums = {name: sum(step.get(name, 0.0) for step in found) for name in names}
    tokens = sum(line.get("tokens", 0) for line in lines if line.get("energy"))
    tenth = max(1, len(lines) // 10)
    rewards = [line.get("reward", 0.0) for line in lines]
    gained = 100 * (sum(rewards[-tenth:]) - sum(rewards[:tenth])) / tenth
    per = {
        "per_step": {name: value / len(found) for name, value in sums.items()},
        "per_million_tokens": {name: value / tokens * 1e6 for name, value in sums.items()} if tokens else {},
        "per_reward_point": {name: value / gained for name, value in sums.items()} if gained > 0 else {},
    }
    return {"steps": len(found), "sums": sums, **per, "compared": _compared_energy(lines)}


def _compared_energy(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the energy of plain decoding (`plain`) and of decoding with speculation (`ours`), summed over the steps
    that decoded the same requests both ways."""
    steps = [line["energy"]["phases"] for line in lines if "compare" in line.get("energy", {}).get("phases", {})]
    if not steps:
        return {}
    kinds = {"plain": "compare", "ours": "rollout"}
    sums = {
        kind: {name: sum(step.get(phase, {}).get(name, 0.0) for step in steps) for name in steps[-1][phase]}
        for kind, phase in kinds.items()
        if phase in steps[-1]
    }
    return {"steps": len(steps), **sums}
