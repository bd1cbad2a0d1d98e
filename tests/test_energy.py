"""Energy and CPU time from fake counters: the counters that are read, their overflow, and what is never mixed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from tlt.energy import CpuTime, Meter, MeteredTracer, nvml, rapl, total_energy

RANGE = 262_143_328_850  # microjoules, as an Intel package has it


def zone(root: Path, name: str, used: int) -> Path:
    place = root / name
    place.mkdir(parents=True)
    (place / "energy_uj").write_text(f"{used}\n", encoding="ascii")
    (place / "max_energy_range_uj").write_text(f"{RANGE}\n", encoding="ascii")
    return place


def test_packages_are_added_their_parts_are_not_and_a_counter_may_wrap(tmp_path: Path) -> None:
    first, second = zone(tmp_path, "intel-rapl:0", RANGE - 2_000_000), zone(tmp_path, "intel-rapl:1", 0)
    zone(tmp_path, "intel-rapl:0:0", 5)
    read = rapl(tmp_path)
    assert read
    assert read() == 0
    (first / "energy_uj").write_text("1000000", encoding="ascii")  # 2 J up to the end, and 1 J since
    (second / "energy_uj").write_text("4000000", encoding="ascii")
    assert read() == pytest.approx(7)
    (second / "energy_uj").write_text("5000000", encoding="ascii")
    assert read() == pytest.approx(8)
    cards = nvml(library([1_500, 2_500]))
    assert cards
    assert cards() == pytest.approx(4), "all cards"


def library(used: list[int], error: Exception | None = None) -> SimpleNamespace:
    """Return a pynvml with one card for each number of millijoules."""

    def energy(card: int) -> int:
        if error:
            raise error
        return used[card]

    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(used),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=energy,
    )


def test_without_a_counter_of_each_card_or_a_readable_package_there_is_no_energy(tmp_path: Path) -> None:
    assert not any((nvml(library([])), nvml(library([1], RuntimeError("not supported"))), rapl(tmp_path / "nothing")))
    (tmp_path / "intel-rapl:0" / "energy_uj").mkdir(parents=True)  # a file that cannot be read
    assert not rapl(tmp_path)


def test_cpu_time_is_that_of_this_process_and_its_descendants() -> None:
    cpu = CpuTime()
    before = cpu.read()
    assert before >= sum(os.times()[:4]) - 0.05
    work = "import time\nwhile time.process_time() < 0.5: pass\nprint(1, flush=True)\ninput()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", work], stdin=pipe, stdout=pipe) as child:
        assert child.stdout
        child.stdout.readline()
        assert cpu.read() < before + 0.4, "it counts from the next search on"
        cpu.find_descendants()
        assert cpu.read() > before + 0.45
        child.communicate(b"x\n")
    assert cpu.read() > before + 0.45, "it has ended"


@pytest.mark.skipif(not Path("/proc/self/schedstat").is_file(), reason="this system does not count it")
def test_the_wait_of_two_processes_for_one_core_is_counted() -> None:
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        work = "import time\nwhile time.process_time() < 0.5: pass"
        with subprocess.Popen([sys.executable, "-c", work]) as child:
            cpu = CpuTime()
            before, end = cpu.read_waiting(), time.process_time() + 0.3
            while time.process_time() < end:
                pass
            assert cpu.read_waiting() - before > 0.3, "each waits while the other computes"
            child.wait()
    finally:
        os.sched_setaffinity(0, cores)


def test_the_wait_is_the_second_number_of_schedstat_in_nanoseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux writes the time on a core, the time of waiting for one, and the number of time slices."""
    cpu = CpuTime()
    cpu._processes = cpu._processes[:1]
    monkeypatch.setattr("os.listdir", lambda folder: ["1", "2"])
    monkeypatch.setattr("tlt.energy.open", lambda *_, **__: StringIO("7000000000 2000000000 3"), raising=False)
    assert cpu.read_waiting() == 4.0


@pytest.mark.skipif(not Path("/proc/self/schedstat").is_file(), reason="this system does not count it")
def test_a_meter_counts_workers_that_start_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuTime, "read", lambda cpu: 2.0 * len(cpu._processes))
    monkeypatch.setattr(CpuTime, "read_waiting", lambda cpu: 7.0 * len(cpu._processes))
    tracer = MeteredTracer(Meter())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = tracer.step_energy()
        child.communicate(b"\n")
    assert (found["cpu_seconds"], found["cpu_wait_seconds"]) == (2.0, 7.0)


def test_a_counter_that_falls_counts_as_0() -> None:
    tracer = MeteredTracer(Meter({"cpu_seconds": iter([5.0, 3.0]).__next__}))
    assert tracer.step_energy() == {"cpu_seconds": 0.0}


def test_the_energy_of_each_phase_is_recorded_and_reset_after_a_step() -> None:
    used = [0]
    tracer = MeteredTracer(Meter({"gpu_joules": nvml(library(used)), "cpu_joules": None}))
    for millijoules in (3_000, 1_000):
        with tracer.span("rollout"):
            used[0] += millijoules
    for name in ("save", "compare"):
        with tracer.span(name):
            used[0] += 500
    phases = {"rollout": {"gpu_joules": 4.0}, "compare": {"gpu_joules": 0.5}}
    assert tracer.step_energy() == {"gpu_joules": 5.0, "phases": phases}
    assert tracer.step_energy() == {"gpu_joules": 0}
    assert [span.name for span in tracer.drain()][-1] == "compare"


def test_a_counter_that_fails_is_named_once_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package = zone(tmp_path, "intel-rapl:0", 0)
    tracer = MeteredTracer(Meter({"cpu_joules": rapl(tmp_path), "gpu_joules": nvml(library([7]))}))
    (package / "energy_uj").unlink()
    with caplog.at_level(logging.WARNING), tracer.span("rollout"):
        pass
    assert tracer.step_energy() == {"gpu_joules": 0, "phases": {"rollout": {"gpu_joules": 0}}}
    assert caplog.text.count("energy/cpu_joules is no longer recorded") == 1


def test_nothing_is_measured_without_a_meter() -> None:
    assert MeteredTracer().step_energy() == {}


def lines(*rewards: float) -> list[dict]:
    """Return metrics of steps with 10 J and 500 tokens. Every second one compares 3 J of plain decoding with 2 J."""
    phases = [{"rollout": {"gpu_joules": 2.0}} | ({"compare": {"gpu_joules": 3.0}} if i % 2 else {}) for i in range(9)]
    return [
        {"step": i, "tokens": 500, "reward": reward, "energy": {"gpu_joules": 10.0, "phases": phases[i]}}
        for i, reward in enumerate(rewards)
    ]


def test_totals_by_hand() -> None:
    found = total_energy(lines(0.1, 0.1, 0.2, 0.3))
    assert found["sums"] == {"gpu_joules": 40}
    assert found["per_step"] == {"gpu_joules": 10}
    assert found["per_million_tokens"] == {"gpu_joules": pytest.approx(20_000)}
    assert found["compared"] == {"steps": 2, "plain": {"gpu_joules": 6}, "ours": {"gpu_joules": 4}}
    assert total_energy([{"step": 0, "energy": {}}]) == {}
    assert total_energy([{"step": 0, "tokens": 500, "energy": {}}, *lines(0.1, 0.1, 0.2, 0.3)]) == found, "no counter"
    failed = total_energy([{"step": 0, "energy": {"cpu_joules": 1.0}}, *lines(0.1, 0.1, 0.2, 0.3)])
    assert failed["sums"] == {"gpu_joules": 40}, "a counter that failed in the run has no total"
